"""One night from the first upload to the last file that is forgotten, by size and by seed."""

import math
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tests.night import books, evening, morning
from tests.night.courses import (
    EXAMPLE_MODEL,
    GEMMA,
    READER,
    SMOLLM2,
    WRITER,
    all_names,
    exam_course,
    example_course,
    made_course,
)
from tests.night.desk import Desk
from tests.night.evening import Endpoint
from tests.night.machine import ROLES, DeployedMachines
from tests.night.record import Record, write
from tests.night.site import Pace, Site, earlier_release, journal_lines, wait_for_workers
from tests.night.troubles import (
    Alerts,
    Night,
    Trouble,
    clear_what_nobody_holds,
    kill_deployed_worker,
    kill_desk,
    strike,
    troubles,
)
from tests.support import gemma3, smollm2, smollm2_folders
from tests.support.processes import ModelEntry
from tests.support.waiting import wait_until

_WRITER_SLOTS, _READER_SLOTS = 6, 4  # of all workers
_MACHINES_SLOTS = 2 * len(ROLES)  # of the writer's, on the machines that `kvasir deploy` has reached
_ANSWER_TOKENS = 25  # of the writer, about
_OTHER = 1000  # added to the seed for another class of the same kind
_TROUBLE_S = 18.0  # each takes with its recovery, at most as a rule
_SLOW = 4  # times as long the first one may take: nobody knows yet how busy the cores are
_EVENING_S = 600.0  # the reader takes for a question while classes are still submitted
_READER_S = 120.0  # at most, for a question of the night: events wait for a result
_FEW_LINES = 60  # of the gateway's batches: when fewer are open, so many more come


@dataclass(frozen=True, slots=True)
class Size:
    """How large a night is."""

    people: int  # of the Canvas class
    team_people: int  # of the Moodle class
    exams: int
    examples: int  # of the example class, by the example's model
    lines: int  # of the batch through the gateway
    rounds: int  # of all troubles
    rest_s: float  # between two of them, at most
    real_exams: int = 0  # graded by SmolLM2, through llama.cpp and MLX, and by Gemma, through transformers
    has_machines: bool = False  # that `kvasir deploy` has reached over ssh
    desk_people: int = 0  # of a class whose instructor sits at the desk, in a browser; 0: nobody does
    has_clusters: bool = False  # of brokers, and of Redis

    def scaled(self, share: float) -> "Size":
        """With so large classes, and as many troubles."""
        names = ("people", "team_people", "exams", "examples", "lines", "real_exams", "desk_people")
        return replace(self, **{name: math.ceil(getattr(self, name) * share) for name in names})

    def pace(self, troubles: int) -> Pace:
        """With which the work lasts as long as `rounds` of so many troubles."""
        night_s = self.rounds * troubles * (_TROUBLE_S + self.rest_s / 2)
        people = self.people + self.team_people + self.desk_people
        reader_s = night_s * _READER_SLOTS / people
        slots = _WRITER_SLOTS + _MACHINES_SLOTS * self.has_machines
        writer_s = night_s * slots / (people + self.lines)
        return Pace(_ANSWER_TOKENS / writer_s, reader_s)


SHORT = Size(people=120, team_people=16, exams=6, examples=2, lines=120, rounds=1, rest_s=0.0)
LONG = Size(
    people=120,
    team_people=40,
    exams=20,
    examples=16,
    lines=600,
    rounds=6,
    rest_s=30.0,
    real_exams=10,
    desk_people=30,
    has_machines=True,
)


def whole_night(folder: Path, size: Size, seed: int, to: Path | None = None, only: Sequence[str] = ()) -> Record:
    """Evening, night and morning. `to`: where table and pictures are written; `only`: of the troubles."""
    record = Record(seed)
    wanted = [each for each in troubles(size.has_clusters) if not only or any(word in each.event for word in only)]
    source = random.Random(f"night {seed}")
    courses = [
        made_course(folder / "canvas", "canvas named", seed, size.people),
        made_course(folder / "moodle", "moodle teams", seed, size.team_people),
        # Whoever is last in the queue, with a deadline of seconds, has something to retry in the morning.
        exam_course(folder / "exam", size.exams, "--code-model", WRITER, "--deadline", "3s", has_examples=True),
        example_course(folder / "example", size.examples),
    ]
    models = _real_models() if size.real_exams else {}
    for number, model in enumerate(models):
        options = ("--code-model", model, "--feedback-model", model)
        courses.append(exam_course(folder / f"real-{number}", size.real_exams, *options, title=f"exam by {model}"))
    if size.desk_people:
        course = made_course(folder / "at-the-desk", "canvas named", seed + _OTHER, size.desk_people)
        courses.append(replace(course, title="desk", out=folder / "desk" / "home" / "riverside"))
        courses[2].out = folder / "desk" / "home" / "exam"  # submitted from a folder, and retried from the desk
    with Site(folder / "site", size.pace(len(wanted)), models, size.has_clusters) as site:
        endpoint = Endpoint(site)
        _prepare(site)
        record.started = time.time()
        with Alerts(site) as alerts, ExitStack() as at_end:
            if size.has_machines:
                at_end.enter_context(DeployedMachines(site))
                seconds = time.time() - record.started
                record.add(f"kvasir deploy install on {len(ROLES)} machines, over ssh", f"took {seconds:.0f} s")
            desk = at_end.enter_context(Desk(site, folder / "desk")) if size.desk_people else None
            night = Night(site, courses, endpoint, record, alerts, source, desk)
            _evening(night, size.lines)
            with endpoint.watched():
                _night(night, size, wanted)
                _end_of_night(night)
            ended = time.time()
            record.night_s = ended - record.started
            _books(night, folder / "quiet")
            _morning(night, folder)
            record.morning_s = time.time() - ended
            if to:
                write(to, record, site, ended)
    return record


def _real_models() -> dict[str, ModelEntry]:
    return {
        SMOLLM2: ModelEntry("llamacpp", str(smollm2.weights()), context=4096),
        GEMMA: ModelEntry("transformers", str(gemma3.folder()), context=4096),
    }


def _prepare(site: Site) -> None:
    """Queues by the operator, workers of every role, the gateway."""
    assert site.command("operator", "status").code == 0
    hands = [site.hire("prefill", WRITER, source=earlier_release(site.folder / "earlier"))]
    hands += [site.hire(role, WRITER) for role in ("decode", "decode", "both")]
    hands += [site.hire("both", model) for model in (READER, EXAMPLE_MODEL)]
    # Nobody waits for the real ones: each comes once it is loaded and its KV transfer is proved.
    for model in site.real_models:
        site.hire("both", model)
    if SMOLLM2 in site.real_models:  # llama.cpp does both, and MLX decodes with another rounding
        site.hire("decode", SMOLLM2, "--engine", "mlx", "--weights", str(smollm2_folders.folder("f32")))
    site.serve()
    wait_for_workers(hands)


def _evening(night: Night, lines: int) -> None:
    site, record, (canvas, moodle, exam, example) = night.site, night.record, night.courses[:4]
    evening.look_before(site, canvas)
    if night.desk:
        course, start = night.courses[-1], time.time()
        site.reader.seconds = 0.0
        night.desk.prepare(course)
        words = "after a trial the rubric is corrected, and tried again"
        record.add(f"{course.title}: uploaded, and looked at in a dry run, in a browser", words, start)
    site.reader.seconds = _EVENING_S
    by_folder = [canvas, moodle, example, *(course for course in night.courses[4:] if course.title != "desk")]
    for course in by_folder:
        start = time.time()
        evening.submit(site, course)
        record.add(f"{course.title}: {len(books.planned_jobs(course))} jobs submitted from a folder", "", start)
    if night.desk:
        course, start = night.courses[-1], time.time()
        site.owners[course.title] = night.desk.submit(course)
        record.add(f"{course.title}: {len(books.planned_jobs(course))} jobs submitted in a browser", "", start)
    _submit_lines(night, lines)
    start = time.time()
    evening.submit(site, exam)
    record.add(f"{exam.title}: {len(books.planned_jobs(exam))} jobs with a deadline", "", start)
    start = time.time()
    seconds = evening.ask(site)
    record.add("a question in between", f"answered in {seconds:.1f} s", start)
    _look_for_names(night, "in the evening")


def _submit_lines(night: Night, count: int) -> None:
    start = time.time()
    night.endpoint.submit(count)
    night.record.add(f"a batch of {count} lines by OpenAI's SDK", "", start)


def _look_for_names(night: Night, when: str) -> None:
    site = night.site
    places = {
        f"the broker's disk {when}": site.broker_files(),
        f"the store {when}": site.store_values(),
        f"a log {when}": site.logs(),
    }
    books.count_names(night.record, all_names(night.courses), places)


def _night(night: Night, size: Size, wanted: Sequence[Trouble]) -> None:
    last = [Trouble("SIGKILL of the desk", kill_desk)] if night.desk else []
    if night.site.deployed_hands:
        last.append(Trouble("SIGKILL of a worker that kvasir deploy started", kill_deployed_worker))
    rounds = [[*night.random.sample(wanted, len(wanted)), *last] for _ in range(size.rounds)]
    coming = [trouble for each in rounds for trouble in each]
    start = time.time()
    for number, trouble in enumerate(coming):
        time.sleep(night.random.uniform(0, size.rest_s))
        each_s = (time.time() - start) / number if number else _SLOW * _TROUBLE_S
        _keep_busy(night, (len(coming) - number + 1) * each_s)
        strike(night, trouble)


def _keep_busy(night: Night, left_s: float) -> None:
    """Trouble in an idle cluster is none: the reader takes as long as the night, and the writer gets more to do.

    On cores that others use too, a trouble takes several times as long as on idle ones.
    """
    done = {line["job_id"] for line in journal_lines([course.out for course in night.courses])}
    jobs = [job for course in night.courses for job in books.planned(course) if job["model"] == READER]
    to_read = sum(job["job_id"] not in done for job in jobs)
    assert to_read, "the reader is done, and the night is not over"
    night.site.reader.seconds = min(_READER_S, left_s * _READER_SLOTS / to_read)
    if night.endpoint.open_lines() < _FEW_LINES:
        _submit_lines(night, _FEW_LINES)


def _end_of_night(night: Night) -> None:
    """What is left is done quickly: a fast machine joins, and the reader hurries."""
    site, start = night.site, time.time()
    site.reader.seconds = 0.0
    fast = site.models(quiet=True)[WRITER].weights
    night.fast = site.hire("both", WRITER, "--weights", fast, "--slots", "4")
    night.fast.process.wait_until_registered()
    for course in night.courses:
        owner = site.owners[course.title]
        code = owner.wait(900)
        if code not in (0, 1):  # whoever comes in the morning types it again
            night.record.unequal.append(f"{course.title}: its owner ended with {code}: {owner.text()[-300:]}")
            site.own(course).wait(300)
    wait_until(lambda: night.endpoint.is_over, "the gateway's batches are over", 600, poll_s=0.5)
    wait_until(lambda: not night.alerts.firing(), "all alerts have cleared", 300, poll_s=0.5)
    night.record.add("all work is done", f"{night.results()} results; no alert fires", start)
    if site.services.broker_cluster:
        clear_what_nobody_holds(night)


def _books(night: Night, folder: Path) -> None:
    record, site = night.record, night.site
    books.count_jobs(record, night.courses)
    record.jobs += night.endpoint.count
    missing = night.endpoint.missing()
    record.lost += len(missing)
    for course in night.courses:
        books.compare_counts(site, record, course)
    books.compare_workers(site, record)
    books.compare_journal_and_logs(site, record, night.courses)
    folder.mkdir()
    # Of one that expired there is nothing to compare, and another engine's rounding may change an answer.
    for course in [course for course in night.courses if not course.title.startswith("exam")]:
        books.count_wrong_answers(record, course, books.quiet_night(site, course, folder))
    _look_for_names(night, "at the end of the night")


def _morning(night: Night, folder: Path) -> None:
    site, record, (canvas, moodle, exam, _) = night.site, night.record, night.courses[:4]
    morning.retry(site, record, exam, night.desk)
    books.count_jobs(record, night.courses)
    record.jobs += night.endpoint.count
    books.compare_counts(site, record, exam)
    morning.agreement(site, record, canvas)
    morning.bound(site, record, canvas, 15)
    morning.review(record, canvas)
    if night.desk:
        morning.review_by_keyboard(record, night.desk, night.courses[-1], 2)
    assert night.fast
    site.dismiss(night.fast)  # with it the next would be over before anybody could say when
    assert night.fast.process.terminate(60) == 0, night.fast.process.text()[-2000:]
    morning.regrade(site, record, canvas)
    morning.request(site, record, moodle)
    for course in [course for course in night.courses if course.truth]:
        start = time.time()
        cells = books.count_wrong_cells(
            record, course, morning.export(site, course, folder / f"{course.title}.export.csv")
        )
        record.add(f"{course.title}: exported", f"the LMS takes {cells} grades", start)
    jobs: set[str] = set()
    for course in night.courses:
        jobs |= morning.forget(site, record, course)
    _look_for_names(night, "after all was forgotten")
    for hand in list(site.hands):
        site.dismiss(hand)
        assert hand.process.terminate(60) == 0, hand.process.text()[-2000:]
    for hand in site.deployed_hands:
        assert hand.process.terminate(60) == 0, hand.process.text()[-2000:]
    assert site.gateway
    assert site.gateway.terminate() == 0, site.gateway.text()[-2000:]
    books.count_left(site, record, jobs)
    shutil.rmtree(folder / "quiet", ignore_errors=True)
