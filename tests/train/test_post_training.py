"""Post-training from a pre-trained model to an exported one: SFT, preferences,
evaluation, export.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import gristmill
from gristmill.core.files import write_json
from gristmill.dataprep.examples.read_examples import read_set
from gristmill.train import trainer
from gristmill.train.checkpoint import Checkpoints
from gristmill.train.data.conversation_tokens import NothingToTrainError
from gristmill.train.generation.scheduler import generate
from gristmill.train.loop.batch_plan import extend_digest
from gristmill.train.models.weights import load_model, read_shape
from gristmill.train.objectives.reference_logps import (
    KEY,
    TABLE,
    NotTheReferenceError,
    StaleReferenceError,
)
from gristmill.train.resuming import ContinueError
from tests.jsonl import read_jsonl, read_metrics, write_jsonl
from tests.train.trained import assert_same_output, steps_of

pytestmark = pytest.mark.slow

WORDS = (
    "json",
    "text",
    "file",
    "name",
    "list",
    "code",
    "line",
    "type",
    "value",
    "error",
    "module",
    "class",
)
TRAINING = {
    "steps": 12,
    "global_batch_size": 5,
    "micro_batch_size": 3,
    "seed": 11,
    "log_every": 1,
    "schedule": {"warmup_steps": 1},
    "sequence_length": 64,
}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture
def pretrained(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> dict[str, Path]:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    pretrain_config = {**pretrain_config, "steps": 4}
    run_stage("pretrain", inputs, pretrain_config, tmp_path / "pretrain")
    return {**inputs, "pretrain": tmp_path / "pretrain" / "data"}


@pytest.fixture
def sft_config(tmp_path: Path) -> dict[str, Any]:
    path = write_jsonl(
        tmp_path / "sft.jsonl",
        [
            {
                "messages": [
                    message("user", f"What is a {word}?"),
                    message("assistant", f"A {word}."),
                ]
            }
            for word in WORDS
        ],
    )
    return {**TRAINING, "data": [{"path": path}], "optimizer": {"learning_rate": 0.01}}


@pytest.fixture
def dpo_config(tmp_path: Path) -> dict[str, Any]:
    path = write_jsonl(
        tmp_path / "dpo.jsonl",
        [
            {
                "prompt": [message("user", f"What is a {word}? {n}")],
                "chosen": [message("assistant", f"A {word}.")],
                "rejected": [message("assistant", "I do not know.")],
            }
            for word in WORDS
            for n in range(3)
        ],
    )
    return {
        **TRAINING,
        "data": [{"path": path}],
        "holdout": 0.25,
        "optimizer": {"learning_rate": 0.001},
    }


@pytest.fixture
def referenced(
    run_stage: Any,
    pretrained: dict[str, Path],
    dpo_config: dict[str, Any],
    tmp_path: Path,
) -> dict[str, Path]:
    """Inputs of the stage `dpo` without SFT."""
    run_stage("reference", pretrained, dpo_config, tmp_path / "reference")
    return {**pretrained, "reference": tmp_path / "reference" / "data"}


def test_sft_learns_the_answers_and_shows_its_mask(
    run_stage: Any,
    pretrained: dict[str, Path],
    sft_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    summary = run_stage(
        "sft", pretrained, {**sft_config, "steps": 25}, tmp_path / "sft"
    )
    losses = [line["loss"] for line in read_metrics(tmp_path / "sft")]
    assert len(losses) == 25
    assert losses[-1] < losses[0] / 2
    assert summary["used"] == len(WORDS)
    assert summary["truncated"] == 0
    rows = (tmp_path / "sft" / "data" / "examples.txt").read_text().splitlines()
    assert summary["rows"] == len(rows) < len(WORDS)
    assert sorted(" ".join(rows).split()) == [
        example["id"]
        for example in read_set(sft_config["data"][0]["path"], "sft").examples
    ]


def test_first_loss_of_sft_is_the_mean_over_answer_tokens(
    run_stage: Any,
    pretrained: dict[str, Path],
    sft_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """One step over all 12 examples in uneven micro-batches, against a sum over single
    examples.
    """
    from gristmill.train.data.conversation_tokens import Chat

    data = {"data": sft_config["data"], "sequence_length": 64}
    rows = run_stage("sft_data", pretrained, data, tmp_path / "rows")["rows"]
    config = {
        **sft_config,
        "steps": 1,
        "global_batch_size": rows,
        "micro_batch_size": 2,
    }
    assert run_stage("sft", pretrained, config, tmp_path / "sft")["rows"] == rows > 2
    model, chat = (
        load_model(pretrained["pretrain"] / "model"),
        Chat(pretrained["tokenizer"]),
    )
    total, count = 0.0, 0
    for word in WORDS:
        tokens = chat.encode(
            [message("user", f"What is a {word}?"), message("assistant", f"A {word}.")]
        )
        ids = torch.from_numpy(tokens.ids)
        logps = torch.log_softmax(model(ids[None])[0, :-1], dim=-1).gather(
            1, ids[1:, None]
        )[:, 0]
        chosen = torch.from_numpy(tokens.turns[1:] > 0)
        total, count = total - float(logps[chosen].sum()), count + int(chosen.sum())
    assert read_metrics(tmp_path / "sft")[0]["loss"] == pytest.approx(
        total / count, abs=1e-5
    )


def test_held_out_conversations_are_not_trained_on_and_measured_correctly(
    run_stage: Any,
    pretrained: dict[str, Path],
    sft_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {**sft_config, "holdout": 0.4, "validate_every": 8}
    summary = run_stage("sft", pretrained, config, tmp_path / "sft")
    lines = {
        line["step"]: line["held_out"]
        for line in read_metrics(tmp_path / "sft")
        if "held_out" in line
    }
    assert list(lines) == [8, 12]
    assert summary["held_out"] == lines[12]
    examples = {
        example["id"]: example
        for example in read_set(sft_config["data"][0]["path"], "sft").examples
    }
    trained = set((tmp_path / "sft" / "data" / "examples.txt").read_text().split())
    held_out = [
        examples[example_id] for example_id in examples if example_id not in trained
    ]
    assert 0 < len(held_out) == summary["sets"][0]["held_out"] < len(WORDS)
    assert len(held_out) + len(trained) == len(WORDS)
    logps_after = [
        logp_of(tmp_path / "sft" / "data" / "model", pretrained["tokenizer"], example)
        for example in held_out
    ]
    total, tokens = (sum(column) for column in zip(*logps_after, strict=True))
    assert lines[12]["loss"] == pytest.approx(-total / tokens, abs=1e-5)
    assert lines[12]["sources"]["sft"]["tokens"] == tokens
    before = [
        logp_of(pretrained["pretrain"] / "model", pretrained["tokenizer"], example)
        for example in held_out
    ]
    assert summary["held_out_before"]["loss"] == pytest.approx(
        -sum(logp for logp, _ in before) / tokens, abs=1e-5
    )
    assert summary["held_out_before"]["loss"] > lines[12]["loss"]


def test_set_without_trained_tokens_is_rejected(
    run_stage: Any,
    pretrained: dict[str, Path],
    sft_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(NothingToTrainError, match=r"12 examples .* 8 tokens"):
        run_stage(
            "sft", pretrained, {**sft_config, "sequence_length": 8}, tmp_path / "sft"
        )


def test_sft_and_dpo_read_the_rows_of_their_streams(
    run_stage: Any,
    referenced: dict[str, Path],
    sft_config: dict[str, Any],
    dpo_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    dpo_config |= {"holdout": 0.25, "data": [{**dpo_config["data"][0], "weight": 1.0}]}
    run_stage("sft", referenced, {**sft_config, "steps": 3}, tmp_path / "sft")
    run_stage("dpo", referenced, {**dpo_config, "steps": 3}, tmp_path / "dpo")
    write_json(
        tmp_path / "run" / "run.json",
        {
            "stages": {
                f"{name}_data": {"folder": str(tmp_path / name / "prepared")}
                for name in ("sft", "dpo")
            },
            "manifest": {
                "seed": 5,
                "sft": {**sft_config, "steps": 3},
                "dpo": {**dpo_config, "steps": 3},
            },
        },
    )
    for name in ("sft", "dpo"):
        rows = gristmill.stream(tmp_path / "run", stage=f"{name}_data", batch_size=5)
        digest, recorded = (
            rows.fingerprint,
            [
                line["rows_digest"]
                for line in read_metrics(tmp_path / name)
                if "rows_digest" in line
            ],
        )
        assert len(recorded) == 3
        for number, expected in enumerate(recorded):
            digest = extend_digest(digest, rows.rows(number))
            assert digest == expected


def test_dpo_starts_at_ln_2_and_learns_the_preferences(
    run_stage: Any,
    referenced: dict[str, Path],
    dpo_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    summary = run_stage("dpo", referenced, dpo_config, tmp_path / "dpo")
    lines = read_metrics(tmp_path / "dpo")
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert lines[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-3)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["rewards/accuracies"] == 1.0
    for line in lines:
        assert line["rewards/margins"] == pytest.approx(
            line["rewards/chosen"] - line["rewards/rejected"]
        )
    assert summary["step_0"]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert summary["held_out_pairs"] + summary["training_pairs"] == 36
    interval = summary["held_out"]["reward_accuracy_interval"]
    assert interval["units"] == summary["held_out_pairs"]
    assert 0.9 < interval["value"] <= interval["high"]
    assert interval["low"] < interval["value"]
    held_out = read_jsonl(tmp_path / "dpo" / "data" / "holdout.jsonl")
    assert len(held_out) == summary["held_out_pairs"] > 0
    margins = pq.read_table(tmp_path / "dpo" / "data" / "margins.parquet").to_pylist()
    assert len(margins) == summary["margins"]["measured"] == 36
    assert {row["id"] for row in margins if row["held_out"]} == {
        pair["id"] for pair in held_out
    }
    margin_row = margins[0]
    examples = read_set(dpo_config["data"][0]["path"], "dpo").examples
    (record,) = (example for example in examples if example["id"] == margin_row["id"])
    (before,) = (
        row
        for row in pq.read_table(referenced["reference"] / TABLE).to_pylist()
        if row["id"] == margin_row["id"]
    )
    for name in ("chosen", "rejected"):
        answered = {"messages": [*record["prompt"], *record[name]]}
        after, _ = logp_of(
            tmp_path / "dpo" / "data" / "model", referenced["tokenizer"], answered
        )
        assert margin_row[name] == pytest.approx(0.1 * (after - before[name]), abs=1e-4)
    assert [line["id"] for line in summary["margins"]["worst"]] == [
        line["id"]
        for line in sorted(margins, key=lambda line: (line["margin"], line["id"]))[:10]
    ]
    assert summary["margins"]["sets"][0]["trained"]["wrong"] == 0.0
    for part, is_out in (("trained", False), ("held_out", True)):
        is_correct = [row["margin"] > 0 for row in margins if row["held_out"] == is_out]
        assert summary["margins"]["right"][part]["value"] == np.mean(is_correct)
        assert summary["margins"]["right"][part]["units"] == len(is_correct)


def logp_of(
    model_folder: Path, tokenizer: Path, example: dict[str, Any]
) -> tuple[float, int]:
    """Sum the log-probabilities of the assistant's tokens, and count them."""
    from gristmill.train.data.conversation_tokens import Chat

    tokens = Chat(tokenizer).encode(example["messages"])
    ids, spoken = torch.from_numpy(tokens.ids), torch.from_numpy(tokens.turns[1:] > 0)
    logps = torch.log_softmax(
        load_model(model_folder)(ids[None])[0, :-1], dim=-1
    ).gather(1, ids[1:, None])[:, 0]
    return float(logps[spoken].sum()), int(spoken.sum())


def test_killed_dpo_resumes_to_the_same_bits(
    run_stage: Any,
    pretrained: dict[str, Path],
    dpo_config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two weighted sets, the smaller one repeated; killed in step 8, after a checkpoint
    of step 5.
    """
    few = write_jsonl(
        tmp_path / "few.jsonl",
        [
            {"prompt": f"Name a {word}.", "chosen": f"My {word}.", "rejected": "What?"}
            for word in WORDS[:7]
        ],
    )
    config = {
        **dpo_config,
        "holdout": 0.15,
        "data": [
            {**dpo_config["data"][0], "weight": 2.0},
            {"path": few, "weight": 1.0},
        ],
    }
    run_stage(
        "reference",
        pretrained,
        config,
        tmp_path / "reference",
    )
    inputs = {**pretrained, "reference": tmp_path / "reference" / "data"}
    run_stage("dpo", inputs, config, tmp_path / "whole", checkpoint_every=1000)
    one_step, save = trainer.one_step, Checkpoints.save

    def killed(attempt: Any, *arguments: Any) -> Any:
        if attempt.progress.step == 7:
            raise KeyboardInterrupt
        return one_step(attempt, *arguments)

    def written(checkpoints: Checkpoints, *arguments: Any) -> None:
        save(checkpoints, *arguments)
        checkpoints.join()

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "one_step", killed)
        patched.setattr(Checkpoints, "save", written)
        with pytest.raises(KeyboardInterrupt):
            run_stage("dpo", inputs, config, tmp_path / "killed", checkpoint_every=5)
    torch.distributed.destroy_process_group()
    saved = sorted(
        path.parent.name
        for path in (tmp_path / "killed" / "work" / "checkpoints").glob(
            "*/complete.json"
        )
    )
    assert saved == ["step-00000005"]
    run_stage("dpo", inputs, config, tmp_path / "killed", checkpoint_every=5)
    names = [
        "model/model.safetensors",
        "margins.parquet",
        "holdout.jsonl",
        "examples.txt",
        "rows-per-set.json",
    ]
    for name in names:
        assert (tmp_path / "killed" / "data" / name).read_bytes() == (
            tmp_path / "whole" / "data" / name
        ).read_bytes()
    digests = [
        [
            (line["step"], line["loss"], line.get("rows_digest"))
            for line in read_metrics(tmp_path / run)
        ]
        for run in ("killed", "whole")
    ]
    assert digests[0] == digests[1]


def test_dpo_metrics_have_the_fall_of_answers_and_the_validation_loss(
    run_stage: Any,
    referenced: dict[str, Path],
    dpo_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Rejected answers fall even without an SFT term; validation rows are those of
    pre-training.
    """
    summary = run_stage(
        "dpo", referenced, {**dpo_config, "validate_every": 6}, tmp_path / "dpo"
    )
    lines = steps_of(tmp_path / "dpo")
    assert lines[-1]["fell/rejected"] == 1.0
    assert lines[-1]["log_ratio/rejected"] < 0
    assert summary["chosen_decline"]["fell_rejected"] == 1.0
    validation_by_step = {
        line["step"]: line["validation"]
        for line in read_metrics(tmp_path / "dpo")
        if "validation" in line
    }
    assert sorted(validation_by_step) == [6, 12]
    (before,) = [
        line["validation"]
        for line in read_metrics(tmp_path / "pretrain")
        if line["step"] == 4 and "validation" in line
    ]
    assert validation_by_step[12]["prose"]["tokens"] == before["prose"]["tokens"]
    assert (
        validation_by_step[12]["prose"]["bits_per_byte"]
        != before["prose"]["bits_per_byte"]
    )
    assert summary["validation"] == validation_by_step[12]


def test_reference_of_another_model_is_rejected(
    run_stage: Any,
    referenced: dict[str, Path],
    dpo_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    table = pq.read_table(referenced["reference"] / TABLE)
    wrong = (table["rejected"].to_numpy() + 1.0).astype(np.float32)
    pq.write_table(
        table.set_column(table.schema.get_field_index("rejected"), "rejected", [wrong]),
        referenced["reference"] / TABLE,
    )
    with pytest.raises(
        NotTheReferenceError, match=r"the margin is 0\.1\d* and the loss 0\.6"
    ):
        run_stage("dpo", referenced, {**dpo_config, "steps": 1}, tmp_path / "dpo")


def test_reference_log_probabilities_are_sums_over_each_answer(
    referenced: dict[str, Path], dpo_config: dict[str, Any]
) -> None:
    from gristmill.train.data.conversation_tokens import Chat

    table = pq.read_table(referenced["reference"] / TABLE).to_pylist()
    examples = read_set(dpo_config["data"][0]["path"], "dpo").examples
    assert [row["id"] for row in table] == [example["id"] for example in examples]
    model, chat = (
        load_model(referenced["pretrain"] / "model"),
        Chat(referenced["tokenizer"]),
    )
    for row, example in zip(table[:4], examples, strict=False):
        for name in ("chosen", "rejected"):
            tokens = chat.encode([*example["prompt"], *example[name]])
            ids, spoken = (
                torch.from_numpy(tokens.ids),
                torch.from_numpy(tokens.turns[1:] > 0),
            )
            logps = torch.log_softmax(model(ids[None])[0, :-1], dim=-1).gather(
                1, ids[1:, None]
            )[:, 0]
            assert row[name] == pytest.approx(float(logps[spoken].sum()), abs=1e-4)
            assert row[f"{name}_tokens"] == int(spoken.sum())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 96}, r"sequence_length was 64 and is 96\. "),
        ({"precision": "bf16"}, "precision was float32 and is bfloat16"),
    ],
)
def test_stale_reference_is_rejected_with_the_difference(
    changes: dict[str, Any],
    message: str,
    run_stage: Any,
    referenced: dict[str, Path],
    dpo_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(StaleReferenceError, match=message):
        run_stage(
            "dpo", referenced, {**dpo_config, **changes, "steps": 1}, tmp_path / "dpo"
        )


def test_every_loss_starts_from_the_same_reference_table(
    run_stage: Any,
    referenced: dict[str, Path],
    dpo_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    before = (referenced["reference"] / KEY).read_bytes()
    for loss, beta, first in (
        ("hinge", 0.5, 1.0),
        ("ipo", 0.5, 1.0),
        ("sigmoid_norm", 2.0, math.log(2)),
    ):
        config = {**dpo_config, "steps": 1, "loss": loss, "beta": beta}
        assert run_stage("dpo", referenced, config, tmp_path / loss)[
            "first_loss"
        ] == pytest.approx(first, abs=1e-4)
    assert (referenced["reference"] / KEY).read_bytes() == before


def test_all_stages_are_evaluated_and_exported(
    run_stage: Any,
    pretrained: dict[str, Path],
    sft_config: dict[str, Any],
    dpo_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage("sft", pretrained, sft_config, tmp_path / "sft")
    inputs = {**pretrained, "sft": tmp_path / "sft" / "data"}
    run_stage(
        "reference",
        {name: inputs[name] for name in ("tokenizer", "mix", "sft")},
        dpo_config,
        tmp_path / "reference",
    )
    inputs["reference"] = tmp_path / "reference" / "data"
    dpo_inputs = {
        name: inputs[name] for name in ("tokenizer", "mix", "sft", "reference")
    }
    run_stage("dpo", dpo_inputs, dpo_config, tmp_path / "dpo")
    inputs["dpo"] = tmp_path / "dpo" / "data"
    del inputs["reference"]

    questions = tmp_path / "questions.jsonl"
    write_jsonl(
        questions,
        [
            {
                "prompt": f"Return the {word}",
                "choices": ["text", "a", "json"],
                "answer": number,
            }
            for number, word in enumerate(("module", "name", "object"))
        ],
    )
    config = {
        "prompts": ["The", "What is a json?"],
        "max_new_tokens": 6,
        "temperature": 0.8,
        "seed": 3,
        "tasks": [{"name": "words", "path": str(questions), "kind": "multiple_choice"}],
        "bootstrap_samples": 50,
        "contamination": {"ngram": 3},
        "reads": {"steps": 4, "global_batch_size": 6, "batch_ramp": [], "seed": 11},
    }
    for name in ("first", "second"):
        run_stage("evaluate", inputs, config, tmp_path / name)
    first, second = (
        (tmp_path / name / "data" / "evaluation.json").read_bytes()
        for name in ("first", "second")
    )
    assert first == second
    evaluation = json.loads(first)
    models = evaluation["models"]
    assert models["dpo"]["tasks"]["words"]["items"] == 3
    assert {
        (difference["from"], difference["to"])
        for difference in evaluation["differences"]
    } == {
        ("pretrain", "sft"),
        ("sft", "dpo"),
    }
    assert evaluation["contamination"]["sft"]["words"]["items"] == 3
    assert list(models) == ["dpo", "pretrain", "sft"]  # sorted keys
    assert set(models["sft"]["sources"]) == {"prose", "code"}
    assert [sample["prompt"] for sample in models["pretrain"]["samples"]] == config[
        "prompts"
    ]
    last = json.loads(
        (tmp_path / "pretrain" / "work" / "metrics.jsonl").read_text().splitlines()[-1]
    )
    for source, measures in models["pretrain"]["sources"].items():
        expected = last["validation"][source]
        estimates = {name: measures[name] for name in ("perplexity", "bits_per_byte")}
        values = {name: estimate["value"] for name, estimate in estimates.items()}
        measured = {name: {**measures, **values}[name] for name in expected}
        assert measured == pytest.approx(expected)
        for estimate in estimates.values():
            assert estimate["low"] <= estimate["value"] <= estimate["high"]

    lineage = {
        "name": "tiny",
        "sources": {"prose": {"weight": 1.0, "licence": "PSF-2.0"}},
    }
    summary = run_stage(
        "export",
        {"tokenizer": inputs["tokenizer"], "dpo": inputs["dpo"]},
        {"dtype": "fp32", "lineage": lineage},
        tmp_path / "export",
    )
    folder = tmp_path / "export" / "data"
    assert summary["model"] == "dpo"
    assert "| prose | 1.0 | PSF-2.0 |" in (folder / "README.md").read_text()
    assert_loads_in_transformers(folder, inputs["dpo"] / "model")


def assert_loads_in_transformers(folder: Path, ours_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    peer, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ours = load_model(ours_folder)
    assert len(tokenizer) == peer.config.vocab_size == ours.shape.vocab_size
    ids = torch.randint(
        0, ours.shape.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(peer(ids).logits, ours(ids), atol=1e-4, rtol=0)
    encoded = tokenizer.apply_chat_template(
        [message("user", "What is a json?")],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    from gristmill.train.data.conversation_tokens import Chat
    from gristmill.train.generation.scheduler import generate

    continued = peer.generate(**encoded, max_new_tokens=6, do_sample=False)[
        0, encoded["input_ids"].shape[1] :
    ]
    expected = generate(ours, encoded["input_ids"].tolist(), 6, Chat(folder).stops)[0]
    assert continued.tolist()[: len(expected)] == expected


def test_bf16_export_has_bf16_tensors(
    run_stage: Any, pretrained: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    run_stage(
        "export",
        {name: pretrained[name] for name in ("tokenizer", "pretrain")},
        {"dtype": "bf16"},
        tmp_path / "export",
    )
    tensors = load_file(tmp_path / "export" / "data" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    assert (
        json.loads((tmp_path / "export" / "data" / "config.json").read_text())["dtype"]
        == "bfloat16"
    )


@pytest.mark.parametrize("stage", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_tuning_is_extended_with_the_same_bits(
    run_stage: Any,
    pretrained: dict[str, Path],
    referenced: dict[str, Path],
    sft_config: dict[str, Any],
    dpo_config: dict[str, Any],
    tmp_path: Path,
    stage: str,
) -> None:
    inputs = pretrained if stage == "sft" else referenced
    config = {
        **(sft_config if stage == "sft" else dpo_config),
        "steps": 6,
        "schedule": {"kind": "constant", "warmup_steps": 1},
    }
    start = {"pretrain": "a"}
    run_stage(stage, inputs, config, tmp_path / "short", start_models=start)
    checkpoint = tmp_path / "short" / "work" / "checkpoints" / "step-00000004"
    nine_steps = {**config, "steps": 9}
    longer = {**nine_steps, "continue_from": str(checkpoint)}
    run_stage(stage, inputs, nine_steps, tmp_path / "whole")
    run_stage(stage, inputs, longer, tmp_path / "longer", start_models=start)
    continued = read_metrics(tmp_path / "longer")
    assert [line["step"] for line in continued] == list(range(5, 10))
    assert [line["rows_digest"] for line in continued] == [
        line["rows_digest"] for line in read_metrics(tmp_path / "whole")[4:]
    ]
    assert_same_output(tmp_path / "longer", tmp_path / "whole")
    with pytest.raises(ContinueError, match="pretrain"):
        run_stage(
            stage, inputs, longer, tmp_path / "other", start_models={"pretrain": "b"}
        )


def test_longer_rows_extend_the_context_in_generation_export_and_rl(
    run_stage: Any,
    pretrained: dict[str, Path],
    sft_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    messages: list[dict[str, Any]] = []

    def emit(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            messages.append(event["message"])

    summary = run_stage("sft", pretrained, sft_config, tmp_path / "sft", emit=emit)
    (warning,) = messages
    assert re.match(r"sft: .*64 tokens.* 32", warning)
    tuned = tmp_path / "sft" / "data"
    assert read_shape(pretrained["pretrain"] / "model").sequence_length == 32
    assert read_shape(tuned / "model").sequence_length == summary["context"] == 64
    (answer,) = generate(load_model(tuned / "model"), [[5] * 50], 20, set())
    assert len(answer) == 14
    run_stage(
        "export",
        {"tokenizer": pretrained["tokenizer"], "sft": tuned},
        {},
        tmp_path / "export",
    )
    exported = json.loads((tmp_path / "export" / "data" / "config.json").read_text())
    assert exported["max_position_embeddings"] == 64

    prompts = write_jsonl(
        tmp_path / "prompts.jsonl", [{"prompt": f"What is a {word}?"} for word in WORDS]
    )
    rl = {
        "data": [{"path": prompts}],
        "rewards": [{"kind": "length", "target_tokens": 3}],
        "steps": 1,
        "seed": 5,
        "group_size": 2,
        "global_batch_size": 4,
        "max_new_tokens": 4,
    }
    inputs = {
        "tokenizer": pretrained["tokenizer"],
        "mix": pretrained["mix"],
        "sft": tuned,
    }
    messages.clear()
    assert (
        run_stage("rl", inputs, rl, tmp_path / "rl", emit=emit)["sequence_length"] == 64
    )
    assert messages == []
    longer = {**rl, "sequence_length": 80, "max_new_tokens": 50}
    summary = run_stage("rl", pretrained, longer, tmp_path / "longer", emit=emit)
    assert (summary["sequence_length"], summary["context"]) == (80, 80)
    assert read_shape(tmp_path / "longer" / "data" / "model").sequence_length == 80
    answers = pq.read_table(
        tmp_path / "longer" / "data" / "answers.parquet"
    ).to_pylist()
    # more than fit into the previous 32 positions
    assert max(answer_row["tokens"] for answer_row in answers) == 50
    (warning,) = messages
    assert re.match(r"rl: .*80 tokens.* 32", warning)


def test_shorter_rows_keep_the_context(
    run_stage: Any,
    pretrained: dict[str, Path],
    sft_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage(
        "sft",
        pretrained,
        {**sft_config, "steps": 1, "sequence_length": 24},
        tmp_path / "sft",
    )
    assert read_shape(tmp_path / "sft" / "data" / "model").sequence_length == 32
