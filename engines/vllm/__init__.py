"""vLLM as an engine: a host process in vLLM's own environment, and the code that talks to it. `host` holds the code
that runs there."""
