"""`kvasir serve` and `kvasir keys`: serve OpenAI's and Ollama's APIs in front of the queues, and manage their users."""

import importlib.util
import json
import os
from datetime import datetime
from pathlib import Path

import click

from gateway import keys as key_file
from infra.config.sources import user_data_dir
from kvasir.connect import connect, is_cluster
from kvasir.options import Globals, group_options, json_option, page_options
from kvasir.terminal import print_table, say, stderr
from kvasir.worker.page import PageOptions
from kvstore.redis.forget import forget_named
from messages.errors import ConfigError, KvasirError
from producers.words import plural

_HOST_NAME = "Answer requests under this name too, without keys: host.docker.internal, for containers."
_OPEN_OBJECTS = "Let answers have keys that a schema doesn't name, where it leaves additionalProperties out."

_state = click.option(
    "--state",
    "folder",
    type=click.Path(path_type=Path),
    default=lambda: (user_data_dir(os.environ) or Path("results")) / "gateway",
    show_default="gateway, in the user's folder for data",
    help="Keep the gateway's keys, files and batches in this folder.",
)


@click.command()
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Listen on this address. Any address except loopback needs an API key (kvasir keys).",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--model", "models", metavar="M", multiple=True, help="Serve this model [default: all configured models]."
)
@click.option("--host-name", "host_names", metavar="NAME", multiple=True, help=_HOST_NAME)
@click.option("--open-objects", is_flag=True, help=_OPEN_OBJECTS)
@_state
@page_options
@group_options(page=PageOptions)
@click.pass_obj
def serve(
    global_options: Globals,
    host: str,
    port: int,
    models: tuple[str, ...],
    host_names: tuple[str, ...],
    open_objects: bool,
    folder: Path,
    page: PageOptions,
) -> None:
    """Answer OpenAI's and Ollama's clients over HTTP: they need another URL and nothing else.

    Without a broker the models run in this process. Ctrl-C ends it; streams under way have ten seconds.
    """
    settings = global_options.settings()
    if not all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "python_multipart")):
        raise ConfigError("kvasir serve needs FastAPI, which is missing: pip install 'kvasir-inference[gateway]'")
    from gateway import server

    served_models = {name: settings.model(name) for name in models or settings.models}
    if not served_models:
        raise ConfigError("no model is configured: add a table [models.NAME] to kvasir.toml")
    server.check_host(host, folder)  # fail before the models are loaded
    if not is_cluster(settings):
        stderr.print(f"no broker is configured: loading {plural(len(served_models), 'model')} into this process")
    with connect(settings, list(served_models), global_options.observer(), "serve") as client:
        metrics_address = None if page.metrics_port is None else (page.metrics_host, page.metrics_port)
        server.serve(
            client,
            served_models,
            (host, port),
            folder,
            lambda url: say(f"Kvasir answers at {url} (OpenAI: {url}/v1, Ollama: {url}); its own page: {url}/docs"),
            metrics_address,
            "open" if open_objects else "closed",
            host_names,
        )


@click.group("keys")
def keys() -> None:
    """Who may use the gateway: API keys, kept as hashes."""


@keys.command("add")
@click.argument("name")
@click.option("--model", "models", metavar="M", multiple=True, help="Let the key use this model [default: all].")
@_state
@click.pass_obj
def add(global_options: Globals, name: str, models: tuple[str, ...], folder: Path) -> None:
    """Make an API key for NAME, and print it: it is shown this once."""
    settings = global_options.settings()
    for model in models:
        settings.model(model)
    click.echo(key_file.add_key(key_file.file_in(folder), name, models))


@keys.command("list")
@json_option
@_state
def list_keys(as_json: bool, folder: Path) -> None:
    """List the keys by name, never the keys themselves."""
    api_keys = key_file.read_keys(key_file.file_in(folder)) or []
    if as_json:
        rows = [{"name": key.name, "models": list(key.models), "created": key.created} for key in api_keys]
        click.echo(json.dumps(rows))
    elif not api_keys:
        say("There is no key.")
    else:
        print_table(
            ("name", "models", "made"),
            [
                [
                    key.name,
                    ", ".join(key.models) or "all",
                    datetime.fromtimestamp(key.created).strftime("%Y-%m-%d") if key.created else "",
                ]
                for key in api_keys
            ],
        )


@keys.command("revoke")
@click.argument("name")
@_state
@click.pass_obj
def revoke(global_options: Globals, name: str, folder: Path) -> None:
    """Revoke the key of NAME and delete its conversations' KV caches; a running gateway sees it within a second."""
    settings = global_options.settings()
    revoked_key = key_file.revoke_key(key_file.file_in(folder), name)
    say(f"The key {name} opens nothing any more.")
    if is_cluster(settings):
        try:
            deleted_count = forget_named(settings.store_url_with_secret(), {revoked_key.tag})
        except KvasirError:  # some logins, such as a producer's, have no right to delete anything in the store
            stderr.print("its conversations' KV caches stay in the store until they expire, a day at most:")
            raise
        say(f"KV caches of its conversations deleted from the store: {plural(deleted_count, 'record')}")
