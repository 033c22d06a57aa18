"""The documentation holds: links lead somewhere, every page is found, commands are commands, nothing is said twice."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from docs.write_reference import PAGES as GENERATED
from docs.write_reference import REFERENCE
from kvasir import cli

ROOT = Path(__file__).resolve().parents[3]
LIST = ROOT / "docs/README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BESIDE_THE_CODE = sorted([*ROOT.glob("benchmarks/*.md"), *ROOT.glob("examples/*/*.md")])
MEASUREMENTS = ROOT / "docs/measurements"
# Made from the code, or written for another day: their words are not counted.
UNCOUNTED = {ROOT / "CHANGELOG.md", *MEASUREMENTS.glob("*.md"), *(REFERENCE / name for name in GENERATED)}
MAX_WORDS, MAX_WORDS_OF_A_PAGE = 26_000, 2_500
MIN_WORDS_OF_A_SENTENCE = 8
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
PLACEHOLDERS = ("…", "|")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page links to, and their anchors."""
    for link, anchor in LINK.findall(page.read_text("utf-8")):
        if "://" not in link:
            yield (page.parent / link).resolve() if link else page, anchor.removeprefix("#")


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: letters, digits, - and _, in small letters, with - for a space."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *BESIDE_THE_CODE], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert [str(target) for target, _ in links(page) if not target.exists()] == []
    assert [
        f"{target.name}#{anchor}" for target, anchor in links(page) if anchor and anchor not in anchors(target)
    ] == []


def test_every_page_is_found_from_the_list_and_the_list_from_the_readme() -> None:
    found, todo = set(), [LIST]
    while todo:
        page = todo.pop()
        if page not in found:
            found.add(page)
            todo += [target for target, _ in links(page) if target.suffix == ".md" and target.exists()]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in found and page != ROOT / "README.md"] == []
    assert LIST in {target for target, _ in links(ROOT / "README.md")}


def test_the_pages_are_short() -> None:
    words = {page: len(page.read_text("utf-8").split()) for page in PAGES if page not in UNCOUNTED}
    assert {page.name: count for page, count in words.items() if count > MAX_WORDS_OF_A_PAGE} == {}
    assert sum(words.values()) <= MAX_WORDS


def sentences(page: Path) -> Iterator[str]:
    """What a page says outside of code blocks, in small letters and without signs."""
    text = re.sub(r"```.*?```|^    .*?$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = LINK.sub("]", text)
    for paragraph in re.split(r"\n\s*\n|^[-*#\d]+\.? |\||^>", text, flags=re.MULTILINE):
        for sentence in re.split(r"[.!?:;]\s", " ".join(paragraph.split())):
            yield " ".join(re.findall(r"[\w'%/=-]+", sentence.lower()))


def test_a_sentence_stands_once() -> None:
    said = Counter(
        sentence
        for page in PAGES
        if page not in UNCOUNTED
        for sentence in sentences(page)
        if len(sentence.split()) >= MIN_WORDS_OF_A_SENTENCE
    )
    assert [sentence for sentence, count in said.items() if count > 1] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs/explanation").glob("*.md")), ids=lambda page: page.name)
def test_what_was_measured_names_its_command(page: Path) -> None:
    sections = re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE)
    measured = [section for section in sections if re.search(r"\bMeasured\b|\bw(?:as|ere) measured\b", section)]
    commands = re.compile(r"python -m benchmarks|\bmake [a-z]|`?kvasir [a-z]|\.\./measurements/")
    assert [section.splitlines()[0] for section in measured if not commands.search(section)] == []


@every_page
def test_what_a_page_tells_to_run_is_there(page: Path) -> None:
    """Modules, targets of make, and commands, wherever a page names one."""
    text = page.read_text("utf-8")
    modules = set(re.findall(r"python -m ((?:benchmarks|docs|infra|tests)\.[\w.]*\w)", text)) - {"benchmarks.NAME"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    places = {name: ROOT / name.replace(".", "/") for name in modules}
    assert [name for name, at in places.items() if not at.with_suffix(".py").exists() and not at.is_dir()] == []
    assert set(re.findall(r"(?:`|^|^    |&& )make ([a-z-]+)", text, re.MULTILINE)) - targets == set()
    assert set(re.findall(r"`kvasir ([a-z][a-z-]*)", text)) - set(cli.kvasir.commands) == set()


def typed(page: Path) -> Iterator[list[str]]:
    """What follows `kvasir` in the code blocks of a page, fenced or indented."""
    for line in re.findall(r"^(?:    )?(kvasir .+)$", page.read_text("utf-8"), re.MULTILINE):
        for part in line.partition("#")[0].split(" && "):
            if part.startswith("kvasir ") and not any(mark in part for mark in PLACEHOLDERS):
                yield shlex.split(part.partition(" > ")[0])[1:]


@every_page
def test_what_a_page_says_to_type_is_a_command_with_its_options(page: Path) -> None:
    for words in [] if page in UNCOUNTED else typed(page):
        context = cli.kvasir.make_context("kvasir", words)
        group: click.Group = cli.kvasir
        while isinstance(group, click.Group):
            name, command, words = group.resolve_command(context, [*context._protected_args, *context.args])
            assert command is not None
            if isinstance(command, click.Group) and command.invoke_without_command and not words:
                break
            context = command.make_context(name, words, parent=context)  # raises for an option that there is not
            group = command  # type: ignore[assignment]
