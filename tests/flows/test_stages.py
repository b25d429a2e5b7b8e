"""The plan: the stages of a manifest, and the inputs of each fingerprint."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from benchmarks.checkout import ROOT
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.stages.plan import Node, UnknownStageError, add_later_stages
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.loader import ManifestError
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

DEMO_CHAT = str(ROOT / "mixtures" / "demo-chat.yaml")


@cache
def opened(*overrides: str, until: str | None = None, exactly: bool = False) -> Session:
    return open_session(DEMO_CHAT, list(overrides), "nowhere", until, exactly)


def changed_by(*overrides: str) -> list[str]:
    original, changed = opened().plan, opened(*overrides).plan
    return [
        name
        for name in original
        if original[name].fingerprint != changed[name].fingerprint
    ]


@pytest.mark.slow
def test_the_chat_demo_has_every_stage_in_order() -> None:
    assert list(opened().plan) == [
        "ingest",
        "langid",
        "filter",
        "dedup",
        "quality",
        "tokenizer",
        "tokenize",
        "mix",
        "sft_data",
        "dpo_data",
        "pretrain",
        "sft",
        "reference",
        "dpo",
        "evaluate",
        "export",
    ]
    later_stages = list(opened().plan)[5:]
    assert [name for name in STAGES if name in later_stages] == later_stages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "first_changed"),
    [
        ("prepare.filter.rules.gopher_quality.min_words=31", "filter"),
        ("prepare.dedup.minhash.threshold=0.8", "dedup"),
        ("prepare.langid.threshold=0.6", "langid"),
        ("tokenizer.vocab_size=5000", "tokenizer"),
        ("tokenizer.pretokenizer=llama3", "tokenizer"),
        ("tokenizer.special_tokens=['<|tool|>']", "tokenizer"),
        ("sources.code.weight=0.4", "mix"),
        ("sources.docstrings.where=quality > 0.5", "mix"),
        ("sources.code.epochs=min(cluster_size, 4)", "mix"),
        ("sources.code.max_epochs=0.5", "mix"),
        ("mix.weights={alpha: 0.7}", "mix"),
        ("mix.phases=[{end: 0.8}, {weights: {docstrings: 1}}]", "mix"),
        ("mix.on_shortfall=redistribute", "mix"),
        ("mix.sequence_length=128", "mix"),
        ("mix.seed=8", "mix"),
        ("pretrain.steps=10", "pretrain"),
        ("sft.replay=0.1", "sft_data"),
        ("sft.packing=none", "sft_data"),
        ("sft.seed=8", "sft_data"),
        ("sft.steps=10", "sft"),
        ("dpo.sequence_length=64", "dpo_data"),
        ("dpo.precision=bf16", "reference"),
        ("dpo.beta=0.2", "dpo"),
        ("dpo.loss=ipo", "dpo"),
        ("dpo.holdout=0.3", "dpo"),
        ("export.dtype=bf16", "export"),
    ],
)
def test_changed_key_affects_only_its_stage_and_later_ones(
    override: str, first_changed: str
) -> None:
    changed = changed_by(override)
    order = list(opened().plan)
    assert changed[0] == first_changed
    untouched = {
        "sft_data": ["dpo_data", "pretrain"],
        "dpo_data": ["pretrain", "sft"],
    }.get(first_changed, [])
    assert changed == [
        name for name in order[order.index(first_changed) :] if name not in untouched
    ]


REINFORCED = (
    "rl={data: [{path: 'python-docs://'}], rewards: [{kind: length, "
    "target_tokens: 9}], steps: 2}",
)


@pytest.mark.slow
def test_reinforcement_stage_follows_its_start_model_and_precedes_its_readers() -> None:
    plan = opened(*REINFORCED).plan
    assert list(plan)[-4:] == ["dpo", "rl", "evaluate", "export"]
    assert set(plan["rl"].inputs) == {"mix", "tokenizer", "dpo"}
    assert "rl" in plan["export"].inputs
    assert changed_by(*REINFORCED) == ["evaluate", "export"]
    from_sft = opened(*REINFORCED, "rl.start_from=sft").plan["rl"]
    assert set(from_sft.inputs) == {"mix", "tokenizer", "sft"}
    # The start model is an input; its name is not.
    assert (
        opened(*REINFORCED, "rl.start_from=dpo").plan["rl"].fingerprint
        == plan["rl"].fingerprint
    )


def test_overridden_weights_are_not_part_of_the_recipe() -> None:
    weights = "mix.weights={docstrings: 0.5, code: 0.5}"
    low_weight, high_weight = (
        opened(weights, f"sources.code.weight={weight}").plan["mix"]
        for weight in (0.1, 0.9)
    )
    assert low_weight.fingerprint == high_weight.fingerprint
    assert (
        low_weight.config["sources"]["code"]["weight"],
        high_weight.config["sources"]["code"]["weight"],
    ) == (
        0.1,
        0.9,
    )


@pytest.mark.slow
def test_lineage_contains_the_effective_weights() -> None:
    source_weights = opened().plan["export"].recipe["lineage"]
    assert (
        source_weights["sources"]["code"]["weight"]
        == opened().manifest.sources["code"].weight
    )
    assert "mix" not in source_weights
    mixture_weights = (
        opened("mix.weights={docstrings: 0.5, code: 0.5}")
        .plan["export"]
        .recipe["lineage"]
    )
    assert "weight" not in mixture_weights["sources"]["code"]
    assert mixture_weights["mix"] == {"weights": {"docstrings": 0.5, "code": 0.5}}


@pytest.mark.parametrize(
    "override",
    [
        "engine.workers=7",
        "engine.ranks=4",
        "engine.runner=PortableRunner",
        "engine.checkpoint_every=3",
        "prepare.langid.model=/some/where/lid.176.ftz",
        "sources.docstrings.licence=PSF",
    ],
)
def test_engine_settings_do_not_change_fingerprints_of_data(override: str) -> None:
    # A licence is a note that only the model card shows.
    assert set(changed_by(override)) <= ({"export"} if "licence" in override else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        "pretrain.micro_batch_size=2",
        "pretrain.log_every=3",
        "pretrain.validate_every=7",
        "pretrain.evaluate_every=7",
        "sft.micro_batch_size=2",
        "sft.validate_every=7",
        "dpo.micro_batch_size=3",
        "dpo.log_every=3",
    ],
)
def test_execution_and_measurement_settings_of_training_are_not_in_the_fingerprint(
    override: str,
) -> None:
    assert changed_by(override) == []
    key, _, value = override.partition("=")
    stage, _, name = key.partition(".")
    # The stage receives it all the same.
    assert opened(override).plan[stage].config[name] == int(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "warmup"),
    [
        (["sft.steps=20"], 2),
        (["sft.steps=400"], 20),
        (["sft.steps=20", "sft.schedule.warmup_steps=15"], 15),
    ],
)
def test_recipe_contains_the_resolved_warmup(settings: list[str], warmup: int) -> None:
    node = opened(*settings).plan["sft"]
    assert (
        node.recipe["schedule"]["warmup_steps"]
        == node.config["schedule"]["warmup_steps"]
        == warmup
    )


def test_early_stopping_validations_are_part_of_the_fingerprint() -> None:
    stops = "pretrain.early_stopping={patience: 2}"
    every_50, every_60 = (
        opened(stops, f"pretrain.validate_every={every}").plan["pretrain"]
        for every in (50, 60)
    )
    assert every_50.fingerprint != every_60.fingerprint


@pytest.mark.slow
def test_continued_checkpoint_is_part_of_the_recipe_by_content(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "step-00000004"
    checkpoint.mkdir()
    (checkpoint / "complete.json").write_text("{}")
    for stage in ("pretrain", "sft", "dpo"):
        override = f"{stage}.continue_from={checkpoint}"
        assert changed_by(override)[0] == stage
        node = opened(override).plan[stage]
        assert node.config["continue_from"] == str(checkpoint)
        assert node.recipe["continue_from"][0]["path"] == "complete.json"


def test_language_model_is_part_of_the_recipe_by_content(
    tmp_path: Path,
) -> None:
    model = tmp_path / "glotlid.bin"
    model.write_bytes(b"one model")
    override = f"prepare.langid.model={model}"
    assert changed_by(override)[0] == "langid"
    original = opened(override).plan["langid"]
    model.write_bytes(b"another one")
    opened.cache_clear()
    changed = opened(override).plan["langid"]
    assert original.fingerprint != changed.fingerprint
    assert changed.config["model"] == str(model)  # the stage receives its path


@pytest.mark.slow
def test_chat_template_is_part_of_the_recipe_by_content(tmp_path: Path) -> None:
    for name, content in (("one", "a"), ("copy", "a"), ("other", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat.jinja").write_text(content)

    def node(name: str) -> Node:
        return opened(
            f"tokenizer.chat_template_path={tmp_path / name / 'chat.jinja'}"
        ).plan["tokenizer"]

    assert (
        node("one").fingerprint == node("copy").fingerprint != node("other").fingerprint
    )
    # The stage receives the path of the file.
    assert node("one").config["tokenizer"]["chat_template_path"] == str(
        tmp_path / "one" / "chat.jinja"
    )


@pytest.mark.slow
def test_start_of_text_of_a_published_model_is_part_of_the_recipe(
    tmp_path: Path,
) -> None:
    starts = []
    for name, config in (("one", {"bos_token": "<s>"}), ("two", {}), ("three", None)):
        folder = tmp_path / name
        write_tokenizer(train(TokenizerSample({"a": ["text"]}, {}), 264), folder)
        path = folder / "tokenizer_config.json"
        path.unlink()
        if config is not None:
            path.write_text(json.dumps(config))
        manifest = opened(f"tokenizer.path={folder / 'tokenizer.json'}").manifest
        assert manifest.pretrain is not None
        model = manifest.pretrain.model.model_copy(update={"init_from": str(folder)})
        pretrain = manifest.pretrain.model_copy(update={"model": model})
        for number, given in enumerate((manifest.pretrain, pretrain)):
            update = manifest.model_copy(update={"pretrain": given})
            recipe = STAGES["tokenizer"].configure(update, False)
            assert recipe is not None
            assert recipe[0]["published"] is bool(number)
            starts.append(recipe[0]["external"].get("bos_token"))
    assert starts == [None, "<s>", None, None, None, None]


def test_a_run_can_end_at_any_stage() -> None:
    assert list(opened(until="mix").plan)[-1] == "mix"
    with pytest.raises(UnknownStageError, match="no such stage: 'polish'"):
        opened(until="polish")


def test_disabled_stage_is_replaced_by_its_predecessor(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("text")
    manifest = tmp_path / "m.yaml"
    manifest.write_text(
        "name: m\nsources: {a: {path: a.txt}}\nprepare: [dedup]\ntokenizer:\n"
    )
    session = open_session(str(manifest), [], "nowhere", until="quality")
    assert list(session.plan) == ["ingest", "dedup"]
    assert (
        list(open_session(str(manifest), [], "nowhere", until="export").plan)[-1]
        == "tokenize"
    )
    with pytest.raises(UnknownStageError, match="has no stage 'quality'"):
        open_session(str(manifest), [], "nowhere", until="quality", exactly=True)


@pytest.mark.slow
def test_stages_after_until_are_those_of_the_full_plan() -> None:
    session = opened()
    whole_plan = session.plan
    names = list(whole_plan)
    for last in ("quality", "mix", "sft"):
        ended = {name: whole_plan[name] for name in names[: names.index(last) + 1]}
        assert (
            add_later_stages(ended, session.manifest, lambda node: node) == whole_plan
        )


def test_prefect_offers_every_stage() -> None:
    from gristmill.flows.prefect.parameters import StageName

    assert TypeAdapter(StageName).json_schema()["enum"] == list(STAGES)


def test_fingerprint_contains_the_content_of_evaluation_sets(
    tmp_path: Path,
) -> None:
    def fingerprint(folder: str, item: str, **settings: int) -> str:
        home = tmp_path / folder
        (home / "eval").mkdir(parents=True, exist_ok=True)
        (home / "a.txt").write_text("text")
        os.utime(home / "a.txt", (0, 0))
        (home / "eval" / "set.txt").write_text(item)
        lines = "".join(f", {key}: {value}" for key, value in settings.items())
        (home / "m.yaml").write_text(
            f"name: m\nsources: {{a: {{path: a.txt}}}}\nprepare: [decontaminate: {{against: [eval/*.txt]{lines}}}]\n"
        )
        node = open_session(str(home / "m.yaml"), [], "nowhere").plan["decontaminate"]
        assert node.config["against"][0]["path"] == str(home / "eval" / "*.txt")
        return node.fingerprint

    first = fingerprint("here", "What is it?")
    assert fingerprint("there", "What is it?") == first
    assert fingerprint("here", "What was it?") != first
    assert fingerprint("there", "What is it?", ngram=10) != first


@pytest.mark.slow
def test_reward_model_uses_dpo_pairs_unless_it_has_its_own() -> None:
    shared_pairs = opened("reward={steps: 3}").plan
    assert list(shared_pairs).index("reward") == list(shared_pairs).index("sft") + 1
    assert shared_pairs["reward"].inputs.keys() == {"tokenizer", "sft"}
    assert (
        shared_pairs["reward"].config["data"] == shared_pairs["dpo_data"].config["data"]
    )
    own_pairs = opened(
        "reward={steps: 3, data: [{path: 'python-docs://', limit: 7}]}"
    ).plan["reward"]
    assert [item["limit"] for item in own_pairs.config["data"]] == [7]
    assert {
        name: node.fingerprint
        for name, node in shared_pairs.items()
        if name != "reward"
    } == {name: node.fingerprint for name, node in opened().plan.items()}
    other_pairs = opened(
        "reward={steps: 3}", "dpo.data=[{path: 'python-docs://', limit: 7}]"
    ).plan["reward"]
    assert other_pairs.fingerprint != shared_pairs["reward"].fingerprint
    with pytest.raises(ManifestError, match="reward: has no pairs to learn from"):
        opened("dpo=null", "reward={steps: 3}")


@pytest.mark.slow
def test_teacher_fingerprint_depends_on_kept_predictions_but_not_on_the_student(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    base = ("sft.distill.teacher=" + str(tmp_path),)
    base_plan = opened(*base).plan
    assert list(base_plan).index("teacher") == list(base_plan).index("sft") - 1
    assert base_plan["teacher"].inputs.keys() == {"tokenizer", "sft_data"}
    assert "teacher" in base_plan["sft"].inputs
    assert base_plan["teacher"].config["teacher"] == str(tmp_path)
    assert base_plan["teacher"].recipe["teacher"][0]["path"] == "config.json"

    def changed(*overrides: str) -> list[str]:
        changed_plan = opened(*base, *overrides).plan
        return [
            name
            for name in base_plan
            if base_plan[name].fingerprint != changed_plan[name].fingerprint
        ]

    behind = list(base_plan)[list(base_plan).index("sft") :]
    assert (
        changed("sft.distill.kind=reverse")
        == changed("sft.distill.weight=0.9")
        == behind
    )
    assert (
        changed("sft.distill.top_k=5")
        == changed("sft.distill.temperature=2")
        == ["teacher", *behind]
    )
    assert changed("pretrain.steps=7") == ["pretrain", *behind]
    own_teacher = opened("sft.distill.teacher=pretrain").plan["teacher"]
    assert own_teacher.inputs.keys() == {"tokenizer", "sft_data", "pretrain"}
    assert "teacher" not in opened().plan
    assert "distill" not in opened().plan["sft"].recipe


@pytest.mark.slow
def test_rounded_base_changes_the_reference_but_not_the_rows() -> None:
    # A model frozen under adapters is its own reference in any storage format; a
    # rounded one is another model.
    assert changed_by("dpo.lora.rank=4") == ["dpo", "evaluate", "export"]
    assert changed_by("dpo.lora.base=int8") == [
        "reference",
        "dpo",
        "evaluate",
        "export",
    ]
    int8 = opened("dpo.lora.base=int8").plan["reference"].fingerprint
    assert (
        opened("dpo.lora.base=int8", "dpo.lora.rank=4").plan["reference"].fingerprint
        == int8
    )
    assert (
        opened("dpo.lora.base=int8", "dpo.lora.targets=[q_proj]")
        .plan["reference"]
        .fingerprint
        != int8
    )
