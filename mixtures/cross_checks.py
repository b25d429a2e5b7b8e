"""What contradicts itself between the sections of a manifest that is not valid yet: where, and a sentence.

Names that refer to nothing, and sections or keys whose input no other section gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from gristmill.mixtures.mix import Location, Mix, mix_problems, weighed_sources
from gristmill.mixtures.objectives.rl_tools import written_tool
from gristmill.mixtures.objectives.span_objectives import SENTINEL, BlankInfilling, SpanCorruption, Spans, Ul2, lacking
from gristmill.mixtures.objectives.token_objectives import MASK_TOKENS
from gristmill.mixtures.steps.examples import made_problems
from gristmill.mixtures.yaml_text import did_you_mean

EMPTY_SECTIONS = ("tokenizer", "text_index", "evaluate", "export")
"""Sections whose key alone asks for their defaults."""
NEED_THE_DECODER = ("sft", "reward", "dpo", "rl", "export")
"""Sections that ask the built-in decoder for more than logits."""
NEED_A_WRITER = ("sft", "reward", "dpo", "rl")
"""Sections that ask a model to write."""
ASK_A_WRITER = ("prompts", "tasks", "suites", "memorisation", "contamination", "red_team")
"""Keys of `evaluate` that do."""
ENCODERS = {
    "masked": "encoder, which fills in masked tokens and cannot write",
    "span_corruption": "encoder-decoder, which fills in hidden spans and cannot write",
    "ul2": "encoder-decoder, which fills in hidden spans and cannot write",
}
"""Objectives of `pretrain` -> what they train that does not write."""
NEED_ITS_LAYERS = {"parallel": ("tensor", "pipeline", "context"), "compute": ("compile", "activation_checkpointing")}
"""Keys of `engine` that do, by its sections."""
MEASURE_LANGUAGES = {"langid", "annotate"}
"""Steps that may write the column `language`: `langid` always does."""
NEED_A_MODEL = ("sft", "reward", "dpo", "rl", "evaluate", "export")
"""Sections that begin with a model, or look at those that there are."""


def contradictions(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """What no single field can know."""
    yield from mix_problems(raw)
    sources = raw.get("sources")
    names = list(sources) if isinstance(sources, dict) else []
    for location, name in _source_references(raw):
        if names and name not in names:
            hint = did_you_mean(str(name), map(str, names))
            yield location, f"no such source: {name!r}{hint} (sources: {', '.join(map(str, names))})"
    yield from _absent_sections(raw)
    yield from _absent_inputs(raw)
    yield from _token_problems(raw)
    yield from _circles(raw)
    yield from made_problems(raw)
    reward = raw.get("reward")
    if isinstance(reward, dict) and not reward.get("data") and raw.get("dpo") is None:
        yield (
            ("reward",),
            (
                "has no pairs to learn from: give it `data:`, or the manifest a section `dpo:`, whose "
                "pairs it then takes"
            ),
        )
    yield from _reinforcement_problems(raw)
    yield from _own_model_problems(raw)
    yield from _encoder_problems(raw)
    yield from _prefix_problems(raw)
    yield from _span_problems(raw)
    for place in ((), ("sft",), ("dpo",)):
        yield from _language_problems(_inside(raw, *place).get("prepare"), (*place, "prepare"))


def _language_problems(steps: Any, at: Location) -> Iterator[tuple[Location, str]]:
    """Rules by language where nothing before has measured the language."""
    is_measured = False
    for index, step in enumerate(steps if isinstance(steps, list) else []):
        named = step if isinstance(step, dict) else {step: None}
        if not is_measured and _inside(named, "filter").get("by_language"):
            yield (
                (*at, index, "filter", "by_language"),
                (
                    "judges each document by the rules of its language, which no step before it measures; put `langid` "
                    "before this step"
                ),
            )
        is_measured = is_measured or bool(MEASURE_LANGUAGES & named.keys())


def _given(raw: Mapping[str, Any]) -> set[str]:
    """The sections that there are: nothing behind a key asks for the defaults of those that EMPTY_SECTIONS names, and
    switches any other off."""
    return {name for name, section in raw.items() if section is not None or name in EMPTY_SECTIONS}


def _absent_sections(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """Sections whose input no other section gives."""
    given = _given(raw)
    has_model = "model" in given
    if not has_model and not {"sources", "examples"} & given:
        yield (
            ("sources",),
            (
                "required but absent, unless a section `model:` gives a model to begin with, or "
                "`examples:` makes examples alone"
            ),
        )
    if "prepare" in given and has_model and "sources" not in given:
        yield ("prepare",), "needs a section `sources:` too, which is absent"
    if "mix" in given and "sources" not in given and has_model:
        yield ("mix",), "needs a section `sources:` too, which is absent"
    if "mix" in given and not {"tokenizer", "model"} & given:
        yield ("mix",), "needs a section `tokenizer:` too, which is absent"
    for name in ("text_index", "pretrain"):
        if name in given and "mix" not in given:
            yield (name,), "needs a section `mix:` too, which is absent"
    if "merge" in given and "pretrain" not in given:
        yield ("merge",), "merges checkpoints of `pretrain:`, which is absent"
    if "pretrain" in given and has_model:
        yield (
            ("model",),
            (
                "gives a model to begin with, and `pretrain:` makes one; to pre-train further, remove this "
                "and give its folder as pretrain.model.init_from"
            ),
        )
    for stage in NEED_A_MODEL:
        if stage in given and not {"pretrain", "model"} & given:
            yield (
                (stage,),
                (
                    "needs a model: a section `model: {path: FOLDER}` that gives one, or `pretrain:` that "
                    "makes one; both are absent"
                ),
            )


def _absent_inputs(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """Keys that ask about a mixture or a pre-training, where the manifest has none."""
    given = _given(raw)
    sections = {name: section for name in NEED_A_MODEL if isinstance(section := raw.get(name), dict)}
    sft, evaluate, rl = (sections.get(name, {}) for name in ("sft", "evaluate", "rl"))
    distill = sft.get("distill")
    of_pretrain = {
        ("sft", "replay"): sft.get("replay"),
        ("sft", "ewc"): sft.get("ewc"),
        ("sft", "distill", "teacher"): isinstance(distill, dict) and distill.get("teacher") == "pretrain",
        ("evaluate", "memorisation"): evaluate.get("memorisation") is not None,
        ("evaluate", "contamination"): evaluate.get("contamination") is not None,
        ("rl", "start_from"): rl.get("start_from") == "pretrain",
    }
    if "pretrain" not in given and "model" in given:
        for location, asks in of_pretrain.items():
            if asks:
                yield location, "asks for a pre-training of this manifest: it needs a section `pretrain:`, or remove it"
        if not {"sft", "dpo", "rl"} & given and sections.get("export", {}).get("weights") == "average":
            yield ("export", "weights"), "a model that is given has no running mean; set it to `raw`"
    if "merge" in given and not {"sft", "dpo", "rl"} & given and sections.get("export", {}).get("weights") == "average":
        yield ("export", "weights"), "a merged model has no running mean beside it; set it to `raw`, or remove `merge:`"
    if "mix" in given:
        return
    for name in ("sft", "dpo", "rl"):
        section = sections.get(name, {})
        measures_more = name == "sft" and section.get("holdout")
        if section.get("validate_every") is not None and not measures_more and "model" in given:
            yield (
                (name, "validate_every"),
                (
                    "measures the held-out rows of a mixture: it needs a section `mix:`"
                    + (", or `sft.holdout`" if name == "sft" else "")
                    + "; or remove it"
                ),
            )


def _token_problems(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """Sources of tokens that nothing reads, or that are asked for text."""
    given, sources = _given(raw), raw.get("sources")
    of_tokens = (
        [name for name, source in sources.items() if isinstance(source, dict) and "tokens" in source]
        if isinstance(sources, dict)
        else []
    )
    if not of_tokens:
        return
    if "mix" not in given:
        yield ("sources", of_tokens[0], "tokens"), "needs a section `mix:` too, which alone reads tokens"
    tokenizer = raw.get("tokenizer")
    has_path = isinstance(tokenizer, dict) and tokenizer.get("path") is not None
    if "mix" in given and not has_path and "model" not in given:
        yield (
            ("sources", of_tokens[0], "tokens"),
            (
                "was made with some tokenizer, which gives the ids their meaning: name its file as `tokenizer: {path: "
                "tokenizer.json}`"
            ),
        )
    if "prepare" in given and isinstance(sources, dict) and len(of_tokens) == len(sources):
        yield ("prepare",), "prepares documents, but all sources are of tokens; remove it, or add a source with `path:`"
    for location, name in _source_references(raw):
        if name in of_tokens and location[0] in ("prepare", "tokenizer"):
            yield location, f"{name!r} is a source of tokens, which have no text; name a source with `path:`"


def _reinforcement_problems(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """A start, or a reward model, that no other section makes."""
    section = raw.get("rl")
    if not isinstance(section, dict):
        return
    start = section.get("start_from", "auto")
    if start in ("merge", "sft", "dpo") and start not in raw:
        yield ("rl", "start_from"), f"needs a section `{start}:` too, which is absent; `auto` takes the last there is"
    rewards = section.get("rewards")
    for number, reward in enumerate(rewards if isinstance(rewards, list) else []):
        is_model = isinstance(reward, dict) and reward.get("kind") == "model"
        if is_model and not reward.get("path") and "reward" not in raw:
            yield ("rl", "rewards", number), "has no `path`, and there is no section `reward:` that makes such a model"
    tools = section.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else []):
        written = written_tool(tool)
        if (
            isinstance(written, dict)
            and written.get("kind") == "search"
            and not written.get("path")
            and ("sources" not in raw)
        ):
            yield ("rl", "tools", number), "has no `path`, and there is no section `sources:` whose documents it finds"


def _own_model_problems(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """What only the built-in decoder can do, where pre-training has a model of the user's."""
    model = _inside(raw, "pretrain", "model")
    if model.get("use") is None:
        return
    message = (
        "needs the built-in decoder, whose layers it knows by name, but pretrain.model.use names a model of "
        "your own; remove one of the two"
    )
    given = _given(raw)
    yield from (((stage,), message) for stage in NEED_THE_DECODER if stage in given)
    for part, keys in NEED_ITS_LAYERS.items():
        engine = _inside(raw, "engine", part)
        yield from ((("engine", part, key), message) for key in keys if engine.get(key) not in (None, 1, "off"))


def _encoder_problems(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """What an encoder cannot do, where pre-training makes one, and a mask token that no tokenizer has."""
    objective = next(
        (
            name
            for name in ENCODERS
            if _inside(raw, "pretrain").get(name) is not None and not (name == "ul2" and _is_joined(raw))
        ),
        None,
    )
    if objective is None:
        return
    given = _given(raw)
    asks: list[Location] = [(stage,) for stage in NEED_A_WRITER if stage in given]
    asks += [("evaluate", key) for key in ASK_A_WRITER if _inside(raw, "evaluate").get(key)]
    asks += [("export", key) for key in ("int8", "gguf") if _inside(raw, "export").get(key)]
    asks += [
        ("engine", "parallel", key)
        for key in NEED_ITS_LAYERS["parallel"]
        if _inside(raw, "engine", "parallel").get(key) not in (None, 1)
    ]
    yield from (
        (
            place,
            f"needs a model that predicts the next token, but pretrain.{objective} trains an "
            f"{ENCODERS[objective]}; remove one of the two",
        )
        for place in asks
    )
    if objective != "masked":
        return
    tokenizer = _inside(raw, "tokenizer")
    special = tokenizer.get("special_tokens")
    if tokenizer.get("path") is None and not set(MASK_TOKENS) & set(special if isinstance(special, list) else ()):
        yield (
            ("pretrain", "masked"),
            (f"needs a mask token: name it in tokenizer.special_tokens, such as {MASK_TOKENS[0]!r}"),
        )


def _prefix_problems(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """What knows no prefix that is read in both directions, or no further tokens, where pre-training has them."""
    split: list[Location] = [
        ("engine", "parallel", key)
        for key in NEED_ITS_LAYERS["parallel"]
        if _inside(raw, "engine", "parallel").get(key) not in (None, 1)
    ]
    if _inside(raw, "pretrain").get("multi_token") is not None:
        yield from (
            (place, "does not know the heads of pretrain.multi_token; use shard, or remove them") for place in split
        )
    reader = next(
        (name for name in ("prefix_lm", "ul2", "blank_infilling") if _inside(raw, "pretrain").get(name) is not None),
        None,
    )
    if reader is None or (reader == "ul2" and not _is_joined(raw)):
        return
    asks = [place for place in split if place[-1] != "context"]
    asks += [("export", "gguf")] if _inside(raw, "export").get("gguf") and not _given(raw) & {*NEED_A_WRITER} else []
    yield from (
        (
            place,
            f"lets each token see those before it alone, but pretrain.{reader} reads prefixes in both "
            "directions; remove one of the two",
        )
        for place in asks
    )


def _span_problems(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """Special tokens that hidden spans need, which a tokenizer that is learnt does not get."""
    tokenizer, length = (
        _inside(raw, "tokenizer"),
        _inside(raw, "mix").get("sequence_length", Mix.model_fields["sequence_length"].default),
    )
    named, count = tokenizer.get("special_tokens", []), tokenizer.get("sentinels", 0)
    if tokenizer.get("path") is not None or not (isinstance(named, list) and type(length) is type(count) is int):
        return
    names = {*map(str, named), *(SENTINEL.format(number) for number in range(count))}
    sections: dict[str, type[Spans]] = {
        "span_corruption": SpanCorruption,
        "ul2": Ul2,
        "blank_infilling": BlankInfilling,
    }
    for key, section in sections.items():
        given = _inside(raw, "pretrain").get(key)
        if given is None:
            continue
        try:
            problem = lacking(section.model_validate(given), length, names.__contains__)
        except ValidationError:
            return  # it is told of anyhow
        if problem is not None:
            yield ("pretrain", key), problem


def _is_joined(raw: Mapping[str, Any]) -> bool:
    """Whether UL2's denoisers train a decoder."""
    return _inside(raw, "pretrain", "ul2").get("shape") == "decoder"


def _inside(raw: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """A section inside another; empty where it is absent, or no mapping."""
    at: Any = raw
    for key in keys:
        at = at.get(key) if isinstance(at, Mapping) else None
    return at if isinstance(at, Mapping) else {}


def _source_references(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    steps = raw.get("prepare")
    for index, step in enumerate(steps if isinstance(steps, list) else []):
        for stage, config in step.items() if isinstance(step, dict) else ():
            if not isinstance(config, dict):
                continue
            at: Location = ("prepare", index, stage)
            classifier: Any = config.get("classifier")
            classifier = classifier if isinstance(classifier, dict) else {}
            own = config.get("rule_sources")
            of_sets = own.items() if isinstance(own, dict) else ()
            for place, names in (
                ((*at, "sources"), config.get("sources")),
                *(((*at, "rule_sources", rule_set), listed) for rule_set, listed in of_sets),
                ((*at, "classifier", "positive"), classifier.get("positive")),
                ((*at, "classifier", "negative"), classifier.get("negative")),
            ):
                for number, name in enumerate(names if isinstance(names, list) else []):
                    yield (*place, number), name
    tokenizer = raw.get("tokenizer")
    weights = tokenizer.get("weights") if isinstance(tokenizer, dict) else None
    for name in weights if isinstance(weights, dict) else ():
        yield ("tokenizer", "weights", name), name
    yield from (
        (("sources", name, "generate", "parents", number), parent)
        for name, parents in _parents(raw).items()
        for number, parent in enumerate(parents)
    )
    yield from weighed_sources(raw.get("mix"))


def _parents(raw: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Generated source -> the sources that it is made from."""
    sources = raw.get("sources")
    found = (
        {
            name: _inside(source, "generate").get("parents")
            for name, source in sources.items()
            if isinstance(source, dict)
        }
        if isinstance(sources, dict)
        else {}
    )
    return {name: parents for name, parents in found.items() if isinstance(parents, list)}


def _circles(raw: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """Generated sources that are made from each other."""
    waiting = _parents(raw)
    while ready := [name for name, parents in waiting.items() if not any(parent in waiting for parent in parents)]:
        waiting = {name: parents for name, parents in waiting.items() if name not in ready}
    for name in waiting:
        yield (
            ("sources", name, "generate", "parents"),
            (f"{', '.join(map(str, waiting))} are made from each other in a circle"),
        )
