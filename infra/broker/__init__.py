"""The broker: its contract, its topology, and how deliveries are received and settled."""
