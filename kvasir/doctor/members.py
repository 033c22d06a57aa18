"""Whether a cluster's nodes and queues can lose a node. AMQP doesn't tell; RabbitMQ's management API does."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import chain
from typing import Any
from urllib.parse import quote

from kvasir.doctor.findings import Finding, ok, warn

_BESIDE = 10_000  # the API's port, counted from AMQP's: 15672 for 5672
_ENOUGH = 3  # members: what RabbitMQ gives a queue that is declared where so many nodes run
_NAMED = 5
_WITHIN_S = 5.0
_LOOK = "rabbitmqctl list_queues name type members online; rabbitmqctl cluster_status"
_GROW = "rabbitmq-queues grow NODE all, for each node that lacks them"


def check_members(url: str, nodes: int) -> Iterator[Finding]:
    """Whether all nodes see each other, and each quorum queue has members enough to lose a node, all of them up."""
    wanted = min(nodes, _ENOUGH)
    queues = _read(url, "queues/{vhost}?columns=name,type,members,online")
    if queues is None:
        what = "how many members its queues have can't be read from here (no management API for this user)"
        yield Finding("ok", "broker", what, f"on a broker's machine: {_LOOK}; fewer than {wanted}: {_GROW}")
        return
    quorum = [queue for queue in queues if queue.get("type") == "quorum"]
    few = [queue["name"] for queue in quorum if len(queue.get("members", ())) < wanted]
    away = [queue["name"] for queue in quorum if len(queue.get("online", ())) < len(queue.get("members", ()))]
    if apart := outside(_read(url, "nodes?columns=name,partitions") or []):
        todo = "restart RabbitMQ there: a node that was frozen, or cut off, does not always join again by itself"
        yield warn("broker", f"apart from the rest of the cluster: {_names(apart)}", todo)
    if few:
        yield warn("broker", f"fewer than {wanted} members: {_names(few)}", f"on a broker's machine: {_GROW}")
    if away:
        yield warn("broker", f"members that are not up: {_names(away)}", "start the node that is down, or replace it")
    if not few and not away:
        yield ok("broker", f"all {len(quorum)} quorum queues have enough members, and all are up")


def outside(nodes: list[dict[str, Any]]) -> list[str]:
    """All nodes but those of the largest part. Each says whom it lost sight of; at first only one may have noticed."""
    cut = {frozenset((node["name"], other)) for node in nodes for other in node.get("partitions", ())}
    parts: list[list[str]] = []
    for node in nodes:
        name = node["name"]
        joined = [part for part in parts if any({name, other} not in cut for other in part)]
        parts = [part for part in parts if part not in joined] + [[name, *chain.from_iterable(joined)]]
    largest = max(parts, key=len, default=[])
    others = [name for part in parts if part is not largest for name in part]
    return others or [other for node in nodes for other in node.get("partitions", ())]


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(sorted(names)[:_NAMED]) + more


def _read(url: str, what: str) -> list[dict[str, Any]] | None:
    """What the first node tells that answers; None if none does. Never asked without TLS over amqps.

    `what`: queues or nodes, and which of their fields.
    """
    # Here and not above: without a broker nothing needs pika.
    from infra.broker.rabbitmq.connection import all_parameters

    if not url.startswith("amqp://"):
        return None
    for parameters in all_parameters(url, "doctor"):
        try:
            with urllib.request.urlopen(_request(parameters, what), timeout=_WITHIN_S) as answer:
                found: list[dict[str, Any]] = json.load(answer)
                return found
        except (OSError, ValueError, urllib.error.URLError):
            continue
    return None


def _request(parameters: Any, what: str) -> urllib.request.Request:
    path = what.format(vhost=quote(parameters.virtual_host, safe=""))
    host = f"[{parameters.host}]" if ":" in parameters.host else parameters.host
    where = f"http://{host}:{parameters.port + _BESIDE}/api/{path}"
    words = f"{parameters.credentials.username}:{parameters.credentials.password}".encode()
    return urllib.request.Request(where, headers={"Authorization": f"Basic {base64.b64encode(words).decode()}"})
