"""What contradicts itself between the section `mix` and the sections around it, in a manifest that is not valid yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gristmill.mixtures.mix import ALPHA, Mix
from gristmill.mixtures.training import Training

Location = tuple[str | int, ...]


def weight_maps(mix: Any) -> Iterator[tuple[Location, Any]]:
    """Every place of a raw section where weights may be given, with what is there: the mixture's, each stage's."""
    if not isinstance(mix, Mapping):
        return
    yield ("mix", "weights"), mix.get("weights")
    stages = mix.get("stages")
    for number, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, Mapping):
            yield ("mix", "stages", number, "weights"), stage.get("weights")


def uses_own_weights(mix: Any) -> bool:
    """Whether the sources' own `weight` counts in some part of the mixture."""
    overall, *stages = [weights for _, weights in weight_maps(mix)] or [None]
    return overall is None and (not stages or any(weights is None for weights in stages))


def weighed_sources(mix: Any) -> Iterator[tuple[Location, str]]:
    """Every name that weights are given to, and where; `alpha` alone is no source."""
    for location, weights in weight_maps(mix):
        if isinstance(weights, Mapping) and list(weights) != [ALPHA]:
            for name in weights:
                yield (*location, name), name


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
            yield (*location, ALPHA), ("is the exponent of shares by size, and also a source's name; rename the "
                                       "source, or give a second source a weight (0 is one)")
    if isinstance(mix, Mapping):
        tokens, length = mix.get("tokens"), mix.get("sequence_length", Mix.model_fields["sequence_length"].default)
        if isinstance(tokens, int) and isinstance(length, int) and length > tokens > 0:
            yield ("mix", "sequence_length"), (
                f"a row of {length} tokens is longer than all {tokens} that the mixture is to have; give shorter rows, "
                "or more tokens (mix.tokens)")
    yield from _reads_of_a_staged_set(mix, raw.get("pretrain"))


def _reads_of_a_staged_set(mix: Any, pretrain: Any) -> Iterator[tuple[Location, str]]:
    if not isinstance(mix, Mapping) or not mix.get("stages") or not isinstance(pretrain, Mapping):
        return
    if mix.get("packing", "stream") != "stream" or pretrain.get("batch_ramp"):
        return  # How many rows there are, or are read, is only known when the set is.
    defaults = {**Mix.model_fields, **Training.model_fields}
    numbers = [section.get(key, defaults[key].default) for section, key in (
        (mix, "tokens"), (mix, "sequence_length"), (pretrain, "steps"), (pretrain, "global_batch_size"))]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return
    tokens, length, steps, batch = numbers
    if steps * batch > tokens // length:
        yield ("pretrain", "steps"), (
            f"{steps} steps of {batch} rows read {steps * batch} rows, but the staged set has {tokens // length}, and "
            f"is read once; take at most {tokens // length // batch} steps, or mix at least "
            f"{steps * batch * length} tokens (mix.tokens)")
