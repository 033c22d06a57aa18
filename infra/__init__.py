"""The broker, its topology, and the settings. Imports messages only."""
