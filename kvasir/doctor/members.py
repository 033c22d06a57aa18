"""Checks whether a broker cluster survives the loss of a node. AMQP doesn't say; RabbitMQ's management API does."""

from collections.abc import Iterator
from itertools import chain
from typing import Any
from urllib.parse import quote

from kvasir.doctor.findings import Finding, ok, warn

_PORT_OFFSET = 10_000  # RabbitMQ's API port minus its AMQP port (15672 - 5672)
_QUORUM_MEMBERS = 3  # number of members that RabbitMQ gives a new queue if there are enough nodes
_NAMES_SHOWN = 5
_WITHIN_S = 5.0
_LOOK = "rabbitmqctl list_queues name type members online; rabbitmqctl cluster_status"
_GROW = "rabbitmq-queues grow NODE all, for each node that lacks them"


def check_members(url: str, nodes: int) -> Iterator[Finding]:
    """Check that all nodes see each other, and that each quorum queue has enough members and all of them are up."""
    required_members = min(nodes, _QUORUM_MEMBERS)
    queues = _query_management(url, "queues/{vhost}?columns=name,type,members,online")
    if queues is None:
        message = "how many members its queues have can't be read from here (no management API for this user)"
        yield Finding(
            "ok", "broker", message, f"on a broker's machine: {_LOOK}; fewer than {required_members}: {_GROW}"
        )
        return
    quorum = [queue for queue in queues if queue.get("type") == "quorum"]
    small_queues = [queue["name"] for queue in quorum if len(queue.get("members", ())) < required_members]
    degraded_queues = [
        queue["name"] for queue in quorum if len(queue.get("online", ())) < len(queue.get("members", ()))
    ]
    if separated_nodes := separated_from_largest(_query_management(url, "nodes?columns=name,partitions") or []):
        todo = "restart RabbitMQ there: a node that was frozen, or cut off, does not always join again by itself"
        yield warn("broker", f"apart from the rest of the cluster: {_names(separated_nodes)}", todo)
    if small_queues:
        yield warn(
            "broker",
            f"fewer than {required_members} members: {_names(small_queues)}",
            f"on a broker's machine: {_GROW}",
        )
    if degraded_queues:
        yield warn(
            "broker",
            f"members that are not up: {_names(degraded_queues)}",
            "start the node that is down, or replace it",
        )
    if not small_queues and not degraded_queues:
        yield ok("broker", f"all {len(quorum)} quorum queues have enough members, and all are up")


def separated_from_largest(nodes: list[dict[str, Any]]) -> list[str]:
    """Return all nodes outside the largest connected part.

    Each node names the nodes that it lost sight of. At first only one side may have noticed.
    """
    cut_links = {frozenset((node["name"], peer)) for node in nodes for peer in node.get("partitions", ())}
    parts: list[list[str]] = []
    for node in nodes:
        name = node["name"]
        connected_parts = [part for part in parts if any({name, peer} not in cut_links for peer in part)]
        parts = [part for part in parts if part not in connected_parts] + [
            [name, *chain.from_iterable(connected_parts)]
        ]
    largest = max(parts, key=len, default=[])
    outside_names = [name for part in parts if part is not largest for name in part]
    return outside_names or [peer for node in nodes for peer in node.get("partitions", ())]


def _names(names: list[str]) -> str:
    remainder = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + remainder


def _query_management(url: str, query: str) -> list[dict[str, Any]] | None:
    """Return the answer of the first node that answers, or None.

    With an amqps URL it is not asked, because this request would send the password without TLS.

    `query`: queues or nodes, and which of their fields.
    """
    # Imported here, because only clusters with a broker need them.
    import httpx

    from infra.broker.rabbitmq.connection import all_parameters

    if not url.startswith("amqp://"):
        return None
    for parameters in all_parameters(url, "doctor"):
        login = parameters.credentials
        try:
            answer = httpx.get(_url(parameters, query), auth=(login.username, login.password), timeout=_WITHIN_S)
            records: list[dict[str, Any]] = answer.raise_for_status().json()
            return records
        except (ValueError, httpx.HTTPError, httpx.InvalidURL):
            continue
    return None


def _url(parameters: Any, query: str) -> str:
    path = query.format(vhost=quote(parameters.virtual_host, safe=""))
    host = f"[{parameters.host}]" if ":" in parameters.host else parameters.host
    return f"http://{host}:{parameters.port + _PORT_OFFSET}/api/{path}"
