"""docs/configuration.md from the schema: `python -m infra.settings_reference > docs/configuration.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from infra.settings_meanings import MEANINGS, TABLES
from infra.settings_schema import ROLE, SCHEMA, Key, Many, Schema

_NAMES = {"models": '"NAME"', "machines": "NAME", "machines.rates": '"MODEL"'}
_VARIABLES = ("services", "grading")  # the only tables that variables reach

_HEAD = """\
# Configuration

One file, `kvasir.toml`, read by every command and worker. [examples/kvasir.toml](../examples/kvasir.toml) is the
team's own, with reasons; [examples/demo.toml](../examples/demo.toml) the smallest. `kvasir config` prints each value
in use and where it came from.

For each value by itself the nearest source wins: a flag, a `KVASIR_*` variable, the file of `--config` (or
`KVASIR_CONFIG`), `./kvasir.toml`, `kvasir.toml` in the user's configuration folder (`~/.config/kvasir`, on a Mac
`~/Library/Application Support/kvasir`), the default. Relative paths start from the file's folder. An unknown key is an
error that names the nearest known one.

This page is made by `python -m infra.settings_reference`; a test compares.
"""

_TAIL = """\
## Only from the environment

| variable | meaning |
|---|---|
| `KVASIR_CONFIG` | the file of `--config` |
| `KVASIR_BROKER_PASSWORD` | the broker's password, where no file holds it; it has no key |
| `KVASIR_STORE_PASSWORD` | the store's |
| `KVASIR_HOURS` | of a worker: `--hours` |
| `KVASIR_STEAL` | of a decode worker: `--steal` |
| `KVASIR_MEMORY_GB` | of a decode worker: `--memory` |
| `KVASIR_METRICS_PORT` | of a worker: `--metrics-port` |
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_tables(SCHEMA, "", ""), _TAIL])


def keys() -> set[str]:
    """The path of every key, names of models and machines left out."""
    return {path for path, _ in _keys(SCHEMA, "")}


def _keys(schema: Schema, prefix: str) -> Iterator[tuple[str, Key]]:
    for name, rule in _rules(schema, prefix):
        path = f"{prefix}{name}"
        if isinstance(rule, Key):
            yield path, rule
        if not isinstance(rule, Key) or path == "machines.roles":
            yield from _keys(_below(rule), f"{path}.")


def _rules(schema: Schema, prefix: str) -> Iterator[tuple[str, Key | Many | Schema]]:
    """Values first: a table in a table comes after them, as in the file."""
    yield from sorted(schema.items(), key=lambda item: not isinstance(item[1], Key))


def _below(rule: Key | Many | Schema) -> Schema:
    """The keys of a table. The only value that is one is a machine's list of roles."""
    if isinstance(rule, Key):
        return ROLE
    return rule.keys if isinstance(rule, Many) else rule


def _tables(schema: Schema, prefix: str, title: str) -> Iterator[str]:
    for name, rule in _rules(schema, prefix):
        path = f"{prefix}{name}"
        if isinstance(rule, Key) and path != "machines.roles":
            continue
        header = f"{title}{name}" + (f".{_NAMES[path]}" if path in _NAMES else "")
        yield _table(_heading(path, header), path, _below(rule))
        yield from _tables(_below(rule), f"{path}.", f"{header}.")


def _heading(path: str, header: str) -> str:
    return f"`{header} = [{{ … }}]`" if path == "machines.roles" else f"`[{header}]`"


def _table(heading: str, path: str, schema: Schema) -> str:
    lines = [f"## {heading}", "", TABLES[path], "", "| key | default | variable | meaning |", "|---|---|---|---|"]
    lines += [_row(f"{path}.{name}", name, rule) for name, rule in schema.items() if isinstance(rule, Key)]
    return "\n".join([*lines, ""])


def _row(path: str, name: str, rule: Key) -> str:
    variable = f"`{rule.variable}`" if rule.variable and path.split(".")[0] in _VARIABLES else ""
    return f"| `{name}` | {_default(path, rule)} | {variable} | {MEANINGS[path]} |"


def _default(path: str, rule: Key) -> str:
    if path.startswith("models.") and f"grading.{path.partition('.')[2]}" in MEANINGS:
        return "`[grading]`'s"
    if rule.default in ("", ()):
        return ""
    return f"{rule.default:g}" if isinstance(rule.default, float) else f"{rule.default}"


def main() -> int:
    """Print the page."""
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
