"""The public names of Python with their signatures, and the command line with its options, defaults and exit codes."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import click

import kvasir
import kvasir.compat
from kvasir.cli import kvasir as root_command
from kvasir.cli import main
from messages import errors

# Other names in annotations are of inner modules, and may change.
FREE_TO_USE = {
    *("Any", "Callable", "Generator", "Iterable", "Iterator", "Literal", "Mapping", "None", "Path", "Self", "Sequence"),
    *("bool", "bytes", "dict", "float", "int", "list", "object", "str", "tuple"),
}
# Came after 0.1.0, each with a default: what was written for it goes on.
SINCE = {"rosters", "min_points", "function"}
OPTIONS_SINCE = {"host_names", "of_batch", "of_job", "open_objects", "since_s", "with_weights"}
COMMANDS_SINCE = {"job"}
PUBLIC = {*kvasir.__all__, *kvasir.compat.__all__}


def names() -> dict[str, Any]:
    """Everything that `from kvasir import` and `from kvasir.compat import` give, and what can be reached from there."""
    return {
        "kvasir": {name: _described(getattr(kvasir, name)) for name in sorted(kvasir.__all__)},
        "kvasir.compat": {name: _described(getattr(kvasir.compat, name)) for name in sorted(kvasir.compat.__all__)},
        "fields of": {what: _fields(kind) for what, kind in sorted(_reached().items())},
    }


def _reached() -> dict[str, type]:
    """Classes without a public name of which attributes and methods of public ones return instances."""
    result, outcome = typing.get_type_hints(kvasir.JobResult), typing.get_type_hints(kvasir.Outcome)
    difference = typing.get_type_hints(kvasir.Regrade.differences.fget)["return"]  # type: ignore[attr-defined]
    grade = typing.get_args(outcome["grades"])[0]
    settings = typing.get_type_hints(kvasir.Settings)
    return {
        "Client.workers()[]": typing.get_args(typing.get_type_hints(kvasir.Client.workers)["return"])[0],
        "JobResult.decode": result["decode"],
        "JobResult.error": typing.get_args(result["error"])[0],
        "JobResult.prefill": result["prefill"],
        "JobResult.answers[]": typing.get_args(result["answers"])[0],
        "Outcome.counts": outcome["counts"],
        "Outcome.grades[]": grade,
        "Outcome.grades[].criteria[]": typing.get_args(typing.get_type_hints(grade)["criteria"])[0],
        "Regrade.differences[]": typing.get_args(difference)[0],
        "Settings.services": settings["services"],
        "Settings.models[]": typing.get_args(settings["models"])[1],
        "Settings.machines[]": typing.get_args(settings["machines"])[1],
    }


def _fields(kind: type) -> list[str]:
    parameters = [each for each in inspect.signature(kind).parameters.values() if not _came_later(each)]
    return [each.name + ("" if each.default is each.empty else f" = {_default(each.default)}") for each in parameters]


def _described(thing: Any) -> Any:
    if not inspect.isclass(thing):
        return _signature(thing)
    made: dict[str, Any] = {"": _signature(thing)}
    if issubclass(thing, Exception):
        made["bases"] = [kind.__name__ for kind in thing.__mro__[1:] if kind.__module__ == errors.__name__]
    fields = {each.name for each in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    for name in sorted({name for kind in thing.__mro__[:-1] for name in vars(kind)} - fields):
        member = inspect.getattr_static(thing, name)
        if name.startswith("_") or (issubclass(thing, Exception) and hasattr(Exception, name)):
            continue
        if isinstance(member, property):
            made[name] = _annotation(inspect.signature(member.fget).return_annotation)  # type: ignore[arg-type]
        elif callable(member) or isinstance(member, staticmethod | classmethod):
            made[name] = _signature(getattr(thing, name))
    return made


def _signature(thing: Callable[..., Any]) -> str:
    """As a call is written, whatever the modules and inner classes in it are called."""
    if inspect.isclass(thing) and thing.__init__ is Exception.__init__:
        return "(*args)"
    signature, written = inspect.signature(thing), _written_annotations(thing)
    parts, star = [], False
    for each in signature.parameters.values():
        if _came_later(each):
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        mark = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        shown = _annotation(written.get(each.name, each.annotation))
        annotation = "" if each.annotation is each.empty else f": {shown}"
        default = "" if each.default is each.empty else f" = {_default(each.default)}"
        parts.append(f"{mark}{each.name}{annotation}{default}")
        if each.kind is each.POSITIONAL_ONLY:
            parts.append("/")
    gives = "" if signature.return_annotation is inspect.Signature.empty else _annotation(signature.return_annotation)
    return f"({', '.join(parts)})" + (f" -> {gives}" if gives else "")


def _written_annotations(thing: Callable[..., Any]) -> dict[str, str]:
    """Each parameter's annotation as the source has it, since an alias is gone from what Python keeps."""
    with contextlib.suppress(OSError, TypeError):  # what has no source, as an exception's own initializer
        of_a_class = inspect.isclass(thing) and not dataclasses.is_dataclass(thing)
        node = ast.parse(textwrap.dedent(inspect.getsource(thing.__init__ if of_a_class else thing))).body[0]
        if isinstance(node, ast.ClassDef):
            return {
                ast.unparse(each.target): ast.unparse(each.annotation)
                for each in node.body
                if isinstance(each, ast.AnnAssign)
            }
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            return {each.arg: ast.unparse(each.annotation) for each in arguments if each.annotation}
    return {}


def _came_later(parameter: inspect.Parameter) -> bool:
    return parameter.name in SINCE and parameter.default is not parameter.empty


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
    known = FREE_TO_USE | PUBLIC
    return re.sub(r"(?<!['\"\w])[A-Za-z_]\w*(?!['\"\w])", lambda word: word[0] if word[0] in known else "…", text)


def _default(value: object) -> str:
    if callable(value):
        return "<function>"
    return repr(value) if isinstance(value, str | int | float | bool | tuple | None) else "<value>"


# --- the command line


def commands() -> dict[str, Any]:
    """Every command, by its words."""
    return dict(_commands(root_command, "kvasir"))


def _commands(command: click.Command, words: str) -> Iterator[tuple[str, Any]]:
    yield (
        words,
        {
            "help": _lines(command.help),
            "epilog": _lines(command.epilog),
            "hidden": command.hidden,
            "parameters": [_parameter(each) for each in command.params if each.name not in OPTIONS_SINCE],
        },
    )
    for name, inner in sorted(command.commands.items() if isinstance(command, click.Group) else ()):
        if words == "kvasir" and name in COMMANDS_SINCE:
            continue
        yield from _commands(inner, f"{words} {name}")


def _lines(text: str | None) -> list[str]:
    return inspect.cleandoc(text or "").replace("\b", "").strip().splitlines()


def _parameter(each: click.Parameter) -> dict[str, Any]:
    default = each.default
    known = isinstance(default, str | int | float | bool | tuple | list)
    made: dict[str, Any] = {
        "required": each.required,
        "type": _type(each.type),
        "default": default if known else "<computed>" if callable(default) else None,
        "multiple": each.multiple,
        "values": each.nargs,
        "variable": each.envvar,
    }
    if isinstance(each, click.Option):
        made |= {"options": [*each.opts, *each.secondary_opts], "flag": each.is_flag, "help": each.help}
        made |= {"hidden": each.hidden, "shown": each.metavar}
    else:
        made |= {"argument": each.human_readable_name}
    return {name: value for name, value in made.items() if value not in (None, False)}


def _type(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(map(str, kind.choices))}"
    if isinstance(kind, click.IntRange | click.FloatRange):
        low, high = ("" if bound is None else bound for bound in (kind.min, kind.max))
        opened = "".join(word for word, is_open in ((" above", kind.min_open), (" below", kind.max_open)) if is_open)
        return f"{kind.name} {low}..{high}{opened}"
    if isinstance(kind, click.Path):
        must = [word for word in ("exists", "file_okay", "dir_okay") if getattr(kind, word)]
        return " ".join([kind.name, *must])
    return kind.name


# --- exit codes


def exit_codes() -> dict[str, int]:
    """How `kvasir` ends on each kind of error, and on what a command may do."""
    raised = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]
    endings: dict[str, Any] = {kind.__name__: kind("why") for kind in raised}
    endings |= {"KeyboardInterrupt": KeyboardInterrupt(), "click.Abort": click.Abort()}
    endings |= {"click.UsageError": click.UsageError("why"), "OSError": OSError(13, "Permission denied", "FILE")}
    made = {f"raises {name}": _code(side_effect=error) for name, error in sorted(endings.items())}
    returns = {"returns nothing": None, "returns 0": 0, "returns 1": 1, "returns 3": 3}
    return made | {name: _code(return_value=value) for name, value in returns.items()}


def _code(**behaviour: Any) -> int:
    with mock.patch.object(click.Command, "main", **behaviour), contextlib.redirect_stderr(io.StringIO()):
        try:
            main([])
        except SystemExit as leaving:
            return int(leaving.code or 0)
    raise AssertionError("the command did not leave")
