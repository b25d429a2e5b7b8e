"""The page of domains: a map of what documents are about, and how many there are of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.flows.browse.addresses import DOCUMENTS, OneStage, Search, address
from gristmill.flows.browse.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.report.pictures import COLOURS

DOMAINS_PAGE = "domains"
SIDE, MARGIN = 600, 24
"""Of the map, in units of its drawing."""


def steps_with_domains(run: BrowsedRun) -> list[str]:
    """The committed steps that have sorted documents by what they are about."""
    steps = run.columns(DOCUMENTS).steps if DOCUMENTS in run.corpora() else []
    return [step for step in steps if run.summary(step).get("domains")]


def domains_page(run: BrowsedRun, asked: OneStage) -> dict[str, Any]:
    """The map of a step, and its domains with links to their documents."""
    steps = steps_with_domains(run)
    if asked.stage not in steps:
        raise NotThereError(
            f"{asked.stage} has sorted no documents by what they are about; steps that have are "
            f"{', '.join(steps) or 'none'}"
        )
    summary, corpus = run.summary(asked.stage), run.columns(DOCUMENTS)
    column = next(name for name, place in corpus.measured.items() if place == (asked.stage, "domain"))
    total = sum(one["documents"] for one in summary["domains"]) or 1
    domains = [
        {
            **one,
            "share": one["documents"] / total,
            "colour": one["domain"] % len(COLOURS),
            "link": Search(where=f"{column} = {one['domain']}").link(),
        }
        for one in summary["domains"]
    ]
    return {
        "step": asked.stage,
        "side": SIDE,
        "others": [(step, address(DOMAINS_PAGE, step)) for step in steps],
        "sample": summary["sample"],
        **draw_map(summary["map"], domains),
    }


def draw_map(
    points: Sequence[tuple[float, float, int]], domains: Sequence[Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Places of dots and of domains in a square of SIDE, as wide as the dots lie apart in the wider direction.

    Args:
        points: x, y and domain of documents; y grows upwards.
        domains: with `x`, `y` and `documents`.
    """
    ends = [(min(values), max(values)) for values in zip(*((x, y) for x, y, _ in points), strict=True)] or [(0, 0)] * 2
    reach = max(high - low for low, high in ends) or 1.0
    middles = [(low + high) / 2 for low, high in ends]

    def at(x: float, y: float) -> dict[str, float]:
        across, up = (
            (value - middle) / reach * (SIDE - 2 * MARGIN) for value, middle in zip((x, y), middles, strict=True)
        )
        return {"at_x": round(SIDE / 2 + across, 1), "at_y": round(SIDE / 2 - up, 1)}

    return {
        "dots": [{**at(x, y), "colour": domain % len(COLOURS)} for x, y, domain in points],
        "domains": [{**one, **at(one["x"], one["y"])} for one in domains],
    }
