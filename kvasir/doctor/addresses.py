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
    brokers = yield from _each("broker", secret, lambda url: _reach_broker(url, settings.broker_ca_file()))
    if len(brokers) > 1:
        todo = "jobs in the one are out of reach at the other: name only nodes of one cluster, or links to one node"
        yield error("broker", f"its addresses lead to {len(brokers)} brokers: {', '.join(sorted(brokers))}", todo)
    stores = yield from _each("store", settings.store_url_with_secret, _reach_store)
    if len(stores) > 1:
        todo = "fine as a reserve: no job is lost, but what the other one lacks is computed again"
        yield warn("store", f"its addresses lead to {len(stores)} Redis servers or clusters", todo)


def _each(
    service: str, url: Callable[[], str], reach: Callable[[str], tuple[str, str]]
) -> Generator[Finding, None, set[str]]:
    """Returns by which names the services know themselves."""
    names: set[str] = set()
    try:
        urls = addresses(url())
    except ConfigError:  # a password file that is missing, say: found once, where the service itself is looked at
        return names
    for number, each in enumerate(urls if len(urls) > 1 else [], 1):
        which = f"address {number} of {len(urls)}, {urlsplit(each).netloc.rpartition('@')[2]}"
        try:
            name, said = reach(each)
        except KvasirError as away:
            todo = "see that it runs and that the link to it is up; the other addresses are used meanwhile"
            yield warn(service, f"{which}: {away}", todo)
        else:
            names.add(name)
            yield ok(service, f"{which}: {said}")
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
            return min(each["node_id"] for each in nodes.values()), f"answers, and knows {plural(len(nodes), 'node')}"
    said = f"answers; {check_link(url).what}"
    with closing(open_client(url)) as client, errors_mapped(place(url)):
        return str(client.info("server")["run_id"]), said
