"""Whether each of several addresses of the broker and of the store works by itself: a fallback is rarely used.

And whether they lead to the same service.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from infra.config.settings import Settings
from infra.config.urls import addresses
from kvasir.doctor.findings import Finding, error, ok, warn
from kvasir.doctor.services import check_link
from kvstore.redis.client import errors_mapped, is_cluster, node_urls, open_client, place
from messages.errors import ConfigError, KvasirError
from producers.words import plural

_WITHIN_S = 3.0


def check_addresses(settings: Settings) -> Iterator[Finding]:
    """A finding for each address, where there are several, and one if they lead to different services."""
    secret = settings.broker_url_with_secret
    brokers = yield from _check_each_address(
        "broker", secret, lambda url: _reach_broker(url, settings.broker_ca_file())
    )
    if len(brokers) > 1:
        todo = "jobs in the one are out of reach at the other: name only nodes of one cluster, or links to one node"
        yield error("broker", f"its addresses lead to {len(brokers)} brokers: {', '.join(sorted(brokers))}", todo)
    stores = yield from _check_each_address("store", settings.store_url_with_secret, _reach_store)
    if len(stores) > 1:
        todo = "fine as a reserve: no job is lost, but what the other one lacks is computed again"
        yield warn("store", f"its addresses lead to {len(stores)} Redis servers or clusters", todo)


def _check_each_address(
    service: str, url: Callable[[], str], reach: Callable[[str], tuple[str, str]]
) -> Generator[Finding, None, set[str]]:
    """Returns by which names the services know themselves."""
    names: set[str] = set()
    try:
        urls = addresses(url())
    except ConfigError:  # a password file that is missing, say: found once, where the service itself is looked at
        return names
    for number, address in enumerate(urls if len(urls) > 1 else [], 1):
        label = f"address {number} of {len(urls)}, {urlsplit(address).netloc.rpartition('@')[2]}"
        try:
            name, answer = reach(address)
        except KvasirError as problem:
            todo = "see that it runs and that the link to it is up; the other addresses are used meanwhile"
            yield warn(service, f"{label}: {problem}", todo)
        else:
            names.add(name)
            yield ok(service, f"{label}: {answer}")
    return names


def _reach_broker(url: str, ca_file: str) -> tuple[str, str]:
    from infra.broker.rabbitmq import RabbitMQBroker

    with closing(RabbitMQBroker(url, "kvasir doctor", _WITHIN_S, ca_file=ca_file)) as broker:
        return str(broker.server.get("cluster_name", "")), "answers"


def _reach_store(url: str) -> tuple[str, str]:
    if is_cluster(url):
        node: Any = open_client(node_urls(url)[0])
        with closing(node), errors_mapped(place(url)):
            nodes = node.execute_command("CLUSTER NODES")
            return min(node["node_id"] for node in nodes.values()), f"answers, and knows {plural(len(nodes), 'node')}"
    answer = f"answers; {check_link(url).what}"
    with closing(open_client(url)) as client, errors_mapped(place(url)):
        return str(client.info("server")["run_id"]), answer
