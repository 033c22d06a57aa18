"""Settings: every key, what it may be and its default; the variables; and how a file with all keys is read."""

import dataclasses
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir import KvasirError, load_settings

ROOT = Path(__file__).resolve().parents[2]
FULL = Path(__file__).parent / "release_0_1_0" / "kvasir.toml"
# One of them is tried after the other: a key is known by those that it takes.
VALUES: tuple[Any, ...] = (
    *("", "a", "a b", "a\nb", "tiny:1b", "two words", "amqp://u@h:1/v", "redis://h:1", "https://example.com"),
    *(
        "amqp://u:secret@h",
        "18:00-08:00",
        "systemd",
        "llamacpp",
        "linux-cuda",
        "decode",
        "/srv/kvasir",
        "fast:5672,b:1",
    ),
    *(True, -1, 0, 1, 2, 3, 16, 1024, 1025, 65535, 65536, 1_000_000, 1_048_576, 1_048_577, 1 << 40, (1 << 40) + 1),
    *(-0.5, 0.05, 0.5, 1.0, 1.5, 5.0, 6.0, 100.0, 168.0, 169.0, 1e5, 1e6, 1e7, 1e9, 1e10, float("inf")),
    *([], ["llamacpp", "mlx"], ["nothing"], {}, {"mlx": "file"}, {"role": 1}),
)
ROLE, MACHINE, MODEL = {"role": "store"}, "m1", "tiny:1b"


def recorded() -> dict[str, Any]:
    """All of it."""
    full = load_settings(config=FULL, environ={}, cwd=FULL.parent, user_dir=FULL.parent / "nowhere")
    bare = load_settings(
        {"models": {MODEL: {}}, "machines": {MACHINE: {"roles": [ROLE], "rates": {MODEL: {}}}}},
        environ={},
        cwd=FULL.parent / "nowhere",
    )
    return {
        "tables": {name: _keys(name, table) for name, table in _tables(bare).items()},
        "a file with every key": _plain(full),
        "where its values come from": sorted(
            f"{name}: {full.origin(name).replace(str(FULL), 'kvasir.toml')}" for name in full.origins
        ),
        "variables in the source": _variables_named(),
        "all variables set": _with_variables(),
        "a file that is refused": [_refusal(text) for text in REFUSED],
    }


REFUSED = (
    "[grading]\ncode_modell = 'm'\n",
    "[grading]\ntemperature = 'warm'\n",
    "[service]\n",
    "[services]\nbroker = 'amqp://u:secret@h'\n",
    "[machines.m1]\nroles = [{ role = 'decode' }]\n",
)


def _tables(bare: Any) -> dict[str, Any]:
    machine = bare.machines[MACHINE]
    return {
        "services": bare.services,
        "grading": bare.grading,
        "costs": bare.costs,
        "models.NAME": bare.models[MODEL],
        "machines.NAME": machine,
        "machines.NAME.roles[]": machine.roles[0],
        "machines.NAME.rates.MODEL": machine.rates[MODEL],
    }


NOT_IN_THE_FILE = {"name", "api_key", "broker_secret", "store_secret"}


def _keys(table: str, made: Any) -> dict[str, Any]:
    keys = [each.name for each in dataclasses.fields(made) if each.name not in NOT_IN_THE_FILE]
    return {
        key: {
            "default": _plain(getattr(made, key)),
            "takes": " | ".join(repr(one) for one in VALUES if _takes(table, key, one)),
        }
        for key in keys
    }


def _takes(table: str, key: str, value: Any) -> bool:
    match table.split("."):
        case ["models", _]:
            flags: dict[str, Any] = {"models": {MODEL: {key: value}}}
        case ["machines", _]:
            flags = {"machines": {MACHINE: {key: value}}}
        case ["machines", _, "roles[]"]:
            flags = {"machines": {MACHINE: {"roles": [{**ROLE, key: value}]}}}
        case ["machines", _, "rates", _]:
            flags = {"machines": {MACHINE: {"rates": {MODEL: {key: value}}}}}
        case _:
            flags = {table: {key: value}}
    try:
        load_settings(flags, environ={}, cwd=FULL.parent / "nowhere", user_dir=FULL.parent / "nowhere")
    except KvasirError:
        return False
    return True


def _variables_named() -> list[str]:
    """Every name of a variable of ours that a program reads, tests' and foreign ones left out."""
    rooms = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("tests", "examples")]
    sources = [path for room in rooms if room.name != "benchmarks" for path in room.rglob("*.py")]
    found = {name for path in sources for name in re.findall(r"\bKVASIR_[A-Z][A-Z_]*[A-Z]\b", path.read_text("utf-8"))}
    return sorted(name for name in found if not name.startswith("KVASIR_TEST"))


def _with_variables() -> dict[str, Any]:
    """Each variable with a value of a form that some setting takes, alone: what changes in the settings."""
    base = dict(_flat(_plain(load_settings(environ={}, cwd=FULL.parent / "nowhere"))))
    made: dict[str, Any] = {}
    for name in _variables_named():
        for value in ("amqp://u@h:1/v", "redis://h:1", "word", "0.5", "7"):
            try:
                given = load_settings(environ={name: value}, cwd=FULL.parent / "nowhere")
            except KvasirError:
                continue
            changed = {key: new for key, new in _flat(_plain(given)) if base.get(key) != new}
            if changed:
                made.setdefault(name, {})[value] = {
                    key: str(new).replace(str(FULL.parent), "FOLDER") for key, new in sorted(changed.items())
                }
    return made


def _flat(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        return [(path, tree)]
    return [row for name, value in tree.items() for row in _flat(value, f"{path}.{name}" if path else name)]


def _refusal(text: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "kvasir.toml")
        place.write_text(text, "utf-8")
        try:
            load_settings(config=place, environ={}, cwd=Path(folder))
        except KvasirError as error:
            return str(error).replace(str(place), "kvasir.toml")
    return "not refused"


def _plain(thing: Any) -> Any:
    """As JSON has it; of secrets only that they are there."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = [each.name for each in dataclasses.fields(thing) if each.name != "origins"]
        return {name: _plain(getattr(thing, name)) for name in fields}
    if isinstance(thing, Mapping):
        return {str(name): _plain(value) for name, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [_plain(each) for each in thing]
    if isinstance(thing, str):
        return thing.replace(str(FULL.parent), "FOLDER")
    return thing if isinstance(thing, int | float | None) else "<secret>"
