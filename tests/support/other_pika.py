"""A pika that has changed inside."""

import threading

import pytest
from pika.adapters.utils import selector_ioloop_adapter

from infra.broker.rabbitmq import pika_inside


def change_pika(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has other streams, and doesn't call what we override.

    `Channel._cancelled` is still there: without it each pause counts as returns of what was on its way, 65 in 600.
    """
    monkeypatch.delattr(selector_ioloop_adapter, "SelectorIOServicesAdapter")
    monkeypatch.delattr(pika_inside.GuardedConnection, "_on_connection_workflow_done")
    monkeypatch.setattr(pika_inside, "REPORT_ONCE", threading.Lock())
