"""vLLM as an engine: a host process in vLLM's own environment, and what talks to it. Code for there is in `host`."""
