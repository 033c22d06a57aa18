"""Deploys Kvasir to the machines of kvasir.toml: what runs where, how it is kept running, and how it gets there."""
