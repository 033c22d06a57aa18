"""What happens to one decode delivery; slots."""
