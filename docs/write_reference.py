"""The pages of docs/reference, from the code that they describe: `python -m docs.write_reference` writes them.

Settings come from their schema, commands from click, the fields of the API from the gateway's tables, rights from what
`kvasir deploy` gives, and the rubric's keys from the docstrings of the modules that read them. A test compares each
page with what this makes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import click

from docs.pictures import ROOT
from gateway.fields import TABLES as API_TABLES
from gateway.fields import Field, Fields
from grading.export import FORMATS, ExportFormat
from grading.rubric import checks, formats, late, rubric
from infra.config.meanings import MEANINGS, TABLES
from infra.config.schema import SAMPLING, keys_of
from infra.config.schema import TABLES as OF_KEYS
from infra.config.sources import VARIABLES
from infra.deploy.permissions import PERMISSIONS, STORE_RULES
from kvasir import cli
from messages import limits
from messages.installed import engine_entry

REFERENCE = ROOT / "docs/reference"

# --- settings

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

Made by `python -m docs.write_reference`; a test compares.

One file, `kvasir.toml`, read by every command and worker. [examples/kvasir.toml](../../examples/kvasir.toml) is the
team's own, with reasons; [examples/demo.toml](../../examples/demo.toml) the smallest. `kvasir config` prints each value
in use and where it came from.

For each value by itself the nearest source wins: a flag, a `KVASIR_*` variable, the file of `--config` (or
`KVASIR_CONFIG`), `./kvasir.toml`, `kvasir.toml` in the user's configuration folder (`~/.config/kvasir`, on a Mac
`~/Library/Application Support/kvasir`), the default. Relative paths start from the file's folder. An unknown key is an
error that names the nearest known one. A `./kvasir.toml` that belongs to another user, or that others may write to, is
refused; `--config` names it all the same. Weights `OWNER/NAME` of an engine that takes hub names are one where no such
folder lies beside the file; `./OWNER/NAME` is always a path.

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


def configuration() -> str:
    """Every setting, by table."""
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
    return "\n".join([*lines, *(_setting(table, key) for key in _keys(table)), ""])


def _setting(table: str, key: str) -> str:
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


# --- commands

_COMMANDS = """\
# Commands

Made by `python -m docs.write_reference` from what `kvasir COMMAND --help` says; a test compares.

Exit codes: 0 all succeeded, 1 some jobs failed or are still waiting, 2 bad usage or input, 3 the cluster can't be
reached, 130 interrupted.
"""


def commands() -> str:
    """Every command with its options, and the formats of `kvasir export`."""
    return "\n".join([_COMMANDS, *_command(("kvasir",), cli.kvasir), _exports()])


def _command(words: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(words), max_content_width=1000, terminal_width=1000)
    if len(words) > 1:
        yield f"## {' '.join(words)}\n"
    yield f"```\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    yield from _paragraphs(command.help or "")
    options = [record for each in command.params if (record := each.get_help_record(context)) and record[1]]
    if options:
        yield "| option | |\n|---|---|"
        yield from (f"| `{_cell(names)}` | {_cell(meaning)} |" for names, meaning in options)
        yield ""
    yield from _paragraphs(command.epilog or "")
    for name, inner in sorted(command.commands.items()) if isinstance(command, click.Group) else ():
        yield from _command((*words, name), inner)


def _paragraphs(text: str) -> Iterator[str]:
    """Click prints a paragraph after a backspace line by line."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in paragraph.splitlines() if line != "Example:"]
        if lines and lines[0] == "\b":
            yield "\n".join(["```", *lines[1:], "```", ""])
        elif paragraph:
            yield " ".join(lines) + "\n"


def _exports() -> str:
    header = "| `--format` | what for | its options | the file |\n|---|---|---|---|"
    return "\n".join(["## The formats of kvasir export\n", header, *map(_export, FORMATS), ""])


def _export(each: ExportFormat) -> str:
    options = ", ".join(f"`{option.flag}`" for option in each.options)
    files = " or ".join(f"`{name}`" for name in each.file_names)
    return f"| `{each.name}` | {each.purpose} | {options} | {files} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# --- the API


def api() -> str:
    """The page as it stands, with the tables of fields as the gateway reads requests."""
    page = (REFERENCE / "api.md").read_text("utf-8")
    for title, table in API_TABLES.items():
        begin = page.index(f"{title}:\n\n|") + len(title) + 3
        page = page[:begin] + "\n".join(_fields(table)) + page[page.index("\n\n", begin) :]
    return page


def _fields(table: Fields) -> Iterator[str]:
    """Fields that are taken alike, one after the other, share a row."""
    yield "| field | |"
    yield "|---|---|"
    for words, alike in groupby(table.items(), lambda pair: _field_words(pair[1])):
        yield f"| {', '.join(f'`{name}`' for name, _ in alike)} | {words} |"


def _field_words(field: Field) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    except_for = f", unless {values}" if values else ""
    return f"{field.kind}{except_for}{': ' if field.words else ''}{field.words}"


# --- rights

_ROLES = {
    "operator": "`kvasir deploy`, `kvasir dead`, `kvasir forget`; declares exchanges and queues",
    "producer": "`grade`, `submit`, `watch`, `retry`, `cancel`, `ask`, `serve`, the desk",
    "prefill": "prefill workers",
    "decode": "decode workers",
    "worker": "workers with both roles",
    "monitor": "`kvasir status`, `kvasir top`: depths, never a message",
}
_RIGHTS = """\
# Rights

Made by `python -m docs.write_reference` from `infra/deploy/permissions.py`; a test compares.

What they can't keep apart: [security](../explanation/security.md#rights). `python -m infra.deploy.permissions [VHOST]`
prints the commands that give them.

## At the broker

RabbitMQ's patterns over the names of exchanges and queues.

| role | for | configure | write | read |
|---|---|---|---|---|
"""
_STORE_RIGHTS = """
## At the store

Rules of Redis 7's ACL; the user `default` is disabled.

| role | rules |
|---|---|
"""


def rights() -> str:
    """What each role may do at the broker and at the store."""
    broker = [
        f"| {role} | {_ROLES[role]} | `{_cell(may.configure)}` | `{_cell(may.write)}` | `{_cell(may.read)}` |\n"
        for role, may in PERMISSIONS.items()
    ]
    store = [f"| {role} | `{_cell(rules)}` |\n" for role, rules in STORE_RULES.items()]
    return "".join([_RIGHTS, *broker, _STORE_RIGHTS, *store])


# --- limits

_LIMITS = """\
# Limits

Made by `python -m docs.write_reference` from `messages/limits.py`; a test compares.

Each bound is checked before the work that it bounds. What students hand in is bounded by
`grading/submissions/archives.py`.
"""
_SECTION = re.compile(r"(?:^# .+\n)+(?:^[A-Z_]+ = .+\n)+", re.MULTILINE)
_LIMIT = re.compile(r"^([A-Z_]+) = [^#\n]+?(?:  # (.+))?$", re.MULTILINE)


def limits_page() -> str:
    """Every bound by its name, as the comments of the module group and explain them."""
    return "\n".join([_LIMITS, *map(_limits, _SECTION.findall(Path(limits.__file__).read_text("utf-8")))])


def _limits(section: str) -> str:
    heading, _, words = " ".join(line[2:] for line in section.splitlines() if line.startswith("# ")).partition(". ")
    rows = [f"| `{name}` | {_bound(name)} | {_cell(what)} |" for name, what in _LIMIT.findall(section)]
    header = [f"## {heading.removesuffix('.')}", "", *([words, ""] if words else []), "| bound | | |", "|---|--:|---|"]
    return "\n".join([*header, *rows, ""])


def _bound(name: str) -> str:
    value: int = getattr(limits, name)
    if "BYTES" not in name:
        return f"{value:,}{' s' if name.endswith('_S') else ''}"
    power = max(power for power in range(4) if value >= 1 << 10 * power)
    return f"{value / (1 << 10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


# --- the rubric

_RUBRIC = """\
# The rubric's file

Made by `python -m docs.write_reference`; a test compares.

"""
# Headings, and the modules whose docstrings say what the part holds.
_PARTS = (
    ("All keys", rubric, "yaml"),
    ("`checks`", checks, "yaml"),
    ("`late`", late, "yaml"),
    ("Other forms", formats, ""),
)
_EXAMPLE = re.compile(r"^(?: {4}.+\n)+", re.MULTILINE)


def rubric_page() -> str:
    """Every key of a rubric, as the docstrings of the modules that read it show them."""
    return _RUBRIC + "\n".join(f"## {heading}\n\n{_part(module, form)}" for heading, module, form in _PARTS)


def _part(module: ModuleType, form: str) -> str:
    return _EXAMPLE.sub(lambda found: f"```{form}\n{dedent(found[0])}```\n", str(module.__doc__))


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "commands.md": commands,
    "api.md": api,
    "rights.md": rights,
    "limits.md": limits_page,
    "rubric.md": rubric_page,
}


if __name__ == "__main__":
    for _name, _page in PAGES.items():
        (REFERENCE / _name).write_text(_page(), "utf-8")
