"""Numbers and lists in sentences."""

import csv
import io
from collections.abc import Iterable, Sequence


def plural(count: int, noun: str, singular_verb: str = "", plural_verb: str = "") -> str:
    """Return `1 image` or `1,200 tokens`; with verbs for both numbers, `1 job is` or `2 jobs are`."""
    words, verb = (noun, singular_verb) if count == 1 else (f"{noun}s", plural_verb)
    return f"{count:,} {words} {verb}".rstrip()


def join_with_and(names: Sequence[str]) -> str:
    """Return `joins`, `joins and plots`, or `joins, plots and style`."""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])


def shorten_names(names: Sequence[str], limit: int = 3) -> str:
    """Return `ada, benno, cato and 4 others`."""
    rest = f" and {plural(len(names) - limit, 'other')}" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def names_in(text: str) -> tuple[str, ...]:
    """Return `a, b` as ('a', 'b'). A name that contains a comma is in double quotes, as in CSV."""
    rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    return tuple(name.strip() for row in rows for name in row if name.strip())


def as_names(names: Iterable[str]) -> str:
    """Return a text that `names_in` reads as these names."""
    line = io.StringIO(newline="")
    csv.writer(line, lineterminator="").writerow(names)
    return line.getvalue()
