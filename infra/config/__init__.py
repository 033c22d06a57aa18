"""Settings: their schema, where they come from, and their reference."""
