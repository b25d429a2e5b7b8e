"""The page of one document: its text before and after edits, what each step said of it, and who has read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.dataprep.corpus import url_of
from gristmill.flows.browse.addresses import DOCUMENTS, OneDocument, Search, address
from gristmill.flows.browse.browsed_run import BrowsedRun
from gristmill.flows.browse.cluster_pages import CLUSTERS_PAGE, address_of, steps_with_clusters
from gristmill.flows.browse.cut_pages import link_of_cut
from gristmill.flows.browse.row_pages import EXAMPLES_PAGE, ROWS_PAGE, TRAINING_PAGE
from gristmill.flows.questions.explain import NOT_DRAWN, history, is_idle_rule
from gristmill.flows.stages.registry import MIX, PRETRAIN

MOST_CHARACTERS = 30_000
"""Of a text that is not wanted whole."""
MOST_LINKS = 60
"""Of rows and steps."""
BEFORE_STEP = ": "
"""Stands in a history between the stage that prepared an example and its step."""
IDS = ("cluster", "duplicate_of")


def document_page(run: BrowsedRun, asked: OneDocument) -> dict[str, Any]:
    """A document's history, with its text as it was read and as it is now.

    Raises:
        gristmill.flows.questions.find_documents.DocumentNotFoundError: none, or more than one, fits.
    """
    found = history(run.session, asked.id, with_text=True)
    corpus = next((judged["stage"].rpartition(BEFORE_STEP)[0] for judged in found["stages"]), "") or DOCUMENTS
    pieces, cut = cut_pieces(found["text"], None if asked.whole else MOST_CHARACTERS)
    return {
        **{key: found[key] for key in ("id", "source", "locator", "characters", "outcome", "shard", "row")},
        "url": url_of(found["locator"], found["metadata"]),
        "metadata": _metadata(found["metadata"]),
        "is_kept": found["outcome"] == "kept",
        "steps": [_step(run, corpus, found["id"], judged) for judged in found["stages"]],
        "pieces": pieces,
        "is_edited": any(piece["edit"] for piece in found["text"]),
        "whole": address(DOCUMENTS, found["id"], whole="true") if cut else None,
        "shown": MOST_CHARACTERS,
        "mix": _use(found[MIX], found["source"]) if MIX in found else None,
        "source_link": Search(corpus=corpus, source=found["source"]).link(),
        "example": None if corpus == DOCUMENTS or found["outcome"] != "kept" else address(EXAMPLES_PAGE, found["id"]),
    }


def cut_pieces(pieces: Sequence[Mapping[str, Any]], most: int | None) -> tuple[list[Mapping[str, Any]], bool]:
    """The first characters of a text in pieces, and whether there are more."""
    left = most
    found: list[Mapping[str, Any]] = []
    for piece in pieces:
        if left is not None and len(piece["text"]) > left:
            return [*found, {**piece, "text": piece["text"][:left]}], True
        found.append(piece)
        left = None if left is None else left - len(piece["text"])
    return found, False


def _metadata(text: str | None) -> list[tuple[str, str]]:
    """What the input carried, by name; what is no object as it is."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = text
    if not isinstance(found, dict):
        return [("", str(found))] if found else []
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in found.items()
    ]


def _step(run: BrowsedRun, corpus: str, document: str, judged: Mapping[str, Any]) -> dict[str, Any]:
    """What a step said: its verdict, with links to its cut, its list and its cluster, and what it measured."""
    step = judged["stage"].rpartition(BEFORE_STEP)[2]
    values = judged["values"]
    clustered = values.get("cluster") and (values.get("duplicate_of") or (values.get("cluster_size") or 1) > 1)
    return {
        "step": step,
        "keep": judged["keep"],
        "reason": judged["reason"],
        "threshold": judged.get("threshold"),
        "error": judged.get("error"),
        "edits": judged.get("edits"),
        "cut": link_of_cut(run, step, judged["reason"]) if corpus == DOCUMENTS else None,
        "list": None if judged["keep"] else Search(corpus=corpus, step=step, reason=judged["reason"]).link(),
        "cluster": address(
            CLUSTERS_PAGE,
            step,
            values["cluster"],
            corpus=address_of(corpus),
            member=None if judged["keep"] else document,
        )
        if clustered and (corpus, step) in steps_with_clusters(run)
        else None,
        "duplicate_of": address(DOCUMENTS, values["duplicate_of"]) if values.get("duplicate_of") else None,
        "values": [
            (name, value) for name, value in values.items() if name not in IDS and not is_idle_rule(name, value)
        ],
    }


def _use(mix: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What the mixture made of it, with links to its rows and to the steps that read them."""
    return {
        "use": mix["use"],
        "reason": NOT_DRAWN.get(mix["reason"], mix["reason"]),
        "pieces": mix["pieces"],
        "tokens": mix["tokens"],
        "copies": mix["copies"],
        "number_of_rows": len(set(mix["rows"])),
        "rows": [
            (row, address(ROWS_PAGE, MIX, row, held_out=source if mix["use"] == "held out" else None))
            for row in sorted(set(mix["rows"]))[:MOST_LINKS]
        ],
        "number_of_steps": len(mix["steps"]),
        "steps": [(step, address(TRAINING_PAGE, PRETRAIN, step)) for step in mix["steps"][:MOST_LINKS]],
    }
