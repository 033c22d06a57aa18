"""The names and interfaces of the team's earlier scripts, on top of Kvasir.

docs/how-to/migration.md says what to use instead.

    DisaggregatedClient("config_current.json").generate(model=, prompt=, max_tokens=)   gives (text, metrics)
    DisaggregatedClient(prefill_url, decode_url, model).generate(prompt, max_tokens=)   gives {"response", "total_time"}
    await DisaggregatedInference(config).generate(prompt=, model_type=, max_tokens=)    gives {"response", …}
    BusinessAnalyticsGraderV2(…).grade_submission(…)                                    gives {"final_score", …}

kvasir.toml says where the machines are. Hosts, ports and URLs given here are not used.
"""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from infra.config.settings import Settings, load_settings
from kvasir.compat.models import resolve_model
from kvasir.connect import connect
from messages.errors import ConfigError, KvasirError
from messages.jobs import JobResult, Sampling
from producers.client import Client

Metrics = dict[str, Any]

_SERVER_LISTS = ("prefill_servers", "decode_servers")


class GenerationFailed(KvasirError):
    """The job ended without an answer. The message says how and why; no text is made up in its place."""


class _Connected:
    """Holds one client for each model, opened when it is first needed. Safe to use from several threads."""

    def __init__(self, settings: Settings | None) -> None:
        self._settings = settings or load_settings()
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()

    def _ask(self, model: str, prompt: str, max_tokens: int) -> tuple[JobResult, float]:
        """Return the result and the time in seconds. Raises GenerationFailed, ConfigError, BrokerUnavailable."""
        name = resolve_model(self._settings, model)
        model_settings = self._settings.model(name)
        start = time.monotonic()
        result = self._client(name).ask(
            name, prompt, Sampling(max_tokens, model_settings.temperature, model_settings.top_p)
        )
        if result.state != "succeeded":
            raise GenerationFailed(f"{name}: {result.state}: {result.error.message if result.error else 'no answer'}")
        return result, time.monotonic() - start

    def _client(self, name: str) -> Client:
        with self._lock:
            if name not in self._clients:
                self._clients[name] = connect(self._settings, [name], name="compat")
            return self._clients[name]

    def close(self) -> None:
        """Close all clients. Idempotent."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()


class DisaggregatedClient(_Connected, AbstractContextManager["DisaggregatedClient"]):
    """Replaces both earlier classes of this name.

    With a path to their config_current.json, a path to a kvasir.toml, or no argument, `generate` returns (text,
    metrics). With two URLs and a model, it returns one dict.
    """

    def __init__(
        self,
        config_path: str | Path | None = None,
        decode_url: str = "",
        model: str = "",
        settings: Settings | None = None,
    ) -> None:
        """Raises ConfigError if the file is of neither kind, or if a URL comes without a model."""
        self._model = model
        if bool(decode_url) != bool(model):
            raise ConfigError("DisaggregatedClient needs either a configuration's path, or two URLs and a model")
        if not model and config_path is not None:
            settings = settings or _settings_for(Path(config_path))
        super().__init__(settings)

    def generate(self, *args: str, **named: Any) -> Any:
        """Call as `generate(model=, prompt=, max_tokens=2000)` or, if made with URLs, `generate(prompt, max_tokens=)`.

        Raises GenerationFailed in cases where the earlier class returned an error text as if it were an answer.
        """
        names = ("prompt", "max_tokens") if self._model else ("model", "prompt", "max_tokens")
        arguments = {**dict(zip(names, args, strict=False)), **named}
        model, limit = self._model or arguments["model"], int(arguments.get("max_tokens", 2000))
        result, seconds = self._ask(model, arguments["prompt"], limit)
        figures = metrics(result, seconds)
        return {"response": result.text, **figures} if self._model else (result.text, figures)

    def __exit__(self, *_exc: object) -> None:
        self.close()


class DisaggregatedInference(_Connected):
    """Replaces the earlier orchestrator, with a dict of servers and an awaitable `generate`."""

    def __init__(self, config: Mapping[str, Any], settings: Settings | None = None) -> None:
        _check_servers("the configuration", config)
        super().__init__(settings)

    async def generate(self, prompt: str, model_type: str = "qwen", max_tokens: int = 2000) -> dict[str, Any]:
        """Return {"response", "tokens_per_sec", …}. Several calls may run at once. Raises GenerationFailed."""
        result, seconds = await asyncio.to_thread(self._ask, model_type, prompt, max_tokens)
        figures = metrics(result, seconds)
        return {"response": result.text, "tokens_per_sec": figures["decode_speed"], **figures}


def metrics(result: JobResult, seconds: float) -> Metrics:
    """Return the metrics under the earlier client's names, in seconds and tokens per second."""
    prefill, decode = result.prefill, result.decode
    computed_tokens = prefill.computed_tokens + decode.evaluated_tokens
    return {
        "prefill_time": prefill.prefill_s,
        "decode_time": decode.decode_s,
        "total_time": seconds,
        "prompt_tokens": decode.prompt_tokens,
        "completion_tokens": decode.completion_tokens,
        "total_tokens": decode.prompt_tokens + decode.completion_tokens,
        "prefill_speed": computed_tokens / prefill.prefill_s if prefill.prefill_s else 0.0,
        "decode_speed": decode.completion_tokens / decode.decode_s if decode.decode_s else 0.0,
        "method": "disaggregated_kv" if decode.kv_transfer != "none" else "no_kv_transfer",
        "prefill_server": prefill.worker_id,
        "decode_server": decode.worker_id,
    }


def _settings_for(path: Path) -> Settings:
    """Load settings. An earlier JSON file is only checked and changes nothing; a .toml is Kvasir's configuration."""
    if path.suffix.lower() == ".toml":
        return load_settings(config=path)
    try:
        servers = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    _check_servers(str(path), servers)
    return load_settings()


def _check_servers(source: str, config: Any) -> None:
    lists = [config.get(name) for name in _SERVER_LISTS] if isinstance(config, Mapping) else [None]
    if not all(
        isinstance(servers, list) and all(isinstance(server, Mapping) for server in servers) for servers in lists
    ):
        raise ConfigError(f"{source} must have the lists {' and '.join(_SERVER_LISTS)}, as in config_current.json")
