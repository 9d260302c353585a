"""How findings put figures into words: the same forms everywhere."""

from __future__ import annotations

import math


def percent(ratio: float) -> str:
    """0.97 -> "97 %", 0.0031 -> "0.31 %"; 0.9996 -> "over 99.9 %": never rounded up to a whole that it is not."""
    value = 100 * ratio
    if 99.5 <= value < 100:
        return f"{math.floor(10 * value) / 10} %" if value < 99.9 else "over 99.9 %"
    return f"{value:.0f} %" if value >= 10 or value == 0 else f"{value:.2g} %"


def times(log2: float) -> str:
    """A power of two as a factor: 3.0 -> "8 times", 18.9 -> "490,000 times"."""
    return factor(2.0 ** abs(log2))


def factor(value: float) -> str:
    """A factor to two digits: "1.4 times", "4,700 times", "7e+06 times"."""
    if value >= 1e7:
        return f"{value:.1e} times"
    if value >= 10:
        return f"{float(f'{value:.2g}'):,.0f} times"
    return f"{value:.2g} times"


def period(first: int | None, last: int | None, end: int | None) -> str:
    """When something was so: "since step 120", "on step 150", "from step 120 to 180".

    Args:
        first, last: first and last sampled step on which it was so.
        end: last sampled step of all; something that lasts until then is still going on.
    """
    if first is None:
        return "throughout"
    if last == first and first != end:
        return f"on step {first}"
    if last is None or (end is not None and last >= end):
        return f"since step {first}"
    return f"from step {first} to {last}"


def listed(names: list[str], at_most: int = 3) -> str:
    """ "a", "a and b", "a, b, c and 4 more"."""
    if len(names) > at_most + 1:
        return f"{', '.join(names[:at_most])} and {len(names) - at_most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
