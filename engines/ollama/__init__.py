"""Ollama as an engine."""
