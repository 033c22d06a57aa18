"""What happens to a prefill delivery."""
