"""Machines to which `kvasir deploy` has brought a worker, over ssh: each is an account's home on this machine.

Their services' passwords, release, configuration and supervisor are what deploy makes of them.
"""

import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from infra.deploy.accounts import SERVICES
from tests.night.courses import WRITER
from tests.night.site import Hand, Site
from tests.support.processes import CompletedCommand, ProcessRole, config_text, environment, json_lines, run
from tests.support.servers import free_port
from tests.support.sshd import Sshd
from tests.support.waiting import wait_until

ROLES: dict[str, ProcessRole] = {"spark1": "both", "spark2": "both", "mac1": "decode", "mac2": "decode"}
_INSTALL_S = 3600.0
_SERVES = re.compile(r"worker \S+?\.(\d+)\.\w+ serves")


class DeployedMachines:
    """Installed and started on entry, stopped on exit. Use as a context manager, before the evening begins."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._folder = site.folder / "machines"
        self._ssh_config = self._folder / "ssh_config"
        # Beside the passwords that deploy has made, as an operator keeps them.
        self._config = site.folder / "services" / "machines.toml"
        self._stack = ExitStack()
        self._ports = {name: free_port() for name in ROLES}

    def __enter__(self) -> Self:
        homes = {name: self._folder / name for name in ROLES}
        with self._stack as stack:
            for name, folder in homes.items():
                folder.mkdir(parents=True)
                homes[name] = stack.enter_context(Sshd(name, folder, self._ssh_config)).home
            self._config.write_text(self._settings(), "utf-8")
            stack.callback(self._deploy, "stop")  # nothing, where all is stopped
            done = self._deploy("install")
            assert done.code == 0, done.stderr
            self._stack = stack.pop_all()
        for name, role in ROLES.items():
            process = SupervisedWorker(homes[name] / "kvasir" / "log", partial(self._deploy, "stop", "--machine", name))
            self._site.deployed_hands.append(Hand(role, WRITER, (), self._ports[name], process))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _settings(self) -> str:
        urls = [f'{name} = "{self._site.deployed.plain_url(name)}"' for name in SERVICES]
        urls += [f"broker_nodes = {len(self._site.services.brokers)}"]
        passwords = [f'{name}_password_file = "{name}"' for name in SERVICES]
        lines = ["[services]", *urls, *passwords]
        for name, role in ROLES.items():
            unit = f'{{ role = "{"worker" if role == "both" else role}", model = "{WRITER}", engine = "simulated" }}'
            machine = [f'host = "{name}"', 'platform = "linux"', 'supervisor = "plain"', f"roles = [{unit}]"]
            lines += [f"[machines.{name}]", *machine, f"metrics_port = {self._ports[name]}"]
        return "\n".join(lines) + "\n" + config_text({WRITER: self._site.models()[WRITER]})

    def _deploy(self, verb: str, *options: str) -> CompletedCommand:
        words = ("--config", str(self._config), "deploy", verb, *options, "--ssh-config", str(self._ssh_config))
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
