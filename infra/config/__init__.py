"""The settings: their schema, their sources, and their reference."""
