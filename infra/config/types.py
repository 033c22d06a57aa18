"""The settings as the program uses them: the tables of `infra.config.schema` with their names and passwords.

`infra.config.settings` makes them. Nothing here reads a file or a variable.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.config.schema import Costs, Grading, MachineTable, ModelTable, ServiceTable, did_you_mean, nearest
from infra.config.urls import Secret, put_option, put_password
from messages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Services(ServiceTable):
    """The broker and the store. "" means in this process. The URLs contain no password."""

    broker_secret: Secret | None = None
    store_secret: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(ModelTable):
    """A model that has queues, with its name."""

    name: str
    api_key: Secret | None = field(default=None, repr=False)

    def weights_for(self, engine: str = "") -> tuple[str, str]:
        """Return (engine, weights) for `engine` or the model's default engine.

        Raises ConfigError if either can't be determined.
        """
        engine_name = engine or self.engine or (next(iter(self.weights)) if len(self.weights) == 1 else "")
        table = f"[models.{self.name!r}]".replace("'", '"')
        if not engine_name:
            engines = ", ".join(sorted(self.weights)) or "none"
            raise ConfigError(
                f"model {self.name!r} has weights for: {engines}; set engine in {table}, or pass --engine"
            )
        if engine_name not in self.weights:
            raise ConfigError(
                f"model {self.name!r} has no weights for {engine_name}: set weights.{engine_name} in {table}"
            )
        return engine_name, self.weights[engine_name]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSettings(MachineTable):
    """A machine, with its name. Its host is never empty."""

    name: str

    def is_called(self, host: str) -> bool:
        """Whether a host that reports this name is the machine, by the machine's name or its address."""
        return _short_name(host) in (_short_name(self.name), _short_name(self.host))


def _short_name(host: str) -> str:
    """Return `Spark1.local` as `spark1`. An IP address stays as it is."""
    return host.lower() if host.replace(".", "").isdigit() else host.lower().partition(".")[0]


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, checked and read-only."""

    services: Services
    grading: Grading
    models: Mapping[str, ModelSettings]
    machines: Mapping[str, MachineSettings]
    origins: Mapping[str, str] = field(repr=False)
    costs: Costs = field(default_factory=Costs)

    def origin(self, name: str) -> str:
        """Return where a value such as `services.broker` came from: a flag, a variable, `FILE line N`, or `default`."""
        return self.origins.get(name, "default")

    def model(self, name: str) -> ModelSettings:
        """Return the settings of a configured model. Raises ConfigError that says what is configured."""
        if name not in self.models:
            raise ConfigError(f"model {name!r} is not configured; {models_hint(name, self.models)}")
        return self.models[name]

    def code_model(self) -> ModelSettings:
        """Return the model that grades code.

        Raises ConfigError if no model is named, or the named one is not configured.
        """
        return self._grading_model("code_model", self.grading.code_model)

    def feedback_model(self) -> ModelSettings:
        """Return the model that writes feedback. Raises as `code_model` does."""
        return self._grading_model("feedback_model", self.grading.feedback_model)

    def _grading_model(self, key: str, name: str) -> ModelSettings:
        if not name:
            flag = key.replace("_", "-")
            raise ConfigError(f"no model is named: pass --{flag}, or set {key} in [grading] of kvasir.toml")
        if name not in self.models:
            origin = self.origin(f"grading.{key}")
            raise ConfigError(f"{origin}: model {name!r} is not configured; {models_hint(name, self.models)}")
        return self.models[name]

    def broker_url_with_secret(self) -> str:
        """Return the broker's URL with its password; "" if there is no broker.

        Raises ConfigError if the password file can't be read.
        """
        if self.services.broker_secret and "@" not in self.services.broker:
            origin = self.origin("services.broker")
            raise ConfigError(f"{origin}: a password is set for the broker, but its URL names no user (amqp://USER@…)")
        return _with_secret(self.services.broker, self.services.broker_secret)

    def store_url_with_secret(self) -> str:
        """Return the store's URL with its password; "" if there is no store.

        Raises ConfigError if the password file can't be read.
        """
        url = _with_secret(self.services.store, self.services.store_secret)
        ca_file = self._ca_file("store", "rediss", "rediss+cluster")
        return put_option(url, "ssl_ca_certs", ca_file) if ca_file else url

    def broker_ca_file(self) -> str:
        """Return the CA file for the broker's certificate; "": the system's CAs.

        Raises ConfigError if it can't be used.
        """
        return self._ca_file("broker", "amqps")

    def _ca_file(self, service: str, *schemes: str) -> str:
        url, path = getattr(self.services, service), getattr(self.services, f"{service}_ca_file")
        origin = self.origin(f"services.{service}_ca_file")
        if url and path and url.partition("://")[0] not in schemes:
            raise ConfigError(
                f"{origin}: a CA file is set, but the {service}'s URL does not begin with {schemes[0]}://"
            )
        if url and path and not os.access(path, os.R_OK):
            raise ConfigError(f"{origin}: can't read the CA file {path}")
        return str(path) if url else ""


def models_hint(name: str, models: Mapping[str, ModelSettings]) -> str:
    """Return the end of a sentence about a model that is not configured."""
    if not models:
        return f'add a table [models."{name}"] to kvasir.toml'
    all_of_them = f" (configured: {', '.join(sorted(models))})" if nearest(name, models) else ""
    return did_you_mean(name, models) + all_of_them


def _with_secret(url: str, secret: Secret | None) -> str:
    return put_password(url, secret.reveal()) if url and secret else url
