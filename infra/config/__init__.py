"""Settings: their schema, their sources, and their reference."""
