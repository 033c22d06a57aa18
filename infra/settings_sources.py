"""Where settings come from: flags, variables, files. Each source becomes a `Layer`; `merge` lets the nearest win.

Precedence is decided for each value by itself, so a file may set what the one before it left open.
"""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import settings_urls as urls
from infra.settings_schema import GRADING, SCHEMA, SERVICES, Key, Many, Schema, did_you_mean
from messages.errors import ConfigError, InvalidMessage

FILE_NAME = "kvasir.toml"
CONFIG_VARIABLE = "KVASIR_CONFIG"

Keys = tuple[str, ...]

# Only from the environment: there is no key for a password in the file, and no flag.
_PASSWORDS = {
    "broker_password": Key("", SERVICES["broker_password_file"].check, "KVASIR_BROKER_PASSWORD"),
    "store_password": Key("", SERVICES["store_password_file"].check, "KVASIR_STORE_PASSWORD"),
}
_FROM_ENVIRONMENT: dict[str, dict[str, Key]] = {"services": SERVICES | _PASSWORDS, "grading": GRADING}
_SHORT: Mapping[str, Keys] = {
    key: (section, key) for section, keys in (("services", SERVICES), ("grading", GRADING)) for key in keys
}
# Set for other purposes: the tests' services, and what container platforms put there for a service named kvasir-….
_FOREIGN = re.compile(r"KVASIR_TEST_|.*_SERVICE_(HOST|PORT)|.*_PORT(_|$)")


@dataclass(frozen=True, slots=True)
class Found:
    """A value, where it came from, how near that is (0: nearest), and the folder its relative paths start from."""

    value: Any
    origin: str
    rank: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Layer:
    """One source: a tree shaped like the file."""

    tree: Mapping[str, Any]
    folder: Path
    origin: Callable[[Keys], str]
    schema: Schema = field(default_factory=lambda: SCHEMA)


def merge(layers: Sequence[Layer]) -> dict[Keys, Found]:
    """Every value given anywhere, checked; the first layer that has one wins. Raises ConfigError.

    A named table (`models.NAME`) is in the result too, as an entry of its own, so that an empty one is not lost.
    """
    found: dict[Keys, Found] = {}
    for rank, layer in enumerate(layers):
        for keys, value in _values(layer, layer.tree, layer.schema, ()):
            found.setdefault(keys, Found(value, layer.origin(keys), rank, layer.folder))
    return found


def dotted(keys: Keys) -> str:
    """`models.qwen3-coder:30b.context`"""
    return ".".join(keys)


def _values(layer: Layer, tree: Mapping[str, Any], schema: Schema, path: Keys) -> Iterator[tuple[Keys, Any]]:
    for name, value in tree.items():
        keys = (*path, name)
        rule = schema.get(name)
        if isinstance(rule, Key):
            _run(layer, keys, rule.check, dotted(keys), value)
            yield keys, value
        elif rule is None:
            known = did_you_mean(name, schema)
            raise ConfigError(f"{layer.origin(keys)}: {dotted(keys)} is no setting of Kvasir; {known}")
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{layer.origin(keys)}: {dotted(keys)} must be a table, not {type(value).__name__}")
        elif isinstance(rule, Many):
            yield from _named(layer, value, rule, keys)
        else:
            yield from _values(layer, value, rule, keys)


def _named(layer: Layer, tree: Mapping[str, Any], rule: Many, path: Keys) -> Iterator[tuple[Keys, Any]]:
    for name, table in tree.items():
        keys = (*path, name)
        _run(layer, keys, rule.check, f"the name in {dotted(path)}", name)
        if not isinstance(table, Mapping):
            raise ConfigError(f"{layer.origin(keys)}: {dotted(keys)} must be a table, not {type(table).__name__}")
        yield keys, {}
        yield from _values(layer, table, rule.keys, keys)


def _run(layer: Layer, keys: Keys, check: Callable[[str, object], None], name: str, value: object) -> None:
    try:
        check(name, value)
    except InvalidMessage as error:
        raise ConfigError(f"{layer.origin(keys)}: {error}") from None


# Flags


def flag_layer(flags: Mapping[str, object], cwd: Path) -> Layer:
    """Command-line values. None means that the flag was not given."""
    tree: dict[str, Any] = {}
    for name, value in _given(flags).items():
        section, *rest = _SHORT.get(name, (name,))
        if rest:
            tree.setdefault(section, {})[rest[0]] = value
        elif isinstance(value, Mapping):
            tree.setdefault(section, {}).update(value)
        else:
            tree[section] = value  # no name of ours: merge says so
    for service in ("broker", "store"):
        _refuse_password(f"--{service}", tree.get("services", {}).get(service))
    return Layer(tree, cwd, _flag)


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested = {name: _given(value) if isinstance(value, Mapping) else value for name, value in flags.items()}
    return {name: value for name, value in nested.items() if value is not None}


def _flag(keys: Keys) -> str:
    name = "weights" if "weights" in keys else keys[-1]
    return "--" + name.replace("_", "-")


def _refuse_password(flag: str, url: object) -> None:
    if isinstance(url, str) and url != urls.mask(url):
        raise ConfigError(
            f"{flag}: a password on the command line can be read by everybody on this machine; "
            f"put it into KVASIR_{flag[2:].upper()}_PASSWORD or a password file"
        )


# Environment variables


def variable_layer(environ: Mapping[str, str], cwd: Path) -> Layer:
    """The `KVASIR_*` variables. An empty one counts as not set."""
    _refuse_misspelt(environ)
    tree = {
        section: {name: _parsed(environ[key.variable], key) for name, key in keys.items() if environ.get(key.variable)}
        for section, keys in _FROM_ENVIRONMENT.items()
    }
    return Layer(tree, cwd, lambda keys: _FROM_ENVIRONMENT[keys[0]][keys[1]].variable, _FROM_ENVIRONMENT)


def _parsed(text: str, key: Key) -> Any:
    try:
        return key.numeric(text) if key.numeric else text
    except ValueError:
        return text  # its check says what is wrong with it


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    """A variable that resembles one of ours is taken for a slip; one that resembles none is somebody else's."""
    known = {key.variable for keys in _FROM_ENVIRONMENT.values() for key in keys.values() if key.variable}
    known.add(CONFIG_VARIABLE)
    for name in environ:
        if not name.startswith("KVASIR_") or name in known or _FOREIGN.match(name):
            continue
        # Without the common prefix, which would make everything look alike.
        close = difflib.get_close_matches(name[7:], sorted(variable[7:] for variable in known), 1, 0.75)
        if close:
            raise ConfigError(f"{name}: Kvasir has no such variable; did you mean KVASIR_{close[0]}?")


# Files


def file_layers(config: Path | None, environ: Mapping[str, str], cwd: Path, user_dir: Path | None) -> list[Layer]:
    """`--config` or KVASIR_CONFIG (must exist), then ./kvasir.toml, then the user's; no file twice."""
    given = _chosen(config, environ, cwd)
    paths = [given] if given else []
    folders = [cwd, user_dir or user_config_dir(environ)]
    paths += [folder / FILE_NAME for folder in folders if folder and (folder / FILE_NAME).exists()]
    unique = {path.resolve(): path for path in reversed(paths)}
    return [_file_layer(path) for path in paths if unique.pop(path.resolve(), None)]


def user_config_dir(environ: Mapping[str, str]) -> Path | None:
    """The user's folder for Kvasir's configuration; None if there is no home."""
    xdg = environ.get("XDG_CONFIG_HOME", "")
    if Path(xdg).is_absolute():  # the XDG specification: a relative one is ignored
        return Path(xdg) / "kvasir"
    home = environ.get("HOME")
    if not home:
        return None
    folder = "Library/Application Support" if sys.platform == "darwin" else ".config"
    return Path(home) / folder / "kvasir"


def _chosen(config: Path | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    name = config or environ.get(CONFIG_VARIABLE)
    if not name:
        return None
    path = cwd / Path(name).expanduser()
    if not path.is_file():
        source = "--config" if config else CONFIG_VARIABLE
        raise ConfigError(f"{source}: there is no file {path}")
    return path


def _file_layer(path: Path) -> Layer:
    try:
        text = path.read_text("utf-8-sig")
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    lines = key_lines(text)
    return Layer(tree, path.parent, lambda keys: _place(path, lines, keys))


def _place(path: Path, lines: Mapping[Keys, int], keys: Keys) -> str:
    """Path and line of a value, or of the table around it."""
    for length in range(len(keys), 0, -1):
        if keys[:length] in lines:
            return f"{path} line {lines[keys[:length]]}"
    return str(path)


def key_lines(text: str) -> dict[Keys, int]:
    """The line of each header and each `key =` of a valid TOML text. Best effort, as tomllib keeps no positions."""
    lines: dict[Keys, int] = {}
    table: Keys = ()
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("["):
            table = _path(line) or table
            lines.setdefault(table, number)
        elif "=" in line:
            keys = _path(line.partition("=")[0] + "= 0")
            lines.setdefault((*table, *keys), number)
    return lines


def _path(line: str) -> Keys:
    """The keys that one line of TOML names; () if it is not a whole statement."""
    try:
        node: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    keys = []
    while isinstance(node, dict | list) and node:
        if isinstance(node, dict):
            keys.append(next(iter(node)))
            node = node[keys[-1]]
        else:
            node = node[0]
    return tuple(keys)
