"""PyTorch as an engine, through the transformers library."""
