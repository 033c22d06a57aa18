"""The lifecycle table: complete, and it leads somewhere."""

from messages.lifecycle import Step
from tests.support.lifecycle import TABLE, Position


def test_every_position_has_its_row_and_every_step_its_use():
    assert set(TABLE) == set(Position)
    assert {step for row in TABLE.values() for step in row} == set(Step)


def test_every_position_can_still_reach_the_journal():
    reaching = {Position.JOURNALED}
    while True:
        more = {position for position, row in TABLE.items() if reaching & set(row.values())} - reaching
        if not more:
            break
        reaching |= more
    assert reaching == set(Position)


def test_the_undisturbed_life_is_legal():
    position = Position.NEW
    for step in (
        Step.SUBMITTED,
        Step.PREFILL_STARTED,
        Step.KV_STORED,
        Step.PASSED_ON,
        Step.DECODE_STARTED,
        Step.FIRST_TOKEN,
        Step.ANSWERED,
        Step.REPLIED,
        Step.JOURNALED,
    ):
        position = TABLE[position][step]
    assert position is Position.JOURNALED
