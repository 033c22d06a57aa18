"""Random classes as the LMSs hand them out: nobody's name in a prompt, and nobody without the grade that is theirs."""

from benchmarks.doors import try_class


def test_a_few_random_classes_keep_names_in_and_leave_nobody_out() -> None:
    findings = [try_class(seed) for seed in range(25)]

    assert [finding for finding in findings if finding.leaked_names or finding.blank_members or finding.refusal] == []
    assert [finding for finding in findings if finding.questions and not finding.is_ambiguous] == []
