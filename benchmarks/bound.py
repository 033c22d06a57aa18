"""How often a promise of `kvasir bound` holds, over simulated classes whose truth is known.

Each class comes from one of several worlds: its size, how doubt and error go together, and how often a grade is off by
more than the tolerance. Classes are exchangeable: the sample is drawn uniformly from the class that the promise is
about. Nothing of the product is left out but files and people: `uniform_sample`, `releases` with the corrected
confidence, and `best_release`. Half of the classes have the default's one threshold, half have three.

    coverage         of all classes, those in which no promise was broken: the worst of worlds, sample sizes and wishes.
                     A promise is broken if more of the unseen grades are off than it says. Wanted: 0.90 or more
    released_share   by sample size, the median share of the class that the default promise (at most 20%, one
                     threshold) lets go unseen in the middle world, in which 3% are off where there is no doubt;
                     0: nothing is promised. A rule that never promises has 0
    rows             for each world, wish and sample size: the share of classes in which anything is promised, and of
                     those with a broken promise
    warned           of classes whose later part is shifted (more doubts, fewer points), those in which the comparison
                     with the part that was drawn from says so; the promise isn't about such a part

Where a world's true share lies just above what is wished for, a promise is rare, and one that is made is likely broken.
What is bounded is how often that happens over all classes, as with every confidence bound. Real graders' errors are not
known to look like these worlds'.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import harness
from grading.error_bound import (
    CONFIDENCE,
    SIGNIFICANCE_LEVEL,
    SIZES,
    Release,
    SamplingUnit,
    best_release,
    bonferroni_confidence,
    releases,
    same_distribution_p,
    uniform_sample,
)

CLASSES, QUICK_CLASSES = 1000, 60  # of each world and sample size
WISHES = (0.1, 0.2)
_ROW = "{world:26} at most {at_most:.0%}, {sample:2}: promised {promised:.3f}, broken {broken:.3f}"
THRESHOLDS = ((0.0,), (0.0, 1.0, 2.0))


@dataclass(frozen=True, slots=True)
class ErrorRates:
    """How many grades are off, by how many reasons for doubt there are: 0, 1, 2, 3."""

    name: str
    off: tuple[float, float, float, float]
    doubts: tuple[float, float, float, float] = (0.7, 0.15, 0.1, 0.05)
    sizes: tuple[int, int] = (60, 400)


MIDDLE = ErrorRates("3% off without doubt", (0.03, 0.2, 0.4, 0.5))
WORLDS = (
    ErrorRates("hardly any off", (0.005, 0.05, 0.1, 0.2)),
    MIDDLE,
    ErrorRates("just above what is wanted", (0.12, 0.12, 0.12, 0.12)),
    ErrorRates("doubt says nothing", (0.06, 0.06, 0.06, 0.06)),
    ErrorRates("most off", (0.4, 0.6, 0.8, 0.9)),
    ErrorRates("small classes", (0.08, 0.2, 0.4, 0.5), sizes=(20, 60)),
)


def one_class(
    world: ErrorRates, sample: int, thresholds: Sequence[float], wish: float, draw: random.Random
) -> tuple[bool, float]:
    """(whether a promise was broken, the share of the class that a promise lets go unseen)."""
    size = draw.randint(*world.sizes)
    doubts = draw.choices(range(4), world.doubts, k=size)
    truth = [draw.random() < world.off[doubt] for doubt in doubts]
    ids = [f"{number:04d}" for number in range(size)]
    seen = set(uniform_sample(ids, sample, str(draw.random())))
    units = [
        SamplingUnit(doubt, off if id in seen else None) for id, doubt, off in zip(ids, doubts, truth, strict=True)
    ]
    found = releases(units, thresholds, bonferroni_confidence(CONFIDENCE, len(thresholds)))
    choice = best_release(found, wish)
    if choice is None:
        return False, 0.0
    unseen = [off for id, doubt, off in zip(ids, doubts, truth, strict=True) if _unseen(choice, id, doubt, seen)]
    return sum(unseen) / len(unseen) > choice.at_most, len(unseen) / size


def _unseen(choice: Release, id: str, doubt: int, seen: set[str]) -> bool:
    return doubt <= choice.threshold and id not in seen


def warned(classes: int, draw: random.Random) -> float:
    """Of shifted second parts of 60 submissions, the share in which one of the two comparisons sees a difference."""
    found = 0
    for _ in range(classes):
        doubts = [draw.choices(range(4), MIDDLE.doubts, k=60), draw.choices(range(4), (0.3, 0.3, 0.2, 0.2), k=60)]
        points = [[draw.betavariate(6, 2) for _ in range(60)], [draw.betavariate(3, 3) for _ in range(60)]]
        found += any(same_distribution_p(now, before) < SIGNIFICANCE_LEVEL / 2 for before, now in (doubts, points))
    return found / classes


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = harness.options(__doc__, arguments)
    classes = QUICK_CLASSES if options.quick else CLASSES
    rows = []
    released: dict[int, float] = {}
    for world, wish, size in itertools.product(WORLDS, WISHES, SIZES):
        draw = random.Random(f"{options.seed} {world.name} {wish} {size}")
        made = [one_class(world, size, THRESHOLDS[number % 2], wish, draw) for number in range(classes)]
        rows.append(
            {
                "world": world.name,
                "at_most": wish,
                "sample": size,
                "promised": sum(share > 0 for _, share in made) / classes,
                "broken": sum(bad for bad, _ in made) / classes,
            }
        )
        print(_ROW.format(**rows[-1]), flush=True)
        if world is MIDDLE and wish == max(WISHES):
            released[size] = median(share for _, share in made[::2])
    harness.finish(
        coverage=1 - max(float(str(row["broken"])) for row in rows),
        released_share=released,
        rows=rows,
        warned=warned(classes, random.Random(options.seed)),
    )


if __name__ == "__main__":
    main()
