"""The users that log in to the broker and the store: the operator, as configured, and one user for each other role.

A role's password is in a file beside the operator's, `NAME.ROLE`. If these files don't exist (the services were set up
by somebody else, or by an older Kvasir), workers log in as the operator. Only `accounts` reads passwords, and nothing
shows them.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import unquote, urlsplit

from infra.config.settings import MachineSettings, Settings
from infra.config.urls import Secret, put_user, take_password
from infra.deploy.permissions import PERMISSIONS, AccountRole
from infra.deploy.units import Unit, UnitRole
from messages.errors import UsageError
from messages.urls import addresses, put_hosts

Service = Literal["broker", "store"]

SERVICES: tuple[Service, ...] = ("broker", "store")
_RESTRICTED_ROLES: tuple[AccountRole, ...] = tuple(role for role in PERMISSIONS if role != "operator")


@dataclass(frozen=True, slots=True)
class Account:
    """A user of a service, with the rights of a role (`infra.deploy.permissions`)."""

    user: str
    password: str
    role: AccountRole = "operator"


@dataclass(frozen=True, slots=True)
class Login:
    """How a worker logs in to a service. `name` is the name of the password's file on its machine."""

    url: str
    name: str
    secret: Secret


def user_of(role: AccountRole) -> str:
    """Return the name of a role's user, which is the same at both services. The operator's is in the configuration."""
    return f"kvasir-{role}"


def passwords(settings: Settings, service: Service) -> Mapping[AccountRole, Secret]:
    """Return the passwords of all users of a service, whether or not they exist yet.

    Raises UsageError if the operator's password is not in a file.
    """
    operator_secret = _operators(settings, service)
    if operator_secret is None or operator_secret.file is None:
        raise UsageError(
            f"the {service} has no password file: set {service}_password_file in [services] (deploy creates the file, "
            "and a file for each role in the same folder)"
        )
    return {"operator": operator_secret, **{role: _role_secret(operator_secret, role) for role in _RESTRICTED_ROLES}}


def accounts(settings: Settings, service: Service, for_show: bool = False) -> list[Account]:
    """Return all users of a service. With `for_show` they have no passwords, which then need not exist yet.

    Raises UsageError if the URL names no user, or the user of another role.
    """
    operator = _operator_of(settings, service)
    return [
        Account(operator if role == "operator" else user_of(role), "" if for_show else secret.reveal(), role)
        for role, secret in passwords(settings, service).items()
    ]


def has_roles(settings: Settings, service: Service) -> bool:
    """Whether workers have their own users at a service."""
    operator_secret = _operators(settings, service)
    files = (
        # In older releases, a worker had only one role. Services from these releases have no user for workers with both
        # roles, so the file of that user is not required.
        [_role_secret(operator_secret, role).file for role in _RESTRICTED_ROLES if role != "worker"]
        if operator_secret and operator_secret.file
        else []
    )
    return bool(files) and all(file and file.exists() for file in files)


def login(settings: Settings, service: Service, role: UnitRole) -> Login | None:
    """Return a worker's login; None if the service needs no password."""
    url, operator_secret = getattr(settings.services, service), _operators(settings, service)
    if operator_secret is None:
        return None
    secret = _role_secret(operator_secret, role) if has_roles(settings, service) else operator_secret
    if secret is operator_secret or not (secret.file and secret.file.exists()):
        return Login(url, service, operator_secret)
    return Login(put_user(url, user_of(role)), f"{service}.{role}", secret)


def with_logins(unit: Unit, settings: Settings) -> Unit:
    """Return the unit with variables that say which users it logs in as, and where their passwords are."""
    variables = dict(unit.environment)
    for service, service_login in _logins(unit, settings).items():
        variables[f"KVASIR_{service.upper()}_PASSWORD_FILE"] = f"{{folder}}/secrets/{service_login.name}"
        if service_login.name != service:
            variables[f"KVASIR_{service.upper()}_URL"] = service_login.url
    return replace(unit, environment=tuple(variables.items()))


def with_hosts(unit: Unit, settings: Settings, machine: MachineSettings) -> Unit:
    """Return the unit with URLs that use the machine's own addresses of the broker and the store, if it has any."""
    variables = dict(unit.environment)
    for service in SERVICES:
        hosts: str = machine.broker_hosts if service == "broker" else machine.store_hosts
        name, url = f"KVASIR_{service.upper()}_URL", getattr(settings.services, service)
        if hosts and url and unit.role:
            variables[name] = put_hosts(variables.get(name, url), hosts)
    return replace(unit, environment=tuple(variables.items()))


def secrets_of(units: Sequence[Unit], settings: Settings) -> dict[str, Secret]:
    """Return the passwords that a machine needs for these workers, by the names of their files there."""
    return {
        service_login.name: service_login.secret for unit in units for service_login in _logins(unit, settings).values()
    }


def without_passwords(config: str) -> str:
    """Return the text of kvasir.toml for machines.

    A password in a service's URL is removed; there it is in a separate file.
    """
    for service in SERVICES:
        url = tomllib.loads(config).get("services", {}).get(service, "")
        if isinstance(url, str) and take_password(url)[1]:
            config = config.replace(url, take_password(url)[0])
    return config


def _logins(unit: Unit, settings: Settings) -> dict[Service, Login]:
    if unit.role is None:
        return {}
    logins = {service: login(settings, service, unit.role) for service in SERVICES}
    return {service: service_login for service, service_login in logins.items() if service_login}


def _operators(settings: Settings, service: Service) -> Secret | None:
    return settings.services.broker_secret if service == "broker" else settings.services.store_secret


def _role_secret(operator_secret: Secret, role: AccountRole) -> Secret:
    assert operator_secret.file
    return Secret(
        f"{operator_secret.origin}, the {role}'s",
        file=operator_secret.file.with_name(f"{operator_secret.file.name}.{role}"),
    )


def _operator_of(settings: Settings, service: Service) -> str:
    url = getattr(settings.services, service)
    user = unquote(urlsplit(addresses(url)[0]).username or "")
    if user in ("", "default", *(user_of(role) for role in _RESTRICTED_ROLES)):
        scheme, _, place = url.partition("://")
        example = f"{scheme}://kvasir@{place.rpartition('@')[2]}"
        problem = f"names the user {user!r}, which is not the operator's" if user else "names no user"
        raise UsageError(f"the {service}'s URL {problem}: write {service} = {example!r} in [services]")
    return user
