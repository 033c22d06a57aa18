"""Every private member of pika that we use is listed in one module, and the pika that is installed has it."""

import ast
import dis
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pika
import pytest
from pika.adapters.base_connection import BaseConnection
from pika.adapters.utils.io_services_utils import _AsyncTransportBase
from pika.channel import Channel

from infra.broker.rabbitmq import pika_inside

OWNERS = {cls.__name__: cls for cls in (pika.SelectConnection, _AsyncTransportBase, Channel)}
LISTED = re.findall(r"^ {4}(\w+)\.(_\w+) {2,}\S", str(pika_inside.__doc__), re.MULTILINE)
PACKAGE = Path(pika_inside.__file__).parent


def missing() -> list[str]:
    """The listed members that the installed pika has neither in the class nor in what its methods set."""
    return [f"{owner}.{member}" for owner, member in LISTED if member not in set(members(OWNERS[owner]))]


def members(cls: type) -> Iterator[str]:
    yield from dir(cls)
    for each in inspect.getmro(cls):
        for method in filter(inspect.isfunction, vars(each).values()):
            yield from (step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")


def private_names(path: Path) -> set[str]:
    """Names with one underscore that a module uses of other objects than `self`, or overrides or asks for by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            found |= {ast.literal_eval(node.args[1])} if isinstance(node.args[1], ast.Constant) else set()
    return {name for name in found if re.match("_[^_]", name)}


def test_the_installed_pika_has_every_private_member_that_we_use() -> None:
    assert len(LISTED) == 3
    assert not missing(), (
        f"pika {pika.__version__} lacks {', '.join(missing())}: see infra/broker/rabbitmq/pika_inside.py"
    )


def test_a_pika_without_one_of_them_is_told_by_the_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BaseConnection, "_on_connection_workflow_done")
    assert missing() == ["SelectConnection._on_connection_workflow_done"]


def test_the_list_is_all_that_is_used() -> None:
    used = {name for path in PACKAGE.rglob("*.py") for name in private_names(path)}
    assert used == {member for _, member in LISTED}
    assert overridden(pika_inside.GuardedConnection) == {"_on_connection_workflow_done"}


def overridden(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) and re.match("_[^_]", name)}


def test_a_channel_that_keeps_no_cancelled_tags_is_left_alone() -> None:
    pika_inside.let_through(SimpleNamespace(), "tag")  # type: ignore[arg-type]
