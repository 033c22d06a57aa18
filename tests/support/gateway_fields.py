"""The gateway's fields as docs/gateway.md has them: `python -m tests.support.gateway_fields` prints the tables."""

import json
import sys
from collections.abc import Iterator
from itertools import groupby

from gateway.fields import TABLES, Field, Fields


def tables() -> str:
    """All tables in Markdown, each under its title."""
    return "\n\n".join(f"{title}:\n\n" + "\n".join(_rows(table)) for title, table in TABLES.items())


def _rows(table: Fields) -> Iterator[str]:
    """Fields that are taken alike, one after the other, share a row."""
    yield "| field | |"
    yield "|---|---|"
    for words, fields in groupby(table.items(), lambda pair: _words(pair[1])):
        yield f"| {', '.join(f'`{name}`' for name, _ in fields)} | {words} |"


def _words(field: Field) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    except_for = f", unless {values}" if values else ""
    return f"{field.kind}{except_for}{': ' if field.words else ''}{field.words}"


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")
