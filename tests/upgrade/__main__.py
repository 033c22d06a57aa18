"""Two versions of the program over one broker and one store, in every order: `make test-upgrade`.

The first release (992a9c4) and this checkout take turns in the middle of a batch of 300 simulated jobs: workers first,
owners first, a mixed fleet, gateways, and each of these rolled back, with kills in between. Then the two cases of
commit 809876f, whose messages and plans have another form, and a wheel that is installed over the older one, and back.

    lost      jobs without a result          doubled    results beyond a job's first
    refused   jobs that failed, and commands that would not go on
    idle      the longest time, in seconds, that an owner ran and got nothing

All but `idle` must be 0, and that at most 30. Ends with 1 otherwise. `--order TEXT`: only rows whose name holds it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from tests.forms.batches import HOME, RELEASE
from tests.support.processes import ROOT, SIMULATED_MODEL, config_text
from tests.support.services import services
from tests.upgrade.programs import (
    EARLIER,
    PREVIOUS,
    TODAY,
    Program,
    built,
    built_wheel,
    environment_of,
    install,
    output_of,
)
from tests.upgrade.stage import GatewayStage, Row, Stage

_READ_DESK = """
import json, sys
from pathlib import Path
try:
    from desk.assignments import grading_work, read_inputs, save_inputs
except ImportError:
    from producers.desk.assignments import grading as grading_work, read_inputs, save_inputs
folder = Path(sys.argv[1])
inputs, work = read_inputs(folder), grading_work(folder)
save_inputs(folder, inputs)
record = work.record()
print(json.dumps([inputs.title, inputs.ask, inputs.samples, record.kind, list(record.only), work.exit_code]))
"""


def workers_first(stage: Stage, old: Program, new: Program) -> None:
    """As it is recommended: workers, then the owner."""
    stage.start_workers(old)
    stage.own(old)
    stage.wait_for(0.15)
    stage.upgrade_workers(new)
    stage.wait_for(0.7)
    stage.own(new)


def workers_first_and_back(stage: Stage, old: Program, new: Program) -> None:
    """The workers are upgraded and rolled back under one owner, which never notices."""
    stage.start_workers(old)
    stage.own(old)
    stage.wait_for(0.1)
    stage.upgrade_workers(new)
    stage.wait_for(0.4)
    stage.upgrade_workers(old)


def owners_first(stage: Stage, old: Program, new: Program) -> None:
    """The owner, then the workers."""
    stage.start_workers(old)
    stage.own(old)
    stage.wait_for(0.15)
    stage.own(new)
    stage.wait_for(0.35)
    stage.upgrade_workers(new)


def owners_first_and_back(stage: Stage, old: Program, new: Program) -> None:
    """The owner is rolled back while older workers serve it, and again when newer ones do."""
    stage.start_workers(old)
    for share, program in ((0.0, old), (0.15, new), (0.3, old)):
        stage.wait_for(share)
        stage.own(program)
    stage.wait_for(0.4)
    stage.upgrade_workers(new)
    for share, program in ((0.7, new), (0.85, old)):
        stage.wait_for(share)
        stage.own(program)


def mixed(stage: Stage, old: Program, new: Program) -> None:
    """One worker of each stage of each version for the whole batch; of each stage one is killed and comes back."""
    programs = (old, new)
    for role, number in stage.places():
        stage.worker(programs[number], role, number)
    stage.own(old)
    stage.wait_for(0.2)
    stage.worker(old, "prefill", 0, "kill")
    stage.wait_for(0.4)
    stage.worker(new, "decode", 1, "kill")
    stage.wait_for(0.6)
    stage.own(new)
    stage.wait_for(0.7)
    stage.worker(old, "decode", 0, "kill")


def both_roles(stage: Stage, old: Program, new: Program) -> None:
    """Older workers and owner beside one of today's with both roles, which is killed and then stays alone."""
    for place in stage.places():
        stage.worker(old, *place)
    stage.worker(new, "both", 0)
    stage.own(old)
    stage.wait_for(0.3)
    stage.worker(new, "both", 0, "kill")
    stage.wait_for(0.5)
    stage.leave_workers()
    stage.worker(new, "both", 1)


def everything_and_back(stage: Stage, old: Program, new: Program) -> None:
    """All at once, killed, and all at once back."""
    stage.start_workers(old)
    stage.own(old)
    for share, program in ((0.25, new), (0.6, old)):
        stage.wait_for(share)
        for place in stage.places():
            stage.worker(program, *place, "kill")
        stage.own(program)


def gateway(stage: Stage, old: Program, new: Program) -> None:
    """A gateway that is killed and upgraded with a batch under way, then its workers."""
    stage.start_workers(old)
    stage.own(old)
    stage.wait_for(0.2)
    stage.own(new)
    stage.wait_for(0.4)
    stage.upgrade_workers(new)


def gateway_and_back(stage: Stage, old: Program, new: Program) -> None:
    """Workers first, then the gateway, and the gateway back."""
    stage.start_workers(old)
    stage.own(old)
    stage.wait_for(0.15)
    stage.upgrade_workers(new)
    for share, program in ((0.5, new), (0.7, old)):
        stage.wait_for(share)
        stage.own(program)


def earlier_owner(stage: Stage, earlier: Program, new: Program) -> None:
    """An owner of message version 1 is served by today's workers."""
    stage.start_workers(new)
    lines = stage.config.read_text("utf-8").splitlines(keepends=True)
    stage.config.write_text("".join(line for line in lines if not line.startswith("short_prompt_tokens")), "utf-8")
    stage.own(earlier)
    stage.wait_for(0.5)
    stage.worker(new, "decode", 0, "kill")


def earlier_plan(stage: Stage, earlier: Program, new: Program) -> None:
    """What the earlier program planned and never sent is carried over."""
    away = stage.folder / "away"
    shutil.copytree(stage.folder, away, ignore=shutil.ignore_patterns("away"))
    config = stage.config.read_text("utf-8").replace("short_prompt_tokens = 0\n", "")
    nowhere = '[services]\nbroker = "amqp://127.0.0.1:9/"\nstore = "redis://127.0.0.1:9/0"\n'
    (away / "cluster.toml").write_text(nowhere + config, "utf-8")
    words = ("--config", str(away / "cluster.toml"), "run", str(stage.prompts), "--out", str(stage.folder / "batch"))
    output_of(earlier, away, words, codes=(3,))
    assert "prompt_form" not in json.loads((stage.folder / "batch/batch.json").read_text("utf-8"))
    stage.start_workers(new)
    stage.own(new)


def wheel_over_wheel(folder: Path, old: Program) -> Row:
    """Today's wheel over the older one, and back: what each wrote is read by the other, the desk's folder too."""
    assert old.wheel
    new_wheel = built_wheel(ROOT, folder / "dist")
    python = environment_of("wheels", str(old.wheel))
    installed = Program("wheel", python, old.wheel)
    (folder / "kvasir.toml").write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")
    # Without what the older one can't read, and today's tries to.
    shutil.copytree(
        ROOT / "tests/integration/older_batch", folder / "class", ignore=shutil.ignore_patterns("out*", "*.docx")
    )
    desk = folder / "desk"
    for path in (RELEASE / "batches/desk").rglob("*"):
        if path.is_file():
            place = desk / path.relative_to(RELEASE / "batches/desk")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes().replace(HOME.encode(), str(folder).encode()))
    grade = ("grade", "class/handed-in", "--rubric", "class/rubric.yaml", "--out", "out", "--quiet", "--json")
    export = ("export", "out", "--format", "csv", "--to", "final.csv", "--include-unreviewed")
    seen = []
    for wheel in (old.wheel, new_wheel, old.wheel):
        install(python, "--no-deps", "--force-reinstall", str(wheel))
        output_of(installed, folder, grade, codes=(0, 1))
        output_of(installed, folder, export, codes=(0, 1))  # one can't be read and is left blank
        shown = json.loads(output_of(installed, folder, ("results", "out", "--json"), codes=(0, 1)))
        words = [str(python), "-c", _READ_DESK, str(desk)]
        told = subprocess.check_output(words, cwd=folder, env=installed.environment(folder))
        journal = (folder / "out/results.jsonl").read_bytes()
        seen.append((shown, told, (folder / "final.csv").read_bytes(), journal))
    differing = sum(each != seen[0] for each in seen)
    return Row("wheel over wheel, and back", len(seen[0][3].splitlines()), 0, 0, differing, 0.0)


Act = Callable[[Stage, Program, Program], None]
ORDERS: dict[str, tuple[str, type[Stage], Act]] = {
    "workers first": (PREVIOUS, Stage, workers_first),
    "workers first, rolled back": (PREVIOUS, Stage, workers_first_and_back),
    "owners first": (PREVIOUS, Stage, owners_first),
    "owners first, rolled back": (PREVIOUS, Stage, owners_first_and_back),
    "mixed fleet": (PREVIOUS, Stage, mixed),
    "beside both roles": (PREVIOUS, Stage, both_roles),
    "everything, rolled back": (PREVIOUS, Stage, everything_and_back),
    "gateway": (PREVIOUS, GatewayStage, gateway),
    "workers, gateway, rolled back": (PREVIOUS, GatewayStage, gateway_and_back),
    f"owner of {EARLIER}": (EARLIER, Stage, earlier_owner),
    f"plan of {EARLIER}": (EARLIER, Stage, earlier_plan),
}


def main() -> int:
    """Run the rows, print each when it is done; 1 if one isn't clean, or broke off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", default="")
    wanted = parser.parse_args().order
    programs = {PREVIOUS: built(PREVIOUS, "[gateway]"), EARLIER: built(EARLIER)}
    clean = True
    with tempfile.TemporaryDirectory(prefix="kvasir-upgrade-") as name, services() as pair:
        rows: dict[str, Callable[[], Row]] = {}
        for number, (order, (commit, kind, act)) in enumerate(ORDERS.items()):
            stage = partial(kind, Path(name) / str(number), pair, f"upgrade-{number}")
            rows[order] = partial(_run, stage, act, order, programs[commit])
        rows["wheel over wheel, and back"] = partial(wheel_over_wheel, Path(name) / "wheels", programs[PREVIOUS])
        click.echo(f"{'order':32}{'jobs':>6}{'lost':>6}{'doubled':>9}{'refused':>9}{'idle':>7}")
        for order, make in rows.items():
            if wanted in order:
                clean = _show(order, make) and clean
    return 0 if clean else 1


def _run(make: Callable[[], Stage], act: Act, order: str, old: Program) -> Row:
    with make() as stage:
        act(stage, old, TODAY)
        return stage.row(order)


def _show(order: str, make: Callable[[], Row]) -> bool:
    began = time.monotonic()
    try:
        row = make()
    except Exception as error:  # noqa: BLE001  the other rows have their say all the same
        click.echo(f"{order:32}broke off: {type(error).__name__}: {error}")
        return False
    cells = f"{row.jobs:6}{row.lost:6}{row.doubled:9}{row.refused:9}{row.idle_s:7.1f}"
    click.echo(f"{order:32}{cells}   ({time.monotonic() - began:.0f} s)")
    return row.is_clean


if __name__ == "__main__":
    sys.exit(main())
