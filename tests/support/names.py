"""Names that say nothing: `python -m tests.support.names` counts them in each room. `make lint` calls it.

A name says what the thing is. A participle, a pronoun or a question word alone does not: `found` may be a path, a count
or a grade. A suffix is no cure, and no check sees it: `found_thing` is as empty as `found`.
"""

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from tests.support.processes import ROOT
from tests.support.rooms import ROOMS

HELPERS = "tests/support"
NEIGHBOURS = ("benchmarks", "examples")  # class names are compared with theirs, too
PERCENT_ALLOWED = 1.0
COUNT_ALLOWED = 5  # in a small room one name is more than a percent
SINGLE_MODULES = frozenset({"bound", "desk", "backend"})


_LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_WORDS = {name: frozenset(text.split()) for name, text in _LISTS["words"].items()}
PARTICIPLES, PLAIN_WORDS = _WORDS["participles"], _WORDS["plain"]
VAGUE_WORDS = _WORDS["questions"] | _WORDS["pronouns"] | _WORDS["adverbs"] | PARTICIPLES
PAIRS = [frozenset(pair.split()) for pair in _LISTS["pairs"]]


@dataclass(frozen=True, slots=True)
class Definition:
    """A place that gives something its name."""

    file: str
    line: int
    col: int
    kind: str
    name: str
    scope: str

    @property
    def word(self) -> str:
        """The name without the underscores around it; in small letters, unless it is two words: `NotFound`."""
        name = self.name.strip("_")
        return name.lower() if name.isupper() or name[1:].islower() else name

    @property
    def keys(self) -> Iterator[str]:
        """The names under which it may stand in the list of exceptions: an attribute stands there by its class."""
        scope = self.scope.rpartition(".")[0] if self.kind == "attribute" else self.scope
        qualname = f"{scope}.{self.name}" if scope else self.name
        yield f"{Path(self.file.removesuffix('/__init__.py')).stem}:{qualname}"
        if scope[:1].isupper() or scope[:1] == "_":
            yield qualname


@dataclass(slots=True)
class Module:
    """All definitions of a file."""

    file: str
    definitions: list[Definition] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # with the classes and functions around them
    prescribed_names: set[Definition] = field(default_factory=set)  # commands, options, Python's own names, enum values


class Reader(ast.NodeVisitor):
    """Collects the definitions of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.module = Module(file)
        self._lines = text.splitlines()
        self._scopes: list[ast.AST] = []
        self._loops = 0
        self.visit(ast.parse(text, file))

    def _add(self, kind: str, name: str, line: int, col: int) -> Definition:
        column = len(self._lines[line - 1].encode()[:col].decode(errors="ignore"))
        scope = ".".join(getattr(node, "name", "") for node in self._scopes)
        definition = Definition(self.module.file, line, column, kind, name, scope)
        self.module.definitions.append(definition)
        if name.startswith("__") and name.endswith("__"):
            self.module.prescribed_names.add(definition)
        return definition

    def _variable_kind(self) -> str:
        if self._loops:
            return "loop"
        if not self._scopes:
            return "global"
        return "class-attribute" if isinstance(self._scopes[-1], ast.ClassDef) else "local"

    def _visit_loop_target(self, target: ast.expr) -> None:
        self._loops += 1
        self.visit(target)
        self._loops -= 1

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._add(self._variable_kind(), node.id, node.lineno, node.col_offset)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if isinstance(node.ctx, ast.Store) and of_self:
            end = node.end_col_offset or 0
            self._add("attribute", node.attr, node.end_lineno or node.lineno, end - len(node.attr.encode()))
        self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        if node.arg not in ("self", "cls"):
            self._add("param", node.arg, node.lineno, node.col_offset)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._visit_loop_target(node.target)
        for child in (node.iter, *node.body, *node.orelse):
            self.visit(child)

    visit_AsyncFor = visit_For  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._visit_loop_target(node.target)
        for child in (node.iter, *node.ifs):
            self.visit(child)

    def visit_alias(self, node: ast.alias) -> None:
        if node.asname and node.asname != node.name:
            end = node.end_col_offset or 0
            self._add("import-alias", node.asname, node.end_lineno or node.lineno, end - len(node.asname.encode()))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._add("local", node.name, node.lineno, node.col_offset)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self._add("local", node.name, node.end_lineno, node.end_col_offset - len(node.name.encode()))
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self._add("local", node.name, node.end_lineno, node.end_col_offset - len(node.name.encode()))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._add("class", node.name, node.lineno, node.col_offset + len("class "))
        qualname = ".".join(getattr(scope, "name", "") for scope in (*self._scopes, node))
        self.module.classes.append(qualname)
        for child in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(child)
        self._visit_body(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        is_method = bool(self._scopes) and isinstance(self._scopes[-1], ast.ClassDef)
        start = len("def " if isinstance(node, ast.FunctionDef) else "async def ")
        definition = self._add("method" if is_method else "function", node.name, node.lineno, node.col_offset + start)
        if _is_command(node):
            self.module.prescribed_names.add(definition)
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._scopes.append(node)
        count = len(self.module.definitions)
        self.visit(node.args)
        options = _option_names(node)
        self.module.prescribed_names.update(param for param in self.module.definitions[count:] if param.name in options)
        self._scopes.pop()
        self._visit_body(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def _visit_body(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        count = len(self.module.definitions)
        self._scopes.append(node)
        for child in node.body:
            self.visit(child)
        self._scopes.pop()
        if isinstance(node, ast.ClassDef) and any(_last_name(base).endswith("Enum") for base in node.bases):
            members = [
                definition for definition in self.module.definitions[count:] if definition.kind == "class-attribute"
            ]
            self.module.prescribed_names.update(members)


def _last_name(node: ast.expr) -> str:
    """`Protocol` of typing.Protocol[T]."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _decorator_calls(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, list[str]]]:
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)] if call else []
        yield _last_name(call.func if call else decorator), [word for word in words if isinstance(word, str)]


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(name in ("command", "group") and not words for name, words in _decorator_calls(node))


def _option_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The parameters whose names are a command's options and arguments."""
    declarations = [words for name, words in _decorator_calls(node) if name in ("option", "argument")]
    return {part.lstrip("-").replace("-", "_") for words in declarations for word in words for part in word.split("/")}


def is_vague(word: str) -> bool:
    """Whether the word alone does not say what the thing is."""
    if word in VAGUE_WORDS:
        return True
    if word in PLAIN_WORDS or "_" in word:
        return False
    if word.startswith("un") and word.removeprefix("un") in PARTICIPLES:
        return True
    return len(word) > 3 and word.islower() and word.endswith("ed")


class Exceptions:
    """The written exceptions, and those of them that are still needed."""

    def __init__(self, reasons: Collection[str] = _LISTS["exceptions"]) -> None:
        self._reasons = reasons
        self.used_keys: set[str] = set()

    def cover(self, module: Module) -> Iterator[Definition]:
        """Yields the definitions of a module that an exception takes out of both counts."""
        words_by_scope: defaultdict[str, set[str]] = defaultdict(set)
        for definition in module.definitions:
            words_by_scope[definition.scope].add(definition.word)
        for definition in module.definitions:
            if definition in module.prescribed_names or self._is_covered(definition, words_by_scope[definition.scope]):
                yield definition

    def _is_covered(self, definition: Definition, words: Collection[str]) -> bool:
        word = definition.word
        keys = [key for key in definition.keys if key in self._reasons]
        self.used_keys.update(keys)
        if keys or word in _LISTS["standard_terms"]:
            return True
        if word in _LISTS["actions"]:
            return definition.kind in ("function", "method")
        return any(word in pair and pair <= set(words) for pair in PAIRS)

    def stale(self) -> list[str]:
        """Exceptions that cover nothing any more."""
        return sorted(set(self._reasons) - self.used_keys)


@dataclass(slots=True)
class RoomCount:
    """A room's vague names, and how many names it has in all."""

    room: str
    total: int
    vague: list[Definition]

    @property
    def percent(self) -> float:
        """The share of vague names."""
        return 100 * len(self.vague) / self.total if self.total else 0.0

    @property
    def is_too_vague(self) -> bool:
        """Whether the room fails the check."""
        return self.percent > PERCENT_ALLOWED and len(self.vague) > COUNT_ALLOWED


def read_modules(root: Path, folder: str) -> list[Module]:
    """All modules in a folder; none if it does not exist."""
    paths = sorted((root / folder).rglob("*.py"))
    return [Reader(path.relative_to(root).as_posix(), path.read_text("utf-8")).module for path in paths]


def count_names(room: str, modules: Iterable[Module], exceptions: Exceptions) -> RoomCount:
    """Counts a room's names, those that an exception covers aside."""
    count = RoomCount(room, 0, [])
    for module in modules:
        left_out = set(exceptions.cover(module))
        names = [definition for definition in module.definitions if definition.word and definition not in left_out]
        count.total += len(names)
        count.vague += [definition for definition in names if is_vague(definition.word)]
    return count


def repeated_classes(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Class names that more than one class has, with the files."""
    files: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for module in modules:
        for qualname in module.classes:
            files[qualname.rpartition(".")[2]].add((module.file, qualname))
    return {name: sorted(file for file, _ in places) for name, places in sorted(files.items()) if len(places) > 1}


def repeated_modules(root: Path, rooms: Iterable[str]) -> dict[str, list[str]]:
    """Modules and folders of one name, of those names that must be single."""
    paths = [path for room in rooms for path in (root / room, *(root / room).rglob("*")) if path.exists()]
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        if path.stem in SINGLE_MODULES and (path.suffix == ".py" or any(path.glob("*.py"))):
            places[path.stem].append(path.relative_to(root).as_posix())
    return {name: sorted(same_name) for name, same_name in sorted(places.items()) if len(same_name) > 1}


def check(root: Path, exceptions: Exceptions) -> int:
    """Prints the counts and what is wrong; 1 if anything is."""
    modules = {folder: read_modules(root, folder) for folder in (*ROOMS, HELPERS, *NEIGHBOURS)}
    in_rooms = [module for room in ROOMS for module in modules[room]]
    problems = []
    for room in (*ROOMS, HELPERS):
        count = count_names(room, modules[room], exceptions)
        if modules[room]:
            click.echo(f"{room}: {len(count.vague)}/{count.total} {count.percent:.1f} %")
        if count.is_too_vague:
            problems.append(f"{room} has {len(count.vague)} vague names; --list {room} prints them")
    problems += [f"class {name} in {', '.join(files)}" for name, files in repeated_classes(in_rooms).items()]
    problems += [f"{name} in {', '.join(paths)}" for name, paths in repeated_modules(root, ROOMS).items()]
    problems += [f"the exception {key} covers nothing" for key in exceptions.stale()]

    everywhere = repeated_classes(module for part in modules.values() for module in part)
    click.echo(f"class names defined twice, with {', '.join(NEIGHBOURS)} and {HELPERS}: {len(everywhere)}")
    for name, files in everywhere.items():
        click.echo(f"  {name}: {', '.join(files)}")
    for problem in problems:
        click.echo(f"names: {problem}")
    click.echo("names: failed" if problems else "names: clean")
    return int(bool(problems))


@click.command()
@click.option("--list", "listing", is_flag=True, help="Print every vague name of the rooms.")
@click.option("--root", type=click.Path(path_type=Path), default=ROOT, help="The checkout.")
@click.argument("rooms", nargs=-1, type=click.Choice([*ROOMS, HELPERS, *NEIGHBOURS]))
def main(listing: bool, root: Path, rooms: Sequence[str]) -> None:
    """Fails where a room has more than 1 % and more than 5 vague names, or where two classes share a name."""
    exceptions = Exceptions()
    if not listing:
        sys.exit(check(root, exceptions))
    for room in rooms or (*ROOMS, HELPERS):
        for definition in count_names(room, read_modules(root, room), exceptions).vague:
            place = f"{definition.file}:{definition.line}"
            click.echo(f"{place} {definition.kind} {definition.name} {definition.scope}".rstrip())


if __name__ == "__main__":
    main()
