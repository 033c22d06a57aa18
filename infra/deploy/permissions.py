"""What each role may do at the broker and at the store.

At the broker, these are RabbitMQ's configure, write and read patterns.

`python -m infra.deploy.permissions` prints the commands that give a user the rights of its role at both:

    rabbitmqctl set_permissions -p / kvasir-decode '^control\\..*$' '^(…)$' '^(…)$'
    redis-cli ACL SETUSER kvasir-decode -@all +@connection … '(~kv:*' … '+unlink)' …

The patterns match names of exchanges and queues (`infra.broker.topology`). Publishing needs write on the exchange;
consuming and getting need read on the queue; declaring and deleting need configure; binding needs write on the queue
and read on the exchange (www.rabbitmq.com/docs/access-control). Only the operator declares the topology; the other
roles find it there.

At the store, these are rules of Redis 7's ACL: commands, and patterns of the keys that they may touch. Commands and
keys that belong together are in brackets (redis.io/docs/latest/operate/oss_and_stack/management/security/acl).
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

AccountRole = Literal["operator", "producer", "prefill", "decode", "worker", "monitor"]

_NO_NAMES = "^$"


@dataclass(frozen=True, slots=True)
class Permission:
    """Three regular expressions. Each must match a whole name."""

    configure: str
    write: str
    read: str


def _names(*patterns: str) -> str:
    return f"^({'|'.join(patterns)})$"


_OWN_CONTROL = r"control\..*"  # the private queue on which a worker receives broadcasts
_WORKER_WRITES = (r"kvasir\.(work|reply|reply\.quorum|dead|control|retry\..*)", _OWN_CONTROL)
_WORKER_READS = (r"kvasir\.control", _OWN_CONTROL, "deaths")
_PREFILL_QUEUES = (r"prefill\..*", r"suspects\.prefill\..*")
_DECODE_QUEUES = (r"decode\..*", r"suspects\.decode\..*")

# If no prefill worker runs, decode workers compute the prompts, so they also read prefill's queues.
_DECODE = Permission(
    _names(_OWN_CONTROL),
    _names(*_WORKER_WRITES, r"kvasir\.stream"),
    _names(*_WORKER_READS, *_DECODE_QUEUES, *_PREFILL_QUEUES),
)

PERMISSIONS: Mapping[AccountRole, Permission] = MappingProxyType(
    {
        # The operator declares exchanges and queues, and handles dead letters.
        "operator": Permission(".*", ".*", ".*"),
        "producer": Permission(
            _names(r"reply\..*", r"stream\..*"),
            _names(r"kvasir\.(work|reply|parked|(reply|parked)\.quorum|control)", r"reply\..*", r"stream\..*"),
            _names(r"kvasir\.(reply|reply\.quorum|stream)", r"results\.parked(\.quorum)?", r"reply\..*", r"stream\..*"),
        ),
        "prefill": Permission(_names(_OWN_CONTROL), _names(*_WORKER_WRITES), _names(*_WORKER_READS, *_PREFILL_QUEUES)),
        "decode": _DECODE,
        # a worker that does both prefill and decode
        "worker": _DECODE,
        # A monitor sees how long queues are, but no messages. From RabbitMQ 4.3 on, it can't see the length either,
        # because that requires the configure permission.
        "monitor": Permission(_NO_NAMES, _NO_NAMES, _NO_NAMES),
    }
)

# A user who is allowed to call one script can call any script. But Redis checks each command in a script against the
# user's rules.
_LOG_IN = "-@all +@connection +@transaction -@admin -@dangerous +info +time +script|load +cluster|slots"
_SEES = "(%R~card:* %R~cards +zrange +mget) (~reservations +evalsha +hvals) (%R~cancelled:* +exists) (%R~sketch:* +get)"
# EVALSHA requires read and write rights for every key that is passed to the script.
_CRASH_COUNTS = "(~takes:* +evalsha +incrby +pexpire +del)"
_OWN_REGISTRATION = (
    "(~card:* ~cards +evalsha +set +zadd +zrange +zrem +zremrangebyscore +pexpireat +mget +del) "
    "(~sketch:* +evalsha +set +pexpire)"
)

# SCAN finds the shared blocks that can be evicted. It shows names of keys, but no values.
_PREFILLS = (
    "(~kv:* ~kvw:* +set +getex +expire +pttl +strlen +unlink) (~claim:{prefix-* +evalsha +get +set +del) "
    "(~reservations +evalsha +hgetall +hset +hdel +pexpireat)"
)
_DECODES = "(~result:* ~claim:* +evalsha +get +set +del) (~answers:* +evalsha +hset +pexpire +hgetall +del)"

STORE_RULES: Mapping[AccountRole, str] = MappingProxyType(
    {
        "operator": "~* &* +@all -@admin -@dangerous +info +config|get",
        "producer": f"{_LOG_IN} {_SEES} (~cancelled:* +evalsha +set)",
        "prefill": f"{_LOG_IN} +scan {_OWN_REGISTRATION} {_CRASH_COUNTS} {_SEES} {_PREFILLS}",
        # A decode worker renews the TTL of blocks and deletes blocks. It never writes a block.
        "decode": (
            f"{_LOG_IN} {_OWN_REGISTRATION} {_CRASH_COUNTS} {_SEES} (~kv:* ~kvw:* +getex +expire +unlink) {_DECODES}"
        ),
        "worker": f"{_LOG_IN} +scan {_OWN_REGISTRATION} {_CRASH_COUNTS} {_SEES} {_PREFILLS} {_DECODES}",
        "monitor": f"{_LOG_IN} {_SEES} +config|get",
    }
)


def set_permissions(role: AccountRole, user: str, vhost: str = "/") -> list[str]:
    """Return rabbitmqctl's arguments that give `user` exactly the rights of `role` in `vhost`."""
    permission = PERMISSIONS[role]
    return ["set_permissions", "-p", vhost, user, permission.configure, permission.write, permission.read]


def main(arguments: Sequence[str]) -> int:
    """Print the commands for each role. The first argument, if any, is the vhost."""
    vhost = arguments[0] if arguments else "/"
    commands = [["rabbitmqctl", *set_permissions(role, f"kvasir-{role}", vhost)] for role in PERMISSIONS]
    commands += [
        ["redis-cli", "ACL", "SETUSER", f"kvasir-{role}", *rules.split()] for role, rules in STORE_RULES.items()
    ]
    sys.stdout.writelines(f"{shlex.join(command)}\n" for command in commands)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
