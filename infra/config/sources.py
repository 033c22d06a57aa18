"""Where settings come from: flags, variables and files. Each source becomes a `Layer`, and for each value `merge` takes
the nearest one.

Precedence is decided for each value separately, so one file may set what a nearer file leaves open.
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
# Passwords come only from the environment: there is no key in the file for one, and no flag.
PASSWORDS = {"broker": "KVASIR_BROKER_PASSWORD", "store": "KVASIR_STORE_PASSWORD"}
API_KEY = "KVASIR_API_KEY"  # key for the server behind the openai engine
VLLM_PYTHON = "KVASIR_VLLM_PYTHON"  # read by the vllm engine
_SHORT: Mapping[str, Keys] = {key: (table, key) for table in ("services", "grading") for key in keys_of(table)}
# Variables for other purposes: those of the tests' services, and those that container platforms set for a service named
# kvasir-….
_FOREIGN = re.compile(r"KVASIR_TEST_|.*_SERVICE_(HOST|PORT)|.*_PORT(_|$)")
_LISTS = {"same_weights": "engines", "roles": "tables such as { role = 'prefill', model = 'qwen3-coder:30b' }"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:")  # two letters or more
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*(?:\?|\Z)")  # OWNER/NAME, perhaps with options


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value, its source, and the source's rank (0: nearest)."""

    value: Any
    origin: str
    rank: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One source: a tree shaped like the file, and the folder where its relative paths start."""

    tree: Mapping[str, Any]
    folder: Path
    origin: Callable[[Keys], str]
    is_text: bool = False  # numbers are given as text, as in environment variables


def merge(layers: Sequence[Layer]) -> dict[Keys, SourcedValue]:
    """Every value that any layer has, checked. If several layers have a value, the first one wins. Raises ConfigError.

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
    """The tree's values, as pydantic returned them."""
    for name, node in tree.items():
        keys, value = (*path, name), table[name] if isinstance(table, Mapping) else getattr(table, name)
        yield keys, {} if isinstance(node, Mapping) else value
        if isinstance(node, Mapping):
            yield from _values(node, value, keys)


def _is_path(keys: Keys) -> bool:
    """Whether the setting may hold a path. For weights, the engine's entry decides."""
    if keys[2:3] == ("weights",):
        return bool(engine_entry(keys[3]).weights_type != "text")
    return keys[-1].endswith("_file") or keys[2:3] == ("tokenizer",)


def _takes_hub_name(keys: Keys) -> bool:
    return keys[2:3] == ("weights",) and engine_entry(keys[3]).weights_type == "path or hub name"


def _resolve_path(place: str, folder: Path, takes_hub_name: bool) -> str:
    """A value that may be a path, made relative to its source's folder; unchanged if it has a scheme, or if it is a hub
    name and not a file."""
    path = Path(place)
    resolved_path = folder / (path.expanduser() if path.parts[:1] == ("~",) else path)
    is_hub_name = takes_hub_name and _HUB_NAME.match(place) and not os.path.exists(str(resolved_path).partition("?")[0])
    return place if _SCHEME.match(place) or is_hub_name else str(resolved_path)


@cache
def _adapter() -> "TypeAdapter[File]":
    """pydantic is imported here because it takes longer than `--help` and completion, which read no settings."""
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
    """The error about a value or a name. A value that may hold a password is not shown."""
    of_key = error["loc"][-1] == "[key]"
    loc = error["loc"][:-1] if of_key else error["loc"]
    keys: Keys = tuple(takewhile(lambda part: isinstance(part, str), loc))  # type: ignore[arg-type]
    try:
        if of_key or error["type"] == "unexpected_keyword_argument":
            problem, quoted_value = _of_name(loc, error), loc[-1]
        else:
            # Errors in [services] never repeat a value, so the problem with a URL can be described.
            problem = _spell_path(loc) + _of_value(loc[-1], error)
            quoted_value = "" if keys[0] == "services" else error["input"]
        secret = urls.may_hold_password(quoted_value)
    except ValueError:
        problem, secret = f"{_spell_path(loc)} must not be a number of thousands of digits", False
    if secret:
        problem = "a URL with a password, or a value that looks like one, is not allowed here"
    return ConfigError(f"{layer.origin(keys)}: {problem}")


def _spell_path(loc: Sequence[Any]) -> str:
    """`models.m.context`, `machines.mac1.roles, entry 2, role`"""
    if loc[2:3] != ("roles",) or not loc[3:]:
        return ".".join(part for part in loc if isinstance(part, str))
    return ", ".join([".".join(loc[:3]), f"entry {loc[3] + 1}", *loc[4:]])


def _of_name(loc: Sequence[str | int], error: "ErrorDetails") -> str:
    """What is wrong with a name: a model's or machine's name is invalid, or there is no such key."""
    if error["type"] == "value_error":
        return f"the name in {_spell_path(loc[:-1])}{error['ctx']['error']}"
    table = "models.weights" if error["type"] == "must" else ".".join(map(str, loc[:-1][::2]))
    suggestion = did_you_mean(str(loc[-1]), keys_of(table))
    if table == "machines.roles":
        return f"{_spell_path(loc[:-1])}: {loc[-1]!r:.60} is no setting of a role; {suggestion}"
    return f"{_spell_path(loc)} is no setting of Kvasir; {suggestion}"


def _of_value(key: str | int, error: "ErrorDetails") -> str:
    """The problem with a value, in words that follow its name."""
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
            return f" must be one of {', '.join(sorted(ROLES))}"  # the only key without a default
    such_as = " such as { llamacpp = 'FILE.gguf' }" if key == "weights" else ""
    return f" must be a table{such_as}, not {kind}"


# Flags


def flag_layer(flags: Mapping[str, object], cwd: Path) -> Layer:
    """Command-line values. None means that the flag was not given."""
    tree: dict[str, Any] = {}
    for name, value in _without_none(flags).items():
        section, *rest = _SHORT.get(name, (name,))
        if rest:
            tree.setdefault(section, {})[rest[0]] = value
        elif isinstance(value, Mapping):
            tree.setdefault(section, {}).update(value)
        else:
            tree[section] = value  # an unknown name, which merge reports
    for service in ("broker", "store"):
        url = tree.get("services", {}).get(service)
        if isinstance(url, str) and url != urls.mask(url):
            raise ConfigError(
                f"--{service}: a password on the command line can be read by everybody on this machine; "
                f"put it into KVASIR_{service.upper()}_PASSWORD or a password file"
            )
    return Layer(tree, cwd, lambda keys: f"--{'weights' if 'weights' in keys else keys[-1].replace('_', '-')}")


def _without_none(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested = {name: _without_none(value) if isinstance(value, Mapping) else value for name, value in flags.items()}
    return {name: value for name, value in nested.items() if value is not None}


# Environment variables


def variable_layer(environ: Mapping[str, str], cwd: Path) -> Layer:
    """The `KVASIR_*` variables except passwords. An empty variable counts as not set."""
    _refuse_misspelt(environ)
    tree: dict[str, dict[str, str]] = {}
    for (table, key), variable in VARIABLES.items():
        if environ.get(variable):
            tree.setdefault(table, {})[key] = environ[variable]
    return Layer(tree, cwd, lambda keys: VARIABLES.get(keys, ""), is_text=True)


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Refuse variables that resemble one of Kvasir's, since they are probably misspelt. Other unknown variables belong
    to other programs."""
    variables = {CONFIG_VARIABLE, API_KEY, VLLM_PYTHON, *VARIABLES.values(), *PASSWORDS.values()}
    for name in environ:
        if not name.startswith("KVASIR_") or name in variables or _FOREIGN.match(name):
            continue
        # Compare without the common prefix, which would make all names look similar.
        close = difflib.get_close_matches(name[7:], sorted(variable[7:] for variable in variables), 1, 0.75)
        if close:
            raise ConfigError(f"{name}: Kvasir has no such variable; did you mean KVASIR_{close[0]}?")


# Files


def file_layers(config: Path | None, environ: Mapping[str, str], cwd: Path, user_dir: Path | None) -> list[Layer]:
    """The file of `--config` or KVASIR_CONFIG (which must exist), then ./kvasir.toml, then the user's file; each file
    only once.

    A file that is merely found in the current folder must belong to this user, because it decides where students' work
    is sent.
    """
    explicit_path = _explicit_file(config, environ, cwd)
    paths = [explicit_path] if explicit_path else []
    folders = [cwd, user_dir or user_config_dir(environ)]
    paths += [folder / FILE_NAME for folder in folders if folder and (folder / FILE_NAME).exists()]
    unique = {path.resolve(): path for path in reversed(paths)}
    unique_paths = [path for path in paths if unique.pop(path.resolve(), None)]
    for path in unique_paths:
        if path != explicit_path and (problem := why_not_ours(path)):
            raise ConfigError(f"{problem}; or name it, if you trust it: --config {path}")
    return [_file_layer(path) for path in unique_paths]


def user_config_dir(environ: Mapping[str, str]) -> Path | None:
    """The user's folder for Kvasir's configuration; None if there is no home."""
    return _user_dir(environ, "XDG_CONFIG_HOME", ".config")


def user_data_dir(environ: Mapping[str, str]) -> Path | None:
    """The user's folder for Kvasir's data; None if there is no home."""
    return _user_dir(environ, "XDG_DATA_HOME", ".local/share")


def _user_dir(environ: Mapping[str, str], variable: str, default: str) -> Path | None:
    xdg = environ.get(variable, "")
    if Path(xdg).is_absolute():  # by the XDG specification a relative path is ignored
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
        label = "of that name, which looks like a URL with a password" if urls.may_hold_password(path) else path
        raise ConfigError(f"{source}: there is no file {label}")
    return path


def _file_layer(path: Path) -> Layer:
    if not path.is_file():  # reading a pipe could block
        raise ConfigError(f"{path}: is not an ordinary file")
    try:
        text = path.read_text("utf-8-sig")
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        problem = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        problem = "a name in it looks like a URL with a password" if urls.may_hold_password(problem) else problem
        raise ConfigError(f"{path}: is not valid TOML: {problem}") from None
    lines = key_lines(text)
    return Layer(tree, path.parent, lambda keys: _place(path, lines, keys))


def _place(path: Path, lines: Mapping[Keys, int], keys: Keys) -> str:
    """The file and line of a value, or of the table around it."""
    for length in range(len(keys), 0, -1):
        if keys[:length] in lines:
            return f"{path} line {lines[keys[:length]]}"
    return str(path)


def key_lines(text: str) -> dict[Keys, int]:
    """The line of each header and of each `key =` in a valid TOML text. This is best effort, because tomllib keeps no
    positions."""
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
    """The keys that one line of TOML names; () if the line is not a whole statement."""
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
