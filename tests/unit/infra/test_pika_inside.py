"""Every private member of pika that we use is listed in one module, and the pika that is installed has it."""

from __future__ import annotations

import ast
import dis
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.utils.io_services_utils import _AsyncTransportBase
from pika.channel import Channel
from pika.heartbeat import HeartbeatChecker

from infra.broker.rabbitmq import pika_inside

OWNERS = {cls.__name__: cls for cls in (pika.SelectConnection, _AsyncTransportBase, HeartbeatChecker, Channel)}
LISTED = re.findall(r"^ {4}(\w+)\.(_\w+) {2,}\S", str(pika_inside.__doc__), re.MULTILINE)
HERE = Path(pika_inside.__file__)


def missing() -> list[str]:
    """The listed members that the installed pika has neither in the class nor in what its methods set."""
    return [f"{owner}.{member}" for owner, member in LISTED if member not in set(members(OWNERS[owner]))]


def members(cls: type) -> Iterator[str]:
    yield from dir(cls)
    for each in inspect.getmro(cls):
        for method in filter(inspect.isfunction, vars(each).values()):
            yield from (step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")


def private_names(path: Path) -> set[str]:
    """Names with one underscore that a module uses of other objects than `self`, or of `self` where it is pika's."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and (path == HERE or ast.unparse(node.value) != "self"):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef) and path == HERE:
            found.add(node.name)
    return {name for name in found if re.match("_[^_]", name)}


def test_the_installed_pika_has_every_private_member_that_we_use() -> None:
    assert len(LISTED) == 13
    assert not missing(), (
        f"pika {pika.__version__} lacks {', '.join(missing())}: see infra/broker/rabbitmq/pika_inside.py"
    )


@pytest.mark.parametrize("member", ["_process_frame", "_terminate_stream"])
def test_a_pika_without_one_of_them_is_told_by_the_member(member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pika.connection.Connection, member)
    assert missing() == [f"SelectConnection.{member}"]


def test_the_list_is_all_that_is_used() -> None:
    ours = {"_corked_frames", "_unread_bytes", "_read_frame"}
    assert private_names(HERE) - ours == {member for _, member in LISTED}
    others = {path.name: private_names(path) for path in HERE.parent.glob("*.py") if path != HERE}
    assert not {name: used for name, used in others.items() if used}
