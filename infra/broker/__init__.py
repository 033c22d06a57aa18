"""The broker: its contract, its topology, and how deliveries are taken and settled."""
