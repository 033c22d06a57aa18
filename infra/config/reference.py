"""docs/configuration.md from the schema: `python -m infra.config.reference > docs/configuration.md`."""

import sys
from dataclasses import MISSING, fields

from infra.config.meanings import MEANINGS, TABLES
from infra.config.schema import SAMPLING, keys_of
from infra.config.schema import TABLES as OF_KEYS
from infra.config.sources import VARIABLES
from messages.installed import engine_entry

_HEADINGS = {
    "services": "`[services]`",
    "grading": "`[grading]`",
    "costs": "`[costs]`",
    "models": '`[models."NAME"]`',
    "models.weights": '`[models."NAME".weights]`',
    "machines": "`[machines.NAME]`",
    "machines.roles": "`machines.NAME.roles = [{ … }]`",
    "machines.rates": '`[machines.NAME.rates."MODEL"]`',
}

_HEAD = """\
# Configuration

One file, `kvasir.toml`, read by every command and worker. [examples/kvasir.toml](../examples/kvasir.toml) is the
team's own, with reasons; [examples/demo.toml](../examples/demo.toml) the smallest. `kvasir config` prints each value
in use and where it came from.

For each value by itself the nearest source wins: a flag, a `KVASIR_*` variable, the file of `--config` (or
`KVASIR_CONFIG`), `./kvasir.toml`, `kvasir.toml` in the user's configuration folder (`~/.config/kvasir`, on a Mac
`~/Library/Application Support/kvasir`), the default. Relative paths start from the file's folder. An unknown key is an
error that names the nearest known one. A `./kvasir.toml` that belongs to another user, or that others may write to, is
refused; `--config` names it all the same. Weights `OWNER/NAME` of an engine that takes hub names are one where no such
folder lies beside the file; `./OWNER/NAME` is always a path.

This page is made by `python -m infra.config.reference`; a test compares.
"""

_TAIL = """\
## Only from the environment

| variable | meaning |
|---|---|
| `KVASIR_CONFIG` | the file of `--config` |
| `KVASIR_BROKER_PASSWORD` | the broker's password; goes before the file that `kvasir.toml` names. It has no key there |
| `KVASIR_STORE_PASSWORD` | the store's, likewise |
| `KVASIR_API_KEY` | the key of the `openai` or `vllm` engine's servers, of all models; goes before `api_key_file` |
| `KVASIR_VLLM_PYTHON` | of the `vllm` engine: another environment's Python |
| `KVASIR_HOURS` | of a worker: `--hours` |
| `KVASIR_STEAL` | of a worker that decodes: `--steal` |
| `KVASIR_MEMORY_GB` | of a worker that decodes: `--memory` |
| `KVASIR_METRICS_PORT` | of a worker: `--metrics-port` |
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *map(_table, TABLES), _TAIL])


def keys() -> set[str]:
    """The path of every key, names of models and machines left out."""
    return {f"{table}.{key}" for table in TABLES for key in _keys(table)}


def _keys(table: str) -> list[str]:
    """Without those that are tables of their own; a machine's roles are a value too."""
    paths = {key: f"{table}.{key}" for key in keys_of(table)}
    return [key for key, path in paths.items() if path not in TABLES or path == "machines.roles"]


def _table(table: str) -> str:
    lines = [
        f"## {_HEADINGS[table]}",
        "",
        TABLES[table],
        "",
        "| key | default | variable | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(table, key) for key in _keys(table)), ""])


def _row(table: str, key: str) -> str:
    variable = VARIABLES.get((table, key), "")
    meaning = engine_entry(key).meaning if table == "models.weights" else MEANINGS[f"{table}.{key}"]
    return f"| `{key}` | {_default(table, key)} | {variable and f'`{variable}`'} | {meaning} |"


def _default(table: str, key: str) -> str:
    if table == "models" and key in SAMPLING:
        return "`[grading]`'s"
    defaults = {field.name: field.default for field in fields(OF_KEYS[table])} if table in OF_KEYS else {key: ""}
    default = defaults.get(key)
    if default in ("", (), MISSING):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else f"{default}"


if __name__ == "__main__":
    sys.stdout.write(reference())
