"""A worker's card: what a worker says of itself in the store, renewed by heartbeat. No card, no worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from messages import checks
from messages.errors import InvalidMessage

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """Read by status, doctor, stealing and the producers; every figure is the worker's own."""

    worker_id: str  # host.pid.random: unique for one process's life
    role: Role
    model: str  # the queue it serves
    engine: str
    device: str  # "cpu", "cuda", "metal", "simulated"
    fingerprint: str  # of the KV family; "" if it can't hand over
    tokenizer: str  # hash of the tokenizer; the producers count tokens with `chars_per_token` where they lack it
    context: int  # tokens
    slots: int
    host: str
    pid: int
    started_at: float  # seconds since the epoch, store's clock
    chars_per_token: float = 0.0  # measured on a sample; 0: unknown
    busy: int = 0  # slots in use
    done: int = 0  # jobs finished since start
    tokens_per_s: float = 0.0  # of its stage, moving average; 0: nothing measured yet
    hands_over: bool = False  # proved at start
    notes: str = ""  # what an operator should know, in one sentence
    jobs: tuple[str, ...] = ()  # job ids it holds

    def __post_init__(self) -> None:
        checks.identifier("worker_id", self.worker_id)
        checks.one_of("role", self.role, ("prefill", "decode"))
        checks.model_name("model", self.model)
        for name in ("engine", "device", "fingerprint", "tokenizer", "host"):
            checks.text(name, getattr(self, name), 255)
        checks.text("notes", self.notes, 1024)
        for name in ("context", "slots", "pid", "busy", "done"):
            checks.whole(name, getattr(self, name), 0, 1 << 32)
        for name in ("started_at", "tokens_per_s", "chars_per_token"):
            checks.number(name, getattr(self, name), 0, 1e11)
        if not isinstance(self.jobs, tuple) or len(self.jobs) > 1024:
            raise InvalidMessage("jobs must be at most 1,024 job ids")
        for job in self.jobs:
            checks.identifier("jobs", job)
