"""What happens to one prefill delivery."""
