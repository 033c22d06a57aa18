"""The gateway: OpenAI's and Ollama's HTTP APIs in front of the queues. Needs the extra `gateway`."""
