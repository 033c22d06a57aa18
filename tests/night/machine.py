"""A machine to which `kvasir deploy` has brought a worker, over ssh: an account's home of its own on this machine.

Its services' passwords, its release, its configuration and its supervisor are what deploy makes of them.
"""

import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from infra.deploy.accounts import SERVICES
from tests.night.courses import WRITER
from tests.night.site import Hand, Site
from tests.support.processes import CompletedCommand, config_text, environment, json_lines, run
from tests.support.servers import free_port
from tests.support.sshd import Sshd
from tests.support.waiting import wait_until

_NAME = "far"
_INSTALL_S = 1800.0
_SERVES = re.compile(r"worker \S+?\.(\d+)\.\w+ serves")


class DeployedMachine:
    """Installed and started on entry, stopped on exit. Use as a context manager, before the evening begins."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._folder = site.folder / "machine"
        self._ssh_config = self._folder / "ssh_config"
        # Beside the passwords that deploy has made, as an operator keeps them.
        self._config = site.folder / "services" / f"{_NAME}.toml"
        self._stack = ExitStack()
        self.port = free_port()

    def __enter__(self) -> Self:
        home = self._folder / _NAME
        home.mkdir(parents=True)
        with self._stack as stack:
            self._sshd = stack.enter_context(Sshd(_NAME, home, self._ssh_config))
            self._config.write_text(self._settings(), "utf-8")
            stack.callback(self._deploy, "stop")  # nothing, where all is stopped
            done = self._deploy("install")
            assert done.code == 0, done.stderr
            self._stack = stack.pop_all()
        process = SupervisedWorker(self._sshd.home / "kvasir" / "log", lambda: self._deploy("stop"))
        self.hand = Hand("both", WRITER, (), self.port, process)
        self._site.deployed_hands.append(self.hand)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _settings(self) -> str:
        urls = [f'{name} = "{self._site.deployed.plain_url(name)}"' for name in SERVICES]
        urls += [f"broker_nodes = {len(self._site.services.brokers)}"]
        passwords = [f'{name}_password_file = "{name}"' for name in SERVICES]
        role = f'{{ role = "worker", model = "{WRITER}", engine = "simulated" }}'
        machine = [f'host = "{_NAME}"', 'platform = "linux"', 'supervisor = "plain"', f"metrics_port = {self.port}"]
        lines = ["[services]", *urls, *passwords, f"[machines.{_NAME}]", *machine, f"roles = [{role}]"]
        return "\n".join(lines) + "\n" + config_text({WRITER: self._site.models()[WRITER]})

    def _deploy(self, verb: str) -> CompletedCommand:
        words = ("--config", str(self._config), "deploy", verb, "--ssh-config", str(self._ssh_config))
        variables = environment(self._folder) | {"PATH": os.environ["PATH"]}
        return run(*words, env=variables, cwd=self._folder, timeout_s=_INSTALL_S)


class SupervisedWorker:
    """The machine's worker, whose supervisor starts it again a second after it was killed."""

    def __init__(self, folder: Path, stop: Callable[[], CompletedCommand]) -> None:
        """`folder`: of its logs; `stop`: has the machine stopped."""
        self._folder = folder
        self._stop = stop
        self._killed = 0  # the process that was last

    def text(self) -> str:
        """What all its processes have written so far."""
        return "".join(path.read_text("utf-8", errors="replace") for path in sorted(self._folder.iterdir()))

    def events(self, event: str = "") -> list[dict[str, Any]]:
        """The JSON lines of these; with `event` only those of this step."""
        return json_lines(self.text(), event)

    @property
    def pid(self) -> int:
        """Of the process that serves now, or served last."""
        return int(_SERVES.findall(self.text())[-1])

    def kill(self) -> None:
        """SIGKILL for it, not for its supervisor."""
        self._killed = self.pid
        os.kill(self._killed, signal.SIGKILL)

    def wait_until_registered(self) -> None:
        """Return when another process serves in place of the one that was killed."""
        wait_until(lambda: self.pid != self._killed, "its supervisor has started it again", 60)

    def terminate(self, _timeout_s: float) -> int:
        """As the operator does it."""
        return self._stop().code
