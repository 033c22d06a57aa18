"""Kvasir: durable, disaggregated LLM inference. The composition root, and the public names.

from kvasir import Sampling, connect, load_settings

with connect(load_settings(), ["qwen3-coder:30b"]) as client:
    print(client.ask("qwen3-coder:30b", "Explain RoPE in one sentence.", Sampling(max_tokens=80)).text)
"""

from infra.settings import Settings, load_settings
from kvasir.connect import connect
from messages.errors import KvasirError
from messages.jobs import JobResult, PrefillJob, Sampling, TokenEvent
from producers.client import Client

__all__ = [
    "Client",
    "JobResult",
    "KvasirError",
    "PrefillJob",
    "Sampling",
    "Settings",
    "TokenEvent",
    "connect",
    "load_settings",
]
