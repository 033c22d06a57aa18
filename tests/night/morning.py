"""What the instructors do in the morning: retry, review by two, a bound, one criterion's rubric, requests, export."""

import csv
import json
import time
from collections import Counter
from pathlib import Path

from desk.decisions import GradeChange, ReviewError, accept_grade, make_overrides
from grading.export import final_grades
from grading.hand_sample import enter_points, load_draw
from grading.reviews import Override, ReviewConflict, append_override, read_overrides, version_of
from tests.night.books import every_job, last_states
from tests.night.courses import ASSIGNMENT, CORRECTED_GUIDANCE, GUIDANCE, Course
from tests.night.desk import REVIEWERS, Desk
from tests.night.record import Record
from tests.night.site import Site
from tests.support.processes import RunningProcess

_SOON_S = 5.0  # an end so near is over before `kvasir status` has said when it comes


def retry(site: Site, record: Record, course: Course, desk: Desk | None) -> None:
    """What expired runs again, from the desk where there is one; afterwards all of it is graded."""
    start = time.time()
    open_states = [state for state in last_states(course).values() if state != "succeeded"]
    at_desk = desk if open_states else None  # which offers it only then
    if at_desk:
        at_desk.retry(course, next(state for state in ("failed", "expired", "cancelled") if state in open_states))
    else:
        again = site.command("producer", "retry", str(course.out), "--json", "--quiet")
        assert again.code in (0, 1), again.stderr
    record.retried = len(open_states)
    states = Counter(last_states(course).values())
    if states["succeeded"] < states.total():
        record.unequal.append(f"{course.title}: after another try its jobs are {dict(states)}")
    where = "from the desk" if at_desk else "by command"
    words = f"{states['succeeded']} of {states.total()} succeeded"
    record.add(f"{course.title}: {len(open_states)} jobs that expired run again, {where}", words, start)


def agreement(site: Site, record: Record, course: Course) -> None:
    """The gradebook with the points that are right, beside the model's: all agree but for the half for clarity."""
    start = time.time()
    truth = course.truth
    assert truth
    lines = course.rosters[0].read_text("utf-8-sig").splitlines()
    rows = list(csv.reader(lines, delimiter=max(",;\t", key=lines[0].count)))
    caption = next(caption for caption in rows[0] if f"({ASSIGNMENT})" in caption)
    place, ids = rows[0].index(caption), rows[0].index("ID")
    for row in rows[1:]:
        row[place] = str(truth.points.get(int(row[ids]), "")) if row[ids].isdigit() else ""
    by_hand = course.out.parent / "by-hand.csv"
    with by_hand.open("w", encoding="utf-8", newline="") as text:
        csv.writer(text).writerows(rows)
    words = ("--grades", str(by_hand), "--column", caption, "--json")
    measured = site.command("producer", "evaluate", str(course.out), *words)
    assert measured.code == 0, measured.stderr
    pairs = [pair for pair in measured.json()["batches"][0]["pairs"] if pair["criterion"] == ""]
    wrong = [pair["submission"] for pair in pairs if not 0 <= pair["first"] - pair["second"] <= 0.5]
    if wrong or not pairs:
        record.unequal.append(f"{course.title}: evaluate finds others' points for {wrong or 'nobody'}")
    record.add(
        f"{course.title}: compared with the right points",
        f"{len(pairs) - len(wrong)} of {len(pairs)} totals agree",
        start,
    )


def review(record: Record, course: Course) -> None:
    """Two people at one grade: the second is told, and nothing of the first one's is lost."""
    start = time.time()
    _, finals = final_grades(course.out, include_unreviewed=True)
    first = next(final.grade for final in finals if final.grade.points is not None)
    seen = version_of(())
    append_override(course.out, _versioned(accept_grade(first, "Ada"), seen))
    change = GradeChange("a clearer sentence", feedback="Looked at by two.")
    changes = make_overrides(first, {}, {first.criteria[0].id: change}, "Bo")
    told = False
    try:
        append_override(course.out, *(_versioned(change, seen) for change in changes))
    except (ReviewConflict, ReviewError):
        told = True
    if not told or len(read_overrides(course.out)) != 1:
        record.unequal.append(f"{course.title}: the second of two reviews replaced the first unasked")
    record.add(f"{course.title}: two people review one grade", "the second is told of the first's", start)


def review_by_keyboard(record: Record, desk: Desk, course: Course, each: int) -> None:
    """Two people at the desk, at the same time, at different grades: each decision stands, with who made it."""
    start = time.time()
    decided = desk.review(course, each)
    people = Counter(override.reviewer for override in decided)
    grades = len({override.item_id for override in decided})
    if people != Counter(dict.fromkeys(REVIEWERS, each)) or grades != each * len(REVIEWERS):
        record.unequal.append(f"{course.title}: of {each} decisions each by keyboard, {dict(people)} stand")
    record.add(f"{course.title}: two people review by keyboard", f"{grades} grades are accepted", start)


def _versioned(override: Override, version: str) -> Override:
    fields = {name: getattr(override, name) for name in ("item_id", "criterion_id", "points", "feedback", "reason")}
    return Override(**fields, reviewer=override.reviewer, version=version)


def bound(site: Site, record: Record, course: Course, count: int) -> None:
    """A sample by hand, and what it promises."""
    start = time.time()
    drawn = site.command("producer", "bound", str(course.out), "--draw", str(count), "--by", "Ada")
    if drawn.code not in (0, 1):
        record.unequal.append(f"{course.title}: bound --draw ended with {drawn.code}: {drawn.stderr[-300:]}")
        return
    _, finals = final_grades(course.out, include_unreviewed=True)
    points = {final.grade.item_id: final.grade for final in finals}
    for item_id in load_draw(course.out).sampled_members():
        for criterion in points[item_id].criteria:
            enter_points(course.out, item_id, criterion.id, f"{criterion.points or 0:g}", "")
    answer = site.command("producer", "bound", str(course.out))
    assert answer.code in (0, 1), answer.stderr
    sentences = [line.strip() for line in answer.stdout.splitlines() if "confidence" in line]
    record.add(f"{course.title}: {count} graded by hand", (sentences or ["nothing can be promised"])[0], start)


def regrade(site: Site, record: Record, course: Course) -> None:
    """One criterion's guidance is edited: nothing else is asked about, and nobody's other points change."""
    start = time.time()
    before = _points(course, "parts")
    text = course.rubric.read_text("utf-8")
    course.rubric.write_text(text.replace(GUIDANCE, CORRECTED_GUIDANCE), "utf-8")
    again = site.start("producer", "regrade", str(course.out), "--criterion", "clear", "--yes", "--json", "--quiet")
    record.finish = _finish_times(site, again)
    assert again.wait() in (0, 1), again.text()
    (cost,) = (line["cost"] for line in again.events() if "cost" in line)
    if set(cost["asked"]) != {"clear"} or _points(course, "parts") != before:
        record.unequal.append(f"{course.title}: a regrade of one criterion touched others: {cost}")
    kept = sum(low_s <= left_s <= high_s for low_s, high_s, left_s in record.finish)
    finish = f"the end came within {kept} of the {len(record.finish)} intervals that status gave"
    record.add(f"{course.title}: one criterion graded again", f"{cost['jobs']} jobs; {finish}", start)


def _finish_times(site: Site, work: RunningProcess) -> list[tuple[float, float, float]]:
    """Each interval that `kvasir status` gives while this runs, and how long it took then. Nobody else has work."""
    intervals: list[tuple[float, float, float]] = []  # when, and the interval in seconds from then
    ended = 0.0
    while work.alive:
        asked = time.time()
        finish = site.command("monitor", "status", "--json").json()["finish"]
        now = (asked + time.time()) / 2
        if finish:
            ended = 0.0
            if finish["left_s"] > _SOON_S:
                intervals.append((now, *finish["interval_s"]))
        elif intervals:
            ended = ended or now
        time.sleep(1.0)
    return [(low_s, high_s, (ended or time.time()) - now) for now, low_s, high_s in intervals]


def _points(course: Course, criterion_id: str) -> dict[str, object]:
    _, finals = final_grades(course.out, include_unreviewed=True)
    return {
        final.submission: criterion.points
        for final in finals
        for criterion in final.criteria
        if criterion.id == criterion_id
    }


def request(site: Site, record: Record, course: Course) -> None:
    """A student asks for another look, and is answered."""
    start = time.time()
    _, finals = final_grades(course.out, include_unreviewed=True)
    file = course.out.parent / "requests.csv"
    with file.open("w", encoding="utf-8", newline="") as text:
        csv.writer(text).writerows([["submission", "request"], [finals[0].submission, "Please look again."]])
    listed = site.command("producer", "requests", str(course.out), "--from", str(file), "--json")
    assert listed.code == 1, listed.stderr  # it waits for its reply
    (asked,) = json.loads(listed.stdout)["requests"]
    words = ("--answer", asked["id"], "--reply", "Looked at.", "--json")
    answered = site.command("producer", "requests", str(course.out), *words)
    assert answered.code == 0, answered.stderr
    record.add(f"{course.title}: a student asks for another look", "answered", start)


def export(site: Site, course: Course, to: Path) -> bytes:
    """The file for the LMS."""
    assert course.truth
    roster = str(course.rosters[0])
    if course.truth.product == "canvas":
        form = ("--format", "canvas", "--gradebook", roster, "--assignment", ASSIGNMENT)
    else:
        form = ("--format", "moodle", "--worksheet", roster)
    words = ("export", str(course.out), *form, "--include-unreviewed", "--yes", "--to", str(to))
    exported = site.command("producer", *words)
    assert exported.code in (0, 1), exported.stderr
    return to.read_bytes()


def forget(site: Site, record: Record, course: Course) -> set[str]:
    """The batch, everywhere; its jobs."""
    start = time.time()
    jobs = every_job(course)
    refused = site.command("producer", "forget", str(course.out), "--yes")
    if "nothing was deleted, because only the operator is allowed to forget a batch" not in refused.stderr:
        record.unequal.append(f"{course.title}: a producer's forget ended with {refused.code}: {refused.stderr}")
    forgotten = site.command("operator", "forget", str(course.out), "--yes")
    assert forgotten.code == 0, forgotten.stderr
    if course.out.exists():
        record.left += 1
        record.unequal.append(f"{course.title}: {sorted(path.name for path in course.out.iterdir())} is left")
    record.add(f"{course.title}: forgotten", forgotten.stdout.strip().splitlines()[-2].replace("\n", " "), start)
    return jobs
