"""The sources of settings: flags, variables, files. Each becomes a `Layer`, and in `merge` the nearest one wins.

Precedence is decided for each value separately, so a farther source may supply a value that a nearer one lacks.
"""

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.config import urls
from infra.config.ownership import why_not_ours
from infra.config.schema import ROLES, File, did_you_mean, keys_of
from messages.errors import ConfigError
from messages.installed import engine_entry

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

FILE_NAME = "kvasir.toml"
CONFIG_VARIABLE = "KVASIR_CONFIG"

Keys = tuple[str, ...]

VARIABLES: Mapping[Keys, str] = {
    ("services", "broker"): "KVASIR_BROKER_URL",
    ("services", "store"): "KVASIR_STORE_URL",
    ("services", "broker_password_file"): "KVASIR_BROKER_PASSWORD_FILE",
    ("services", "store_password_file"): "KVASIR_STORE_PASSWORD_FILE",
    ("services", "broker_ca_file"): "KVASIR_BROKER_CA_FILE",
    ("services", "store_ca_file"): "KVASIR_STORE_CA_FILE",
    ("grading", "code_model"): "KVASIR_CODE_MODEL",
    ("grading", "feedback_model"): "KVASIR_FEEDBACK_MODEL",
    ("grading", "max_tokens"): "KVASIR_MAX_TOKENS",
    ("grading", "temperature"): "KVASIR_TEMPERATURE",
    ("grading", "top_p"): "KVASIR_TOP_P",
}
# Variables for passwords. The configuration file can only name a password file, and no command has an option for a
# password.
PASSWORDS = {"broker": "KVASIR_BROKER_PASSWORD", "store": "KVASIR_STORE_PASSWORD"}
API_KEY = "KVASIR_API_KEY"  # API key for the server of the openai or vllm engine
VLLM_PYTHON = "KVASIR_VLLM_PYTHON"  # the vllm engine reads this variable
_SHORT: Mapping[str, Keys] = {key: (table, key) for table in ("services", "grading") for key in keys_of(table)}
# Variables that are not settings: the tests' own, and those that container platforms set for a service named kvasir-….
_FOREIGN = re.compile(r"KVASIR_TEST_|.*_SERVICE_(HOST|PORT)|.*_PORT(_|$)")
_LISTS = {"same_weights": "engines", "roles": "tables such as { role = 'prefill', model = 'qwen3-coder:30b' }"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:")  # the scheme of a URL, with at least two characters
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*(?:\?|\Z)")  # OWNER/NAME, possibly with options


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value, its origin, and the rank of its source (0: nearest)."""

    value: Any
    origin: str
    rank: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One source: a tree of values like the file's, and the folder that relative paths start from."""

    tree: Mapping[str, Any]
    folder: Path
    origin: Callable[[Keys], str]
    is_text: bool = False  # whether numbers are given as text, as in environment variables


def merge(layers: Sequence[Layer]) -> dict[Keys, SourcedValue]:
    """Check every value given anywhere, and keep the one from the nearest layer. Raises ConfigError.

    The result also contains tables, as {}, so that an empty `models.NAME` is not lost.
    """
    entries: dict[Keys, SourcedValue] = {}
    for rank, layer in enumerate(layers):
        for keys, value in _values(layer.tree, _validate(layer), ()):
            if value and _is_path(keys):
                value = _resolve_path(value, layer.folder, takes_hub_name=_takes_hub_name(keys))
            entries.setdefault(keys, SourcedValue(value, layer.origin(keys), rank))
    return entries


def _values(tree: Mapping[str, Any], table: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield the tree's values, as converted by pydantic."""
    for name, node in tree.items():
        keys, value = (*path, name), table[name] if isinstance(table, Mapping) else getattr(table, name)
        yield keys, {} if isinstance(node, Mapping) else value
        if isinstance(node, Mapping):
            yield from _values(node, value, keys)


def _is_path(keys: Keys) -> bool:
    """Whether the setting may be a path. For weights, the engine's entry says so."""
    if keys[2:3] == ("weights",):
        return bool(engine_entry(keys[3]).weights_type != "text")
    return keys[-1].endswith("_file") or keys[2:3] == ("tokenizer",)


def _takes_hub_name(keys: Keys) -> bool:
    return keys[2:3] == ("weights",) and engine_entry(keys[3]).weights_type == "path or hub name"


def _resolve_path(place: str, folder: Path, takes_hub_name: bool) -> str:
    """Resolve a value that may be a path against its source's folder.

    A value with a scheme is kept as it is, and so is a hub name for which no file exists.
    """
    path = Path(place)
    resolved_path = folder / (path.expanduser() if path.parts[:1] == ("~",) else path)
    is_hub_name = takes_hub_name and _HUB_NAME.match(place) and not os.path.exists(str(resolved_path).partition("?")[0])
    return place if _SCHEME.match(place) or is_hub_name else str(resolved_path)


@cache
def _adapter() -> "TypeAdapter[File]":
    """Return pydantic's checker.

    It is imported here, because `--help` and completion don't need it and it imports slowly.
    """
    from pydantic import TypeAdapter

    return TypeAdapter(File)


def _validate(layer: Layer) -> File:
    from pydantic import ValidationError

    check = _adapter().validate_strings if layer.is_text else _adapter().validate_python
    try:
        return check(layer.tree)
    except ValidationError as error:
        raise _refusal(layer, error.errors(include_url=False)[0]) from None


def _refusal(layer: Layer, error: "ErrorDetails") -> ConfigError:
    """Return the error about a value or a name. A value that may be a password is not shown."""
    of_key = error["loc"][-1] == "[key]"
    loc = error["loc"][:-1] if of_key else error["loc"]
    keys: Keys = tuple(takewhile(lambda part: isinstance(part, str), loc))  # type: ignore[arg-type]
    try:
        if of_key or error["type"] == "unexpected_keyword_argument":
            problem, quoted_value = _of_name(loc, error), loc[-1]
        else:
            # Errors about the URLs in [services] never quote them, so it is safe to say what is wrong.
            problem = _spell_path(loc) + _of_value(loc[-1], error)
            quoted_value = "" if keys[0] == "services" else error["input"]
        secret = urls.may_hold_password(quoted_value)
    except ValueError:
        problem, secret = f"{_spell_path(loc)} must not be a number with thousands of digits", False
    if secret:
        problem = "a URL with a password, or a value that looks like one, is not allowed here"
    return ConfigError(f"{layer.origin(keys)}: {problem}")


def _spell_path(loc: Sequence[Any]) -> str:
    """Return the path of a value for people: `models.m.context`, `machines.mac1.roles, entry 2, role`."""
    if loc[2:3] != ("roles",) or not loc[3:]:
        return ".".join(part for part in loc if isinstance(part, str))
    return ", ".join([".".join(loc[:3]), f"entry {loc[3] + 1}", *loc[4:]])


def _of_name(loc: Sequence[str | int], error: "ErrorDetails") -> str:
    """Say what is wrong with a name: an invalid model or machine name, or an unknown key."""
    if error["type"] == "value_error":
        return f"the name in {_spell_path(loc[:-1])}{error['ctx']['error']}"
    table = "models.weights" if error["type"] == "must" else ".".join(map(str, loc[:-1][::2]))
    suggestion = did_you_mean(str(loc[-1]), keys_of(table))
    if table == "machines.roles":
        return f"{_spell_path(loc[:-1])}: {loc[-1]!r:.60} is no setting of a role; {suggestion}"
    return f"{_spell_path(loc)} is no setting of Kvasir; {suggestion}"


def _of_value(key: str | int, error: "ErrorDetails") -> str:
    """Say what is wrong with a value, in words that follow its name."""
    value, kind = error["input"], type(error["input"]).__name__
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "must":
            return f" must be {error['msg']}, not " + (f"{value:g}" if kind == "float" else f"{value!r:.60}")
        case "string_type":
            return f" must be text, not {kind}"
        case "tuple_type":
            return f" must be a list of {_LISTS[str(key)]}, not {value!r:.40}"
        case "missing":
            return f" must be one of {', '.join(sorted(ROLES))}"  # `role` is the only key without a default
    such_as = " such as { llamacpp = 'FILE.gguf' }" if key == "weights" else ""
    return f" must be a table{such_as}, not {kind}"


# Flags


def flag_layer(flags: Mapping[str, object], cwd: Path) -> Layer:
    """Return the layer of command-line values. None means that a flag was not given."""
    tree: dict[str, Any] = {}
    for name, value in _without_none(flags).items():
        section, *rest = _SHORT.get(name, (name,))
        if rest:
            tree.setdefault(section, {})[rest[0]] = value
        elif isinstance(value, Mapping):
            tree.setdefault(section, {}).update(value)
        else:
            tree[section] = value  # an unknown name, which `merge` reports
    for service in ("broker", "store"):
        url = tree.get("services", {}).get(service)
        if isinstance(url, str) and url != urls.mask(url):
            raise ConfigError(
                f"--{service}: every user of this machine can read a password on the command line; "
                f"put it into KVASIR_{service.upper()}_PASSWORD or a password file"
            )
    return Layer(tree, cwd, lambda keys: f"--{'weights' if 'weights' in keys else keys[-1].replace('_', '-')}")


def _without_none(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested = {name: _without_none(value) if isinstance(value, Mapping) else value for name, value in flags.items()}
    return {name: value for name, value in nested.items() if value is not None}


# Environment variables


def variable_layer(environ: Mapping[str, str], cwd: Path) -> Layer:
    """Return the layer of the `KVASIR_*` variables, except for passwords. An empty variable counts as not set."""
    _refuse_misspelt(environ)
    tree: dict[str, dict[str, str]] = {}
    for (table, key), variable in VARIABLES.items():
        if environ.get(variable):
            tree.setdefault(table, {})[key] = environ[variable]
    return Layer(tree, cwd, lambda keys: VARIABLES.get(keys, ""), is_text=True)


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable that looks like a misspelling of ours. Others may belong to another program."""
    variables = {CONFIG_VARIABLE, API_KEY, VLLM_PYTHON, *VARIABLES.values(), *PASSWORDS.values()}
    for name in environ:
        if not name.startswith("KVASIR_") or name in variables or _FOREIGN.match(name):
            continue
        # Compare without the common prefix, which would make all names look alike.
        close = difflib.get_close_matches(name[7:], sorted(variable[7:] for variable in variables), 1, 0.75)
        if close:
            raise ConfigError(f"{name}: Kvasir has no such variable; did you mean KVASIR_{close[0]}?")


# Files


def file_layers(config: Path | None, environ: Mapping[str, str], cwd: Path, user_dir: Path | None) -> list[Layer]:
    """Return `--config` or KVASIR_CONFIG (must exist), then ./kvasir.toml, then the user's file. No file occurs twice.

    A file that was not named explicitly must belong to this user, because it decides where students' work is sent.
    """
    explicit_path = _explicit_file(config, environ, cwd)
    paths = [explicit_path] if explicit_path else []
    folders = [cwd, user_dir or user_config_dir(environ)]
    paths += [folder / FILE_NAME for folder in folders if folder and (folder / FILE_NAME).exists()]
    unique = {path.resolve(): path for path in reversed(paths)}
    unique_paths = [path for path in paths if unique.pop(path.resolve(), None)]
    for path in unique_paths:
        if path != explicit_path and (problem := why_not_ours(path)):
            raise ConfigError(f"{problem}; if you trust this file, pass --config {path}")
    return [_file_layer(path) for path in unique_paths]


def user_config_dir(environ: Mapping[str, str]) -> Path | None:
    """Return the user's folder for Kvasir's configuration; None if there is no home."""
    return _user_dir(environ, "XDG_CONFIG_HOME", ".config")


def user_data_dir(environ: Mapping[str, str]) -> Path | None:
    """Return the user's folder for data that Kvasir keeps; None if there is no home."""
    return _user_dir(environ, "XDG_DATA_HOME", ".local/share")


def _user_dir(environ: Mapping[str, str], variable: str, default: str) -> Path | None:
    xdg = environ.get(variable, "")
    if Path(xdg).is_absolute():  # the XDG specification says that relative paths must be ignored
        return Path(xdg) / "kvasir"
    home = environ.get("HOME")
    if not home:
        return None
    folder = "Library/Application Support" if sys.platform == "darwin" else default
    return Path(home) / folder / "kvasir"


def _explicit_file(config: Path | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    name = config or environ.get(CONFIG_VARIABLE)
    if not name:
        return None
    path = cwd / Path(name).expanduser()
    if not path.is_file():
        source = "--config" if config else CONFIG_VARIABLE
        label = "with that name, which looks like a URL with a password" if urls.may_hold_password(path) else path
        raise ConfigError(f"{source}: there is no file {label}")
    return path


def _file_layer(path: Path) -> Layer:
    if not path.is_file():  # reading a pipe would block
        raise ConfigError(f"{path} is not a regular file")
    try:
        text = path.read_text("utf-8-sig")
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits raises a ValueError
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        problem = "a name in it looks like a URL with a password" if urls.may_hold_password(problem) else problem
        raise ConfigError(f"{path} is not valid TOML: {problem}") from None
    lines = key_lines(text)
    return Layer(tree, path.parent, lambda keys: _place(path, lines, keys))


def _place(path: Path, lines: Mapping[Keys, int], keys: Keys) -> str:
    """Return the file and line of a value, or of the table around it."""
    for length in range(len(keys), 0, -1):
        if keys[:length] in lines:
            return f"{path} line {lines[keys[:length]]}"
    return str(path)


def key_lines(text: str) -> dict[Keys, int]:
    """Return the line of each header and each `key =` of a valid TOML text.

    This is best effort, since tomllib keeps no positions.
    """
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
    """Return the keys that one line of TOML names; () if it is not a complete statement."""
    try:
        node: Any = tomllib.loads(line)
    except (ValueError, RecursionError):
        return ()
    keys = []
    while isinstance(node, dict | list) and node:
        if isinstance(node, dict):
            keys.append(next(iter(node)))
            node = node[keys[-1]]
        else:
            node = node[0]
    return tuple(keys)
