"""Requests to models and their yield, as summaries list them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired

from typing_extensions import TypedDict


class RequestCounts(TypedDict):
    """Requests to a model and their costs, for the summary.

    Attributes:
        asked: requests to the endpoint.
        kept: answers from the store.
        money: cost, if the model has prices.
    """

    model: str
    asked: int
    kept: int
    retried: int
    repaired: int
    unusable: int
    prompt_tokens: int
    answer_tokens: int
    money: NotRequired[float]


@dataclass(frozen=True)
class GeneratedSource:
    """Yield of a generated source.

    Attributes:
        style: of its prompt, or the template.
        made_from: names of the parents' sources.
        parents: number of parents that the preparing steps kept.
        eligible: of these, within its share.
        used: of these, within its limit.
        requests: number of new documents that were requested.
        kept, dropped, quarantined: new documents by outcome.
        bytes: of the kept ones.
        asked: requests and costs; empty if all documents were written before.
    """

    style: str
    made_from: Sequence[str]
    parents: int
    eligible: int
    used: int
    requests: int
    kept: int
    dropped: Mapping[str, int]
    quarantined: int
    bytes: int
    asked: RequestCounts | dict[str, int]
