"""What engines that load a Hugging Face model folder have in common."""
