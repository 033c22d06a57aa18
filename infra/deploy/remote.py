"""Runs shell commands and writes files on another machine, over ssh with the user's own setup (keys, ~/.ssh/config)."""

import hashlib
import io
import shlex
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from infra.config.settings import MachineSettings
from messages.errors import UsageError

SECRET = 0o600  # the mode of a file with a secret: only the file's owner can read it
_CONNECT_S = 10
_COMMAND_S = 900.0
_WEIGHTS_S = 6 * 3600.0  # time limit for reading or sending one file; enough for 120 GB at 50 Mbit/s
_NO_SSH = "there is no ssh command on this machine; install OpenSSH"
# sha256sum (Linux) and shasum (macOS) print lines in the same form. A file that can't be read counts as missing.
_DIGESTS = "if command -v sha256sum >/dev/null; then sha256sum -- *; else shasum -a 256 -- *; fi 2>/dev/null || true"


class DeployFailed(UsageError):
    """A machine can't be reached, or a command failed on it."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to be written. Secrets have the mode SECRET."""

    content: bytes
    mode: int = 0o644


class Remote:
    """A machine. Every method may raise DeployFailed, with the machine's name and the last line of its output."""

    def __init__(self, machine: MachineSettings, ssh_config: Path | None = None) -> None:
        self.name = machine.name
        if not machine.host:
            raise DeployFailed(f'{machine.name}: this machine has no host; set host in [machines."{machine.name}"]')
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=15"]
        if ssh_config:
            options += ["-F", str(ssh_config)]
        target = f"{machine.user}@{machine.host}" if machine.user else machine.host
        self._ssh = ["ssh", *options, target]
        self._processes: list[subprocess.Popen[bytes]] = []

    def run_script(self, script: str, stdin: "bytes | BinaryIO" = b"", timeout_s: float = _COMMAND_S) -> str:
        """Run a shell script, which stops at its first error, and return its output."""
        given: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
        command = [*self._ssh, f"sh -c {shlex.quote('set -eu; ' + script)}"]
        try:
            completed_process: subprocess.CompletedProcess[bytes] = subprocess.run(
                command, **given, capture_output=True, timeout=timeout_s, check=False
            )
        except FileNotFoundError:
            raise DeployFailed(_NO_SSH) from None
        except subprocess.TimeoutExpired:
            raise DeployFailed(f"{self.name}: no answer after {timeout_s:.0f} s to: {script:.80}") from None
        if completed_process.returncode:
            reason = _reason(completed_process.stderr, completed_process.stdout)
            raise DeployFailed(f"{self.name}: {reason} (status {completed_process.returncode})")
        return completed_process.stdout.decode("utf-8", "replace")

    def lines(self, script: str) -> Iterator[str]:
        """Run a shell script and yield its output line by line, until it ends or `hang_up` is called."""
        command = [*self._ssh, f"sh -c {shlex.quote(script)}"]
        pipe = subprocess.PIPE
        try:
            # ssh gets a new session, so that Ctrl-C reaches only this process.
            #
            # The script's stdin stays open until this process ends. A script can stop when its stdin ends.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except FileNotFoundError:
            raise DeployFailed(_NO_SSH) from None
        self._processes.append(process)
        assert process.stdout
        assert process.stderr
        for line in process.stdout:
            yield line.decode("utf-8", "replace").rstrip("\r\n")
        if process.wait():
            raise DeployFailed(f"{self.name}: {_reason(process.stderr.read(), b'')} (status {process.returncode})")

    def hang_up(self) -> None:
        """End the scripts that `lines` still reads."""
        for process in self._processes:
            process.terminate()

    def put(self, files: Mapping[str, RemoteFile], root: bool = False) -> None:
        """Write files, by absolute path. Existing files are replaced as a whole. `root`: with sudo, owned by root."""
        if files:
            sudo = "sudo -n " if root else ""
            self.run_script(f"{sudo}tar -xf - -C /", _tar(files))

    def put_folder(self, local: Path, folder: str) -> Sequence[str]:
        """Copy a file, or the files of a folder, unless the same name with the same SHA-256 is there.

        Returns the names copied.
        """
        quoted_folder = shlex.quote(folder)
        listing = self.run_script(f"mkdir -p {quoted_folder}; cd {quoted_folder}; {_DIGESTS}", timeout_s=_WEIGHTS_S)
        digests = {name: digest for digest, name in (line.split(None, 1) for line in listing.splitlines())}
        new_paths = [
            path
            for path in (sorted(local.iterdir()) if local.is_dir() else [local])
            if path.is_file() and digests.get(path.name) != _digest(path)
        ]
        for path in new_paths:  # one file for each call, so that a broken connection costs only one file
            draft, target = shlex.quote(f"{folder}/.{path.name}"), shlex.quote(f"{folder}/{path.name}")
            with path.open("rb") as file:
                self.run_script(f"cat > {draft}; mv {draft} {target}", file, _WEIGHTS_S)
        return [path.name for path in new_paths]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tar(files: Mapping[str, RemoteFile]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, file in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(file.content), file.mode
            tar.addfile(entry, io.BytesIO(file.content))
    return buffer.getvalue()


def _reason(stderr: bytes, stdout: bytes) -> str:
    lines = (stderr or stdout).decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else "the command failed without any output"
