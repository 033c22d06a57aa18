"""RoPE as an engine computes it, to compare two engines before a KV cache is transferred between them. Pure
functions."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Relative tolerance for comparing frequencies. Rounding to float32 changes a frequency by up to 2e-6, and a GPU's fast
# sine by ten times that. Truncating YaRN's ramp changes frequencies by a few percent, and a difference in any other
# setting changes them by more.
TOLERANCE = 1e-4
# How many digits of each frequency are part of a family's name. Names are compared exactly, so there is no tolerance.
# With this many digits, two configurations of one model still differ in at least one frequency. However, for about one
# model in a thousand, two engines round a frequency differently, and the transfer is refused.
_NAMED_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Rope:
    """What one kind of layer does to its keys: pair i is rotated by `frequencies[i]` radians per position."""

    frequencies: tuple[float, ...]
    scale: float = 1.0  # factor by which the rotated numbers are multiplied: YaRN's attention factor (mscale)
    base: float = 0.0  # the base that the model states, for messages about a difference; 0 if no base is known

    def __str__(self) -> str:
        pairs = len(self.frequencies)
        slowest = self.frequencies[-1] / self.base ** (1 / pairs - 1) if self.base else 1.0
        digits = " ".join(f"{number:.{_NAMED_DIGITS - 1}e}" for number in (*self.frequencies, self.scale))
        name = hashlib.blake2b(digits.encode(), digest_size=4).hexdigest()
        return f"RoPE base {self.base:.4g}, {pairs} pairs, scaling {slowest:.3g} x {self.scale:.4g}, {name}"


def ropes_text(ropes: Sequence[Rope]) -> str:
    """RoPE as text, for people, and for comparisons where only text is stored: in a registration or a family's name. ""
    for none."""
    return " and ".join(dict.fromkeys(map(str, ropes)))


def difference(left: Sequence[Rope], right: Sequence[Rope]) -> str:
    """The difference, such as "RoPE base 10,000 and 500,000"; "" if there is none beyond rounding, or if one side is
    unknown."""
    if not left or not right:
        return ""
    if len(left) != len(right):
        return f"RoPE of {len(left)} and {len(right)} kinds of layers"
    return next((text for pair in zip(left, right, strict=True) if (text := _difference(*pair))), "")


def _difference(left: Rope, right: Rope) -> str:
    if len(left.frequencies) != len(right.frequencies):
        return f"RoPE of {len(left.frequencies)} and {len(right.frequencies)} pairs of each key"
    deviations = [abs(a / b - 1) for a, b in zip(left.frequencies, right.frequencies, strict=True)]
    worst = deviations.index(max(deviations))
    if (
        deviations[worst] > TOLERANCE
        and left.base
        and right.base
        and not math.isclose(left.base, right.base, rel_tol=TOLERANCE)
    ):
        return f"RoPE base {left.base:,.0f} and {right.base:,.0f}"
    if deviations[worst] > TOLERANCE:
        turns = f"{left.frequencies[worst]:.4g} and {right.frequencies[worst]:.4g} radians a position"
        return f"RoPE scaling: pair {worst + 1} of {len(deviations)} is turned by {turns}"
    if not math.isclose(left.scale, right.scale, rel_tol=TOLERANCE):
        return f"RoPE scaling: an attention factor of {left.scale:.5g} and {right.scale:.5g}"
    return ""


def plain(base: float, dimensions: int) -> list[float]:
    """Frequencies without scaling: base^(-2i/d) (Su et al., RoFormer, arXiv 2104.09864, 3.2.2)."""
    return [base ** (-2 * pair / dimensions) for pair in range(dimensions // 2)]


def yarn(
    frequencies: Sequence[float],
    factor: float,
    base: float,
    original: float,
    rotations: tuple[float, float],
    truncate: bool = True,
) -> list[float]:
    """Fast pairs unchanged, slow ones slowed by `factor`, and a ramp in between (YaRN, arXiv 2309.00071, 3.2).

    The two `rotations` are how often the pairs at the ramp's ends turn within the `original` context. With `truncate`
    the ramp starts and ends at whole pairs.
    """
    dimensions = 2 * len(frequencies)
    low, high = (dimensions * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in rotations)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    ramp = [min(1.0, max(0.0, (pair - low) / (high - low or 0.001))) for pair in range(len(frequencies))]
    return [f * (1 - part) + f / factor * part for f, part in zip(frequencies, ramp, strict=True)]
