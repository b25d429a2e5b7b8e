"""Training, fine-tuning and adapters of decoders of transformers, next to plain loops
over the same modules, and their resumption.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gristmill.core.files import read_json, write_json
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.lora import LoraError
from gristmill.train.distributed.process_groups import multiply_with_avx512
from gristmill.train.models.model_config import ShapeError
from gristmill.train.models.weights import (
    load_model,
)
from gristmill.train.objectives.losses import IGNORED, next_tokens
from gristmill.train.objectives.preflight_checks import pieces_of
from gristmill.train.objectives.sft import AssistantTurns
from tests.jsonl import read_metrics, write_jsonl
from tests.train.decoder_families import (
    FAMILIES,
    LENGTH,
    VOCAB,
    hf_model,
    random_ids,
    save_tiny_decoder,
)
from tests.train.test_resume import (
    finish,
    torchrun,
    train,
    wait_for_step,
    without_timing,
    write_stage,
)
from tests.train.trained import assert_same_output, losses_of, weights_of

WORDS = "json text file name list code line type value error module class".split()


@pytest.fixture
def sft_config(tmp_path: Path) -> dict[str, Any]:
    path = write_jsonl(
        tmp_path / "sft.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": f"What is a {word}?"},
                    {"role": "assistant", "content": f"A {word}."},
                ]
            }
            for word in WORDS
        ],
    )
    return {
        "data": [{"path": path}],
        "steps": 6,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "seed": 11,
        "log_every": 1,
        "sequence_length": LENGTH,
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "optimizer": {"learning_rate": 0.003, "weight_decay": 0.0},
    }


def preference_config(folder: Path) -> dict[str, Any]:
    """Settings of `dpo` on pairs that are written to a folder."""
    pairs = write_jsonl(
        folder / "pairs.jsonl",
        [{"prompt": word, "chosen": "yes", "rejected": "no"} for word in WORDS],
    )
    return {
        "data": [{"path": pairs}],
        "steps": 3,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "seed": 11,
        "log_every": 1,
        "sequence_length": LENGTH,
        "optimizer": {"learning_rate": 0.01},
    }


@pytest.fixture
def products_of_stages() -> Iterator[None]:
    """Products of matrices by the library that stages use on this processor."""
    before = torch.get_float32_matmul_precision()
    multiply_with_avx512()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.slow
@pytest.mark.usefixtures("products_of_stages")
@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tuning_equals_a_plain_loop_over_the_module(
    family: str,
    run_stage: Any,
    given_model: Any,
    sft_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """AdamW amplifies rounding in Gemma 4's smallest gradients, of 1e-10."""
    given = given_model(family)
    run_stage("sft", given, sft_config, tmp_path / "sft")
    model = hf_model(tmp_path / family)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.0
    )
    packed = PackedSet(tmp_path / "sft" / "prepared" / "data")
    turns = AssistantTurns(packed, 11, torch.ones(VOCAB), 1.0)
    losses = []
    for step in range(6):
        rows = turns.order.rows(np.arange(4 * step, 4 * step + 4, dtype=np.int64))
        nll = torch.zeros(())
        for row in rows:
            batch = turns.prepare(row[None])
            for piece in pieces_of(batch, 0):
                logits = model(piece.ids, use_cache=False).logits
                nll = nll + torch.nn.functional.cross_entropy(
                    logits[0],
                    next_tokens(piece.ids, piece.trained)[0],
                    ignore_index=IGNORED,
                    reduction="sum",
                )
        loss = nll / turns.weight(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tolerance = 1e-3 if family == "gemma4_text" else 1e-5
    assert losses_of(tmp_path / "sft") == pytest.approx(losses, abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma2", "olmo2", "granite", "deepseek_v3", "gpt_neox"]
)
def test_pretraining_equals_a_plain_loop_over_the_module(
    family: str,
    run_stage: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
) -> None:
    save_tiny_decoder(family, tmp_path / family)
    config = {
        **pretrain_config,
        "model": {"init_from": str(tmp_path / family)},
        "steps": 24,
        "global_batch_size": 3,
        "micro_batch_size": 2,
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "optimizer": {"learning_rate": 0.003, "weight_decay": 0.0},
    }
    run_stage("pretrain", inputs, config, tmp_path / "ours")
    model = hf_model(tmp_path / family)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.0
    )
    packed = PackedSet(inputs["mix"])
    order = packed.order(11)
    losses = []
    for step in range(24):
        rows = order.rows(np.arange(3 * step, 3 * step + 3, dtype=np.int64))
        ids = torch.from_numpy(packed.read(rows))
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses_of(tmp_path / "ours") == pytest.approx(losses, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_pretraining_continues_resumes_to_the_same_bits_and_merges(
    run_stage: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
    stop_pretraining: Any,
    family: str,
    precision: str,
) -> None:
    """In bfloat16, FSDP wraps the module even in one process."""
    save_tiny_decoder(family, tmp_path / "start")
    config = {
        **pretrain_config,
        "model": {"init_from": str(tmp_path / "start"), "document_mask": True},
        "precision": precision,
        "average": {"decay": 0.5},
    }
    engine = {"permanent_every": 4}
    summary = run_stage("pretrain", inputs, config, tmp_path / "whole", **engine)
    assert summary["last_loss"] < summary["first_loss"] - 0.5
    stop_pretraining(inputs, config, tmp_path / "cut")
    run_stage("pretrain", inputs, config, tmp_path / "cut")
    assert_same_output(tmp_path / "cut", tmp_path / "whole")
    merge = {"steps": [12], "shares": [1.0], "of": 12}
    given = {**inputs, "pretrain": tmp_path / "whole" / "data"}
    run_stage("merge", given, merge, tmp_path / "merged")
    assert_same_output(tmp_path / "merged", tmp_path / "whole")


@pytest.mark.parallel
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "deepseek_v3"])
def test_two_ranks_train_the_same_model(
    run_stage: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
    family: str,
) -> None:
    save_tiny_decoder(family, tmp_path / "start")
    config = {
        **pretrain_config,
        "model": {"init_from": str(tmp_path / "start"), "document_mask": True},
    }
    run_stage("pretrain", inputs, config, tmp_path / "one")
    write_stage(tmp_path / "two", "pretrain", inputs, config, 4)
    train(tmp_path / "two", 2)
    assert losses_of(tmp_path / "two") == pytest.approx(
        losses_of(tmp_path / "one"), abs=1e-4
    )
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=2e-3)


@pytest.mark.parallel
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1)])
def test_killed_training_resumes_on_as_many_or_other_processes(
    before: int,
    after: int,
    run_stage: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
) -> None:
    """As for the package's own decoder: the same bits on as many processes, the same
    rows and losses within rounding on others.
    """
    save_tiny_decoder("gemma2", tmp_path / "start")
    config = {
        **pretrain_config,
        "model": {"init_from": str(tmp_path / "start"), "document_mask": True},
        "optimizer": {"learning_rate": 0.003},
    }
    run_stage("pretrain", inputs, config, tmp_path / "whole")
    write_stage(tmp_path / "killed", "pretrain", inputs, config, every=1)
    with torchrun(tmp_path / "killed", before) as process:
        wait_for_step(process, 5)
        process.send_signal(signal.SIGKILL)
        finish(process)
    assert not (tmp_path / "killed" / "data").exists()
    train(tmp_path / "killed", after)
    whole, killed = (
        without_timing(read_metrics(tmp_path / name)) for name in ("whole", "killed")
    )
    for line, expected in zip(killed, whole, strict=True):
        assert line.get("rows_digest") == expected.get("rows_digest")
        if "loss" in line:
            assert line["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    if before == after:
        assert killed == whole
        assert_same_output(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_adapters_resume_to_the_same_bits(
    run_stage: Any, given_model: Any, sft_config: dict[str, Any], tmp_path: Path
) -> None:
    given = given_model("gemma2")
    config = {**sft_config, "lora": {"rank": 4}}
    run_stage("sft", given, {**config, "steps": 4}, tmp_path / "resumed")
    for name in ("whole", "resumed"):
        run_stage("sft", given, config, tmp_path / name)
    assert_same_output(tmp_path / "resumed", tmp_path / "whole")
    assert losses_of(tmp_path / "resumed") == losses_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_preferences_begin_at_ln_2(
    family: str, run_stage: Any, given_model: Any, tmp_path: Path
) -> None:
    given = given_model(family)
    config = preference_config(tmp_path)
    run_stage("reference", given, config, tmp_path / "reference")
    given["reference"] = tmp_path / "reference" / "data"
    run_stage("dpo", given, config, tmp_path / "dpo")
    losses = losses_of(tmp_path / "dpo")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_train_frozen_weights_or_the_family_is_refused(
    family: str,
    run_stage: Any,
    given_model: Any,
    sft_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """GPT-2's matrices are not linear layers of torch."""
    given = given_model(family)
    config = {**sft_config, "lora": {"rank": 4}}
    if family == "gpt2":
        with pytest.raises(LoraError):
            run_stage("sft", given, config, tmp_path / "sft")
        return
    run_stage("sft", given, config, tmp_path / "sft")
    losses = losses_of(tmp_path / "sft")
    assert losses[-1] < losses[0]
    before = load_file(given["model"] / "model" / "model.safetensors")
    after = weights_of(tmp_path / "sft")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("embed" in name or "norm" in name for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tuning_resumes_to_the_same_bits(
    family: str,
    run_stage: Any,
    given_model: Any,
    sft_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    given = given_model(family)
    run_stage("sft", given, {**sft_config, "steps": 4}, tmp_path / "resumed")
    for name in ("whole", "resumed"):
        run_stage("sft", given, sft_config, tmp_path / name)
    assert_same_output(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi3"])
def test_adapters_are_those_of_peft(
    run_stage: Any,
    given_model: Any,
    sft_config: dict[str, Any],
    tmp_path: Path,
    family: str,
) -> None:
    from peft import PeftModel

    given = given_model(family)
    run_stage("sft", given, {**sft_config, "lora": {"rank": 4}}, tmp_path / "sft")
    model = load_model(tmp_path / "sft" / "data" / "model")
    adapted = PeftModel.from_pretrained(
        hf_model(tmp_path / family), tmp_path / "sft" / "data" / "adapter"
    ).eval()
    ids = random_ids(2, 20)
    with torch.no_grad():
        theirs = adapted(input_ids=ids, use_cache=False).logits
        base = hf_model(tmp_path / family)(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids), theirs, rtol=0, atol=1e-4)
    assert float((theirs - base).abs().max()) > 0.01
    layers = read_json(tmp_path / "sft" / "data" / "adapter" / "adapter_config.json")
    assert not any(
        "vision" in name for name, _ in adapted.named_parameters() if "lora" in name
    )
    if family == "phi3":
        assert {"qkv_proj", "gate_up_proj"} < set(layers["target_modules"])


@pytest.mark.slow
def test_part_for_images_is_kept(
    run_stage: Any, given_model: Any, sft_config: dict[str, Any], tmp_path: Path
) -> None:
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "do_resize": True}
    write_json(tmp_path / "qwen3_vl" / "preprocessor_config.json", processor)
    given = given_model("qwen3_vl")
    run_stage("sft", given, sft_config, tmp_path / "sft")
    trained = {"tokenizer": given["tokenizer"], "sft": tmp_path / "sft" / "data"}
    run_stage("export", trained, {"dtype": "fp32"}, tmp_path / "export")
    out = tmp_path / "export" / "data"
    before = load_file(tmp_path / "qwen3_vl" / "model.safetensors")
    after = load_file(out / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "visual" not in name}
    assert read_json(out / "preprocessor_config.json") == processor
    assert "AutoModelForImageTextToText" in (out / "README.md").read_text()


def test_longer_rows_are_refused(
    run_stage: Any, given_model: Any, sft_config: dict[str, Any], tmp_path: Path
) -> None:
    given = given_model("gpt2")
    with pytest.raises(ShapeError):
        run_stage(
            "sft",
            given,
            {**sft_config, "sequence_length": 2 * LENGTH},
            tmp_path / "sft",
        )


@pytest.mark.slow
def test_rewards_evaluation_and_export_of_one_decoder(
    run_stage: Any, given_model: Any, tmp_path: Path
) -> None:
    given = given_model("deepseek_v3")
    prompts = write_jsonl(
        tmp_path / "prompts.jsonl", [{"prompt": word} for word in WORDS]
    )
    rl = {
        **preference_config(tmp_path),
        "data": [{"path": prompts}],
        "rewards": [{"kind": "contains", "text": "e"}],
        "group_size": 2,
        "max_new_tokens": 4,
        "kl_weight": 0.01,
    }
    run_stage("rl", given, rl, tmp_path / "rl")
    first = next(line for line in read_metrics(tmp_path / "rl") if "kl" in line)
    assert (first["kl"], first["clip_ratio"]) == (0.0, 0.0)
    trained = {"tokenizer": given["tokenizer"], "rl": tmp_path / "rl" / "data"}
    run_stage("export", trained, {}, tmp_path / "export")
    ids = random_ids(2, 20)
    with torch.no_grad():
        exported = hf_model(tmp_path / "export" / "data")(ids, use_cache=False).logits
        ours = load_model(tmp_path / "rl" / "data" / "model")(ids)
    # Exported weights are bfloat16.
    torch.testing.assert_close(exported, ours, rtol=0, atol=0.2)
    evaluation = run_stage(
        "evaluate", {**given, "rl": trained["rl"]}, {"bootstrap_samples": 10}, tmp_path
    )
    assert list(evaluation["models"]) == ["model", "rl"]
