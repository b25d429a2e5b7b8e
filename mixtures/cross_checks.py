"""Contradictions between the sections of a manifest that is not validated yet:
locations, and sentences.

They are references to missing names, and sections or keys whose input no other section
provides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from gristmill.mixtures.base import Location, RawSection, in_circles
from gristmill.mixtures.mix import Mix, mix_problems, weighed_sources
from gristmill.mixtures.objectives.rl_tools import written_tool
from gristmill.mixtures.objectives.span_objectives import (
    SENTINEL,
    BlankInfilling,
    SpanCorruption,
    Spans,
    Ul2,
    lacking,
)
from gristmill.mixtures.objectives.token_objectives import MASK_TOKENS
from gristmill.mixtures.steps.examples import made_problems
from gristmill.mixtures.yaml_text import did_you_mean

EMPTY_SECTIONS = ("tokenizer", "text_index", "evaluate", "export")
"""Sections for which an empty key enables the defaults."""
NEED_THE_DECODER = ("sft", "reward", "dpo", "rl", "export")
"""Sections that need more of the built-in decoder than logits."""
NEED_A_WRITER = ("sft", "reward", "dpo", "rl")
"""Sections that need a model that writes text."""
ASK_A_WRITER = (
    "prompts",
    "tasks",
    "suites",
    "memorisation",
    "contamination",
    "red_team",
)
"""Keys of `evaluate` that need such a model."""
ENCODERS = {
    "masked": "encoder, which fills in masked tokens and cannot write",
    "span_corruption": "encoder-decoder, which fills in hidden spans and cannot write",
    "ul2": "encoder-decoder, which fills in hidden spans and cannot write",
}
"""Objectives of `pretrain` -> the model that they train, which does not write text."""
NEED_ITS_LAYERS = {
    "parallel": ("tensor", "pipeline", "context"),
    "compute": ("compile", "activation_checkpointing"),
}
"""Keys of `engine` that need the built-in decoder's layers, by section."""
MEASURE_LANGUAGES = {"langid", "annotate"}
"""Steps that may write the column `language`; `langid` always does."""
NEED_A_MODEL = ("sft", "reward", "dpo", "rl", "evaluate", "export")
"""Sections that start from a model, or evaluate existing ones."""


def contradictions(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield contradictions that no single field can detect."""
    yield from mix_problems(raw)
    sources = raw.get("sources")
    names = list(sources) if isinstance(sources, dict) else []
    for location, name in _source_references(raw):
        if names and name not in names:
            hint = did_you_mean(str(name), map(str, names))
            yield (
                location,
                f"no such source: {name!r}{hint} (sources: "
                f"{', '.join(map(str, names))})",
            )
    yield from _absent_sections(raw)
    yield from _absent_inputs(raw)
    yield from _token_problems(raw)
    yield from _circles(raw)
    yield from made_problems(raw)
    reward = raw.get("reward")
    if isinstance(reward, dict) and not reward.get("data") and raw.get("dpo") is None:
        yield (
            ("reward",),
            "has no pairs to learn from: set its `data:`, or add a section `dpo:`, "
            "whose pairs it then uses",
        )
    yield from _reinforcement_problems(raw)
    yield from _own_model_problems(raw)
    yield from _encoder_problems(raw)
    yield from _prefix_problems(raw)
    yield from _span_problems(raw)
    for place in ((), ("sft",), ("dpo",)):
        yield from _language_problems(
            _inside(raw, *place).get("prepare"), (*place, "prepare")
        )


def _language_problems(steps: Any, at: Location) -> Iterator[tuple[Location, str]]:
    """Yield rules by language where no earlier step has measured the language."""
    is_measured = False
    for index, step in enumerate(steps if isinstance(steps, list) else []):
        stages = step if isinstance(step, dict) else {step: None}
        if not is_measured and _inside(stages, "filter").get("by_language"):
            yield (
                (*at, index, "filter", "by_language"),
                (
                    "judges each document by the rules of its language, which no "
                    "earlier step measures; put `langid` before this step"
                ),
            )
        is_measured = is_measured or bool(MEASURE_LANGUAGES & stages.keys())


def _given(raw: RawSection) -> set[str]:
    """Return the sections that are present.

    An empty key enables the defaults of a section in EMPTY_SECTIONS, and disables any
    other section.
    """
    return {
        name
        for name, section in raw.items()
        if section is not None or name in EMPTY_SECTIONS
    }


def _absent_sections(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield sections whose input no other section provides."""
    present = _given(raw)
    has_model = "model" in present
    if not has_model and not {"sources", "examples"} & present:
        yield (
            ("sources",),
            (
                "required but absent, unless a section `model:` gives a model to start "
                "from, or `examples:` makes only examples"
            ),
        )
    if "prepare" in present and has_model and "sources" not in present:
        yield ("prepare",), "needs a section `sources:` too, which is absent"
    if "mix" in present and "sources" not in present and has_model:
        yield ("mix",), "needs a section `sources:` too, which is absent"
    if "mix" in present and not {"tokenizer", "model"} & present:
        yield ("mix",), "needs a section `tokenizer:` too, which is absent"
    for name in ("text_index", "pretrain"):
        if name in present and "mix" not in present:
            yield (name,), "needs a section `mix:` too, which is absent"
    if "merge" in present and "pretrain" not in present:
        yield ("merge",), "merges checkpoints of `pretrain:`, which is absent"
    if "pretrain" in present and has_model:
        yield (
            ("model",),
            (
                "gives a model to start from, but `pretrain:` trains one; to "
                "continue pre-training, remove this "
                "and set its folder as pretrain.model.init_from"
            ),
        )
    for stage in NEED_A_MODEL:
        if stage in present and not {"pretrain", "model"} & present:
            yield (
                (stage,),
                (
                    "needs a model: a section `model: {path: FOLDER}` that gives "
                    "one, or `pretrain:` that "
                    "trains one; both are absent"
                ),
            )


def _absent_inputs(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield keys that refer to a mixture or a pre-training that the manifest does not
    have.
    """
    present = _given(raw)
    sections = {
        name: section
        for name in NEED_A_MODEL
        if isinstance(section := raw.get(name), dict)
    }
    sft, evaluate, rl = (sections.get(name, {}) for name in ("sft", "evaluate", "rl"))
    distill = sft.get("distill")
    needs_of_pretrain = {
        ("sft", "replay"): sft.get("replay"),
        ("sft", "ewc"): sft.get("ewc"),
        ("sft", "distill", "teacher"): isinstance(distill, dict)
        and distill.get("teacher") == "pretrain",
        ("evaluate", "memorisation"): evaluate.get("memorisation") is not None,
        ("evaluate", "contamination"): evaluate.get("contamination") is not None,
        ("rl", "start_from"): rl.get("start_from") == "pretrain",
    }
    if "pretrain" not in present and "model" in present:
        for location, is_set in needs_of_pretrain.items():
            if is_set:
                yield (
                    location,
                    "refers to a pre-training of this manifest: add a section "
                    "`pretrain:`, or remove it",
                )
        if (
            not {"sft", "dpo", "rl"} & present
            and sections.get("export", {}).get("weights") == "average"
        ):
            yield (
                ("export", "weights"),
                "a model that was trained elsewhere has no running mean; set it to "
                "`raw`",
            )
    if (
        "merge" in present
        and not {"sft", "dpo", "rl"} & present
        and sections.get("export", {}).get("weights") == "average"
    ):
        yield (
            ("export", "weights"),
            "a merged model has no running mean beside it; set it to `raw`, or "
            "remove `merge:`",
        )
    if "mix" in present:
        return
    for name in ("sft", "dpo", "rl"):
        section = sections.get(name, {})
        measures_more = name == "sft" and section.get("holdout")
        if (
            section.get("validate_every") is not None
            and not measures_more
            and "model" in present
        ):
            yield (
                (name, "validate_every"),
                (
                    "measures the held-out rows of a mixture: it needs a section `mix:`"
                    + (", or `sft.holdout`" if name == "sft" else "")
                    + "; or remove it"
                ),
            )


def _token_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield sources of tokens that nothing reads, or whose text is needed."""
    present = _given(raw)
    sources = raw.get("sources")
    of_tokens: list[Any] = []
    if isinstance(sources, dict):
        of_tokens = [
            name
            for name, source in sources.items()
            if isinstance(source, dict) and "tokens" in source
        ]
    if not of_tokens:
        return
    if "mix" not in present:
        yield (
            ("sources", of_tokens[0], "tokens"),
            "needs a section `mix:` too, since only that reads tokens",
        )
    tokenizer = raw.get("tokenizer")
    has_path = isinstance(tokenizer, dict) and tokenizer.get("path") is not None
    if "mix" in present and not has_path and "model" not in present:
        yield (
            ("sources", of_tokens[0], "tokens"),
            (
                "was encoded with a tokenizer, which gives the ids their meaning: "
                "name its file as `tokenizer: {path: "
                "tokenizer.json}`"
            ),
        )
    if (
        "prepare" in present
        and isinstance(sources, dict)
        and len(of_tokens) == len(sources)
    ):
        yield (
            ("prepare",),
            "prepares documents, but all sources are of tokens; remove it, or add a "
            "source with `path:`",
        )
    for location, name in _source_references(raw):
        if name in of_tokens and location[0] in ("prepare", "tokenizer"):
            yield (
                location,
                f"{name!r} is a source of tokens, which has no text; name a source "
                "with `path:`",
            )


def _reinforcement_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield a start, or a reward model, that no other section makes."""
    section = raw.get("rl")
    if not isinstance(section, dict):
        return
    start = section.get("start_from", "auto")
    if start in ("merge", "sft", "dpo") and start not in raw:
        yield (
            ("rl", "start_from"),
            f"needs a section `{start}:` too, which is absent; `auto` takes the last "
            "one that exists",
        )
    rewards = section.get("rewards")
    for number, reward in enumerate(rewards if isinstance(rewards, list) else []):
        is_model = isinstance(reward, dict) and reward.get("kind") == "model"
        if is_model and not reward.get("path") and "reward" not in raw:
            yield (
                ("rl", "rewards", number),
                "has no `path`, and there is no section `reward:` that trains such a "
                "model",
            )
    tools = section.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else []):
        written = written_tool(tool)
        is_search = (
            isinstance(written, dict)
            and written.get("kind") == "search"
            and not written.get("path")
        )
        if is_search and "sources" not in raw:
            yield (
                ("rl", "tools", number),
                "has no `path`, and there is no section `sources:` whose documents "
                "it finds",
            )


def _own_model_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield keys that need the built-in decoder, if pre-training has a model of the
    user's.
    """
    model = _inside(raw, "pretrain", "model")
    if model.get("use") is None:
        return
    message = (
        "needs the built-in decoder, whose layers it knows by name, but "
        "pretrain.model.use names a model of your own; remove one of the two"
    )
    present = _given(raw)
    for stage in NEED_THE_DECODER:
        if stage in present:
            yield (stage,), message
    for part, keys in NEED_ITS_LAYERS.items():
        engine = _inside(raw, "engine", part)
        yield from (
            (("engine", part, key), message)
            for key in keys
            if engine.get(key) not in (None, 1, "off")
        )


def _encoder_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield keys that an encoder cannot support, if pre-training trains one, and a
    missing mask token.
    """
    pretrain = _inside(raw, "pretrain")
    objectives = [name for name in ENCODERS if pretrain.get(name) is not None]
    if _is_joined(raw) and "ul2" in objectives:
        objectives.remove("ul2")
    objective = objectives[0] if objectives else None
    if objective is None:
        return
    present = _given(raw)
    conflicts: list[Location] = [
        (stage,) for stage in NEED_A_WRITER if stage in present
    ]
    conflicts += [
        ("evaluate", key) for key in ASK_A_WRITER if _inside(raw, "evaluate").get(key)
    ]
    conflicts += [
        ("export", key) for key in ("int8", "gguf") if _inside(raw, "export").get(key)
    ]
    conflicts += _split_keys(raw)
    for location in conflicts:
        yield (
            location,
            f"needs a model that predicts the next token, but pretrain.{objective} "
            f"trains an {ENCODERS[objective]}; remove one of the two",
        )
    if objective != "masked":
        return
    tokenizer = _inside(raw, "tokenizer")
    special = tokenizer.get("special_tokens")
    if tokenizer.get("path") is None and not set(MASK_TOKENS) & set(
        special if isinstance(special, list) else ()
    ):
        yield (
            ("pretrain", "masked"),
            "needs a mask token: name it in tokenizer.special_tokens, such as "
            f"{MASK_TOKENS[0]!r}",
        )


def _prefix_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield keys that do not support prefixes read in both directions, or further
    tokens, if pre-training has them.
    """
    split_keys = _split_keys(raw)
    pretrain = _inside(raw, "pretrain")
    if pretrain.get("multi_token") is not None:
        for location in split_keys:
            yield (
                location,
                "does not support the heads of pretrain.multi_token; use shard, or "
                "remove them",
            )
    reader = next(
        (
            name
            for name in ("prefix_lm", "ul2", "blank_infilling")
            if pretrain.get(name) is not None
        ),
        None,
    )
    if reader is None or (reader == "ul2" and not _is_joined(raw)):
        return
    conflicts = [location for location in split_keys if location[-1] != "context"]
    if _inside(raw, "export").get("gguf") and not _given(raw) & {*NEED_A_WRITER}:
        conflicts.append(("export", "gguf"))
    for location in conflicts:
        yield (
            location,
            f"lets each token see only those before it, but pretrain.{reader} reads "
            "prefixes in both directions; remove one of the two",
        )


def _split_keys(raw: RawSection) -> list[Location]:
    """Return the keys of `engine.parallel` that split the built-in decoder's layers."""
    parallel = _inside(raw, "engine", "parallel")
    return [
        ("engine", "parallel", key)
        for key in NEED_ITS_LAYERS["parallel"]
        if parallel.get(key) not in (None, 1)
    ]


def _span_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield missing special tokens for hidden spans, if the tokenizer is trained
    here.
    """
    tokenizer = _inside(raw, "tokenizer")
    length = _inside(raw, "mix").get(
        "sequence_length", Mix.model_fields["sequence_length"].default
    )
    special_tokens = tokenizer.get("special_tokens", [])
    count = tokenizer.get("sentinels", 0)
    if tokenizer.get("path") is not None or not (
        isinstance(special_tokens, list) and type(length) is type(count) is int
    ):
        return
    token_names = {
        *map(str, special_tokens),
        *(SENTINEL.format(number) for number in range(count)),
    }
    sections: dict[str, type[Spans]] = {
        "span_corruption": SpanCorruption,
        "ul2": Ul2,
        "blank_infilling": BlankInfilling,
    }
    for key, section in sections.items():
        settings = _inside(raw, "pretrain").get(key)
        if settings is None:
            continue
        try:
            problem = lacking(
                section.model_validate(settings), length, token_names.__contains__
            )
        except ValidationError:
            return  # the schema reports it
        if problem is not None:
            yield ("pretrain", key), problem


def _is_joined(raw: RawSection) -> bool:
    """Return True if UL2's denoisers train a decoder."""
    return _inside(raw, "pretrain", "ul2").get("shape") == "decoder"


def _inside(raw: RawSection, *keys: str) -> RawSection:
    """Return a section inside another; empty if it is absent or not a mapping."""
    section: Any = raw
    for key in keys:
        section = section.get(key) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _source_references(raw: RawSection) -> Iterator[tuple[Location, str]]:
    steps = raw.get("prepare")
    for index, step in enumerate(steps if isinstance(steps, list) else []):
        for stage, config in step.items() if isinstance(step, dict) else ():
            if not isinstance(config, dict):
                continue
            at: Location = ("prepare", index, stage)
            classifier: Any = config.get("classifier")
            classifier = classifier if isinstance(classifier, dict) else {}
            rule_sources = config.get("rule_sources")
            of_sets = rule_sources.items() if isinstance(rule_sources, dict) else ()
            for place, names in (
                ((*at, "sources"), config.get("sources")),
                *(
                    ((*at, "rule_sources", rule_set), source_names)
                    for rule_set, source_names in of_sets
                ),
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


def _parents(raw: RawSection) -> dict[str, list[Any]]:
    """Return the sources from which each generated source is made."""
    sources = raw.get("sources")
    if not isinstance(sources, dict):
        return {}
    parents_by_source: dict[str, list[Any]] = {}
    for name, source in sources.items():
        parents = (
            _inside(source, "generate").get("parents")
            if isinstance(source, dict)
            else None
        )
        if isinstance(parents, list):
            parents_by_source[name] = parents
    return parents_by_source


def _circles(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield generated sources that are made from each other."""
    circular = in_circles(_parents(raw))
    for name in circular:
        yield (
            ("sources", name, "generate", "parents"),
            f"{', '.join(map(str, circular))} are made from each other in a cycle",
        )
