"""Every key of kvasir.toml, once: its default, its check, and the environment variable that may set it.

The schema has the shape of the file: tables are dicts, `Many` is a table whose keys are names that people choose,
`Key` is a value. Checks raise InvalidMessage; the reader adds where the value came from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from infra import settings_urls as urls
from infra.hours import Hours
from messages import checks
from messages.errors import InvalidMessage
from messages.jobs import MAX_TOKENS, SHORT_PROMPT_TOKENS

ENGINES = ("llamacpp", "mlx", "ollama", "simulated", "transformers")
PLATFORMS = ("linux", "linux-cuda", "macos")
SUPERVISORS = ("launchd", "plain", "systemd")
WORKER_ROLES = ("decode", "prefill")
SERVICE_ROLES = ("app", "broker", "grafana", "prometheus", "store")
ROLES = WORKER_ROLES + SERVICE_ROLES

Check = Callable[[str, object], None]

# No leading dash and no blanks: a host and a user end up on the command line of ssh.
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_\-]{0,252}\Z")
# It stands in unit files and shell commands.
_FOLDER = re.compile(r"/?[A-Za-z0-9_.][A-Za-z0-9_./\-]{0,200}\Z")
_USER = re.compile(r"(?:[A-Za-z_][A-Za-z0-9._\-]{0,63})?\Z")


@dataclass(frozen=True, slots=True)
class Key:
    """One value of the file."""

    default: Any
    check: Check
    variable: str = ""
    numeric: type[int] | type[float] | None = None  # what an environment variable's text is turned into


@dataclass(frozen=True, slots=True)
class Many:
    """A table of tables, each under a name of somebody's choice."""

    check: Check
    keys: Schema


Schema = Mapping[str, "Key | Many | Schema"]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, sorted(known), 1, 0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(sorted(known))}" if known else "none is known"


def _text(name: str, value: object) -> None:
    checks.text(name, value, 4096)


def _model_or_none(name: str, value: object) -> None:
    if value != "":
        checks.model_name(name, value)


def _engine_or_none(name: str, value: object) -> None:
    if value != "":
        engine(name, value)


def engine(name: str, value: object) -> None:
    """The name of an engine."""
    checks.one_of(name, value, ENGINES)


def _engines(name: str, value: object) -> None:
    if not isinstance(value, list | tuple):
        raise InvalidMessage(f"{name} must be a list of engines, not {value!r:.40}")
    for item in value:
        engine(name, item)


def _platform(name: str, value: object) -> None:
    checks.one_of(name, value, PLATFORMS)


def _hours(name: str, value: object) -> None:
    checks.text(name, value, 200)
    Hours.parse(name, str(value))


def _supervisor(name: str, value: object) -> None:
    if value != "":
        checks.one_of(name, value, SUPERVISORS)


def _folder(name: str, value: object) -> None:
    if not isinstance(value, str) or not _FOLDER.match(value):
        raise InvalidMessage(f"{name} must be a folder, absolute or from the user's home on, not {value!r:.60}")


def _host(name: str, value: object) -> None:
    if not isinstance(value, str) or not _HOST.match(value):
        raise InvalidMessage(f"{name} must be a host name or an address, not {value!r:.60}")


def _user(name: str, value: object) -> None:
    if not isinstance(value, str) or not _USER.match(value):
        raise InvalidMessage(f"{name} must be a user's login name, not {value!r:.60}")


def _broker(name: str, value: object) -> None:
    urls.check(name, value, urls.BROKER_SCHEMES)


def _store(name: str, value: object) -> None:
    urls.check(name, value, urls.STORE_SCHEMES)


def _roles(name: str, value: object) -> None:
    if not isinstance(value, list | tuple):
        raise InvalidMessage(
            f"{name} must be a list of tables such as {{ role = 'prefill', model = 'qwen3-coder:30b' }}"
        )
    for number, role in enumerate(value, 1):
        _role(f"{name}, entry {number}", role)


def _role(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidMessage(f"{name} must be a table, not {value!r:.40}")
    for key, item in value.items():
        if key not in ROLE:
            raise InvalidMessage(f"{name}: {key!r:.60} is no setting of a role; {did_you_mean(key, ROLE)}")
        ROLE[key].check(f"{name}, {key}", item)
    role = value.get("role")
    checks.one_of(f"{name}: role", role, ROLES)
    needed = ("model", "engine") if role in WORKER_ROLES else ()
    for key in needed:
        if not value.get(key):
            raise InvalidMessage(f"{name}: a {role} worker needs {key!r}")


def _whole(low: int, high: int) -> Check:
    return lambda name, value: checks.whole(name, value, low, high)


def _number(low: float, high: float) -> Check:
    return lambda name, value: checks.number(name, value, low, high)


RATE = Key(0.0, _number(0, 1e9))

ROLE: dict[str, Key] = {
    "role": Key("", lambda name, value: checks.one_of(name, value, ROLES)),
    "model": Key("", checks.model_name),
    "engine": Key("", engine),
    "weights": Key("", _text),
    "slots": Key(0, _whole(1, 1024)),
    "memory_gb": Key(0.0, _number(0, 1e6)),
}
SERVICES: dict[str, Key] = {
    "broker": Key("", _broker, "KVASIR_BROKER_URL"),
    "store": Key("", _store, "KVASIR_STORE_URL"),
    "broker_password_file": Key("", _text, "KVASIR_BROKER_PASSWORD_FILE"),
    "store_password_file": Key("", _text, "KVASIR_STORE_PASSWORD_FILE"),
    "broker_ca_file": Key("", _text, "KVASIR_BROKER_CA_FILE"),
    "store_ca_file": Key("", _text, "KVASIR_STORE_CA_FILE"),
}
# What the team's grader used; a model's own table may say otherwise.
_SAMPLING: dict[str, Key] = {
    "max_tokens": Key(3000, _whole(1, MAX_TOKENS), "KVASIR_MAX_TOKENS", int),
    "temperature": Key(0.2, _number(0, 5), "KVASIR_TEMPERATURE", float),
    "top_p": Key(0.9, _number(0, 1), "KVASIR_TOP_P", float),
}
SAMPLING = tuple(_SAMPLING)
GRADING: dict[str, Key] = {
    "code_model": Key("", _model_or_none, "KVASIR_CODE_MODEL"),
    "feedback_model": Key("", _model_or_none, "KVASIR_FEEDBACK_MODEL"),
    "notice": Key("", _text),
    **_SAMPLING,
}
COSTS: dict[str, Key] = {
    "price_per_kwh": Key(0.0, _number(0, 1e6)),
    "years": Key(4.0, _number(0.1, 100)),
    "hours_per_week": Key(40.0, _number(0.1, 168)),
}
MODEL: dict[str, Key | Many | Schema] = {
    "context": Key(0, _whole(0, MAX_TOKENS)),
    **_SAMPLING,
    "engine": Key("", _engine_or_none),
    "slots": Key(4, _whole(1, 1024)),
    "threads": Key(0, _whole(0, 1024)),
    "short_prompt_tokens": Key(SHORT_PROMPT_TOKENS, _whole(0, MAX_TOKENS)),
    "copies": Key(1, _whole(1, 2)),
    "tokenizer": Key("", _text),
    "same_weights": Key((), _engines),
    "kv_bytes_per_token": Key(0, _whole(0, 1 << 40)),
    "memory_gb": Key(0.0, _number(0, 1e6)),
    "weights": {name: Key("", _text) for name in ENGINES},
}
MACHINE: dict[str, Key | Many | Schema] = {
    "host": Key("", _host),
    "user": Key("", _user),
    "platform": Key("linux", _platform),
    "folder": Key("kvasir", _folder),
    "supervisor": Key("", _supervisor),
    "metrics_port": Key(9101, _whole(1, 65535)),
    "hours": Key("", _hours),
    "memory_gb": Key(0.0, _number(0, 1e6)),
    "link_gbps": Key(0.0, _number(0, 1e5)),
    "watts": Key(0.0, _number(0, 1e5)),
    "price": Key(0.0, _number(0, 1e9)),
    "roles": Key((), _roles),
    "rates": Many(checks.model_name, {"prefill": RATE, "decode": RATE}),
}
SCHEMA: Schema = {
    "services": SERVICES,
    "grading": GRADING,
    "costs": COSTS,
    "models": Many(checks.model_name, MODEL),
    "machines": Many(checks.identifier, MACHINE),
}
