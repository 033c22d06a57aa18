"""The evening, the night and the morning of three courses over one cluster: `make night`."""
