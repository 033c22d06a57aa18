"""`from kvasir import grade, regrade`: the commands as functions, for scripts and notebooks."""

from collections.abc import Sequence
from pathlib import Path

from grading.request import AskForm
from infra.config.settings import Settings, load_settings
from kvasir import class_run
from kvasir.class_run import Outcome
from kvasir.options import BatchPlace
from kvasir.regrading import Regrade
from kvasir.terminal import TerminalProgress
from monitoring.events import Observer
from producers.words import names_in


def grade(
    folder: Path | str,
    rubric: Path | str,
    solution: Path | str | None = None,
    template: Path | str | None = None,
    *,
    out: Path | str | None = None,
    replace: bool = False,
    code_model: str | None = None,
    feedback_model: str | None = None,
    only: str | Sequence[str] = (),
    limit: int = 0,
    samples: int = 1,
    ask: AskForm = "together",
    deadline_s: float = 0.0,
    max_wait_s: float | None = None,
    quiet: bool = False,
    config: Path | str | None = None,
    settings: Settings | None = None,
    observe: Observer = lambda _moment: None,
    rosters: Sequence[Path | str] = (),
) -> Outcome:
    """Grade every submission in `folder` and write the report. Calling it again continues where it stopped.

    Args:
        folder: a folder, a zip, or one file.
        out: folder of the batch; the default is that of the command.
        replace: if `out` holds another class's batch, move it aside.
        only: names or LMS ids, as a sequence or separated by commas.
        limit: grade only this many submissions, the first ones; 0 for all.
        samples: answers to each prompt.
        ask: ask for all criteria in one answer (`together`), or one question for each (`criteria`).
        deadline_s: jobs published now expire after this many seconds; 0: never.
        max_wait_s: return after this many seconds, with the results so far.
        quiet: show no progress on stderr.
        config: the file of --config. If `settings` is given, `config` and the two models are not used.
        rosters: who is in the class: the LMS's gradebook, worksheet or groups CSV.

    Raises KvasirError, with a sentence that says what to do.
    """
    effective_settings = settings or load_settings(
        {"code_model": code_model, "feedback_model": feedback_model}, config=Path(config) if config else None
    )
    solution, template, out = (Path(path) if path else None for path in (solution, template, out))
    request = class_run.request_from(
        effective_settings,
        Path(folder),
        Path(rubric),
        solution,
        template,
        names=names_in(only) if isinstance(only, str) else tuple(only),
        limit=limit,
        samples=samples,
        ask=ask,
        rosters=tuple(map(Path, rosters)),
    )
    with (
        TerminalProgress(quiet) as progress,
        class_run.open_class(request, BatchPlace(out, replace, yes=True), progress.say) as (batch, assignment),
    ):
        return class_run.run_class(effective_settings, batch, assignment, progress, observe, max_wait_s, deadline_s)


def regrade(
    batch: Path | str,
    criteria: Sequence[str] = (),
    rubric: Path | str | None = None,
    max_wait_s: float | None = None,
    quiet: bool = False,
    config: Path | str | None = None,
    settings: Settings | None = None,
    observe: Observer = lambda event: None,
) -> Regrade:
    """Ask again about what changed in the rubric of the batch in this folder.

    No grades are replaced yet: see `Regrade`.

    `cost`, `differences` and `tried` of the result describe the outcome; `adopt()` replaces the grades. The arguments
    are those of `grade`, and `criteria` and `rubric` of `Regrade`. Raises KvasirError.
    """
    effective_settings = settings or load_settings(config=Path(config) if config else None)
    regrading = Regrade(effective_settings, Path(batch), criteria, Path(rubric) if rubric else None)
    if regrading.needed:
        with TerminalProgress(quiet) as progress:
            regrading.run(progress, observe, max_wait_s)
    return regrading
