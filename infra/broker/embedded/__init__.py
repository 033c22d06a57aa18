"""The broker in this process."""
