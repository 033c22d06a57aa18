"""What engines that load a Hugging Face model folder share."""
