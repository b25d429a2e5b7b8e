"""Settings of `gristmill ablate`: arms, budget of the proxies, and the rule that decides.

arms:
  no-dedup: {without: [dedup]}
  long: {where: "tokens >= 200"}
  strict: {set: {filter.gopher_quality.min_words: 100}}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from gristmill.mixtures.base import (
    InnerFraction,
    Name,
    NonEmpty,
    NotNegative,
    OutsidePath,
    PositiveFloat,
    Section,
    Several,
)
from gristmill.mixtures.scaling.size_rules import SIZE_PATTERN

REFERENCE = "reference"
"""Name of the manifest itself among the arms."""
Pool = Literal["equal_tokens", "equal_pool"]


class Arm(Section):
    """A variant of the manifest."""

    without: tuple[str, ...] = ()
    """Names of steps of `prepare`, of rule sets of a filter (`filter.fineweb`) and of
    sources to leave out.
    """
    where: str | None = None
    """SQL condition on documents, in addition to that of their source."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Replaced settings, as in `--set`: `{dedup.minhash.threshold: 0.8}`."""

    def _problems(self) -> Iterator[str]:
        if not self.changed_keys():
            yield "an arm differs from the manifest; give `without`, `where` or `set`"


class Decide(Section):
    """The rule that decides. It is stored before the first training, and a run with
    another rule says so.
    """

    confidence: InnerFraction = 0.95
    """Confidence of intervals, and of the decisions on all arms together (Holm
    1979).
    """
    smallest_difference: NotNegative = 0.002
    """Smallest difference in bits per byte that matters."""
    target: dict[str, NotNegative] = Field(default_factory=dict)
    """Share of each held-out source, or task of `pretrain.tasks`, in the measured mean,
    relative to each other; if absent, all sources have equal shares. A task counts by
    its error, as in sweeps.
    """


class Ablation(Section):
    """The file of `gristmill ablate --arms`."""

    arms: dict[Name, Arm] = Field(default_factory=dict)
    """Variants of the manifest, each compared with the manifest itself."""
    each_rule: bool = False
    """Also compare: no rule set of the filters, each one left out, each one alone."""
    held_out: InnerFraction | dict[Name, OutsidePath] = 0.05
    """Text that is measured. A number: this share of the documents of each source,
    chosen by hash before any step of `prepare`, so that no rule has judged them. Or
    name -> path of files with many documents, of which nine tenths are measured. No arm trains on these documents, nor on others that contain
    their passages (`decontaminate`).
    """
    sizes: NonEmpty[Annotated[str, Field(pattern=SIZE_PATTERN)]] = ("1m",)
    """Sizes of the proxies, as in `pretrain.size`; the largest decides. Rankings of 150M
    models decide about 80 % of pairs as 1B models do (DataDecide: Magnusson et al.
    2025).
    """
    tokens_per_parameter: PositiveFloat = 20.0
    """Training tokens per weight of a proxy's layers."""
    seeds: Several = 5
    """Seeds of each arm. A seed has the same initialisation, order and draw of
    documents in all arms.
    """
    rates: Annotated[dict[Name, PositiveFloat], Field(min_length=1)] = Field(
        default_factory=lambda: {"tuned": 1.0, "tiny": 0.01}
    )
    """Name -> factor of the learning rate that the size determines; an arm counts as
    better or worse only if it is at all of them. Rankings flip with the rate, and
    those at very small rates (1e-5 and less for 125M weights) agree with those of large
    models with tuned rates (Wang et al. 2025).
    """
    pools: NonEmpty[Pool] = ("equal_tokens",)
    """`equal_tokens`: every arm may choose its tokens from all documents, and repeats
    them only if it has too few. `equal_pool`: the documents are limited so that the
    arm that keeps most reads each once, and stricter arms repeat theirs (with enough
    compute no filter beats the raw pool: arXiv 2605.19407).
    """
    pretrain: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the proxies' section `pretrain`, such as `tasks`."""
    decide: Decide = Decide()
    """The rule that decides."""

    def _problems(self) -> Iterator[str]:
        if REFERENCE in self.arms:
            yield f"arms: {REFERENCE} is the manifest itself; choose another name"


def quick(settings: Ablation) -> Ablation:
    """Return the smallest budget that shows an ablation at work: minutes for some
    arms.
    """
    return settings.model_copy(
        update={
            "sizes": ("50k",),
            "tokens_per_parameter": 5.0,
            "seeds": 3,
            "rates": {"tuned": 1.0},
            "pools": ("equal_tokens",),
        }
    )
