"""The settings as typed, frozen values. `infra.settings` makes them; nothing here reads a file or a variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.settings_schema import did_you_mean
from infra.settings_urls import Secret, put_option, put_password
from messages.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Services:
    """Where broker and store are; an empty URL means in this process. The URLs carry no password."""

    broker: str = ""
    store: str = ""
    broker_secret: Secret | None = None
    store_secret: Secret | None = None
    broker_ca_file: str = ""  # PEM, of who signed the broker's certificate; "": whom the system trusts
    store_ca_file: str = ""


@dataclass(frozen=True, slots=True)
class Grading:
    """Which models grade, and how they sample unless their own table says otherwise."""

    code_model: str = ""
    feedback_model: str = ""
    notice: str = ""  # a sentence across the top of every report, such as the demo's: these are no real grades
    max_tokens: int = 3000
    temperature: float = 0.2
    top_p: float = 0.9


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model that has queues. `weights` maps an engine to a file, a folder, or what else the engine can load."""

    name: str
    context: int  # tokens; 0: as much as the model was trained for
    max_tokens: int
    temperature: float
    top_p: float
    engine: str  # for the local pipeline; "": the only one with weights
    slots: int
    threads: int  # of the CPU; 0: the engine's choice
    short_prompt_tokens: int  # prompts of up to so many go to decode without a KV cache; 0: none does
    copies: int  # in the local pipeline: 1, or 2 so that prefill and decode never share a batch
    tokenizer: str
    same_weights: tuple[str, ...]  # engines whose weights are conversions of the same: they share KV caches
    kv_bytes_per_token: int  # of its KV cache, for planning; 0: unknown
    memory_gb: float  # of its weights, for planning; 0: unknown
    weights: Mapping[str, str]

    def weights_for(self, engine: str = "") -> tuple[str, str]:
        """(engine, weights) for `engine`, or for the model's default. Raises ConfigError if that is not settled."""
        chosen = engine or self.engine or (next(iter(self.weights)) if len(self.weights) == 1 else "")
        table = f"[models.{self.name!r}]".replace("'", '"')
        if not chosen:
            having = ", ".join(sorted(self.weights)) or "none"
            raise ConfigError(f"model {self.name!r} has weights for: {having}; set engine in {table}, or pass --engine")
        if chosen not in self.weights:
            raise ConfigError(f"model {self.name!r} has no weights for {chosen}: set weights.{chosen} in {table}")
        return chosen, self.weights[chosen]


@dataclass(frozen=True, slots=True)
class Role:
    """One thing that runs on a machine: a worker, or a service."""

    role: str  # prefill, decode; app, broker, grafana, prometheus, store
    model: str = ""
    engine: str = ""
    weights: str = ""  # as that machine sees it; "": the model's own for this engine
    slots: int = 0  # 0: the model's
    memory_gb: float = 0.0  # what a store may use; 0: no limit of ours


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of one model on one machine, for planning; 0: unknown."""

    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """A machine: how to reach it, what it can do, what runs there. 0 means unknown."""

    name: str
    host: str
    user: str  # "": whoever deploys
    platform: str  # linux, linux-cuda, macos
    folder: str  # where `kvasir deploy` puts everything: absolute, or from the user's home on
    supervisor: str  # systemd, launchd, plain; "": the platform's own
    hours: str  # in which its workers take jobs, such as 18:00-08:00; "": always
    metrics_port: int  # of its first worker's page; the others' follow
    memory_gb: float
    link_gbps: float  # to the store's machine, gigabits a second
    watts: float  # under load
    price: float  # paid for it, in the currency of [costs]
    roles: tuple[Role, ...]
    rates: Mapping[str, Rates]  # by model


@dataclass(frozen=True, slots=True)
class Costs:
    """What electricity costs, and how machines' prices are spread over their use; in any one currency."""

    price_per_kwh: float = 0.0  # 0: unknown
    years: float = 4.0  # that a machine is used
    hours_per_week: float = 40.0  # that it is used for something


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, checked. Read-only."""

    services: Services
    grading: Grading
    models: Mapping[str, ModelSettings]
    machines: Mapping[str, MachineSettings]
    origins: Mapping[str, str] = field(repr=False)
    costs: Costs = field(default_factory=Costs)

    def origin(self, name: str) -> str:
        """Where the value of e.g. `services.broker` came from: a flag, a variable, `FILE line N`, or `default`."""
        return self.origins.get(name, "default")

    def model(self, name: str) -> ModelSettings:
        """The settings of a configured model. Raises ConfigError with what is configured."""
        if name not in self.models:
            raise ConfigError(f"model {name!r} is not configured; {configured(name, self.models)}")
        return self.models[name]

    def code_model(self) -> ModelSettings:
        """The model that analyses code. Raises ConfigError if none is named, or the named one is not configured."""
        return self._grading_model("code_model", self.grading.code_model)

    def feedback_model(self) -> ModelSettings:
        """The model that writes feedback. Raises as `code_model`."""
        return self._grading_model("feedback_model", self.grading.feedback_model)

    def _grading_model(self, key: str, name: str) -> ModelSettings:
        if not name:
            flag = key.replace("_", "-")
            raise ConfigError(f"no model is named: pass --{flag}, or set {key} in [grading] of kvasir.toml")
        if name not in self.models:
            origin = self.origin(f"grading.{key}")
            raise ConfigError(f"{origin}: model {name!r} is not configured; {configured(name, self.models)}")
        return self.models[name]

    def broker_url_with_secret(self) -> str:
        """The broker's URL to connect with; "" if there is none. Raises ConfigError on an unreadable password file."""
        if self.services.broker_secret and "@" not in self.services.broker:
            origin = self.origin("services.broker")
            raise ConfigError(f"{origin}: a password is set for the broker, but its URL names no user (amqp://USER@…)")
        return _with_secret(self.services.broker, self.services.broker_secret)

    def store_url_with_secret(self) -> str:
        """The store's URL to connect with; "" if there is none. Raises ConfigError on an unreadable password file."""
        url = _with_secret(self.services.store, self.services.store_secret)
        ca_file = self._ca_file("store", "rediss")
        return put_option(url, "ssl_ca_certs", ca_file) if ca_file else url

    def broker_ca_file(self) -> str:
        """The file to check the broker's certificate with; "": the system's. Raises ConfigError if it is of no use."""
        return self._ca_file("broker", "amqps")

    def _ca_file(self, service: str, scheme: str) -> str:
        url, path = getattr(self.services, service), getattr(self.services, f"{service}_ca_file")
        origin = self.origin(f"services.{service}_ca_file")
        if url and path and not url.startswith(f"{scheme}://"):
            raise ConfigError(f"{origin}: a CA file is set, but the {service}'s URL is not {scheme}://…")
        if url and path and not os.access(path, os.R_OK):
            raise ConfigError(f"{origin}: can't read the CA file {path}")
        return str(path) if url else ""


def configured(name: str, models: Mapping[str, ModelSettings]) -> str:
    """The end of a sentence about a model that is not configured."""
    if not models:
        return f'none is: add a table [models."{name}"] to kvasir.toml'
    return did_you_mean(name, models) + f" (configured: {', '.join(sorted(models))})"


def _with_secret(url: str, secret: Secret | None) -> str:
    return put_password(url, secret.reveal()) if url and secret else url
