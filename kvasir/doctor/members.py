"""Whether a cluster's nodes and queues can lose a node. AMQP doesn't tell; RabbitMQ's management API does."""

from collections.abc import Iterator
from itertools import chain
from typing import Any
from urllib.parse import quote

from kvasir.doctor.findings import Finding, ok, warn

_PORT_OFFSET = 10_000  # the API's port, counted from AMQP's: 15672 for 5672
_QUORUM_MEMBERS = 3  # members: what RabbitMQ gives a queue that is declared where so many nodes run
_NAMES_SHOWN = 5
_WITHIN_S = 5.0
_LOOK = "rabbitmqctl list_queues name type members online; rabbitmqctl cluster_status"
_GROW = "rabbitmq-queues grow NODE all, for each node that lacks them"


def check_members(url: str, nodes: int) -> Iterator[Finding]:
    """Whether all nodes see each other, and each quorum queue has members enough to lose a node, all of them up."""
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
    """All nodes but those of the largest part. Each says whom it lost sight of; at first only one may have noticed."""
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
    """What the first node tells that answers; None if none does. Never asked without TLS over amqps.

    `query`: queues or nodes, and which of their fields.
    """
    # Here and not above: without a broker nothing needs them.
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
