import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.submissions.reading import Submission, SubmissionPart
from grading.submissions.truncation import Cut, Limits, count_parts, truncate

MARKER = re.compile(r"\[… ([\d,]+) tokens(?: in [\d,]+ parts)? left out here …\]")


def words(text):
    return len(text.split())


def output(tokens, where="cell 1, output"):
    return SubmissionPart("output", " ".join(f"w{i}" for i in range(tokens)), where)


def submission(*parts):
    return Submission("a.ipynb", "R", parts)


class Counter:
    """Counts words, and the characters it was asked to count."""

    def __init__(self):
        self.calls = 0
        self.characters = 0

    def __call__(self, text):
        self.calls += 1
        self.characters += len(text)
        return words(text)


def test_what_fits_is_returned_unchanged():
    given_one = submission(
        output(4000), SubmissionPart("code", "x " * 12_000, "cell 2"), SubmissionPart("text", "y " * 6000, "cell 3")
    )

    result, cuts = truncate(given_one, Limits(part_tokens=4000), words)

    assert result is given_one
    assert cuts == ()


def test_a_long_output_keeps_its_beginning_and_end_around_a_marker():
    result, cuts = truncate(submission(output(5412)), Limits(), words)

    text = result.parts[0].text
    match = MARKER.search(text)
    assert text.startswith("w0 w1 ")
    assert text.endswith(" w5410 w5411")
    assert text[: match.start()].endswith("\n")
    assert text[match.end() :].startswith("\n")
    assert 0.8 * 2000 <= words(text) <= 2000
    assert cuts == (Cut("cell 1, output", "output", 5412 - cuts[0].dropped_tokens, cuts[0].dropped_tokens),)
    assert int(match[1].replace(",", "")) == cuts[0].dropped_tokens
    assert words(MARKER.sub("", text)) == cuts[0].kept_tokens


def test_small_parts_survive_and_giants_are_cut_first():
    sizes = [10, 3000, 50, 2500, 700, 1]
    result, cuts = truncate(submission(*(output(size, f"o{size}") for size in sizes)), Limits(), words)

    kept = [words(part.text) for part in result.parts]
    assert [kept[i] for i in (0, 2, 4, 5)] == [10, 50, 700, 1]
    assert abs(kept[1] - kept[3]) <= 0.2 * kept[1]
    assert sum(kept) <= 4000
    assert [cut.where for cut in cuts] == ["o3000", "o2500"]


def test_code_and_text_are_cut_only_past_their_own_budget_and_outputs_are_reported_first():
    parts = [SubmissionPart("code", "x " * 500, "c"), SubmissionPart("text", "y " * 300, "t"), output(900, "o")]

    result, cuts = truncate(submission(*parts), Limits(code_tokens=400, text_tokens=300, output_tokens=100), words)

    assert [(cut.where, cut.kind) for cut in cuts] == [("o", "output"), ("c", "code")]
    assert result.parts[1] == parts[1]
    counts = count_parts(result, words)
    assert counts["code"] <= 400
    assert counts["output"] <= 100


def test_of_far_too_many_outputs_the_first_and_last_stay_and_one_line_stands_for_the_rest():
    result, cuts = truncate(submission(*(output(20, f"o{i}") for i in range(1000))), Limits(output_tokens=500), words)

    shown = [part.location for part in result.parts]
    assert shown[0] == "o0"
    assert shown[-1] == "o999"
    markers = [part for part in result.parts if MARKER.fullmatch(part.text)]
    assert len(markers) == 1
    assert sum(words(part.text) for part in result.parts) <= 500
    assert len(cuts) == 1000 - len(result.parts) + 1
    assert sum(cut.dropped_tokens for cut in cuts) == int(MARKER.fullmatch(markers[0].text)[1].replace(",", ""))


def test_a_budget_of_nothing_leaves_one_line_that_says_so():
    result, cuts = truncate(submission(output(30, "a"), output(5, "b")), Limits(output_tokens=0), words)

    assert [part.text for part in result.parts] == ["[… 35 tokens in 2 parts left out here …]"]
    assert [(cut.where, cut.kept_tokens, cut.dropped_tokens) for cut in cuts] == [("a", 0, 30), ("b", 0, 5)]


def test_cuts_are_made_at_line_ends_where_one_is_near():
    lines = [f"line {i} of this very long output" for i in range(2000)]

    result, _ = truncate(submission(SubmissionPart("output", "\n".join(lines), "o")), Limits(), words)

    head, tail = MARKER.sub("|", result.parts[0].text).split("\n|\n")
    assert set(head.split("\n") + tail.split("\n")) <= set(lines)


def test_an_output_of_600_000_characters_is_tokenized_once():
    count = Counter()
    text = "1 2 3 4 5 6\n" * 50_000

    result, cuts = truncate(submission(SubmissionPart("output", text, "o")), Limits(), count)

    assert cuts[0].kept_tokens + cuts[0].dropped_tokens == 300_000
    assert words(result.parts[0].text) <= 2000
    assert count.calls <= 12
    assert count.characters <= len(text) + 50_000


def test_a_text_with_all_its_tokens_in_the_middle_is_not_tokenized_over_and_over():
    count = Counter()
    text = "x" * 300_000 + " a" * 300_000 + "x" * 300_000

    truncate(submission(SubmissionPart("output", text, "o")), Limits(), count)

    assert count.characters <= 2 * len(text)


@pytest.mark.parametrize(
    "text",
    [
        "a " * 3000 + "x" * 100_000,
        "x" * 100_000 + " a" * 3000,
        "x" * 50_000 + " a" * 3000 + " " + "x" * 50_000,
        "a " * 1500 + "x" * 100_000 + " a" * 1500,
    ],
)
def test_tokens_that_sit_unevenly_in_the_text_stay_within_the_limit(text):
    result, cuts = truncate(submission(SubmissionPart("output", text, "o")), Limits(), words)

    assert words(result.parts[0].text) <= 2000
    assert cuts


PARTS = st.lists(
    st.builds(
        SubmissionPart,
        st.sampled_from(["code", "text", "output"]),
        st.text("ab \n", max_size=400),
        st.sampled_from(["cell 1", "cell 2"]),
    ),
    max_size=12,
)
BUDGET = st.integers(0, 400)


@given(
    parts=PARTS,
    limits=st.builds(Limits, BUDGET, BUDGET, BUDGET, BUDGET),
    count=st.sampled_from([words, len, lambda text: -(-len(text) // 3), lambda text: words(text) + 1]),
)
def test_limits_hold_nothing_is_silent_and_twice_is_the_same(parts, limits, count):
    one = submission(*parts)

    result, cuts = truncate(one, limits, count)

    before, after = count_parts(one, count), count_parts(result, count)
    slack = count("\n[… 99,999 tokens in 12 parts left out here …]\n")  # one marker, where the budget is below it
    for kind in ("code", "text", "output"):
        budget = limits.of(kind)
        assert after[kind] <= max(budget, slack)
        longest = max((count(part.text) for part in parts if part.kind == kind), default=0)
        over = before[kind] > budget or (kind == "output" and longest > limits.part_tokens)
        assert any(cut.kind == kind for cut in cuts) == over
    assert all(cut.dropped_tokens > 0 and cut.kept_tokens >= 0 for cut in cuts)
    assert [part for part in result.parts if MARKER.search(part.text) is None and part not in parts] == []
    assert truncate(one, limits, count) == (result, cuts)
