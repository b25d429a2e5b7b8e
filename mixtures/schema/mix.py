"""The sections `mix`, for the tokens to train on, their shares and their packing, and
`text_index`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gristmill.mixtures.base import (
    Fraction,
    Location,
    NotNegative,
    OutsidePath,
    PartialShare,
    Positive,
    RawSection,
    RowLength,
    Section,
    Seeded,
    Share,
    entries,
    inside,
)
from gristmill.mixtures.schema.pretrain import Training

ALPHA = "alpha"
"""The key for shares by size."""
ROW_LENGTH = 512
"""Tokens per row unless a manifest sets them."""


def temperature(weights: Mapping[str, float]) -> float | None:
    """Return the exponent of shares by size; None if the weights are those of
    sources.
    """
    return weights[ALPHA] if list(weights) == [ALPHA] else None


def check_weights(weights: dict[str, float]) -> dict[str, float]:
    """Return the weights.

    Raises:
        ValueError: an exponent is above 1, or all weights are 0.
    """
    alpha = temperature(weights)
    if alpha is not None and alpha > 1:
        raise ValueError(
            "alpha must be between 0 (all sources equal) and 1 (in "
            f"proportion to size), not {alpha:g}"
        )
    if alpha is None and not any(weights.values()):
        raise ValueError(
            "every weight is 0, so the mixture is empty; give at least "
            "one source a weight"
        )
    return weights


Weights = Annotated[dict[str, NotNegative], AfterValidator(check_weights)]
"""Source -> share relative to the others', or `{alpha: exponent}`."""


class MixPhase(Section):
    """A part of the training order with its own weights."""

    end: Share | None = None
    """Share of the training set at which the phase ends; only the last phase has no
    `end` and ends with the set.
    """
    weights: Weights | None = None
    """Shares of tokens within this phase, as in `mix.weights`, which applies if absent.
    A source that is not named is not read in this phase.
    """


FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)
"""Special tokens for prefix, suffix and middle: those of Qwen2.5-Coder, of StarCoder,
of SantaCoder.
"""


class FillInMiddle(Section):
    """Rearranged documents from which a model learns to fill in a middle (Bavarian et
    al. 2022).

    Documents are rearranged before packing. The tokenizer needs three special tokens:
    `special_tokens: ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]`, or those
    of StarCoder or SantaCoder in an existing tokenizer. See docs/objectives.md.
    """

    rates: Annotated[dict[str, Fraction], Field(min_length=1)]
    """Source -> share of its documents that are rearranged (Bavarian et al. 2022 use
    0.5 and 0.9); documents of other sources and held-out documents are never
    rearranged. A document's id decides if it is rearranged; the positions of the cuts
    also depend on the pass over the source. Cuts are between tokens.
    """
    spm_rate: Fraction = 0.5
    """Share of the rearranged documents that become suffix-prefix-middle; the others
    become prefix-suffix-middle (Bavarian et al. 2022 train on half of each).
    """


class Mix(Seeded):
    """The packed training set."""

    added = ("fim",)

    tokens: Positive
    """Tokens of the training set's documents, rounded down to whole rows; padding does
    not count.
    """
    weights: Weights | None = None
    """Shares of tokens, relative to each other, instead of the sources' own `weight`: a
    source that is not named is not in the mixture. Or `{alpha: 0.7}`: shares in
    proportion to the number of tokens of a source, raised to that power (XLM-R, section
    3.1, and mT5, section 3.1: 0.7 and 0.3); 1 keeps the proportions, 0 makes all
    sources equal.
    """
    phases: tuple[MixPhase, ...] = ()
    """Other weights for consecutive parts of the training order, for example for
    annealing: `[{end: 0.8, weights: {...}}, {weights: {...}}]`. The limits on repeating
    a source hold for all phases together. A set with phases is read once: a training
    that needs more rows is an error.
    """
    on_shortfall: Literal["error", "redistribute"] = "error"
    """Reaction if a source's share is more than its `max_epochs` allow. `error` says by
    how much, and what would help; `redistribute` gives the source what its limit
    allows, divides the difference among the other sources by their weights, and warns.
    """
    sequence_length: RowLength = ROW_LENGTH
    """Tokens per row."""
    packing: Literal["stream", "best_fit"] = "stream"
    """`stream`: documents back to back, each with its end-of-text token, cut wherever a
    row ends. `best_fit`: documents of at most one row stay whole, longer ones are cut
    into whole rows and a remainder, and each piece goes into the fullest row that has
    room for it, longest first (best-fit-decreasing: Ding et al. 2024). Free space in
    rows is padding, which is never trained on and does not count as `tokens`. The
    summary shows how much was cut and padded. Held-out rows are always packed as
    `stream`, so that losses of different packings can be compared.
    """
    exclude: OutsidePath | None = None
    """A list of documents that must not be trained on, one id (32 hexadecimal digits)
    per line: every row that contains one of them is emptied and left out of the
    training order, and held-out rows with one of them are dropped. All other rows keep
    their place and contents, so that a training that has not read any of these
    documents resumes from its checkpoint (`pretrain.continue_from`). `gristmill
    takedown` writes such a list.
    """
    fim: FillInMiddle | None = None
    """Documents that are rearranged for fill-in-the-middle; not used if absent."""
    validation: PartialShare = 0.005
    """Share of duplicate clusters held out of training, chosen by hash."""
    max_validation_rows: Positive = 1024
    """Largest number of rows per source in the validation set."""
    shard_rows: Positive | None = None
    """Rows per shard; if absent, as many as make about 64 MB."""
    seed: int | None = None
    """Seed of the hashes that choose documents; the manifest's if absent."""

    def _problems(self) -> Iterator[str]:
        ends = [phase.end for phase in self.phases]
        if not ends:
            return
        if any(end is None for end in ends[:-1]) or ends[-1] not in (None, 1.0):
            yield (
                "every phase but the last needs `end`, and the last ends with the "
                "set: [{end: 0.8, "
                "weights: ...}, {weights: ...}]"
            )
        inner = [end for end in ends[:-1] if end is not None]
        if inner != sorted(set(inner)) or inner[-1:] == [1.0]:
            yield (
                f"the phases end at {inner} of the training set; each must end after "
                "the one before it, and before 1"
            )


class TextIndex(Section):
    """An index of the training rows, with which `gristmill trace MANIFEST --text FILE`
    finds passages of a text in them, and their documents. It takes up to six bytes per
    token, or eleven with more than 2^32 tokens.
    """

    shortest_span: Annotated[int, Field(ge=4, le=64)] = 8
    """Tokens of the shortest passage that can be found; every passage of this length or
    more is found.
    """


def weight_maps(mix: Any) -> Iterator[tuple[Location, Any]]:
    """Yield every place of a raw section that may have weights, with its value: the
    mixture's, and each phase's.
    """
    if isinstance(mix, Mapping):
        yield ("mix", "weights"), mix.get("weights")
        for number, phase in enumerate(entries(mix, "phases")):
            if isinstance(phase, Mapping):
                yield ("mix", "phases", number, "weights"), phase.get("weights")


def uses_own_weights(mix: Any) -> bool:
    """Return True if the sources' own `weight` counts in some part of the mixture."""
    overall, *phases = [weights for _, weights in weight_maps(mix)] or [None]
    return overall is None and (not phases or None in phases)


def weighed_sources(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield every name that `weights` or the rates of `fim` mention, with its location;
    a lone `alpha` is not a source.
    """
    for location, weights in weight_maps(raw.get("mix")):
        if list(inside(weights)) != [ALPHA]:
            for name in inside(weights):
                yield (*location, name), name
    for name in inside(raw, "mix", "fim", "rates"):
        yield ("mix", "fim", "rates", name), name


def mix_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield mistakes that no single key shows: a location and a sentence."""
    mix, sources = raw.get("mix"), raw.get("sources")
    if mix is None or not isinstance(sources, Mapping):
        return
    weights_of_sources = [
        inside(source).get("weight", 1) for source in sources.values()
    ]
    if sources and uses_own_weights(mix) and not any(weights_of_sources):
        yield (
            ("sources",),
            "every weight is 0, so the mixture is empty; give at least one source a "
            "weight",
        )
    for location, weights in weight_maps(mix):
        if list(inside(weights)) == [ALPHA] and ALPHA in sources:
            yield (
                (*location, ALPHA),
                "is the exponent of shares by size, but also the name of a source; "
                "rename the source, or give a second source a weight (0 is allowed)",
            )
    tokens = inside(mix).get("tokens")
    length = inside(mix).get("sequence_length", ROW_LENGTH)
    if isinstance(tokens, int) and isinstance(length, int) and length > tokens > 0:
        yield (
            ("mix", "sequence_length"),
            f"a row of {length} tokens is longer than all {tokens} tokens of "
            "the mixture; use shorter rows, or more tokens (mix.tokens)",
        )
    tokenizer = inside(raw, "tokenizer")
    special_tokens = {*map(str, entries(tokenizer, "special_tokens"))}
    if (
        inside(mix).get("fim")
        and tokenizer.get("path") is None
        and not any(special_tokens.issuperset(names) for names in FIM_TOKENS)
    ):
        listed = ", ".join(f'"{name}"' for name in FIM_TOKENS[0])
        yield (
            ("mix", "fim"),
            "needs special tokens for prefix, suffix and middle, which the tokenizer "
            f"does not have; add `tokenizer: {{special_tokens: [{listed}]}}`",
        )
    yield from _reads_of_a_set_with_phases(inside(mix), inside(raw, "pretrain"))
    of_training, of_mix = (
        len(entries(inside(raw, name), "phases")) for name in ("pretrain", "mix")
    )
    if of_training not in (0, of_mix):
        yield (
            ("pretrain", "phases"),
            f"has {of_training} entries, but mix.phases has {of_mix}: give one for "
            "each of them, {} where nothing differs",
        )


def _reads_of_a_set_with_phases(
    mix: RawSection, pretrain: RawSection
) -> Iterator[tuple[Location, str]]:
    # Otherwise the number of rows, or of rows read, is only known when the set exists.
    is_known = mix.get("packing", "stream") == "stream" and not pretrain.get(
        "batch_ramp"
    )
    if not pretrain or not is_known or not mix.get("phases"):
        return
    batch_default = Training.model_fields["global_batch_size"].default
    numbers = [
        mix.get("tokens"),
        mix.get("sequence_length", ROW_LENGTH),
        pretrain.get("steps"),
        pretrain.get("global_batch_size", batch_default),
    ]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return
    tokens, length, steps, batch = numbers
    if steps * batch > tokens // length:
        yield (
            ("pretrain", "steps"),
            f"{steps} steps of {batch} rows read {steps * batch} rows, but the set "
            f"with phases has {tokens // length} and is read once; take at most "
            f"{tokens // length // batch} steps, or mix at least "
            f"{steps * batch * length} tokens (mix.tokens)",
        )
