"""Contradictions between the sections of a manifest that is not validated yet:
locations, and sentences.

They are references to missing names, and sections or keys whose input no other section
provides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from gristmill.mixtures.base import (
    Location,
    RawSection,
    dependency_order,
    entries,
    inside,
)
from gristmill.mixtures.manifest import EMPTY_ALLOWED, TUNINGS
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
from gristmill.mixtures.schema.mix import ROW_LENGTH, mix_problems, weighed_sources
from gristmill.mixtures.steps.examples import made_problems
from gristmill.mixtures.yaml_text import did_you_mean

NEED_THE_DECODER = (*TUNINGS, "export")
"""Sections that need more of the built-in decoder than logits."""
WRITERS_KEYS = {
    "evaluate": ("prompts", "tasks", "suites", "contamination", "canaries"),
    "export": ("gguf",),
}
"""Keys that need a model that writes text, by section."""
ENCODERS = {
    "masked": "encoder, which fills in masked tokens and cannot write",
    "span_corruption": "encoder-decoder, which fills in hidden spans and cannot write",
    "ul2": "encoder-decoder, which fills in hidden spans and cannot write",
}
"""Objectives of `pretrain` -> the model that they train, which does not write text."""
TASKS = {"masked": "classify", "span_corruption": "text2text", "ul2": "text2text"}
"""Objectives of `pretrain` -> the task of `sft` that such a model can be tuned for."""
NEED_ITS_LAYERS = {
    "parallel": ("tensor", "context"),
    "compute": ("compile", "activation_checkpointing"),
}
"""Keys of `engine` that need the built-in decoder's layers, by section."""
MEASURE_LANGUAGES = {"langid", "annotate"}
"""Steps that may write the column `language`; `langid` always does."""
NEED_A_MODEL = (*TUNINGS, "evaluate", "export")
"""Sections that start from a model, or evaluate existing ones."""


def contradictions(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield contradictions that no single field can detect."""
    names = list(inside(raw, "sources"))
    for location, name in _source_references(raw):
        if names and name not in names:
            hint = did_you_mean(str(name), map(str, names))
            yield (
                location,
                f"no such source: {name!r}{hint} (sources: "
                f"{', '.join(map(str, names))})",
            )
    for find in (
        mix_problems,
        _absent_sections,
        _absent_inputs,
        _token_problems,
        made_problems,
        _reinforcement_problems,
        _own_model_problems,
        _encoder_problems,
        _other_task_problems,
        _prefix_problems,
        _span_problems,
        _language_problems,
    ):
        yield from find(raw)
    parents = _parents(raw)
    circular = dependency_order(parents)[1]
    for name in circular:
        yield (
            ("sources", name, "generate", "parents"),
            f"{', '.join(map(str, circular))} are made from each other in a cycle",
        )


def _language_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield rules by language where no earlier step has measured the language."""
    for place in ((), ("sft",), ("dpo",)):
        is_measured = False
        for index, step in enumerate(entries(inside(raw, *place), "prepare")):
            if not is_measured and inside(step, "filter").get("by_language"):
                yield (
                    (*place, "prepare", index, "filter", "by_language"),
                    "judges each document by the rules of its language, which no "
                    "earlier step measures; put `langid` before this step",
                )
            stages = {step} if isinstance(step, str) else inside(step).keys()
            is_measured = is_measured or bool(MEASURE_LANGUAGES & stages)


def _given(raw: RawSection) -> set[str]:
    """Return the sections that are present.

    An empty key enables the defaults of a section in EMPTY_ALLOWED, and disables any
    other section.
    """
    return {
        name
        for name, section in raw.items()
        if section is not None or name in EMPTY_ALLOWED
    }


def _absent_sections(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield sections whose input no other section provides."""
    present = _given(raw)
    if not {"sources", "examples", "model"} & present:
        yield (
            ("sources",),
            "required but absent, unless a section `model:` gives a model to start "
            "from, or `examples:` makes only examples",
        )
    providers: list[tuple[str, tuple[str, ...]]] = [
        ("mix", ("tokenizer", "model")),
        ("text_index", ("mix",)),
        ("pretrain", ("mix",)),
    ]
    if "model" in present:
        providers += [("prepare", ("sources",)), ("mix", ("sources",))]
    for name, needed in providers:
        if name in present and not present.intersection(needed):
            yield (name,), f"needs a section `{needed[0]}:` too, which is absent"
    if "merge" in present and "pretrain" not in present:
        yield ("merge",), "merges checkpoints of `pretrain:`, which is absent"
    if {"pretrain", "model"} <= present:
        yield (
            ("model",),
            "gives a model to start from, but `pretrain:` trains one; to continue "
            "pre-training, remove this and set its folder as pretrain.model.init_from",
        )
    for stage in NEED_A_MODEL:
        if stage in present and not {"pretrain", "model"} & present:
            yield (
                (stage,),
                "needs a model: a section `model: {path: FOLDER}` that gives one, or "
                "`pretrain:` that trains one; both are absent",
            )


def _absent_inputs(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield keys that refer to a mixture or a pre-training that the manifest does not
    have.
    """
    present = _given(raw)
    sft, evaluate, rl = (inside(raw, name) for name in ("sft", "evaluate", "rl"))
    is_given = "model" in present and "pretrain" not in present
    needs_of_pretrain = {
        ("sft", "replay"): sft.get("replay"),
        ("sft", "distill", "teacher"): inside(sft, "distill").get("teacher")
        == "pretrain",
        ("evaluate", "contamination"): evaluate.get("contamination") is not None,
        ("rl", "start_from"): rl.get("start_from") == "pretrain",
    }
    for location, is_set in needs_of_pretrain.items():
        if is_given and is_set:
            yield (
                location,
                "refers to a pre-training of this manifest: add a section "
                "`pretrain:`, or remove it",
            )
    if (
        not {"sft", "dpo", "rl"} & present
        and inside(raw, "export").get("weights") == "average"
    ):
        if is_given:
            yield (
                ("export", "weights"),
                "a model that was trained elsewhere has no running mean; set it to "
                "`raw`",
            )
        if "merge" in present:
            yield (
                ("export", "weights"),
                "a merged model has no running mean beside it; set it to `raw`, or "
                "remove `merge:`",
            )
    for name in ("sft", "dpo", "rl") if "mix" not in present else ():
        if (
            "model" in present
            and inside(raw, name).get("validate_every") is not None
            and not (name == "sft" and sft.get("holdout"))
        ):
            yield (
                (name, "validate_every"),
                "measures the held-out rows of a mixture: it needs a section `mix:`"
                + (", or `sft.holdout`" if name == "sft" else "")
                + "; or remove it",
            )


def _token_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield sources of tokens that nothing reads, or whose text is needed."""
    present = _given(raw)
    sources = inside(raw, "sources")
    of_tokens = [name for name in sources if "tokens" in inside(sources, name)]
    if not of_tokens:
        return
    if "mix" not in present:
        yield (
            ("sources", of_tokens[0], "tokens"),
            "needs a section `mix:` too, since only that reads tokens",
        )
    elif "model" not in present and inside(raw, "tokenizer").get("path") is None:
        yield (
            ("sources", of_tokens[0], "tokens"),
            "was encoded with a tokenizer, which gives the ids their meaning: name "
            "its file as `tokenizer: {path: tokenizer.json}`",
        )
    if "prepare" in present and len(of_tokens) == len(sources):
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
    """Yield pairs, a start, or a reward model, that no other section makes."""
    reward_section = raw.get("reward")
    if (
        isinstance(reward_section, dict)
        and not reward_section.get("data")
        and raw.get("dpo") is None
    ):
        yield (
            ("reward",),
            "has no pairs to learn from: set its `data:`, or add a section `dpo:`, "
            "whose pairs it then uses",
        )
    section = inside(raw, "rl")
    start = section.get("start_from", "auto")
    if start in ("merge", "sft", "dpo") and start not in raw:
        yield (
            ("rl", "start_from"),
            f"needs a section `{start}:` too, which is absent; `auto` takes the last "
            "one that exists",
        )
    for number, reward in enumerate(entries(section, "rewards")):
        is_model = inside(reward).get("kind") == "model"
        if is_model and not reward.get("path") and "reward" not in raw:
            yield (
                ("rl", "rewards", number),
                "has no `path`, and there is no section `reward:` that trains such a "
                "model",
            )
    for number, tool in enumerate(entries(section, "tools")):
        written = inside(written_tool(tool))
        is_search = written.get("kind") == "search" and not written.get("path")
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
    if inside(raw, "pretrain", "model").get("use") is None:
        return
    places: list[Location] = [
        (stage,) for stage in NEED_THE_DECODER if stage in _given(raw)
    ]
    places += [
        ("engine", part, key)
        for part, keys in NEED_ITS_LAYERS.items()
        for key in keys
        if inside(raw, "engine", part).get(key) not in (None, 1, "off")
    ]
    for place in places:
        yield (
            place,
            "needs the built-in decoder, whose layers it knows by name, but "
            "pretrain.model.use names a model of your own; remove one of the two",
        )


def _encoder_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield keys that an encoder cannot support, if pre-training trains one, and a
    missing mask token.
    """
    pretrain = inside(raw, "pretrain")
    for objective, model in ENCODERS.items():
        if pretrain.get(objective) is None or (objective == "ul2" and _is_joined(raw)):
            continue
        conflicts: list[Location] = [
            (stage,)
            for stage in TUNINGS
            if stage in _given(raw)
            and not (
                stage == "sft" and inside(raw, "sft").get("task") in TASKS.values()
            )
        ]
        conflicts += [
            (section, key)
            for section, keys in WRITERS_KEYS.items()
            for key in keys
            if inside(raw, section).get(key)
        ]
        for location in (*conflicts, *_split_keys(raw)):
            yield (
                location,
                f"needs a model that predicts the next token, but pretrain.{objective} "
                f"trains an {model}; remove one of the two",
            )
        tokenizer = inside(raw, "tokenizer")
        if (
            objective == "masked"
            and tokenizer.get("path") is None
            and not {*MASK_TOKENS}.intersection(entries(tokenizer, "special_tokens"))
        ):
            yield (
                ("pretrain", "masked"),
                "needs a mask token: name it in tokenizer.special_tokens, such as "
                f"{MASK_TOKENS[0]!r}",
            )
        return


def _other_task_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield sections that a fine-tuned encoder or encoder-decoder cannot serve, and a
    start that is of another kind.
    """
    task = inside(raw, "sft").get("task", "chat")
    if task == "chat":
        return
    stages = ("reward", "dpo", "rl", *(("evaluate",) if task == "classify" else ()))
    for stage in stages:
        if stage in _given(raw):
            yield (
                (stage,),
                f"needs a decoder, but sft.task is {task}; remove one of the two "
                "(sft.holdout measures the task)",
            )
    pretrain = inside(raw, "pretrain")
    objectives = [name for name in ENCODERS if pretrain.get(name) is not None]
    if _is_joined(raw):
        objectives = []
    if "pretrain" in _given(raw) and task not in map(TASKS.get, objectives):
        yield (
            ("sft", "task"),
            f"{task} does not fit the model that `pretrain:` trains; see "
            "docs/objectives.md",
        )


def _prefix_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield keys that do not support prefixes read in both directions, if pre-training
    has them.
    """
    pretrain = inside(raw, "pretrain")
    conflicts = [location for location in _split_keys(raw) if location[-1] != "context"]
    if inside(raw, "export").get("gguf") and not _given(raw) & {*TUNINGS}:
        conflicts.append(("export", "gguf"))
    for reader in ("prefix_lm", "ul2", "blank_infilling"):
        if pretrain.get(reader) is None or (reader == "ul2" and not _is_joined(raw)):
            continue
        for location in conflicts:
            yield (
                location,
                f"lets each token see only those before it, but pretrain.{reader} "
                "reads prefixes in both directions; remove one of the two",
            )
        return


def _split_keys(raw: RawSection) -> list[Location]:
    """Return the keys of `engine.parallel` that split the built-in decoder's layers."""
    parallel = inside(raw, "engine", "parallel")
    return [
        ("engine", "parallel", key)
        for key in NEED_ITS_LAYERS["parallel"]
        if parallel.get(key) not in (None, 1)
    ]


def _span_problems(raw: RawSection) -> Iterator[tuple[Location, str]]:
    """Yield missing special tokens for hidden spans, if the tokenizer is trained
    here.
    """
    tokenizer = inside(raw, "tokenizer")
    length = inside(raw, "mix").get("sequence_length", ROW_LENGTH)
    count = tokenizer.get("sentinels", 0)
    if tokenizer.get("path") is not None or not type(length) is type(count) is int:
        return
    token_names = {
        *map(str, entries(tokenizer, "special_tokens")),
        *map(SENTINEL.format, range(count)),
    }
    sections: dict[str, type[Spans]] = {
        "span_corruption": SpanCorruption,
        "ul2": Ul2,
        "blank_infilling": BlankInfilling,
    }
    for key, section in sections.items():
        settings = inside(raw, "pretrain").get(key)
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
    return inside(raw, "pretrain", "ul2").get("shape") == "decoder"


def _source_references(raw: RawSection) -> Iterator[tuple[Location, str]]:
    for index, step in enumerate(entries(raw, "prepare")):
        for stage in inside(step):
            config = inside(step, stage)
            places = [
                ("sources",),
                *(("rule_sources", name) for name in inside(config, "rule_sources")),
                ("classifier", "positive"),
                ("classifier", "negative"),
            ]
            for place in places:
                names = entries(inside(config, *place[:-1]), place[-1])
                for number, name in enumerate(names):
                    yield ("prepare", index, stage, *place, number), name
    for name in inside(raw, "tokenizer", "weights"):
        yield ("tokenizer", "weights", name), name
    for name, parents in _parents(raw).items():
        for number, parent in enumerate(parents):
            yield ("sources", name, "generate", "parents", number), parent
    yield from weighed_sources(raw)


def _parents(raw: RawSection) -> dict[str, Sequence[Any]]:
    """Return the sources from which each generated source is made."""
    sources = inside(raw, "sources")
    return {
        name: entries(inside(sources, name, "generate"), "parents") for name in sources
    }
