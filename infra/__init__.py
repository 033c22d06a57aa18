"""Adapters: the broker, the loop that both workers run, the settings, and deployment. Imports `messages` only."""
