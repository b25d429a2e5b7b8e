"""Maps of documents: dots in a square, with the number of each cluster in the middle of
its documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gristmill.flows.pages.page_elements import DotMap, MapPoint
from gristmill.flows.pages.pictures import COLOURS

SIDE, MARGIN = 600, 24
"""Units of the drawing."""


@dataclass(frozen=True)
class Domain:
    """A cluster of documents about one subject, and the middle of them on the map."""

    domain: int
    name: str
    documents: int
    x: float = 0.0
    y: float = 0.0


def draw_map(
    points: Sequence[tuple[float, float, int]],
    domains: Sequence[Domain],
    caption: str,
    link: Callable[[int], str] = lambda domain: "",
) -> DotMap:
    """Draw points in a square as wide as the larger of their two ranges.

    Args:
        points: x, y and domain of documents; y grows upwards.
        domains: those without documents have no label.
        caption: of the picture.
        link: address for a domain.
    """
    xs, ys = ([point[axis] for point in points] or [0.0] for axis in (0, 1))
    scale = (SIDE - 2 * MARGIN) / (max(max(xs) - min(xs), max(ys) - min(ys)) or 1.0)
    middle_x, middle_y = (min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - middle_x) * scale, (y - middle_y) * scale
        return round(SIDE / 2 + across, 1), round(SIDE / 2 - up, 1)

    dots = [MapPoint(*place(x, y), series_of(domain)) for x, y, domain in points]
    labels = [
        MapPoint(
            *place(domain.x, domain.y),
            series_of(domain.domain),
            str(domain.domain),
            f"{domain.name}: {domain.documents:,} documents",
            link(domain.domain),
        )
        for domain in domains
        if domain.documents
    ]
    return DotMap(dots, labels, caption)


def series_of(domain: int) -> int:
    """The number of a domain's colour."""
    return domain % len(COLOURS)
