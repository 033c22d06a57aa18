"""The page that shows which workers are alive, and how fast the work goes."""

import time
from datetime import UTC, datetime
from pathlib import Path

import streamlit as st

from desk import assignments
from desk.estimate import duration, model_rates
from desk.pages.shared import REFRESH_S, Desk, draw_live, pictures, show_errors, show_table
from desk.text import escape_markdown
from grading.charts import runs
from messages.workers import WorkerInfo


def show_fleet_page(desk: Desk, folder: Path) -> None:
    """Draw it."""

    def fleet() -> None:
        show_workers(desk, folder)
        _rates(desk, folder)

    draw_live(fleet, REFRESH_S)
    with show_errors():
        _show_run(desk, folder)


def _show_run(desk: Desk, folder: Path) -> None:
    """Show the run. It is outside the part that refreshes itself, because for a large class this is much data."""
    view = desk.view(folder)
    html = pictures(desk, ("run", folder), view.version, lambda: runs.pictures(view.results))
    if html:
        st.subheader("The run in pictures", anchor=False)
        st.caption("Of the jobs that have an answer, each from when it was submitted; as of when this page was opened.")
        st.html(html)


def show_workers(desk: Desk, folder: Path) -> None:
    """Show who is doing what: a table of the cluster's workers, or the jobs of this machine's process."""
    if not desk.backend.is_cluster:
        record, alive = assignments.grading_work(folder).record(), assignments.grading_work(folder).is_alive
        st.write(f"Process {record.pid} on this machine is grading." if alive and record else "Nothing is running.")
        if alive:
            _in_hand(desk, folder)
        return
    fleet_view = desk.fleet.look()
    if fleet_view is None:
        st.caption("Asking the cluster …")
        return
    if fleet_view.problem:
        st.error(escape_markdown(fleet_view.problem))
        return
    st.metric("Workers alive", len(fleet_view.workers))
    now = time.time()
    show_table(
        [
            {
                "worker": registration.worker_id,
                "does": _activity(registration),
                "stage": registration.role,
                "model": registration.model,
                "engine": registration.engine,
                "device": registration.device,
                "done": registration.done,
                "tokens/s": round(registration.tokens_per_s, 1),
                "up": duration(max(0.0, now - registration.started_at)),
                "remark": registration.notes,
            }
            for registration in fleet_view.workers
        ],
        "Workers",
    )
    show_table([{"queue": name, "waiting": ready} for name, ready in (fleet_view.queue_depths or {}).items()], "Queues")


def _activity(worker: WorkerInfo) -> str:
    slots = f" in {worker.busy} of {worker.slots} slots" if worker.slots > 1 else ""
    return f"{worker.role} of {worker.model}{slots}" if worker.busy else "nothing"


def _in_hand(desk: Desk, folder: Path) -> None:
    """List the jobs that this machine's process is working on now. It does not say whose they are."""
    models, now = desk.view(folder).models(), datetime.now(UTC)
    rows = [
        {
            "stage": stage,
            "model": models[job],
            "since": since.astimezone().strftime("%H:%M:%S"),
            "seconds": max(0, round((now - since).total_seconds())),
            "job": job,
        }
        for job, stage, since in desk.stages(folder).in_hand()
        if job in models
    ]
    if rows:
        show_table(rows, "In hand")


def _rates(desk: Desk, folder: Path) -> None:
    rates = model_rates(desk.view(folder).results)
    if rates:
        show_table(
            [
                {
                    "model": rate.model,
                    "answers": rate.answers,
                    "prefill tokens/s": round(rate.prefill_tokens_per_s),
                    "decode tokens/s, each sequence": round(rate.decode_tokens_per_s, 1),
                    "from a transferred KV cache": rate.transferred_answers,
                }
                for rate in rates
            ],
            "Models",
        )
