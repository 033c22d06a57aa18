"""A machine to deploy to: an OpenSSH server of our own on a loopback port, whose sessions have a home of their own."""

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.support import programs
from tests.support.servers import HOST, Process, free_port
from tests.support.waiting import wait_until

_SEPARATION = Path("/run/sshd")  # a root sshd insists on it


class Sshd:
    """Started on entry, ended on exit. `alias` is its Host in `config`, which several of them may share."""

    def __init__(self, alias: str, folder: Path, config: Path, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: what else is in the environment of its sessions."""
        self.alias = alias
        self._variables = variables or {}
        self.home = folder / "home"
        self._folder = folder
        self._config = config

    def __enter__(self) -> Self:
        program = programs.require("sshd")
        self.home.mkdir(parents=True)
        if os.geteuid() == 0:
            _SEPARATION.mkdir(mode=0o755, exist_ok=True)
        for name in ("host", "user"):
            key = self._folder / name
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        port = free_port()
        settings = self._folder / "sshd_config"
        settings.write_text(self._settings(port), "utf-8")
        settings.chmod(0o600)
        command = [program, "-D", "-e", "-f", str(settings)]
        self._process = Process(command, dict(os.environ), self._folder, self._folder / "log")
        with self._config.open("a", encoding="utf-8") as config:
            config.write(self._host(port))
        wait_until(self._answers, f"sshd {self.alias} lets us in", 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end(signal.SIGTERM, 10)

    def _settings(self, port: int) -> str:
        environment = " ".join(f"{name}={value}" for name, value in {"HOME": self.home, **self._variables}.items())
        return (
            f"ListenAddress {HOST}\nPort {port}\nHostKey {self._folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self._folder}/user.pub\nPasswordAuthentication no\nStrictModes no\n"
            f"PermitRootLogin yes\nSetEnv {environment}\n"
        )

    def _host(self, port: int) -> str:
        return (
            f"Host {self.alias}\n  HostName {HOST}\n  Port {port}\n  IdentityFile {self._folder}/user\n"
            "  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )

    def _answers(self) -> bool:
        completed_process = subprocess.run(
            ["ssh", "-F", str(self._config), "-o", "BatchMode=yes", self.alias, "echo $HOME"],
            capture_output=True,
            text=True,
        )
        return completed_process.stdout.strip() == str(self.home)
