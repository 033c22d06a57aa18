"""The settings of every command and worker: one file kvasir.toml, and what may override it.

Order, decided for each value by itself: flag, `KVASIR_*` variable, the file given with --config (or KVASIR_CONFIG),
./kvasir.toml, kvasir.toml in the user's configuration folder, default. Every value knows where it came from.

Passwords come from the environment or from files. They are kept apart from the URLs, so that printing settings,
or an error about them, shows none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infra import settings_urls as urls
from infra.settings_schema import COSTS, GRADING, MACHINE, MODEL, RATE, SAMPLING, SERVICES, WORKER_ROLES, Key
from infra.settings_sources import Found, Keys, dotted, file_layers, flag_layer, merge, variable_layer
from infra.settings_types import (
    Costs,
    Grading,
    MachineSettings,
    ModelSettings,
    Rates,
    Role,
    Services,
    Settings,
    configured,
)
from infra.settings_urls import Secret, mask
from messages.errors import ConfigError

__all__ = [
    "Costs",
    "Grading",
    "MachineSettings",
    "ModelSettings",
    "Rates",
    "Role",
    "Services",
    "Settings",
    "describe",
    "load_settings",
    "mask",
]

Row = tuple[str, str, str]

_ZERO_OF_A_MODEL = {
    "context": "(as trained)",
    "short_prompt_tokens": "(none)",
    "threads": "(the engine's choice)",
    "kv_bytes_per_token": "(not known)",
    "memory_gb": "(not known)",
}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:")  # two letters or more


def load_settings(
    flags: Mapping[str, object] | None = None,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user_dir: Path | None = None,
) -> Settings:
    """Read and check all sources.

    Args:
        flags: by the name of a key in [services] or [grading] (`{"code_model": "m"}`), or nested like the file
            (`{"models": {"m": {"engine": "llamacpp", "weights": {"llamacpp": "m.gguf"}}}}`). None: not given.
        config: the file of --config.
        environ: in place of the process's environment.
        cwd: in place of the current folder; relative paths in flags and variables start here.
        user_dir: in place of the user's configuration folder.

    Raises ConfigError that names the flag, variable, or file and line. Password files are not read here, so that
    commands that connect to nothing work without them.
    """
    environ = os.environ if environ is None else environ
    cwd = (cwd or Path()).absolute()
    layers = [flag_layer(flags or {}, cwd), variable_layer(environ, cwd)]
    found = merge([*layers, *file_layers(config, environ, cwd, user_dir)])
    return _Builder(found).settings()


class _Builder:
    """Turns the merged values into Settings, noting each one's origin."""

    def __init__(self, found: Mapping[Keys, Found]) -> None:
        self._found = dict(found)
        self._origins = {dotted(keys): entry.origin for keys, entry in found.items()}

    def settings(self) -> Settings:
        models = {name: self._model(name) for name in self._names("models")}
        machines = {name: self._machine(name, models) for name in self._names("machines")}
        return Settings(
            self._services(),
            Grading(**{name: self._value(("grading", name), GRADING[name]) for name in GRADING}),
            MappingProxyType(models),
            MappingProxyType(machines),
            MappingProxyType(self._origins),
            Costs(**{name: self._value(("costs", name), COSTS[name]) for name in COSTS}),
        )

    def _names(self, *path: str) -> list[str]:
        """Names of the tables right below `path`, in order of precedence and appearance."""
        return [keys[-1] for keys in self._found if keys[:-1] == path]

    def _value(self, keys: Keys, key: Any) -> Any:
        value = self._found[keys].value if keys in self._found else key.default
        if isinstance(value, list):
            return tuple(value)
        return float(value) if isinstance(key.default, float) else value

    def _path(self, keys: Keys) -> str:
        """A value that may be a path: relative to its source's folder, unless it has a scheme."""
        entry = self._found.get(keys)
        if entry is None or not entry.value or _SCHEME.match(entry.value):
            return entry.value if entry else ""
        path = Path(entry.value)
        return str(entry.folder / (path.expanduser() if path.parts[0] == "~" else path))

    def _services(self) -> Services:
        broker, broker_secret = self._service("broker")
        store, store_secret = self._service("store")
        ca_files = (self._path(("services", f"{name}_ca_file")) for name in ("broker", "store"))
        return Services(broker, store, broker_secret, store_secret, *ca_files)

    def _service(self, name: str) -> tuple[str, Secret | None]:
        """URL and password. The nearest source of a password wins, its own variable or file before the URL."""
        given = self._value(("services", name), SERVICES[name])
        if given in ("", urls.LOCAL):
            return "", None
        url, password = urls.take_password(given)
        candidates: list[tuple[int, Secret]] = []
        if variable := self._found.get(("services", f"{name}_password")):
            candidates.append((variable.rank, Secret(variable.origin, variable.value)))
        if file := self._found.get(("services", f"{name}_password_file")):
            path = Path(self._path(("services", f"{name}_password_file")))
            candidates.append((file.rank, Secret(file.origin, file=path)))
        if password:
            entry = self._found["services", name]
            candidates.append((entry.rank, Secret(entry.origin, password)))
        secret = min(candidates, key=lambda candidate: candidate[0], default=(0, None))[1]
        if secret:
            self._origins[f"services.{name}_password"] = secret.origin
        return url, secret

    def _model(self, name: str) -> ModelSettings:
        path = ("models", name)
        for key in SAMPLING:
            self._inherit((*path, key), ("grading", key))
        plain = {key: self._value((*path, key), rule) for key, rule in MODEL.items() if isinstance(rule, Key)}
        plain["tokenizer"] = self._path((*path, "tokenizer"))
        places = {engine: self._path((*path, "weights", engine)) for engine in self._names(*path, "weights")}
        weights = {engine: place for engine, place in places.items() if place}
        return ModelSettings(name=name, weights=MappingProxyType(weights), **plain)

    def _inherit(self, own: Keys, general: Keys) -> None:
        """A sampling value of [grading] is the model's, unless the model has its own from a source as near."""
        if general not in self._found:
            return
        if own not in self._found or self._found[general].rank < self._found[own].rank:
            self._found[own] = self._found[general]
            self._origins[dotted(own)] = self._found[general].origin

    def _machine(self, name: str, models: Mapping[str, ModelSettings]) -> MachineSettings:
        path = ("machines", name)
        plain = {key: self._value((*path, key), rule) for key, rule in MACHINE.items() if isinstance(rule, Key)}
        plain["host"] = plain["host"] or name
        plain["roles"] = tuple(Role(**role) for role in plain["roles"])
        for role in plain["roles"]:
            if role.role in WORKER_ROLES and role.model not in models:
                origin = self._origins[dotted((*path, "roles"))]
                raise ConfigError(f"{origin}: model {role.model!r} is not configured; {configured(role.model, models)}")
        rates = {model: self._rates((*path, "rates", model)) for model in self._names(*path, "rates")}
        return MachineSettings(name=name, rates=MappingProxyType(rates), **plain)

    def _rates(self, path: Keys) -> Rates:
        return Rates(*(self._value((*path, stage), RATE) for stage in ("prefill", "decode")))


def describe(settings: Settings) -> list[Row]:
    """(name, value as shown, origin) of every setting, for `kvasir config`; passwords are `***`."""
    rows = list(_rows("services", settings, settings.services, ("broker", "store")))
    for number, name in enumerate(("broker", "store")):
        if secret := getattr(settings.services, f"{name}_secret"):
            url = urls.put_password(getattr(settings.services, name), "x")
            rows[number] = (rows[number][0], mask(url), rows[number][2])
            rows.append((f"services.{name}_password", repr(secret), secret.origin))
    rows += _rows("services", settings, settings.services, ("broker_ca_file", "store_ca_file"))
    rows += _rows("grading", settings, settings.grading, GRADING)
    rows += _rows("costs", settings, settings.costs, COSTS)
    for name, model in settings.models.items():
        rows += _rows(f"models.{name}", settings, model, [key for key in MODEL if key != "weights"])
        rows += _named(f"models.{name}.weights", settings, model.weights)
    for name, machine in settings.machines.items():
        rows += _rows(f"machines.{name}", settings, machine, [key for key in MACHINE if key != "rates"])
        for model_name, rates in machine.rates.items():
            rows += _rows(f"machines.{name}.rates.{model_name}", settings, rates, ("prefill", "decode"))
    return rows


def _rows(prefix: str, settings: Settings, holder: object, names: Iterable[str]) -> Iterator[Row]:
    return _named(prefix, settings, {name: getattr(holder, name) for name in names})


def _named(prefix: str, settings: Settings, values: Mapping[str, object]) -> Iterator[Row]:
    for name, value in values.items():
        full = f"{prefix}.{name}"
        yield full, _absent(full, value) or _shown(value), settings.origin(full)


def _absent(name: str, value: object) -> str:
    """What an empty value means, or a zero where zero means nothing; "" if the value is there."""
    if value in ("", ()):
        if name.endswith("_ca_file"):
            return "(the system's)"
        return "(in this process)" if name in ("services.broker", "services.store") else "(not set)"
    if value == 0 and (name.startswith("machines.") or name == "costs.price_per_kwh"):
        return "(not known)"
    if value == 0 and name.startswith("models."):
        return _ZERO_OF_A_MODEL.get(name.rsplit(".", 1)[-1], "")
    return ""


def _shown(value: object) -> str:
    if isinstance(value, Role):
        return " ".join(part for part in (value.role, value.model, value.engine and f"by {value.engine}") if part)
    if isinstance(value, tuple):
        return ", ".join(_shown(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
