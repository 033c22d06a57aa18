"""The settings of every command and worker: one file, kvasir.toml, and the sources that may override it.

Precedence is decided for each value separately: flag, `KVASIR_*` variable, the file given with --config (or
KVASIR_CONFIG), ./kvasir.toml, kvasir.toml in the user's configuration folder, default. Every value has its origin
recorded.

Passwords come from the environment or from files. They are kept apart from the URLs, so that settings and errors about
them can be shown without passwords.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infra.config import urls
from infra.config.schema import SAMPLING, WORKER_ROLES, Costs, Grading, MachineRole, Rates, keys_of
from infra.config.sources import (
    API_KEY,
    PASSWORDS,
    Keys,
    SourcedValue,
    file_layers,
    flag_layer,
    merge,
    variable_layer,
)
from infra.config.types import MachineSettings, ModelSettings, Services, Settings, models_hint
from infra.config.urls import Secret, mask
from messages.errors import ConfigError

__all__ = [
    "Costs",
    "Grading",
    "MachineRole",
    "MachineSettings",
    "ModelSettings",
    "Rates",
    "Services",
    "Settings",
    "describe",
    "load_settings",
    "mask",
]

Row = tuple[str, str, str]

_VARIABLES = 1  # rank of environment variables; flags are stronger and have rank 0

_ZERO_OF_A_MODEL = {
    "context": "(as trained)",
    "short_prompt_tokens": "(none)",
    "kv_check_every": "(never)",
    "threads": "(the engine's choice)",
    "kv_bytes_per_token": "(not known)",
    "kv_state_bytes": "(none)",
    "memory_gb": "(not known)",
    "free_memory_gb": "(not looked at)",
}


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
        config: the file given with --config.
        environ: replaces the process's environment.
        cwd: replaces the current folder; relative paths in flags and variables start here.
        user_dir: replaces the user's configuration folder.

    Raises ConfigError that names the flag, the variable, or the file and line. Password files are not read here, so
    that commands that connect to nothing work without them.
    """
    environ = os.environ if environ is None else environ
    cwd = (cwd or Path()).absolute()
    entries = merge(
        [flag_layer(flags or {}, cwd), variable_layer(environ, cwd), *file_layers(config, environ, cwd, user_dir)]
    )
    services = _services(entries, environ)
    models = {name: _model(entries, name, environ.get(API_KEY, "")) for name in _values_below(entries, "models")}
    machines = {name: _machine(entries, name, models) for name in _values_below(entries, "machines")}
    return Settings(
        services,
        Grading(**_values_below(entries, "grading")),
        MappingProxyType(models),
        MappingProxyType(machines),
        MappingProxyType({".".join(keys): entry.origin for keys, entry in entries.items()}),
        Costs(**_values_below(entries, "costs")),
    )


def _values_below(entries: Mapping[Keys, SourcedValue], *table: str) -> dict[str, Any]:
    """Return the values directly below a table, or the names there, in order of precedence and appearance."""
    return {keys[-1]: entry.value for keys, entry in entries.items() if keys[:-1] == table}


def _services(entries: dict[Keys, SourcedValue], environ: Mapping[str, str]) -> Services:
    """Return the broker and the store. Passwords are taken out of their URLs."""
    values = _values_below(entries, "services")
    for name in PASSWORDS:
        values[name], secret = _service(entries, name, environ.get(PASSWORDS[name], ""))
        if secret:
            values[f"{name}_secret"] = secret
            entries["services", f"{name}_password"] = SourcedValue(secret, secret.origin, 0)
    return Services(**values)


def _service(entries: Mapping[Keys, SourcedValue], name: str, variable: str) -> tuple[str, Secret | None]:
    """Return the URL and the password.

    The nearest source of a password wins; at equal rank its variable or file wins over the URL.
    """
    entry = entries.get(("services", name))
    if entry is None or entry.value in ("", urls.LOCAL):
        return "", None
    url, password = urls.take_password(entry.value)
    candidates = []
    if variable:
        candidates.append((_VARIABLES, Secret(PASSWORDS[name], variable)))
    if file := entries.get(("services", f"{name}_password_file")):
        candidates.append((file.rank, Secret(file.origin, file=Path(file.value))))
    if password:
        candidates.append((entry.rank, Secret(entry.origin, password)))
    return url, min(candidates, key=lambda candidate: candidate[0], default=(0, None))[1]


def _model(entries: dict[Keys, SourcedValue], name: str, variable: str) -> ModelSettings:
    for key in SAMPLING:
        own, general = ("models", name, key), ("grading", key)
        # A value of [grading] applies to the model, unless the model's own value comes from the same source, or from a
        # stronger one.
        if general in entries and (own not in entries or entries[general].rank < entries[own].rank):
            entries[own] = entries[general]
    places = _values_below(entries, "models", name, "weights")
    weights = {engine: place for engine, place in places.items() if place}
    fields = _values_below(entries, "models", name) | {"name": name, "weights": MappingProxyType(weights)}
    file = entries.get(("models", name, "api_key_file"))
    if variable:
        fields["api_key"] = Secret(API_KEY, variable)
    elif file and file.value:
        fields["api_key"] = Secret(file.origin, file=Path(file.value))
    return ModelSettings(**fields)


def _machine(entries: Mapping[Keys, SourcedValue], name: str, models: Mapping[str, ModelSettings]) -> MachineSettings:
    path = ("machines", name)
    values = {"host": name} | _values_below(entries, *path)
    for role in values.get("roles", ()):
        if role.role in WORKER_ROLES and role.model not in models:
            origin = entries[*path, "roles"].origin
            raise ConfigError(f"{origin}: model {role.model!r} is not configured; {models_hint(role.model, models)}")
    rates = {
        model: Rates(**_values_below(entries, *path, "rates", model))
        for model in _values_below(entries, *path, "rates")
    }
    return MachineSettings(**values | {"name": name, "rates": MappingProxyType(rates)})


def describe(settings: Settings) -> list[Row]:
    """Return (name, value as shown, origin) of every setting, for `kvasir config`. Passwords are shown as `***`."""
    rows = list(_rows("services", settings, settings.services, ("broker", "store")))
    for number, name in enumerate(("broker", "store")):
        if secret := getattr(settings.services, f"{name}_secret"):
            url = urls.put_password(getattr(settings.services, name), "x")
            rows[number] = (rows[number][0], mask(url), rows[number][2])
            rows.append((f"services.{name}_password", repr(secret), secret.origin))
    rows += _rows("services", settings, settings.services, ("broker_ca_file", "store_ca_file", "broker_nodes"))
    rows += _rows("grading", settings, settings.grading, keys_of("grading"))
    rows += _rows("costs", settings, settings.costs, keys_of("costs"))
    for name, model in settings.models.items():
        rows += _rows(f"models.{name}", settings, model, keys_of("models")[:-1])
        if model.api_key:
            rows.append((f"models.{name}.api_key", repr(model.api_key), model.api_key.origin))
        rows += _value_rows(f"models.{name}.weights", settings, model.weights)
    for name, machine in settings.machines.items():
        rows += _rows(f"machines.{name}", settings, machine, keys_of("machines")[:-1])
        for model_name, rates in machine.rates.items():
            rows += _rows(f"machines.{name}.rates.{model_name}", settings, rates, keys_of("machines.rates"))
    return rows


def _rows(prefix: str, settings: Settings, holder: object, names: Iterable[str]) -> Iterator[Row]:
    return _value_rows(prefix, settings, {name: getattr(holder, name) for name in names})


def _value_rows(prefix: str, settings: Settings, values: Mapping[str, object]) -> Iterator[Row]:
    for name, value in values.items():
        full = f"{prefix}.{name}"
        yield full, _absent(full, value) or _display(value), settings.origin(full)


def _absent(name: str, value: object) -> str:
    """Return what an empty value means, or a zero that stands for something else; "" for any other value."""
    if value in ("", ()):
        if name.endswith("_ca_file"):
            return "(the system's)"
        return "(in this process)" if name in ("services.broker", "services.store") else "(not set)"
    if value == 0 and (name.startswith("machines.") or name == "costs.price_per_kwh"):
        return "(not known)"
    if value == 0 and name.startswith("models."):
        return _ZERO_OF_A_MODEL.get(name.rsplit(".", 1)[-1], "")
    return ""


def _display(value: object) -> str:
    if isinstance(value, MachineRole):
        return " ".join(part for part in (value.role, value.model, value.engine and f"by {value.engine}") if part)
    if isinstance(value, tuple):
        return ", ".join(_display(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
