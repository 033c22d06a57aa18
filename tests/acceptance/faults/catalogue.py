"""Every fault of the table: a name, what is done, and with which plan.

A fault's function is called when the batch's owner has started (`owner_starts=False`: it starts the owner itself), and
returns when it has undone what can be undone.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from infra.broker import failpoints, topology
from infra.broker.base import Address, Message
from infra.broker.rabbitmq import RabbitMQBroker
from messages.workers import WorkerStage
from tests.acceptance.faults import load
from tests.acceptance.faults.proxy import TcpProxy
from tests.acceptance.faults.services import (
    HEARTBEAT_S,
    BareRedisClusterServices,
    BothClustersServices,
    BrokerClusterServices,
    NamedServices,
    NetworkServices,
    RedisClusterServices,
    Services,
    retry_levels,
)
from tests.acceptance.faults.stage import PATIENCE_S, Plan, Role, Stage
from tests.acceptance.faults.storm import JOB_S, storm
from tests.support.network import HERE, Link
from tests.support.servers import RabbitMQServer, RedisCluster, RedisServer, Server
from tests.support.waiting import wait_until

Inject = Callable[[Stage], None]

CONSUMER_TIMEOUT_S = 5
AFTER_A_NODE_S = 3.0  # until its replicas have caught up: never two of three at once
IN_HAND_S = 2.0  # quick jobs that a worker may hold are done in that time


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the table."""

    name: str
    what: str
    inject: Inject
    owner_starts: bool = True
    services: type[Services] = Services  # what it needs
    failed: int = 0  # jobs that must end as failed
    dead_lettered: int = 0


# --- processes ---


def kill_workers(stage: Stage, role: Role) -> None:
    for _ in stage.moments(4):
        stage.kill(role)


def kill_all_workers(stage: Stage) -> None:
    for _ in stage.moments(2):
        for role in ("prefill", "decode"):
            for _worker in list(stage.workers[role]):
                stage.kill(role)


def kill_at(stage: Stage, role: Role, points: tuple[str, ...], each: int) -> None:
    """Beside the workers that stay, `each` for every point, which die there at one of their first jobs."""
    latest = min(20, max(1, stage.plan.jobs // 40))  # jobs come in groups: of few, one of ten workers may see only some
    settings = [f"kill:{point}:{stage.random.randint(1, latest)}" for point in points for _ in range(each)]
    armed = [stage.start_worker(role, fault_point=setting) for setting in settings]
    stage.wait_for_registrations()
    stage.start_owner()
    deadline = time.monotonic() + PATIENCE_S
    while armed and stage.done < stage.plan.jobs and time.monotonic() < deadline:
        for worker in [worker for worker in armed if not worker.alive]:
            stage.over(jobs=stage.held_by(worker))
            armed.remove(worker)
            stage.workers[role].remove(worker)
        time.sleep(0.01)
    assert not armed, f"no job took {[worker.name for worker in armed]} to their failpoints"


def stop_workers(stage: Stage) -> None:
    """SIGSTOP for more than two heartbeats: the broker gives its deliveries to others, then it comes back."""
    for _ in stage.moments(2, last=0.5):
        sleepers = [stage.random.choice(stage.workers[role]) for role in ("prefill", "decode")]
        for worker in sleepers:
            worker.send(signal.SIGSTOP)
        time.sleep(HEARTBEAT_S * stage.random.uniform(2.2, 3.0))
        for worker in sleepers:
            worker.send(signal.SIGCONT)
        stage.over(programs=sleepers)


def leave_workers(stage: Stage) -> None:
    """SIGTERM: each hands back what it has not begun."""
    for _ in stage.moments(3):
        for role in ("prefill", "decode"):
            leaving = stage.random.choice(stage.workers[role])
            leaving.send(signal.SIGTERM)
            stage.start_worker(role, instead_of=leaving)


def step_clocks(stage: Stage) -> None:
    """Those of most workers, while Redis, whose clock all of them share, is out of reach."""
    for _ in stage.moments(3):
        stage.services.to_store.cut()
        for worker in stage.workers["prefill"] + stage.workers["decode"]:
            if worker.alive and stage.random.random() < 0.7:
                worker.send(signal.SIGUSR1)
        time.sleep(stage.random.uniform(1, 3))
        stage.services.to_store.heal()


def clocks_apart(stage: Stage) -> None:
    """All along; recovery can't be told, since the times in the workers' logs go by those clocks."""
    for _ in stage.moments(3):
        stage.services.to_store.cut()
        time.sleep(stage.random.uniform(1, 3))
        stage.services.to_store.heal()


def slow_worker(stage: Stage) -> None:
    """A decode worker ten times slower joins."""
    stage.start_worker("decode", "--weights", load.WEIGHTS.replace("decode=100", "decode=10"))


# --- the owner ---


def kill_owner(stage: Stage) -> None:
    for _ in stage.moments(3):
        assert stage.owner
        stage.owner.kill()
        time.sleep(stage.random.uniform(0.5, 2.0))
        stage.over(programs=[stage.start_owner()])


def owner_away(stage: Stage) -> None:
    """It submits and leaves; it comes back when the workers have done all of it."""
    owner = stage.start_owner("--submit-only")
    wait_until(lambda: owner.exit_code is not None, "the owner has submitted", PATIENCE_S)
    queue = _reply_queue(stage)
    # Without an owner there was no reply queue: its results were parked.
    places = [queue, topology.RESULTS_PARKED]
    wait_until(lambda: stage.services.ready(places) >= stage.plan.jobs, "all results are there", 120, poll_s=0.5)
    stage.over(programs=[stage.start_owner()])


def delete_reply_queue(stage: Stage) -> None:
    for _ in stage.moments(1, last=0.5):
        _delete_queue(stage, _reply_queue(stage))
        stage.over()


# --- the broker ---


def restart_broker(stage: Stage, how: Callable[[RabbitMQServer], None], times: int = 1) -> None:
    for _ in stage.moments(times, last=0.6):
        how(stage.services.broker)
        time.sleep(stage.random.uniform(0, 1))
        stage.services.broker.start()
        stage.over()


def stop_app(stage: Stage) -> None:
    for _ in stage.moments(1, last=0.6):
        stage.services.broker.control("stop_app")
        stage.services.broker.control("start_app")
        stage.over()


def kill_broker_with_retries(stage: Stage) -> None:
    """Once 500 jobs wait in retry levels."""
    wait_until(lambda: stage.services.ready(retry_levels()) >= _half(stage), "half of the jobs wait", PATIENCE_S)
    stage.services.broker.kill()
    stage.services.broker.start()
    stage.over(programs=[stage.owner] if stage.owner else [])


def alarm(stage: Stage, on: tuple[str, ...], off: tuple[str, ...]) -> None:
    for _ in stage.moments(1, last=0.5):
        stage.services.broker.control(*on)
        time.sleep(stage.random.uniform(3, 6))
        stage.services.broker.control(*off)
        stage.over()


def short_consumer_timeout(stage: Stage) -> None:
    """Deliveries held longer than 5 s close their channel; the plan may have jobs of 16 s."""
    broker = stage.services.broker
    stage.at_end.callback(_set_consumer_timeout, broker, timeout_ms=1_800_000, tick_ms=60_000)
    _set_consumer_timeout(broker, timeout_ms=CONSUMER_TIMEOUT_S * 1000, tick_ms=1_000)
    broker.control("close_all_connections", "a consumer time-out holds for channels opened after it was set")
    stage.start_owner()


def pause_prefill(stage: Stage) -> None:
    """For three consumer time-outs, jobs waiting: no job may come back, nor meet an error, for that."""
    short_consumer_timeout(stage)
    queue = [topology.work_queue("prefill", stage.model, "bulk")]
    stage.wait_for_results(1)
    stage.pause("prefill", True)
    time.sleep(1)  # what was in hand is done, the rest handed back, the last job submitted
    waiting = stage.services.ready(queue)
    time.sleep(3 * CONSUMER_TIMEOUT_S)
    assert stage.services.ready(queue) == waiting > 0, "nothing waited, or somebody went on"
    stage.pause("prefill", False)
    stage.over(programs=stage.workers["prefill"])
    stage.wait_for_results(stage.plan.jobs)
    # What was on its way to a consumer when that was cancelled a quorum queue takes back, and counts: one each at most.
    steps = [line for program in stage.programs for line in program.lines()]
    came_back = Counter(step["job"] for step in steps if step["event"] == "redelivered")
    on_the_way = len(stage.workers["prefill"])
    assert all(count == 1 for count in came_back.values()), f"deliveries came back again and again: {came_back}"
    assert len(came_back) <= on_the_way, f"{len(came_back)} deliveries came back"
    closed = [step for step in steps if "406 PRECONDITION_FAILED" in step["event"]]
    assert not closed, f"the consumer time-out closed a channel: {closed[0]['event']}"
    tried_again = sum(result["attempts"] != 1 for result in stage.results())
    assert not tried_again, f"{tried_again} jobs met an error"


def delete_work_queue(stage: Stage, stage_name: WorkerStage) -> None:
    for _ in stage.moments(1, last=0.5):
        _delete_queue(stage, topology.work_queue(stage_name, stage.model, "bulk"))
        if stage_name == "decode":  # without its prefill queue there is nothing left to do until the owner comes back
            stage.over()


def purge_work_queue(stage: Stage) -> None:
    for _ in stage.moments(1, last=0.5):
        with stage.services.connect() as connection:
            connection.channel().queue_purge(topology.work_queue("prefill", stage.model, "bulk"))


def forget_confirmed(stage: Stage) -> None:
    """The broker drops what it had confirmed, here and there; the owner finds it without being started again."""
    owner = stage.owner
    assert owner
    dropped = 0
    for _ in stage.moments(4, last=0.5):
        with stage.services.connect() as connection:
            channel = connection.channel()
            for work in topology.WORK_STAGES:
                for _message in range(25):
                    dropped += channel.basic_get(topology.work_queue(work, stage.model, "bulk"), True)[0] is not None
    wait_until(lambda: owner.exit_code is not None, "the owner ends by itself", PATIENCE_S)
    assert dropped > 0, "nothing was there to drop"
    assert owner.exit_code == 0, "the owner ended without all results"


# --- one node of three ---


def each_node(stage: Stage) -> Iterator[RabbitMQServer]:
    """The first node, where the clients are, and then a random one, at random moments."""
    cluster = stage.services.cluster
    assert cluster
    for number in stage.moments(2, last=0.6):
        yield stage.random.choice(cluster.nodes) if number else cluster.nodes[0]


def kill_node(stage: Stage, how: Callable[[RabbitMQServer], None]) -> None:
    """Recovery counts from the fault on, not from the node's return."""
    for node in each_node(stage):
        how(node)
        stage.over(in_hand_s=IN_HAND_S)
        time.sleep(stage.random.uniform(2, 5))
        node.start()
        time.sleep(AFTER_A_NODE_S)


def kill_node_and_owner(stage: Stage) -> None:
    """The owner comes back while the node is away that it was connected to, and that holds every classic queue."""
    cluster = stage.services.cluster
    assert cluster
    for _ in stage.moments(1, last=0.5):
        node = cluster.nodes[0]
        node.kill()
        assert stage.owner
        stage.owner.kill()
        stage.over(programs=[stage.start_owner()])
        wait_until(lambda: stage.done >= stage.plan.jobs, "the batch is done without the node", PATIENCE_S)
        node.start()


def freeze_node(stage: Stage) -> None:
    """SIGSTOP, longer than the others and the clients need to see it.

    It never knew that it was away, so `pause_minority` doesn't stop it: somebody has to start it again.
    """
    for node in each_node(stage):
        os.kill(node.pid, signal.SIGSTOP)
        stage.over(in_hand_s=IN_HAND_S)
        time.sleep(stage.random.uniform(12, 18))
        os.kill(node.pid, signal.SIGCONT)
        time.sleep(AFTER_A_NODE_S)
        node.kill()
        node.start()
        time.sleep(AFTER_A_NODE_S)


def empty_node(stage: Stage) -> None:
    """A node comes back without its disk, and gets its share again."""
    cluster = stage.services.cluster
    assert cluster
    for _ in stage.moments(1, last=0.3):
        victim = cluster.nodes[-1]
        victim.kill()
        stage.over(in_hand_s=IN_HAND_S)
        cluster.replace(victim)


def move_leaders(stage: Stage) -> None:
    """Every 5 s, each quorum queue's to a random node."""
    while stage.done < stage.plan.jobs and stage.owner and stage.owner.alive:
        stage.services.broker.control("eval", _MOVE_LEADERS)
        stage.over()
        time.sleep(5)


def roll_nodes(stage: Stage) -> None:
    """Each node restarted in turn, as docs/how-to/clusters.md has it."""
    cluster = stage.services.cluster
    assert cluster
    for _ in stage.moments(1, last=0.1):
        for node in cluster.nodes:
            cluster.restart(node)
            stage.over()


_MOVE_LEADERS = (
    "Nodes = rabbit_nodes:all_running(), "
    "[rabbit_quorum_queue:transfer_leadership(Q, lists:nth(rand:uniform(length(Nodes)), Nodes)) "
    "|| Q <- rabbit_amqqueue:list(), amqqueue:get_type(Q) =:= rabbit_quorum_queue], ok."
)


# --- one node of a Redis Cluster ---


def harm_store_node(stage: Stage, harm: Callable[[RedisServer], None], fix: Callable[[RedisServer], None]) -> None:
    """First the primary with the registrations, then a random one. Recovery counts from the fault on."""
    redis_cluster = stage.services.redis_cluster
    assert redis_cluster
    for number in stage.moments(2, last=0.6):
        primaries = redis_cluster.primaries()
        node = stage.random.choice(primaries) if number else _holder(redis_cluster, "cards")
        harm(node)
        stage.over(in_hand_s=IN_HAND_S)
        time.sleep(stage.random.uniform(4, 8))
        fix(node)
        redis_cluster.wait_until_whole()


def separate_store_node(stage: Stage) -> None:
    """Clients are with the others; a copy of what the node was sent meanwhile is nowhere."""
    redis_cluster = stage.services.redis_cluster
    assert redis_cluster
    harm_store_node(stage, redis_cluster.separate, lambda _: redis_cluster.rejoin())


def separate_node(stage: Stage) -> None:
    """`pause_minority` stops the node; when it sees the others again it starts by itself."""
    cluster = stage.services.cluster
    assert cluster
    for node in each_node(stage):
        cluster.separate(node)
        stage.over(in_hand_s=IN_HAND_S)
        time.sleep(stage.random.uniform(12, 18))
        assert cluster.is_separate(node), "its links were not cut all the time"
        cluster.rejoin(node)
        cluster.wait_until_whole()
        time.sleep(AFTER_A_NODE_S)


def separate_node_of_each(stage: Stage) -> None:
    cluster, redis_cluster = stage.services.cluster, stage.services.redis_cluster
    assert cluster
    assert redis_cluster
    for _ in stage.moments(1, last=0.5):
        node, primary = cluster.nodes[0], _holder(redis_cluster, "cards")
        redis_cluster.separate(primary)
        cluster.separate(node)
        stage.over(in_hand_s=IN_HAND_S)
        time.sleep(stage.random.uniform(12, 18))
        assert cluster.is_separate(node), "its links were not cut all the time"
        redis_cluster.rejoin()
        cluster.rejoin(node)
        cluster.wait_until_whole()
        redis_cluster.wait_until_whole()


def _holder(redis_cluster: RedisCluster, key: str) -> RedisServer:
    return next(node for node in redis_cluster.primaries() if redis_cluster.serves(node, key))


def harm_node_of_each(stage: Stage, how: signal.Signals) -> None:
    """A broker, and the primary with the registrations, at once."""
    cluster, redis_cluster = stage.services.cluster, stage.services.redis_cluster
    assert cluster
    assert redis_cluster
    for _ in stage.moments(1, last=0.5):
        nodes: list[Server] = [cluster.nodes[0], _holder(redis_cluster, "cards")]
        for node in nodes:
            os.kill(node.pid, how)
        stage.over(in_hand_s=IN_HAND_S)
        time.sleep(stage.random.uniform(12, 18))
        for node in nodes:
            if how == signal.SIGSTOP:
                os.kill(node.pid, signal.SIGCONT)
        time.sleep(AFTER_A_NODE_S)
        cluster.nodes[0].kill()  # as after a freeze of a broker alone
        for node in nodes:
            if not node.alive:
                node.start()
        redis_cluster.wait_until_whole()


def reshard(stage: Stage) -> None:
    """At four moments, a hundred slots of a random primary, those with keys first, to another one."""
    redis_cluster = stage.services.redis_cluster
    assert redis_cluster
    for _ in stage.moments(4):
        source, target = stage.random.sample(redis_cluster.primaries(), 2)
        for slot in redis_cluster.slots(source)[:100]:
            redis_cluster.begin_move(slot, source, target)
            redis_cluster.move_keys(slot, source, target)
            redis_cluster.end_move(slot, target)
        stage.over()


# --- the network ---


def reset(stage: Stage, proxy: TcpProxy) -> None:
    for _ in stage.moments(5):
        proxy.reset()
        stage.over()


def freeze(stage: Stage, proxy: TcpProxy) -> None:
    """Both directions, for up to five heartbeats; then what was sent arrives, as TCP has it."""
    for _ in stage.moments(2, last=0.5):
        proxy.freeze()
        time.sleep(stage.random.uniform(0.5, HEARTBEAT_S * 5))
        proxy.thaw()
        stage.over()


def forget(stage: Stage, proxy: TcpProxy) -> None:
    """Connections that are open die in silence, new ones work. Who doesn't know yet goes on with what it holds."""
    for _ in stage.moments(2, last=0.5):
        proxy.forget()
        stage.over(in_hand_s=IN_HAND_S)


def cut(stage: Stage, proxy: TcpProxy) -> None:
    for _ in stage.moments(2, last=0.6):
        proxy.cut()
        time.sleep(stage.random.uniform(1, 6))
        proxy.heal()
        stage.over()


def delay(stage: Stage, proxy: TcpProxy) -> None:
    for _ in stage.moments(2, last=0.5):
        proxy.delay_s = stage.random.uniform(0.05, 0.3)
        time.sleep(stage.random.uniform(2, 5))
        proxy.heal()
        stage.over()


def slow(stage: Stage, proxy: TcpProxy) -> None:
    for _ in stage.moments(2, last=0.5):
        proxy.bytes_per_s = stage.random.uniform(5_000, 50_000)
        time.sleep(stage.random.uniform(2, 5))
        proxy.heal()
        stage.over()


def slow_names(stage: Stage) -> None:
    """Whoever has lost its connections needs the name, and waits for it."""
    services = stage.services
    assert isinstance(services, NamedServices)
    for _ in stage.moments(3, last=0.6):
        services.name_server.delay_s = stage.random.uniform(2, 4.5)  # the resolver gives up after 5
        services.to_broker.reset()
        services.to_store.reset()
        time.sleep(stage.random.uniform(5, 10))
        services.name_server.delay_s = 0.0
        stage.over()


def silent_names(stage: Stage) -> None:
    """Nobody knows where the services are until the name server answers again."""
    services = stage.services
    assert isinstance(services, NamedServices)
    for _ in stage.moments(2, last=0.5):
        services.name_server.is_silent = True
        services.to_broker.reset()
        services.to_store.reset()
        time.sleep(stage.random.uniform(6, 15))
        services.name_server.is_silent = False
        stage.over()


# --- the store ---


def flush_store(stage: Stage) -> None:
    for _ in stage.moments(5):
        client = stage.services.redis()
        client.flushall()
        client.close()
        stage.over()


def kill_store(stage: Stage) -> None:
    for _ in stage.moments(2, last=0.6):
        stage.services.store.kill()
        time.sleep(stage.random.uniform(0, 4))
        stage.services.store.start()
        stage.over()


def fill_store(stage: Stage) -> None:
    """No room for anything: neither blocks, nor results, nor registrations."""
    for _ in stage.moments(1, last=0.5):
        client = stage.services.redis()
        before = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", "1mb")
        time.sleep(stage.random.uniform(3, 6))
        client.config_set("maxmemory", before)
        client.close()
        stage.over()


# --- the network between two machines ---


def harm_link(stage: Stage, links: Sequence[tuple[str, str, Link]], times: int, longest_s: float) -> None:
    """Each of (source, target, link) in turn, `times` times, for up to `longest_s`."""
    services = stage.services
    assert isinstance(services, NetworkServices)
    for number, _ in enumerate(stage.moments(times, last=0.5)):
        source, target, link = links[number % len(links)]
        services.network.set_link(link, source, target)
        time.sleep(stage.random.uniform(longest_s / 4, longest_s))
        services.network.set_link(services.link)
        stage.over()


_LINK = NetworkServices.link
_DOWN = replace(_LINK, is_up=False)


# --- messages ---


def poison(stage: Stage) -> None:
    """One job takes every worker along that decodes it; a supervisor starts them again."""
    victim = stage.random.randrange(stage.plan.jobs // 4, stage.plan.jobs // 2)
    batch_id = stage.batch_id()
    bad = load.tasks(batch_id, stage.model, stage.plan.jobs, stage.plan.seed)[victim].job_id
    point = f"kill:decode.loaded:{bad}"
    for worker in list(stage.workers["decode"]):
        stage.start_worker("decode", fault_point=point, instead_of=worker)
        worker.send(signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while stage.done < stage.plan.jobs and time.monotonic() < deadline:
        for worker in [worker for worker in stage.workers["decode"] if not worker.alive]:
            stage.over(jobs=[job for job in stage.held_by(worker) if job != bad])
            stage.start_worker("decode", fault_point=point, instead_of=worker)
        time.sleep(0.05)


def garbage(stage: Stage) -> None:
    """300 messages that nobody can read, in every work queue; nobody waits for their results."""
    broker = RabbitMQBroker(stage.services.broker.url, name="garbage")
    queues = [topology.work_queue(each, stage.model, lane) for each in topology.WORK_STAGES for lane in ("now", "bulk")]
    for _ in stage.moments(3):
        sends = [
            (Address(topology.WORK, stage.random.choice(queues)), Message(stage.random.randbytes(size), f"bad-{size}"))
            for size in stage.random.choices(range(1, 5000), k=100)
        ]
        broker.publish_many(sends)
    broker.close()


def nothing(_stage: Stage) -> None:
    """The row to compare the others with."""


def _half(stage: Stage) -> int:
    return stage.plan.jobs // 2


def _reply_queue(stage: Stage) -> str:
    return topology.reply_queue(stage.batch_id())


def _delete_queue(stage: Stage, queue: str) -> None:
    with stage.services.connect() as connection:
        connection.channel().queue_delete(queue)


def _set_consumer_timeout(broker: RabbitMQServer, timeout_ms: int, tick_ms: int) -> None:
    for name, value in (("consumer_timeout", timeout_ms), ("channel_tick_interval", tick_ms)):
        broker.control("eval", f"application:set_env(rabbit, {name}, {value}).")


_MEMORY = (("set_vm_memory_high_watermark", "0.0001"), ("set_vm_memory_high_watermark", "0.4"))
_DISK = (("set_disk_free_limit", "1000000GB"), ("set_disk_free_limit", "50MB"))


def _to_broker(inject: Callable[[Stage, TcpProxy], None]) -> Inject:
    return lambda stage: inject(stage, stage.services.to_broker)


def _to_store(inject: Callable[[Stage, TcpProxy], None]) -> Inject:
    return lambda stage: inject(stage, stage.services.to_store)


def _killed(name: str, role: Role, of: str = "") -> Fault:
    return Fault(name, f"SIGKILL of a {role} worker, four times{of}", partial(kill_workers, role=role))


def _killed_at(name: str, role: Role, points: tuple[str, ...], each: int, of: str = "") -> Fault:
    what = f"{each} SIGKILLs at {points[0]}" if len(points) == 1 else "a SIGKILL at each step of the handler"
    return Fault(name, what + of, partial(kill_at, role=role, points=points, each=each), owner_starts=False)


def _of_node(name: str, what: str, inject: Inject) -> Fault:
    return Fault(name, f"{what}; of a cluster of three", inject, services=BrokerClusterServices)


def _of_network(name: str, what: str, inject: Inject) -> Fault:
    return Fault(f"network-{name}", f"{what}; over a network", inject, services=NetworkServices)


def _of_store_node(name: str, what: str, inject: Inject, replicas: bool = True) -> Fault:
    services = RedisClusterServices if replicas else BareRedisClusterServices
    having = "a replica each" if replicas else "no replicas"
    return Fault(name, f"{what}; of three primaries with {having}", inject, services=services)


def _of_both(name: str, what: str, inject: Inject) -> Fault:
    return Fault(name, f"{what}, each one of three", inject, services=BothClustersServices)


def _freeze(server: Server) -> None:
    os.kill(server.pid, signal.SIGSTOP)


def _thaw(server: Server) -> None:
    os.kill(server.pid, signal.SIGCONT)


_kill_store_node = partial(harm_store_node, harm=RedisServer.kill, fix=RedisServer.start)
_stop_store_node = partial(harm_store_node, harm=RedisServer.stop, fix=RedisServer.start)
_freeze_store_node = partial(harm_store_node, harm=_freeze, fix=_thaw)
_FORKED = "jobs of 8 answers, forked from one KV cache"
_HYBRID = "a model with a recurrent layer"
_BATCHED = "four prompts at once in each"
FAULTS = [
    Fault("none", "nothing", nothing),
    _killed("decode-killed", "decode"),
    _killed("prefill-killed", "prefill"),
    Fault("all-workers-killed", "SIGKILL of all workers at once, twice", kill_all_workers),
    _killed_at("prefill-steps", "prefill", failpoints.PREFILL, each=1),
    _killed_at("decode-steps", "decode", failpoints.DECODE, each=1),
    _killed_at("two-roles-prefill-steps", "both", failpoints.PREFILL, 1, "; of workers with both roles"),
    _killed_at("two-roles-decode-steps", "both", failpoints.DECODE, 1, "; of workers with both roles"),
    _killed_at("two-roles-changing", "both", failpoints.CHANGE, 3, ", of workers with both roles"),
    _killed("two-roles-killed", "both", ", with both roles, beside workers with one"),
    *[_killed_at(point, "prefill", (point,), each=3) for point in failpoints.PREFILL],
    *[_killed_at(point, "decode", (point,), each=3) for point in failpoints.DECODE],
    _killed("forked-decode-killed", "decode", f"; {_FORKED}"),
    _killed_at("forked-prefill-steps", "prefill", failpoints.PREFILL, each=1, of=f"; {_FORKED}"),
    *[_killed_at(point, "decode", (point,), each=3, of=f"; {_FORKED}") for point in failpoints.PER_ANSWER],
    _killed("hybrid-decode-killed", "decode", f"; {_HYBRID}"),
    _killed_at("hybrid-prefill-steps", "prefill", failpoints.PREFILL, each=1, of=f"; {_HYBRID}"),
    _killed("batched-prefill-killed", "prefill", f"; {_BATCHED}"),
    _killed_at("batched-prefill-steps", "prefill", failpoints.PREFILL, each=1, of=f"; {_BATCHED}"),
    Fault("workers-stopped", "SIGSTOP of two workers for 2 to 3 heartbeats, then SIGCONT, twice", stop_workers),
    Fault("workers-leave", "SIGTERM of two workers, three times", leave_workers),
    Fault("slow-worker", "a decode worker ten times slower joins", slow_worker),
    Fault("clock-back", "clocks of workers set back an hour while Redis is out of reach, three times", step_clocks),
    Fault("clock-forward", "clocks of workers set an hour ahead while Redis is out of reach, three times", step_clocks),
    Fault("clocks-apart", "clocks of workers 5 minutes ahead or behind; Redis out of reach, three times", clocks_apart),
    Fault("owner-killed", "SIGKILL of the batch's owner, three times", kill_owner),
    Fault("owner-away", "the owner submits, leaves, and returns when all is done", owner_away, owner_starts=False),
    Fault("reply-queue-deleted", "the reply queue deleted by hand", delete_reply_queue),
    Fault("broker-restarted", "SIGTERM of the broker, and start", partial(restart_broker, how=RabbitMQServer.stop)),
    Fault("broker-killed", "SIGKILL of the broker, and start", partial(restart_broker, how=RabbitMQServer.kill)),
    Fault("broker-stop-app", "rabbitmqctl stop_app, start_app", stop_app),
    Fault(
        "broker-killed-retries", "SIGKILL of the broker with half of the jobs in retry levels", kill_broker_with_retries
    ),
    Fault("memory-alarm", "memory alarm for 3 to 6 s", partial(alarm, on=_MEMORY[0], off=_MEMORY[1])),
    Fault("disk-alarm", "disk alarm for 3 to 6 s", partial(alarm, on=_DISK[0], off=_DISK[1])),
    Fault("consumer-timeout", "consumer time-out of 5 s, 8 jobs of 16 s", short_consumer_timeout, owner_starts=False),
    Fault("prefill-paused", "prefill paused for three consumer time-outs", pause_prefill, owner_starts=False),
    Fault("prefill-queue-deleted", "prefill queue deleted", partial(delete_work_queue, stage_name="prefill")),
    Fault("decode-queue-deleted", "decode queue deleted", partial(delete_work_queue, stage_name="decode")),
    Fault("prefill-queue-purged", "prefill queue purged", purge_work_queue),
    Fault("broker-forgets", "confirmed messages dropped from the work queues, four times", forget_confirmed),
    _of_node("node-killed", "SIGKILL of a node, and start, twice", partial(kill_node, how=RabbitMQServer.kill)),
    _of_node("node-away", "SIGKILL of a node, which stays away, and of the owner, which starts", kill_node_and_owner),
    _of_node("node-stopped", "SIGTERM of a node, and start, twice", partial(kill_node, how=RabbitMQServer.stop)),
    _of_node("node-frozen", "SIGSTOP of a node for 12 to 18 s, SIGCONT, SIGKILL and start, twice", freeze_node),
    _of_node("node-separated", "a node's links to the others cut for 12 to 18 s, twice", separate_node),
    _of_node("node-empty", "SIGKILL of a node, which comes back without its disk", empty_node),
    _of_node("leaders-moved", "every queue's leader to a random node, every 5 s", move_leaders),
    _of_node("nodes-rolled", "every node restarted in turn", roll_nodes),
    Fault("broker-reset", "every connection to the broker reset, five times", _to_broker(reset)),
    Fault("broker-black-hole", "nothing to or from the broker for 0.5 to 20 s, twice", _to_broker(freeze)),
    Fault("broker-forgotten", "every connection to the broker dead in silence, twice", _to_broker(forget)),
    Fault("broker-cut", "broker out of reach for 1 to 6 s, twice", _to_broker(cut)),
    Fault("broker-delay", "50 to 300 ms to the broker, each way, twice", _to_broker(delay)),
    Fault("broker-slow", "5 to 50 kB/s to the broker, twice", _to_broker(slow)),
    Fault("store-reset", "every connection to Redis reset, five times", _to_store(reset)),
    Fault("store-black-hole", "nothing to or from Redis for 0.5 to 20 s (time-outs), twice", _to_store(freeze)),
    Fault("store-forgotten", "every connection to Redis dead in silence, twice", _to_store(forget)),
    Fault("store-cut", "Redis out of reach for 1 to 6 s, twice", _to_store(cut)),
    Fault("store-delay", "50 to 300 ms to Redis, each way, twice", _to_store(delay)),
    Fault("store-slow", "5 to 50 kB/s to Redis, twice", _to_store(slow)),
    Fault("store-flushed", "FLUSHALL, five times", flush_store),
    Fault("store-killed", "SIGKILL of Redis, and an empty start, twice", kill_store),
    Fault("store-full", "Redis at its maxmemory for 3 to 6 s", fill_store),
    *(
        _of_store_node(f"redis-{name}{suffix}", f"{what}: a primary, twice", inject, replicas)
        for replicas, suffix in ((True, ""), (False, "-alone"))
        for name, what, inject in (
            ("killed", "SIGKILL, and an empty start", _kill_store_node),
            ("stopped", "SIGTERM, and an empty start", _stop_store_node),
            ("frozen", "SIGSTOP for 4 to 8 s", _freeze_store_node),
            ("separated", "for 4 to 8 s no packet to or from anybody", separate_store_node),
        )
    ),
    _of_store_node("redis-resharded", "a hundred slots moved to another primary, four times", reshard),
    _of_both(
        "both-killed",
        "SIGKILL of a broker and of a Redis primary at once",
        partial(harm_node_of_each, how=signal.SIGKILL),
    ),
    _of_both(
        "both-stopped",
        "SIGTERM of a broker and of a Redis primary at once",
        partial(harm_node_of_each, how=signal.SIGTERM),
    ),
    _of_both(
        "both-frozen",
        "SIGSTOP of a broker and of a Redis primary for 12 to 18 s",
        partial(harm_node_of_each, how=signal.SIGSTOP),
    ),
    _of_both("both-separated", "links of a broker and of a Redis primary cut for 12 to 18 s", separate_node_of_each),
    _of_network("slow", "nothing", nothing),
    _of_network(
        "mtu-hole",
        "packets over 576 bytes vanish for 2 to 8 s, twice",
        partial(harm_link, links=[("", "", replace(_LINK, mtu=576))], times=2, longest_s=8),
    ),
    _of_network(
        "one-way-cut",
        "nothing from the services, then nothing to them, for 2 to 10 s",
        partial(harm_link, links=[("services", HERE, _DOWN), (HERE, "services", _DOWN)], times=2, longest_s=10),
    ),
    _of_network(
        "flapping",
        "the link down for 0.3 to 1.2 s, ten times",
        partial(harm_link, links=[("", "", _DOWN)], times=10, longest_s=1.2),
    ),
    _of_network(
        "lossy",
        "5% of the packets lost for 3 to 12 s, twice",
        partial(harm_link, links=[("", "", replace(_LINK, loss=0.05))], times=2, longest_s=12),
    ),
    Fault(
        "names-slow", "2 to 4.5 s for a name, every connection reset, three times", slow_names, services=NamedServices
    ),
    Fault(
        "names-fail",
        "no answer to any name for 6 to 15 s, every connection reset, twice",
        silent_names,
        services=NamedServices,
    ),
    Fault("poison", "one job kills every worker that decodes it", poison, failed=1, dead_lettered=1),
    Fault("garbage", "300 unreadable messages in the work queues", garbage, dead_lettered=300),
    Fault("published-ten-times", "100 of the jobs published ten times each", nothing),
    Fault("storm", "one to three faults at once, every 0.5 to 3 s, 200 at least, for ten minutes at least", storm),
]

_STORE_NODE_ROWS = [fault.name for fault in FAULTS if fault.services.replicas is not None]
_PLANS = {
    "clock-back": {"environment": {"KVASIR_CLOCK_STEP_S": "-3600"}, "deadline_s": 600.0},
    "clock-forward": {"environment": {"KVASIR_CLOCK_STEP_S": "3600"}, "deadline_s": 600.0},
    "clocks-apart": {"clocks_s": (300.0, -300.0), "deadline_s": 600.0},
    **{name: {"questions": 4} for name in ("forked-decode-killed", "forked-prefill-steps", *failpoints.PER_ANSWER)},
    **{name: {"weights": load.HYBRID} for name in ("hybrid-decode-killed", "hybrid-prefill-steps")},
    **{name: {"weights": load.BATCHING} for name in ("batched-prefill-killed", "batched-prefill-steps")},
    **{
        name: {"prefill_workers": 0, "decode_workers": 0, "both_workers": 2}
        for name in ("two-roles-prefill-steps", "two-roles-decode-steps")
    },
    # Long enough for changes.
    "two-roles-changing": {
        **{"prefill_workers": 0, "decode_workers": 0, "both_workers": 2},
        **{"slots": 1, "long_jobs": 1_000_000, "long_s": 0.1},
    },
    "two-roles-killed": {"prefill_workers": 1, "decode_workers": 1, "both_workers": 2},
    "broker-killed-retries": {"environment": {failpoints.VARIABLE: "fail:prefill.taken:-1000"}},
    "consumer-timeout": {"long_jobs": 8, "long_s": 16.0, "slots": 8},
    "poison": {"jobs": 200, "decode_workers": 1, "slots": 8},
    # Long enough for what is done to the nodes meanwhile.
    **{name: {"slots": 1, "long_jobs": 1_000_000, "long_s": 0.2} for name in ("node-empty", "nodes-rolled")},
    # Long enough for what is done to the nodes meanwhile, and with KV caches that are sent.
    **{name: {"slots": 1, "long_jobs": 1_000_000, "long_s": 0.1} for name in _STORE_NODE_ROWS},
    "leaders-moved": {"slots": 1, "long_jobs": 1_000_000, "long_s": 0.1},
    "storm": {"slots": 1, "long_jobs": 1_000_000, "long_s": JOB_S},
    "published-ten-times": {"copies": 10, "copied_jobs": 100},
}


def plan_of(fault: Fault, jobs: int, seed: int) -> Plan:
    """The fault's plan with this many jobs, unless it has its own number."""
    return replace(Plan(jobs=jobs, seed=seed), **_PLANS.get(fault.name, {}))


def find(name: str) -> Fault:
    """The fault of this name. Raises KeyError, with the names there are."""
    by_name = {fault.name: fault for fault in FAULTS}
    if name not in by_name:
        raise KeyError(f"no fault {name!r}; choose from: {', '.join(by_name)}")
    return by_name[name]
