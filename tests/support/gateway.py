"""A gateway on a loopback port, for real clients: `ServedGateway` in a thread of the test, over any client."""

import asyncio
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel

from gateway.batches import Batches
from gateway.batches_api import check_body
from gateway.dispatch import Dispatcher
from gateway.files import open_files
from gateway.gateway import Gateway
from gateway.keys import KeyRing, file_in
from gateway.server import GatewayServer, listening
from infra.config.types import ModelSettings
from producers.client import Client
from tests.support.pipeline import MODEL
from tests.support.waiting import wait_until


class ServedGateway:
    """The gateway of a client, until the end of its `with` block."""

    def __init__(self, client: Client, home: Path, models: Mapping[str, ModelSettings] | None = None) -> None:
        self._stack = ExitStack()
        self._listener = self._stack.enter_context(listening("127.0.0.1", 0))
        self.name = f"gateway-{self._listener.getsockname()[1]}"
        self._dispatch = Dispatcher(client, self.name)
        models = models or {MODEL: ModelSettings(name=MODEL, max_tokens=16, temperature=0.0)}
        self.batches = Batches(self._stack.enter_context(open_files(home)), client, check_body)
        self.gateway = Gateway(models, client, self._dispatch, KeyRing(file_in(home)), self.batches)
        self._server = GatewayServer(self.gateway)
        self._runner = asyncio.Runner()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def stop(self) -> None:
        """As SIGTERM begins it."""
        self._runner.get_loop().call_soon_threadsafe(self.gateway.stop)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self._server.started, "the gateway serves")
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the gateway did not end"
        self.batches.close()
        self._dispatch.close()
        self._stack.close()

    def _serve(self) -> None:
        with self._runner:
            self._runner.run(self._server.serve([self._listener]))


def nothing_unknown(parsed_reply: object) -> None:
    """No field, at any depth, that the SDK's own models don't have. They keep unknown ones, or drop them."""
    if isinstance(parsed_reply, BaseModel):
        assert not parsed_reply.model_extra, parsed_reply.model_extra
        for name in type(parsed_reply).model_fields:
            nothing_unknown(getattr(parsed_reply, name))
    elif isinstance(parsed_reply, list | tuple):
        for element in parsed_reply:
            nothing_unknown(element)


def validate(kind: type[BaseModel], raw: Mapping[str, Any]) -> Any:
    """`raw` as an SDK's model: with all that it requires, and nothing that it doesn't know."""
    model = kind.model_validate(raw)
    nothing_unknown(model)
    _nothing_dropped(raw, model.model_dump(by_alias=True))
    return model


def _nothing_dropped(raw: Any, dumped_fields: Any) -> None:
    if isinstance(raw, dict):
        assert set(raw) <= set(dumped_fields), set(raw) - set(dumped_fields)
        for name, value in raw.items():
            _nothing_dropped(value, dumped_fields[name])
    elif isinstance(raw, list):
        for raw_element, dumped_element in zip(raw, dumped_fields, strict=True):
            _nothing_dropped(raw_element, dumped_element)
