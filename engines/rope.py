"""RoPE as an engine computes it, to hold two engines to each other before a KV cache goes between them. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Relative. Through a file's float32 and a power in float32 a frequency is off by up to 2e-6, and through a GPU's fast
# sine by ten times that; YaRN's ramp, truncated or not, moves frequencies by percents, and any other choice by more.
TOLERANCE = 1e-4
# Of what names a family, where no tolerance is possible: no two configurations of one model differ by less in every
# frequency, and two engines' roundings fall on different sides of one in some thousand of models, which is refused.
_NAMED_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Rope:
    """What one kind of layer does to its keys: pair i is turned by `frequencies[i]` radians at each position."""

    frequencies: tuple[float, ...]
    scale: float = 1.0  # of the rotated numbers: YaRN's attention factor (mscale)
    base: float = 0.0  # as stated, to say what differs; 0: measured, not stated

    def __str__(self) -> str:
        pairs = len(self.frequencies)
        slowest = self.frequencies[-1] / self.base ** (1 / pairs - 1) if self.base else 1.0
        digits = " ".join(f"{number:.{_NAMED_DIGITS - 1}e}" for number in (*self.frequencies, self.scale))
        name = hashlib.blake2b(digits.encode(), digest_size=4).hexdigest()
        return f"RoPE base {self.base:.4g}, {pairs} pairs, scaling {slowest:.3g} x {self.scale:.4g}, {name}"


def ropes_text(ropes: Sequence[Rope]) -> str:
    """For people, and for comparing where only text can be kept: a registration, a family's name. "" for none."""
    return " and ".join(dict.fromkeys(map(str, ropes)))


def difference(one: Sequence[Rope], other: Sequence[Rope]) -> str:
    """What differs, such as "RoPE base 10,000 and 500,000"; "": nothing beyond rounding, or one is not known."""
    if not one or not other:
        return ""
    if len(one) != len(other):
        return f"RoPE of {len(one)} and {len(other)} kinds of layers"
    return next((found for pair in zip(one, other, strict=True) if (found := _difference(*pair))), "")


def _difference(one: Rope, other: Rope) -> str:
    if len(one.frequencies) != len(other.frequencies):
        return f"RoPE of {len(one.frequencies)} and {len(other.frequencies)} pairs of each key"
    apart = [abs(a / b - 1) for a, b in zip(one.frequencies, other.frequencies, strict=True)]
    most = apart.index(max(apart))
    if (
        apart[most] > TOLERANCE
        and one.base
        and other.base
        and not math.isclose(one.base, other.base, rel_tol=TOLERANCE)
    ):
        return f"RoPE base {one.base:,.0f} and {other.base:,.0f}"
    if apart[most] > TOLERANCE:
        turns = f"{one.frequencies[most]:.4g} and {other.frequencies[most]:.4g} radians a position"
        return f"RoPE scaling: pair {most + 1} of {len(apart)} is turned by {turns}"
    if not math.isclose(one.scale, other.scale, rel_tol=TOLERANCE):
        return f"RoPE scaling: an attention factor of {one.scale:.5g} and {other.scale:.5g}"
    return ""


def plain(base: float, dimensions: int) -> list[float]:
    """Frequencies without any scaling: base^(-2i/d) (Su et al., RoFormer, arXiv 2104.09864, 3.2.2)."""
    return [base ** (-2 * pair / dimensions) for pair in range(dimensions // 2)]


def yarn(frequencies: Sequence[float], factor: float, low: float, high: float) -> list[float]:
    """Pairs to `low` as they are, from `high` on slowed by `factor`, a ramp between (YaRN, arXiv 2309.00071, 3.2)."""
    width = high - low or 0.001
    slowed = [min(1.0, max(0.0, (pair - low) / width)) for pair in range(len(frequencies))]
    return [f * (1 - part) + f / factor * part for f, part in zip(frequencies, slowed, strict=True)]


def yarn_bound(rotations: float, dimensions: int, base: float, original: float) -> float:
    """The pair that turns so many times in the `original` context (YaRN, arXiv 2309.00071, 3.2)."""
    return dimensions * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))
