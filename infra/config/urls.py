"""Service URLs and the passwords in them. No function here, nor any of its errors, ever shows a password."""

import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from messages.errors import ConfigError, InvalidMessage
from messages.urls import STORE_SCHEMES, addresses, netloc, with_netloc

BROKER_SCHEMES = ("amqp", "amqps")
_ENCODING_RULE = "a '/', '#', '?' or '@' in a name or password must be percent-encoded"
# This word in place of a URL means that the service runs in this process. It overrides a URL from a weaker source.
LOCAL = "local"

# Greedy on purpose, because an unescaped '/', '@' or '#' in a password must not end the mask too early.
_IN_USERINFO = re.compile(r"(://[^:@/?#]*:).*@", re.DOTALL)
_CREDENTIALS = re.compile(r":.*@", re.DOTALL)
_CREDENTIALS_WITHIN = re.compile(r":[^\s'\"]*@")  # credentials within a printed Python list or dict
_IN_QUERY = re.compile(r"([?&;]pass[^=&;]*=)[^&;#]*", re.IGNORECASE)
_SECRET_OPTION = re.compile(r"pass|auth|secret", re.IGNORECASE)


def mask(url: str) -> str:
    """Return the URL with `***` in place of a password. It works on malformed URLs too."""
    return _IN_QUERY.sub(r"\1***", _IN_USERINFO.sub(r"\1***@", url))


def may_hold_password(value: object) -> bool:
    """Whether a value contains text of the form `user:password@…`, with or without the rest of a URL."""
    return bool((_CREDENTIALS_WITHIN if isinstance(value, list | dict) else _CREDENTIALS).search(str(value)))


def check(name: str, value: str, schemes: Sequence[str]) -> None:
    """Raise InvalidMessage unless the value is a URL of one of `schemes`, `local` or empty.

    A URL needs hosts (for unix: a path) and valid ports. The error never repeats the value: if it is not a URL, any
    part of it may be the password.
    """
    if value in ("", LOCAL):
        return
    shape = " or ".join(f"{scheme}://…" for scheme in schemes)
    problem = _problem(value, schemes)
    if problem:
        raise InvalidMessage(f"{name} must be {shape} (or {LOCAL!r}): {problem}")


def _problem(url: str, schemes: Sequence[str]) -> str:
    """Say what is wrong with a URL, without quoting it; "" if nothing is."""
    if re.search(r"\s", url) or not url.isprintable():
        return "it contains a space or an invisible character"
    try:
        places = [urlsplit(address) for address in addresses(url)]
        ports = [place.port for place in places]  # this can raise a ValueError whose text contains a password
    except ValueError:
        return f"its host or port can't be read ({_ENCODING_RULE})"
    if "://" not in url:
        return "it has no protocol"
    parts = places[0]
    if parts.scheme not in schemes:
        return "it has another protocol"
    if "@" in url.replace(netloc(url), "", 1) or "#" in url:
        return _ENCODING_RULE
    if 0 in ports:
        return "port 0 is not a valid port"
    if "%3a" in (parts.username or "").lower():
        return "the ':' between name and password must not be percent-encoded"
    if _SECRET_OPTION.search(unquote(parts.query)):
        return "a password belongs before the '@' or in a password file"
    if not all(place.hostname for place in places) and parts.scheme != "unix":
        return "it names no host"
    return _problem_of_path(parts.scheme, parts.path)


def _problem_of_path(scheme: str, path: str) -> str:
    if scheme == "unix":
        return "" if path not in ("", "/") else "it names no socket"
    is_store = scheme in STORE_SCHEMES  # redis-py uses database 0 if the path is not a number
    return "its database, after the '/', must be a number" if is_store and not re.fullmatch(r"/?[0-9]*/?", path) else ""


def take_password(url: str) -> tuple[str, str]:
    """Return (URL without its password, the password or "")."""
    userinfo, _, place = netloc(url).rpartition("@")
    user, _, password = userinfo.partition(":")
    return with_netloc(url, f"{user}@{place}" if user else place), unquote(password)


def put_password(url: str, password: str) -> str:
    """Return the URL with a password, percent-encoded. The URL must have none yet."""
    user, _, place = netloc(url).rpartition("@")
    return with_netloc(url, f"{user}:{quote(password, safe='')}@{place}")


def put_user(url: str, user: str) -> str:
    """Return the URL with another user. The URL must have no password."""
    return with_netloc(url, f"{quote(user, safe='')}@{netloc(url).rpartition('@')[2]}")


def put_option(url: str, name: str, value: str) -> str:
    """Return the URL with one more option in its query."""
    return f"{url}{'&' if '?' in url else '?'}{name}={quote(value, safe='/')}"


class Secret:
    """A password, or the file that contains it. It is printed as `***`.

    It is not a dataclass, because `dataclasses.asdict` of the settings would show it.
    """

    def __init__(self, origin: str, value: str = "", file: Path | None = None) -> None:
        self.origin = origin
        self._value = value
        self.file = file  # None if the password is in a variable or a URL

    def __repr__(self) -> str:
        return "***"

    def make(self) -> Path | None:
        """Write a random password into its file, with mode 0o600, if the file doesn't exist yet.

        Returns the file if it was written.
        """
        if self.file is None or self.file.exists():
            return None
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        except OSError as error:
            raise ConfigError(f"{self.origin}: can't write the password file {self.file}: {error.strerror}") from None
        return self.file

    def reveal(self) -> str:
        """Return the password. A file is read again each time; its last line break is removed.

        Raises ConfigError if the file can't be read or is empty.
        """
        if self.file is None:
            return self._value
        try:
            password = self.file.read_text("utf-8").rstrip("\r\n")
        except OSError as error:
            raise ConfigError(f"{self.origin}: can't read the password file {self.file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{self.origin}: the password file {self.file} is not UTF-8 text") from None
        if not password:
            raise ConfigError(f"{self.origin}: the password file {self.file} is empty")
        return password
