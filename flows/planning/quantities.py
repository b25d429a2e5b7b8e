"""Short forms of counts, sizes and times in plans."""

from __future__ import annotations

LETTERS = {21: "Z", 18: "E", 15: "P", 12: "T", 9: "B", 6: "M", 3: "k"}
"""Power of ten -> its letter."""


def quantity(value: float) -> str:
    """Format three digits with a letter for the thousands: 1.23B."""
    for power, letter in LETTERS.items():
        # 999.5 has three digits as 1000.
        if abs(value) >= 0.9995 * 10**power:
            return f"{value / 10**power:.3g}{letter}"
    return f"{value:.3g}"


def size(value: float) -> str:
    """Format bytes with three digits and a unit: 1.55 GB."""
    number = quantity(value).replace("B", "G")
    if not number[-1].isalpha():
        return f"{number} B"
    return f"{number[:-1]} {number[-1]}B"


def duration(hours: float) -> str:
    """Format hours as days, hours, minutes or seconds."""
    if hours >= 48:
        return f"{hours / 24:.1f} d"
    for unit, factor in (("h", 1), ("min", 60), ("s", 3600)):
        if hours * factor >= 1:
            return f"{hours * factor:.1f} {unit}"
    return "< 1 s"


def at_least(value: float) -> str:
    """Format a number with two decimals, or as `less than` the smallest one that they
    show.
    """
    return "less than 0.01" if 0 < value < 0.01 else f"{value:,.2f}"


def counted(number: int, noun: str) -> str:
    """Format a count: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
