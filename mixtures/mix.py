"""The section `mix`: which tokens are trained on, in which shares, and how they are packed; `text_index` of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from gristmill.mixtures.base import Fraction, OutsidePath, Positive, Section, Seeded
from gristmill.mixtures.training import Training

ALPHA = "alpha"
"""The key that asks for shares by size."""


def temperature(weights: Mapping[str, float]) -> float | None:
    """The exponent of shares by size; None where the weights are of sources."""
    return weights[ALPHA] if list(weights) == [ALPHA] else None


def _mean_something(weights: dict[str, float]) -> dict[str, float]:
    alpha = temperature(weights)
    if alpha is not None and alpha > 1:
        raise ValueError(f"alpha lies between 0 (all sources equal) and 1 (as large as they are), not at {alpha:g}")
    if alpha is None and not any(weights.values()):
        raise ValueError("every weight is 0, so the mixture is empty; give at least one source a weight")
    return weights


Weights = Annotated[dict[str, Annotated[float, Field(ge=0.0)]], AfterValidator(_mean_something)]
"""Source -> share relative to the others', or `{alpha: exponent}`."""


class MixPhase(Section):
    """A part of the training order with weights of its own."""

    end: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the training set at which it ends; only the last phase has none, and ends with the set."""
    weights: Weights | None = None
    """Shares of tokens within this phase, as in `mix.weights`, which hold if absent. A source that is not named has no
    part in it."""


class Continues(Section):
    """The training set whose first rows have been read, when a mixture is changed on the way. `gristmill continue`
    writes it. See docs/phases.md."""

    rows: Positive
    """How many rows of that set, in the order of its training, begin this one. They count as part of `mix.tokens`."""
    sources: tuple[str, ...]
    """Its sources, in its order; there may be others now."""
    phases: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    """The rows that each source had in it, for every phase (`train.stages` of its packed.json)."""
    seed: int
    """Seed of the training that read it."""
    fingerprint: str
    """What its rows held; a checkpoint of its training has the same."""
    digest: str
    """Of the rows that are kept. Other documents or settings than those of that set give other rows: an error."""
    withheld: tuple[int, ...] = ()
    """Its rows that had been emptied (`mix.exclude`)."""
    exclude: OutsidePath | None = None
    """Like `mix.exclude`, but for the rows behind the kept ones alone: documents that are read no more."""
    continues: Continues | None = None
    """The set that it had continued itself."""

    @model_validator(mode="after")
    def _is_a_beginning(self) -> Continues:
        total = sum(map(sum, self.phases))
        if any(len(rows) != len(self.sources) for rows in self.phases) or not 0 < self.rows <= total:
            raise ValueError(
                f"keeps {self.rows} rows of a set with {total} in phases {self.phases} of the sources "
                f"{', '.join(self.sources)}, which is no beginning of it; let `gristmill continue` write "
                "this section"
            )
        return self


FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)
"""Special tokens for prefix, suffix and middle: those of Qwen2.5-Coder, of StarCoder, of SantaCoder."""


class FillInMiddle(Section):
    """Documents rearranged, before they are packed, so that a model learns to fill in a middle (Bavarian et al. 2022).

    The tokenizer needs three special tokens: `special_tokens: ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]`,
    or those of StarCoder or SantaCoder in a given one. See docs/objectives.md."""

    rates: Annotated[dict[str, Fraction], Field(min_length=1)]
    """Source -> share of its documents that are rearranged (Bavarian et al. 2022 use 0.5 and 0.9); those of a source
    that is not named stay as they are, and so do all held-out ones. Which they are depends on their ids, where they are
    cut also on the pass over the source. Cuts are between tokens."""
    spm_rate: Fraction = 0.5
    """Share of these that become suffix-prefix-middle; the others become prefix-suffix-middle (Bavarian et al. 2022
    train on half of each)."""


class Mix(Seeded):
    """The packed training set."""

    added = ("fim", "continues")

    tokens: Positive
    """Tokens of the training set's documents, rounded down to whole rows; padding does not count."""
    weights: Weights | None = None
    """Shares of tokens, relative to each other, instead of the sources' own `weight`: a source that is not named has
    no part in the mixture. Or `{alpha: 0.7}`: shares in proportion to the tokens that a source has, to that power
    (XLM-R, section 3.1, and mT5, section 3.1: 0.7 and 0.3); 1 leaves the proportions as they are, 0 makes all equal."""
    phases: tuple[MixPhase, ...] = ()
    """Other weights for parts of the training order, one after another, as annealing wants them:
    `[{end: 0.8, weights: {...}}, {weights: {...}}]`. A document is repeated no more than its source allows over all
    phases together. A set with phases is read once: asking for more rows in a training is an error."""
    on_shortfall: Literal["error", "redistribute"] = "error"
    """What happens where a source's share is more than its `max_epochs` or `max_tokens` allow, or less than its
    `min_tokens`. `error` says by how much and what would help; `redistribute` gives the source what its limit says and
    lets the others have the difference, by their weights, and warns of it."""
    sequence_length: Annotated[int, Field(ge=8)] = 512
    """Tokens per row."""
    packing: Literal["stream", "best_fit"] = "stream"
    """`stream`: documents back to back, each with its end-of-text token, cut wherever a row ends. `best_fit`: documents
    of at most a row stay whole, longer ones are cut into whole rows and a rest, and each part goes into the fullest row
    that has room for it, longest first (best-fit-decreasing: Ding et al. 2024); what rows have left over is padding,
    which is never trained on, and comes on top of `tokens`. The summary says what each packing would cut and pad.
    Held-out rows are always packed as `stream`, so that losses of different packings can be compared."""
    document_starts: Literal["any", "aligned"] = "any"
    """`aligned`: every row begins with a document's first token, and what does not fit into the row that a document
    begins in is dropped (as nanochat's loader crops), which the summary counts; `max_epochs` counts it as read."""
    exclude: OutsidePath | None = None
    """A list of documents that must not be trained on, an id (32 hexadecimal digits) a line: every row that holds any
    of them is emptied and left out of the training order, and held-out rows with any of them are dropped. All other
    rows stay what and where they are, so that a training which has read none of these resumes from its checkpoint
    (`pretrain.continue_from`). `gristmill takedown` makes such a list."""
    fim: FillInMiddle | None = None
    """Documents that are rearranged for filling in the middle; none if absent."""
    continues: Continues | None = None
    """The set that was read before the mixture was changed, whose first rows begin this one; none if absent. `weights`
    and `phases` hold for what comes behind them. A source goes on where it was: no row of it is read twice, and
    `max_epochs` counts what was read."""
    validation: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.005
    """Share of duplicate clusters held out of training, chosen by hash."""
    max_validation_rows: Positive = 1024
    """Rows per source of the validation set at the most."""
    shard_rows: Positive | None = None
    """Rows per shard; about 64 MB a shard if absent."""
    seed: int | None = None
    """Seed of the hashes that choose documents; the manifest's if absent."""

    @model_validator(mode="after")
    def _rows_are_those_of_the_stream(self) -> Mix:
        if self.continues is not None and self.packing == "best_fit":
            raise ValueError(
                "continues needs packing: stream, where a row does not depend on how many there are; "
                "those of best_fit do"
            )
        return self

    @model_validator(mode="after")
    def _phases_follow_one_another(self) -> Mix:
        ends = [phase.end for phase in self.phases]
        if not ends:
            return self
        if any(end is None for end in ends[:-1]) or ends[-1] not in (None, 1.0):
            raise ValueError(
                "every phase but the last needs `end`, and the last ends with the set: [{end: 0.8, "
                "weights: ...}, {weights: ...}]"
            )
        inner = [end for end in ends[:-1] if end is not None]
        if inner != sorted(set(inner)) or inner[-1:] == [1.0]:
            raise ValueError(
                f"the phases end at {inner} of the training set; each must end after the one before it, and before 1"
            )
        return self


class TextIndex(Section):
    """An index of the training rows, by which `gristmill trace MANIFEST --text FILE` finds the passages of a text in
    them, with their documents. It takes up to six bytes per token, and eleven where there are more than 2^32 tokens."""

    shortest_span: Annotated[int, Field(ge=4, le=64)] = 8
    """Tokens of the shortest passage that is found; every one of so many tokens or more is."""


Location = tuple[str | int, ...]


def weight_maps(mix: Any) -> Iterator[tuple[Location, Any]]:
    """Every place of a raw section where weights may be given, with what is there: the mixture's, each phase's."""
    if not isinstance(mix, Mapping):
        return
    yield ("mix", "weights"), mix.get("weights")
    phases = mix.get("phases")
    for number, phase in enumerate(phases if isinstance(phases, list | tuple) else []):
        if isinstance(phase, Mapping):
            yield ("mix", "phases", number, "weights"), phase.get("weights")


def uses_own_weights(mix: Any) -> bool:
    """Whether the sources' own `weight` counts in some part of the mixture."""
    overall, *phases = [weights for _, weights in weight_maps(mix)] or [None]
    return overall is None and (not phases or any(weights is None for weights in phases))


def weighed_sources(mix: Any) -> Iterator[tuple[Location, str]]:
    """Every name that weights, or rates of `fim`, are given to, and where; `alpha` alone is not a source."""
    for location, weights in weight_maps(mix):
        if isinstance(weights, Mapping) and list(weights) != [ALPHA]:
            for name in weights:
                yield (*location, name), name
    fim = mix.get("fim") if isinstance(mix, Mapping) else None
    rates = fim.get("rates") if isinstance(fim, Mapping) else None
    for name in rates if isinstance(rates, Mapping) else ():
        yield ("mix", "fim", "rates", name), name


def mix_problems(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """Mistakes that no single key shows: where, and a sentence."""
    mix, sources = raw.get("mix"), raw.get("sources")
    if mix is None or not isinstance(sources, Mapping):
        return
    own = [source.get("weight", 1) if isinstance(source, Mapping) else 1 for source in sources.values()]
    if own and uses_own_weights(mix) and not any(own):
        yield ("sources",), "every weight is 0, so the mixture is empty; give at least one source a weight"
    for location, weights in weight_maps(mix):
        if isinstance(weights, Mapping) and list(weights) == [ALPHA] and ALPHA in sources:
            yield (
                (*location, ALPHA),
                (
                    "is the exponent of shares by size, and also a source's name; rename the "
                    "source, or give a second source a weight (0 is one)"
                ),
            )
    if isinstance(mix, Mapping):
        tokens, length = mix.get("tokens"), mix.get("sequence_length", Mix.model_fields["sequence_length"].default)
        if isinstance(tokens, int) and isinstance(length, int) and length > tokens > 0:
            yield (
                ("mix", "sequence_length"),
                (
                    f"a row of {length} tokens is longer than all {tokens} that the mixture is to have; give shorter rows, "
                    "or more tokens (mix.tokens)"
                ),
            )
        yield from _fim_tokens_missing(mix.get("fim"), raw.get("tokenizer"))
        continued = mix.get("continues")
        before = continued.get("sources") if isinstance(continued, Mapping) else None
        gone = [str(name) for name in before if name not in sources] if isinstance(before, list | tuple) else []
        if gone:
            yield (
                ("mix", "continues", "sources"),
                (
                    f"the set that is continued has rows of {', '.join(gone)}, which is no source now; give it again, with "
                    "a weight of 0 where it is no longer read"
                ),
            )
    yield from _reads_of_a_set_with_phases(mix, raw.get("pretrain"))
    yield from _phases_that_differ(mix, raw.get("pretrain"))


def _phases_that_differ(mix: Any, pretrain: Any) -> Iterator[tuple[Location, str]]:
    """Phases of the training that are not those of the mixture."""
    told, mixed = (section.get("phases") or () if isinstance(section, Mapping) else () for section in (pretrain, mix))
    if told and isinstance(told, list | tuple) and isinstance(mixed, list | tuple) and len(told) != len(mixed):
        yield (
            ("pretrain", "phases"),
            (
                f"has {len(told)} entries, but mix.phases has {len(mixed)}: give one for each of them, {{}} where nothing "
                "differs"
            ),
        )


def _fim_tokens_missing(fim: Any, tokenizer: Any) -> Iterator[tuple[Location, str]]:
    """A tokenizer that is trained here, without the tokens that rearranged documents need."""
    given = tokenizer if isinstance(tokenizer, Mapping) else {}
    named = given.get("special_tokens", ())
    if not fim or given.get("path") is not None or not isinstance(named, list | tuple):
        return
    if not any(set(names) <= {str(name) for name in named} for names in FIM_TOKENS):
        listed = ", ".join(f'"{name}"' for name in FIM_TOKENS[0])
        yield (
            ("mix", "fim"),
            (
                "needs special tokens for prefix, suffix and middle, which the tokenizer does not have; "
                f"add `tokenizer: {{special_tokens: [{listed}]}}`"
            ),
        )


def _reads_of_a_set_with_phases(mix: Any, pretrain: Any) -> Iterator[tuple[Location, str]]:
    if not isinstance(mix, Mapping) or not isinstance(pretrain, Mapping):
        return
    if not mix.get("phases") and not mix.get("continues"):
        return
    if mix.get("packing", "stream") != "stream" or pretrain.get("batch_ramp"):
        return  # How many rows there are, or are read, is only known when the set is.
    defaults = {**Mix.model_fields, **Training.model_fields}
    numbers = [
        section.get(key, defaults[key].default)
        for section, key in (
            (mix, "tokens"),
            (mix, "sequence_length"),
            (pretrain, "steps"),
            (pretrain, "global_batch_size"),
        )
    ]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return
    tokens, length, steps, batch = numbers
    if steps * batch > tokens // length:
        yield (
            ("pretrain", "steps"),
            (
                f"{steps} steps of {batch} rows read {steps * batch} rows, but the set with phases has {tokens // length}, "
                f"and is read once; take at most {tokens // length // batch} steps, or mix at least "
                f"{steps * batch * length} tokens (mix.tokens)"
            ),
        )
