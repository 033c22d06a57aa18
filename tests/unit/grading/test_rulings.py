"""Whom a ruling may be about: those whose evidence shares a word with it that is not everybody's."""

from grading.rulings import may_affect

EVIDENCE = {
    "ann.R": "left_join(orders, customers)",
    "ben.R": "merge(orders, customers) # unnamed",
    "cat.R": "orders[customers$id, ]",
    "dan.R": "",
}


def test_a_submission_is_named_with_the_words_that_it_shares() -> None:
    found = may_affect(["Half the points if the JOIN is right but unnamed."], EVIDENCE)

    assert found == {"ann.R": ("join",), "ben.R": ("unnamed",)}


def test_a_word_of_most_evidence_tells_nobody_apart() -> None:
    assert may_affect(["Orders of no customers don't count."], EVIDENCE) == {}
    assert may_affect([], EVIDENCE) == {}
    assert may_affect(["Half the points."], {}) == {}
