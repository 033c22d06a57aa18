"""A certificate authority for one test, made by openssl: loopback's certificates, and another authority's."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files."""

    ca: Path
    certificate: Path  # for 127.0.0.1 and localhost, signed by `ca`
    key: Path
    other_ca: Path  # signed nothing


def make_certificates(folder: Path) -> Certificates:
    """New ones, good for a day."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ca", "other"):
        _openssl(folder, "req", "-x509", "-days", "1", *_key(name), "-out", f"{name}.pem", "-subj", f"/CN=test {name}")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    _openssl(folder, "req", *_key("server"), "-out", "server.csr", "-subj", "/CN=localhost")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "1")
    _openssl(folder, "x509", "-req", "-in", "server.csr", "-out", "server.pem", *signing)
    return Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key", folder / "other.pem")


def _key(name: str) -> tuple[str, ...]:
    return "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key"


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
