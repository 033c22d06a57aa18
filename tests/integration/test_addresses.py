"""One broker and one store behind two links: the first is preferred, the second takes over."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from infra.broker.base import Address, Message
from infra.broker.rabbitmq import RabbitMQBroker
from infra.broker.rabbitmq import connection as connections
from infra.config.settings import load_settings
from infra.config.urls import put_password, take_password
from kvasir.doctor.cluster import examine
from kvstore.redis import links as store_links
from kvstore.redis.cluster_state import RedisClusterState
from kvstore.redis.store import RedisKVStore
from messages.errors import BrokerUnavailable, ConfigError, StoreUnavailable
from messages.urls import put_hosts
from tests.acceptance.faults.proxy import TcpProxy
from tests.support.kv_samples import layout, records_of, refs_of, same_bits
from tests.support.servers import HOST, free_port
from tests.support.waiting import wait_until

SOON_S = 5.0  # well above what it takes, well below a heartbeat


@contextlib.contextmanager
def links(url: str) -> Iterator[tuple[str, TcpProxy, TcpProxy]]:
    port = urlsplit(url).port or 0
    with TcpProxy(port) as fast, TcpProxy(port) as slow:
        yield put_hosts(url, f"{HOST}:{fast.port},{HOST}:{slow.port}"), fast, slow


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RETURN_S", 0.2)


def peers(broker: RabbitMQBroker) -> set[str]:
    return {broker._publishing.peer, broker._consuming.peer}


def on(broker: RabbitMQBroker, link: TcpProxy) -> bool:
    return broker.is_connected and peers(broker) == {f"{HOST}:{link.port}"}


@pytest.mark.system  # ten seconds
@pytest.mark.usefixtures("impatient")
def test_a_broker_is_reached_by_the_next_link_and_by_the_best_one_again(broker_url: str) -> None:
    with links(broker_url) as (url, fast, slow), contextlib.closing(RabbitMQBroker(url)) as broker:
        assert on(broker, fast)
        broker.declare([])
        queue = broker.open_reply_queue(f"links-{fast.port}")
        fast.cut()
        broker.publish(Address("", queue), Message(b"over the slow one"), timeout_s=SOON_S)
        wait_until(lambda: on(broker, slow), "both connections use the second link", timeout_s=SOON_S)
        fast.heal()
        wait_until(lambda: on(broker, fast), "both are back on the first", timeout_s=SOON_S)
        delivery = broker.get(queue)
        assert delivery is not None
        assert delivery.message.body == b"over the slow one"
        delivery.ack()
        broker.delete_queue(queue)


@pytest.mark.usefixtures("impatient")
def test_a_held_delivery_is_not_given_up_for_a_better_link(broker_url: str) -> None:
    with links(broker_url) as (url, fast, slow):
        fast.cut()
        with contextlib.closing(RabbitMQBroker(url)) as broker:
            assert on(broker, slow)
            broker.declare([])
            queue = broker.open_reply_queue(f"held-{fast.port}")
            broker.publish(Address("", queue), Message(b"work"))
            delivery = broker.get(queue)
            fast.heal()
            wait_until(lambda: broker._publishing.peer.endswith(f":{fast.port}"), "publishing is back", timeout_s=5)
            time.sleep(1)
            assert delivery is not None
            assert not delivery.is_lost
            assert broker._consuming.peer.endswith(f":{slow.port}")
            assert delivery.ack()
            wait_until(lambda: on(broker, fast), "consuming is back once nothing is held", timeout_s=SOON_S)
            assert broker.get(queue) is None
            broker.delete_queue(queue)


def test_a_frozen_link_is_passed_over(broker_url: str) -> None:
    with links(broker_url) as (url, fast, slow):
        fast.freeze()
        started = time.monotonic()
        with contextlib.closing(RabbitMQBroker(url)) as broker:
            assert on(broker, slow)
            assert time.monotonic() - started < SOON_S


def test_a_link_that_freezes_under_an_open_connection_is_left_when_its_heartbeat_fails(broker_url: str) -> None:
    with links(f"{broker_url}?heartbeat=2") as (url, fast, slow), contextlib.closing(RabbitMQBroker(url)) as broker:
        assert on(broker, fast)
        fast.freeze()
        wait_until(lambda: on(broker, slow), "both connections use the second link", timeout_s=15)


def test_a_refused_password_is_final_only_if_every_address_refuses_it(broker_url: str) -> None:
    wrong = put_password(take_password(broker_url)[0], "wrong")
    with pytest.raises(ConfigError, match="password refused"):
        RabbitMQBroker(put_hosts(wrong, f"{HOST}:{urlsplit(wrong).port},{HOST}:{urlsplit(wrong).port}"))
    nobody = (free_port(), free_port())
    with pytest.raises(BrokerUnavailable, match=f":{nobody[0]} or {HOST}:{nobody[1]}"):
        RabbitMQBroker(put_hosts(broker_url, f"{HOST}:{nobody[0]},{HOST}:{nobody[1]}"), connect_timeout_s=0.5)


STOPS = [TcpProxy.cut, TcpProxy.freeze]


def works(call: Callable[[], object]) -> bool:
    try:
        call()
    except StoreUnavailable:
        return False
    return True


@pytest.mark.parametrize("stop", STOPS)
def test_a_store_is_reached_by_the_next_link_and_by_the_best_one_again(
    store_url: str, stop: Callable[[TcpProxy], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_links, "RETURN_S", 0.2)
    with links(store_url) as (url, fast, slow), contextlib.closing(RedisClusterState(url)) as state:
        state.cancel("before")
        assert state._links.current == 0
        stop(fast)
        wait_until(lambda: works(lambda: state.is_cancelled("before")), "it answers over the other", timeout_s=SOON_S)
        assert state._links.current == 1
        fast.heal()
        wait_until(lambda: state._links.current == 0, "the better link is found", timeout_s=SOON_S)
        slow.cut()
        assert state.is_cancelled("before")


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("bulk", [True, False])
def test_blocks_go_over_the_next_link(store_url: str, stop: Callable[[TcpProxy], None], bulk: bool) -> None:
    lay, key = layout(), f"links-{free_port()}"
    refs = refs_of(lay, 203, fingerprint=key)
    records = records_of(lay, refs)
    with links(store_url) as (url, fast, _slow), contextlib.closing(RedisKVStore(url, bulk=bulk)) as store:
        store.put(key, lay, records)
        stop(fast)
        wait_until(lambda: works(lambda: store.get(key, lay, refs)), "they come over the other", timeout_s=SOON_S)
        got = store.get(key, lay, refs)
        assert all(same_bits(block.data, put.data) for block, (_, put) in zip(got, records, strict=True))
        store.delete(refs)


def test_doctor_says_which_address_does_not_answer(
    broker_url: str, store_url: str, tmp_path: Path, model_name: str
) -> None:
    with contextlib.closing(RabbitMQBroker(broker_url)) as connection:
        connection.declare([])
    with links(broker_url) as (broker, broken, _), links(store_url) as (store, *_):
        broken.cut()
        urls = {"KVASIR_BROKER_URL": broker, "KVASIR_STORE_URL": store}
        (tmp_path / "kvasir.toml").write_text(
            f'[models."{model_name}"]\nengine = "simulated"\nweights.simulated = "sim:"\n'
        )
        found = list(examine(lambda: load_settings(environ=urls, cwd=tmp_path)))
    about = [(each.level, each.subject) for each in found if "address " in each.what]
    assert about == [("warn", "broker"), ("ok", "broker"), ("ok", "store"), ("ok", "store")]
    assert any(each.level == "warn" and f"1 of 2, {HOST}:{broken.port}: " in each.what for each in found)
    assert [each.subject for each in found if f"link of this machine to {HOST}: " in each.what] == ["links", "links"]
