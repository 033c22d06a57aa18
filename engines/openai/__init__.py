"""Any server of OpenAI's chat completions as an engine."""
