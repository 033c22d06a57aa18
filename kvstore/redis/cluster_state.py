"""The cluster state in Redis 7 or newer.

    card:{cards}:<worker id>   an encoded WorkerInfo   cards    index of the live ones (sorted set: expiry in ms)
    card:{cards}:<worker id>:details    an encoded WorkerDetails, if it has any
    card:{cards}:<worker id>:last    the WorkerInfo, kept for LOST_FOR_S longer; its worker id also stays in the index
    result:{<job>:<run>}  an encoded JobResult         cancelled:<batch>    tombstone
    claim:{<job>:<run>}   worker id                reservations   hash: name -> "bytes expiry in ms"
    takes:<stage>:<job>:<run>    a count           sketch:<hash>        what an engine computes (engines.sketch)
    answers:<job>:<run>   hash: number -> one answer of several, while the others are not complete

A cluster keeps keys with the same text in braces in one slot, so that one script may use them. The slot of `cards` has
the registrations, and its primary's clock is the store's clock. If that primary is lost without a replica, workers
register again within a second after the slot is served again. Lost reservations allow more records to be put than there
is room for; the store then refuses them.

All writes are scripts with `allow-oom`. A store full of KV caches must not keep a worker from renewing its registration
or storing a result, which take only a few bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis import exceptions
from redis.commands.core import Script

from kvstore.base import LOST_FOR_S, TTL_S, ClusterState, EncodedRegistration, Run, encoded, readable_registrations
from kvstore.redis.client import TIMEOUT_S, open_client, place, with_errors_mapped
from kvstore.redis.links import Links
from messages.workers import WorkerInfo

R = TypeVar("R")

_INDEX = "cards"
_RESERVATIONS = "reservations"
_LUA = "#!lua flags=allow-oom\n"

_SET = "redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])"

# The index expires when its last worker, live or lost, expires.
#
# Times are formatted explicitly, because Lua would write a round number as 1.7e+12.
_PUT_REGISTRATION = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if ARGV[4] == '' then redis.call('DEL', KEYS[3]) else redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[2]) end
redis.call('SET', KEYS[4], ARGV[1], 'PX', ARGV[2] + ARGV[5])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now - ARGV[5]))
redis.call('ZADD', KEYS[2], string.format('%.0f', now + ARGV[2]), ARGV[3])
local latest = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
redis.call('PEXPIREAT', KEYS[2], string.format('%.0f', latest + ARGV[5]))
"""

_CLAIM = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# In this script and the next one, KEYS consists of pairs: the key of a result, and the key of its claim. This script
# returns for each pair the stored result, or 1 if this worker now has the claim, or 0 if another worker has the claim.
_TAKE_UP = """
local answers = {}
for i = 1, #KEYS, 2 do
  local answer = redis.call('GET', KEYS[i])
  if not answer then
    local owner = redis.call('GET', KEYS[i + 1])
    answer = (owner and owner ~= ARGV[1]) and 0 or 1
    if answer == 1 then redis.call('SET', KEYS[i + 1], ARGV[1], 'PX', ARGV[2]) end
  end
  answers[#answers + 1] = answer
end
return answers
"""

# A claim is deleted only if this worker still has it.
_FINISH = """
for i, body in ipairs({unpack(ARGV, 3)}) do
  redis.call('SET', KEYS[2 * i - 1], body, 'PX', ARGV[2])
  if redis.call('GET', KEYS[2 * i]) == ARGV[1] then redis.call('DEL', KEYS[2 * i]) end
end
"""

_NOTE_ANSWER = "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) redis.call('PEXPIRE', KEYS[1], ARGV[3])"

# This script also deletes expired entries. The hash expires when its last entry expires.
_RESERVE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local entries = redis.call('HGETALL', KEYS[1])
local total, latest = tonumber(ARGV[2]), now + ARGV[4]
for i = 1, #entries, 2 do
  local size, expiry = string.match(entries[i + 1], '^(%d+) (%d+)$')
  if entries[i] == ARGV[1] or tonumber(expiry) <= now then
    redis.call('HDEL', KEYS[1], entries[i])
  else
    total = total + tonumber(size)
    latest = math.max(latest, tonumber(expiry))
  end
end
if total > tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%s %.0f', ARGV[2], now + ARGV[4]))
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', latest))
return 1
"""

_SUM_RESERVATIONS = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local total = 0
for _, entry in ipairs(redis.call('HVALS', KEYS[1])) do
  local size, expiry = string.match(entry, '^(%d+) (%d+)$')
  if tonumber(expiry) > now then total = total + tonumber(size) end
end
return string.format('%.0f', total)
"""

_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"

_COUNT_CRASHES = """
local count = redis.call('INCRBY', KEYS[1], ARGV[1])
if count <= 0 then
  redis.call('DEL', KEYS[1])
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return count
"""


class RedisClusterState(ClusterState):
    """Small facts as Redis keys, each with a TTL."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._place = place(url)
        self._links = Links(url)
        self._client = open_client(url, timeout_s, self._links)
        self._set, self._register, self._claim, self._release, self._reserve, self._sum_reservations = (
            self._script(text) for text in (_SET, _PUT_REGISTRATION, _CLAIM, _RELEASE, _RESERVE, _SUM_RESERVATIONS)
        )
        self._take_up, self._finish, self._count_crashes, self._note_answer = (
            self._script(text) for text in (_TAKE_UP, _FINISH, _COUNT_CRASHES, _NOTE_ANSWER)
        )

    def _script(self, text: str) -> Callable[[Sequence[str], Sequence[Any]], Any]:
        """Return a function that calls a script with keys and arguments."""
        client: Any = self._client
        script: Script = client.register_script(_LUA + text)
        if isinstance(client, redis.Redis):
            return script

        def call(keys: Sequence[str], arguments: Sequence[Any]) -> Any:
            try:
                return client.evalsha(script.sha, len(keys), *keys, *arguments)
            except exceptions.NoScriptError:
                # Load the script only into the node of this key. redis-py's `Script` loads it into every primary, and
                # fails if one of them is unavailable.
                node = client.get_node_from_key(keys[0])
                client.execute_command("SCRIPT LOAD", script.script, target_nodes=node)
                return client.evalsha(script.sha, len(keys), *keys, *arguments)

        return call

    @with_errors_mapped
    def now(self) -> float:
        """See ClusterState."""
        client: Any = self._client
        target_options = {} if isinstance(client, redis.Redis) else {"target_nodes": client.get_node_from_key(_INDEX)}
        time = client.time(**target_options)
        return float(time[0] + time[1] / 1e6)

    @with_errors_mapped
    def register(self, registration: WorkerInfo, ttl_s: float) -> None:
        """See ClusterState."""
        worker_id, (card, details) = registration.worker_id, encoded(registration)
        keys = [_card(worker_id), _INDEX, _details(worker_id), _card(f"{worker_id}:last")]
        self._register(keys, [card, _milliseconds(ttl_s), worker_id, details, _milliseconds(LOST_FOR_S)])

    @with_errors_mapped
    def encoded_registrations(self) -> dict[str, EncodedRegistration]:
        """See ClusterState."""
        names: Any = self._client.zrange(_INDEX, 0, -1)
        worker_ids = [name.decode() for name in names]
        keys = [key(worker_id) for key in (_card, _details) for worker_id in worker_ids]
        bodies: Any = self._client.mget(keys) if names else []
        cards, details = bodies[: len(names)], bodies[len(names) :]
        rows = zip(worker_ids, cards, details, strict=True)
        return {worker_id: (card, more or b"") for worker_id, card, more in rows if card is not None}

    @with_errors_mapped
    def lost_registrations(self) -> list[tuple[float, WorkerInfo]]:
        """See ClusterState."""
        index: Any = self._client.zrange(_INDEX, 0, -1, withscores=True)
        now = self.now()
        ends = {name.decode(): expiry_ms / 1000 for name, expiry_ms in index if expiry_ms <= 1000 * now}
        bodies: Any = self._client.mget([_card(f"{worker_id}:last") for worker_id in ends]) if ends else []
        return [
            (end, card)
            for end, body in zip(ends.values(), bodies, strict=True)
            for card in readable_registrations([(body, b"")] if body else [])
        ]

    @with_errors_mapped
    def unregister(self, worker_id: str) -> None:
        """See ClusterState."""
        with self._client.pipeline() as pipeline:
            pipeline.delete(_card(worker_id))
            pipeline.delete(_details(worker_id))
            pipeline.delete(_card(f"{worker_id}:last"))
            pipeline.zrem(_INDEX, worker_id)
            pipeline.execute()

    @with_errors_mapped
    def take_up(self, worker_id: str, runs: Sequence[Run], ttl_s: float) -> list[tuple[bytes | None, bool]]:
        """See ClusterState."""
        arguments = [worker_id, _milliseconds(ttl_s)]
        calls = [self._take_up(_results_and_claims(chunk), arguments) for chunk in self._chunks(runs)]
        answers = [answer for call in calls for answer in call]
        return [(answer, False) if isinstance(answer, bytes) else (None, bool(answer)) for answer in answers]

    @with_errors_mapped
    def finish(self, worker_id: str, results: Sequence[tuple[str, int, bytes]], ttl_s: float = TTL_S) -> None:
        """See ClusterState."""
        for chunk in self._chunks(results):
            keys = _results_and_claims([(job_id, run) for job_id, run, _ in chunk])
            self._finish(keys, [worker_id, _milliseconds(ttl_s), *(body for _, _, body in chunk)])

    def _chunks(self, runs: Sequence[R]) -> list[Sequence[R]]:
        """Return groups of runs whose keys one script may use: all of them, or on a cluster each run separately."""
        return [runs] if isinstance(self._client, redis.Redis) else [[run] for run in runs]

    @with_errors_mapped
    def note_answer(self, job_id: str, run: int, number: int, body: bytes, ttl_s: float = TTL_S) -> None:
        """See ClusterState."""
        self._note_answer([f"answers:{job_id}:{run}"], [number, body, _milliseconds(ttl_s)])

    @with_errors_mapped
    def noted_answers(self, job_id: str, run: int) -> dict[int, bytes]:
        """See ClusterState."""
        bodies: Any = self._client.hgetall(f"answers:{job_id}:{run}")
        return {int(number): bytes(body) for number, body in bodies.items()}

    @with_errors_mapped
    def forget_answers(self, job_id: str, run: int) -> None:
        """See ClusterState."""
        self._client.delete(f"answers:{job_id}:{run}")

    @with_errors_mapped
    def cancel(self, batch_id: str, ttl_s: float = TTL_S) -> None:
        """See ClusterState."""
        self._set([f"cancelled:{batch_id}"], [b"1", _milliseconds(ttl_s)])

    @with_errors_mapped
    def is_cancelled(self, batch_id: str) -> bool:
        """See ClusterState."""
        return bool(self._client.exists(f"cancelled:{batch_id}"))

    @with_errors_mapped
    def claim(self, job_id: str, run: int, worker_id: str, ttl_s: float) -> bool:
        """See ClusterState."""
        return bool(self._claim([_run_key("claim", job_id, run)], [worker_id, _milliseconds(ttl_s)]))

    @with_errors_mapped
    def release(self, job_id: str, run: int, worker_id: str) -> None:
        """See ClusterState."""
        self._release([_run_key("claim", job_id, run)], [worker_id])

    @with_errors_mapped
    def count_crashes(self, stage: str, job_id: str, run: int, change: int, ttl_s: float = TTL_S) -> int:
        """See ClusterState."""
        return int(self._count_crashes([f"takes:{stage}:{job_id}:{run}"], [change, _milliseconds(ttl_s)]))

    @with_errors_mapped
    def put_sketch(self, name: str, body: bytes, ttl_s: float = TTL_S) -> None:
        """See `ClusterState`.

        The bytes are sent only if they are missing, since workers renew their sketch every second.
        """
        if not self._client.pexpire(f"sketch:{name}", _milliseconds(ttl_s)):
            self._set([f"sketch:{name}"], [body, _milliseconds(ttl_s)])

    @with_errors_mapped
    def get_sketch(self, name: str) -> bytes | None:
        """See ClusterState."""
        body: Any = self._client.get(f"sketch:{name}")
        return None if body is None else bytes(body)

    @with_errors_mapped
    def reserve(self, name: str, size_bytes: int, capacity_bytes: int, ttl_s: float) -> bool:
        """See ClusterState."""
        return bool(self._reserve([_RESERVATIONS], [name, size_bytes, max(0, capacity_bytes), _milliseconds(ttl_s)]))

    @with_errors_mapped
    def unreserve(self, name: str) -> None:
        """See ClusterState."""
        self._client.hdel(_RESERVATIONS, name)

    @with_errors_mapped
    def reserved_bytes(self) -> int:
        """See ClusterState."""
        return int(self._sum_reservations([_RESERVATIONS], []))

    def close(self) -> None:
        """See ClusterState."""
        self._links.close()
        self._client.close()


def _results_and_claims(runs: Sequence[Run]) -> list[str]:
    return [_run_key(kind, job_id, run) for job_id, run in runs for kind in ("result", "claim")]


def _run_key(kind: str, job_id: str, run: int) -> str:
    return f"{kind}:{{{job_id}:{run}}}"


def _details(worker_id: str) -> str:
    # The Redis users that the previous release created have access only to keys with certain prefixes. This key begins
    # with `card:`, because that is one of these prefixes.
    return f"{_card(worker_id)}:details"


def _card(worker_id: str) -> str:
    return f"card:{{{_INDEX}}}:{worker_id}"


def _milliseconds(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))
