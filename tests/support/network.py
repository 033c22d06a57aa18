"""Several machines with a network between them, on one: namespaces, and a router in userspace that can be slow or cut.

Needs Linux, root, a C compiler and iproute2. The router (`tun_router.c`) carries about 1 Gb/s on one core: a figure of
it is one of this machine's processors too. Processes of a host start with `Network.command`.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support import programs
from tests.support.servers import Machine

SOURCE = Path(__file__).with_name("tun_router.c")
GIGABIT = 1_000_000_000
HERE = "here"  # the host that is this process's own namespace


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two hosts."""

    delay_ms: float = 0.0  # one way: half of the round trip
    rate_bits: int = 0  # a second; 0: as fast as it goes
    loss: float = 0.0  # share of the packets
    queue_bytes: int = 4 << 20  # before a link with a rate drops packets
    mtu: int = 1500  # a larger packet vanishes without a word
    is_up: bool = True


def reason_against() -> str:
    """Why there can be no such network here, in a sentence; "" where there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces and TUN devices need root"
    if not Path("/dev/net/tun").exists():
        return "this machine has no /dev/net/tun"
    return ""


class Network:
    """Hosts by name, each with an address, and links between them."""

    def __init__(self, hosts: Sequence[str], seed: int = 0) -> None:
        """Raises ProgramMissing, or RuntimeError with `reason_against`'s sentence."""
        if reason := reason_against():
            raise RuntimeError(reason)
        self._ip = programs.require("iproute2")
        self._seed = seed
        self._numbers = {host: number for number, host in enumerate(hosts)}
        self._namespaces = {host: f"kvasir-{os.getpid()}-{host}" for host in hosts if host != HERE}
        router_path = str(programs.compiled(SOURCE))
        self._router: subprocess.Popen[str] | None = None
        try:
            for namespace in self._namespaces.values():
                self._run("netns", "add", namespace)
            command = [router_path, *(self._namespaces.get(host, "-") for host in hosts)]
            self._router = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._wait_for_ok()
        except BaseException:
            self.close()
            raise

    def address(self, host: str) -> str:
        """The host's IPv4 address."""
        return f"10.77.0.{self._numbers[host] + 1}"

    def machine(self, host: str) -> Machine:
        """The host for a server of tests.support.servers."""
        return Machine(self.address(host), tuple(self.command(host, ())))

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """What starts `arguments` on that host."""
        if host == HERE:
            return [*arguments]
        return [self._ip, "netns", "exec", self._namespaces[host], *arguments]

    def set_link(self, link: Link, source: str = "", target: str = "") -> None:
        """From one host to another, that way only; "": from or to every host."""
        numbers = [self._numbers[host] if host else -1 for host in (source, target)]
        figures = [
            round(link.delay_ms * 1000),
            link.rate_bits,
            round(link.loss * 1e6),
            link.queue_bytes,
            link.mtu,
            int(link.is_up),
            self._seed,
        ]
        assert self._router
        assert self._router.stdin
        self._router.stdin.write(" ".join(map(str, [*numbers, *figures])) + "\n")
        self._router.stdin.flush()
        self._wait_for_ok()

    @contextlib.contextmanager
    def cut(self, link: Link, source: str, target: str = "") -> Iterator[None]:
        """Nothing passes from `source` meanwhile; `link` is what is set again."""
        self.set_link(replace(link, is_up=False), source, target)
        try:
            yield
        finally:
            self.set_link(link, source, target)

    def close(self) -> None:
        """End the router, and remove the namespaces. Processes in them lose their network."""
        if self._router:
            self._router.kill()
            self._router.communicate()
        for namespace in self._namespaces.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                self._run("netns", "delete", namespace)

    def _run(self, *arguments: str) -> None:
        subprocess.run([self._ip, *arguments], check=True, stderr=subprocess.DEVNULL)

    def _wait_for_ok(self) -> None:
        assert self._router
        assert self._router.stdout
        if self._router.stdout.readline() != "ok\n":
            raise RuntimeError(f"the router ended with status {self._router.wait(10)}")


@contextlib.contextmanager
def network(hosts: Sequence[str], link: Link | None = None, seed: int = 0) -> Iterator[Network]:
    """A network for the length of a block, every link like `link`."""
    bench = Network(hosts, seed)
    try:
        bench.set_link(link or Link())
        yield bench
    finally:
        bench.close()


@contextlib.contextmanager
def kernel_setting(name: str, value: str) -> Iterator[None]:
    """A sysctl such as `net/core/rmem_max` for the length of a block; the old value is restored. Root."""
    path = Path("/proc/sys") / name
    value_before = path.read_text()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(value_before)
