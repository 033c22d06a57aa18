"""Numbers and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def plural(count: int, noun: str, one: str = "", many: str = "") -> str:
    """`1 image`, `1,200 tokens`; with the verb in both numbers `1 job is`, `2 jobs are`."""
    words, verb = (noun, one) if count == 1 else (f"{noun}s", many)
    return f"{count:,} {words} {verb}".rstrip()


def listed(names: Sequence[str]) -> str:
    """`joins`, `joins and plots`, `joins, plots and style`."""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])
