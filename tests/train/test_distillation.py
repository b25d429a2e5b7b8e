"""Distillation: divergences by hand and against PyTorch, saved distributions of a
teacher, and a student's progress.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.posttraining import Distill, Divergence
from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import load_model, read_shape, save_model
from gristmill.train.objectives import losses
from gristmill.train.objectives.distillation import (
    Taught,
    TeacherFiles,
    distilled_nll,
    divergence,
    kept_of,
)
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.reference_logps import StaleReferenceError
from gristmill.train.objectives.sft import AssistantTurns
from gristmill.train.stages.sft import check_teacher
from gristmill.train.stages.teacher import TeacherError
from tests.jsonl import read_metrics, write_jsonl

WORDS = ("json", "text", "file", "name", "list", "code", "line", "type")
KINDS: tuple[Divergence, ...] = ("forward", "reverse", "jsd")


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, 0.5 * math.log(3 / 2) + 0.5 * math.log(3 / 4)),
        (1.0, (math.log(2 / 3) + 2 * math.log(4 / 3)) / 3),
        # The mixture of beta 1/4 is (3/8, 5/16, 5/16).
        (
            0.25,
            0.125 * (math.log(4 / 3) + math.log(4 / 5))
            + 0.25 * (math.log(8 / 9) + 2 * math.log(16 / 15)),
        ),
    ],
)
def test_divergences_are_derived_by_hand(beta: float, expected: float) -> None:
    """Probabilities are 1/2, 1/4, 1/4 of the teacher and 1/3 each of the student."""
    teacher = torch.tensor([[0.5, 0.25, 0.25]]).log()
    student = torch.full((1, 3), 7.0)
    losses_ = divergence(student, kept_of(teacher, 1.0, None), 1.0, beta)
    assert losses_.tolist() == [pytest.approx(expected, abs=1e-7)]
    # At a temperature of 1/2, the teacher has 2/3, 1/6, 1/6, the student still 1/3
    # each.
    colder = divergence(student, kept_of(teacher, 0.5, None), 0.5, 0.0)
    assert colder.tolist() == [
        pytest.approx(2 / 3 * math.log(2) + 1 / 3 * math.log(1 / 2), abs=1e-7)
    ]


def test_ids_beyond_top_k_are_one_outcome() -> None:
    """Of 1/2, 3/8, 1/8 only the first is kept, where the student has 1/4, and 3/4 for
    all others.
    """
    teacher = kept_of(torch.tensor([[0.375, 0.5, 0.125]]).log(), 1.0, 1)
    assert teacher.ids is not None
    assert teacher.rest is not None
    assert (
        teacher.ids.tolist(),
        teacher.logps.exp().tolist(),
        teacher.rest.exp().tolist(),
    ) == (
        [[1]],
        [[0.5]],
        [pytest.approx(0.5)],
    )
    losses_ = divergence(torch.tensor([[0.25, 0.25, 0.5]]).log(), teacher, 1.0, 0.0)
    assert losses_.tolist() == [
        pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-7)
    ]


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from((0.0, 0.3, 1.0)),
    st.integers(2, 12),
    st.integers(1, 12),
    st.floats(0.3, 4.0),
    st.integers(0, 2**31),
)
def test_top_k_divergence_is_at_most_the_full_one_and_zero_from_itself(
    beta: float, v: int, k: int, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randn(6, v, generator=generator) * 3 for _ in range(2))
    full, part = (
        divergence(student, kept_of(teacher, temperature, top_k), temperature, beta)
        for top_k in (None, k)
    )
    assert (part <= full + 1e-5).all()
    assert (part >= -1e-5).all()
    if k >= v:
        assert torch.equal(part, full)
    itself = divergence(teacher, kept_of(teacher, temperature, k), temperature, beta)
    torch.testing.assert_close(itself, torch.zeros(6), atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(2, 9),
    st.integers(1, 40),
    st.integers(0, 2**31),
)
def test_chunked_loss_and_gradients_equal_a_dense_computation(
    kind: Divergence, n: int, t: int, v: int, chunk: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, matrix, weights, teacher = (
        torch.randn(size, generator=generator)
        for size in ((n, t, 5), (v, 5), (n, t), (n, t, v))
    )
    targets = torch.randint(0, v, (n, t), generator=generator)
    targets[torch.rand(n, t, generator=generator) < 0.4] = IGNORED
    trained, mixing = (
        targets != IGNORED,
        Distill(teacher="pretrain", temperature=2.0, kind=kind, weight=0.3),
    )
    ours, theirs = (
        [part.clone().requires_grad_() for part in (hidden, matrix)] for _ in range(2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_LOGITS", chunk)
        total, nll, divergences = distilled_nll(
            *ours, targets, weights, kept_of(teacher[trained], 2.0, None), mixing
        )
    (3 * total).backward()
    logits = theirs[0] @ theirs[1].T
    p, q = (F.log_softmax(part / 2.0, dim=-1) for part in (logits, teacher))
    m = (0.5 * p.exp() + 0.5 * q.exp()).log()

    def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return F.kl_div(second, first, reduction="none", log_target=True).sum(dim=-1)

    soft = {
        "forward": kl(q, p),
        "reverse": kl(p, q),
        "jsd": 0.5 * kl(q, m) + 0.5 * kl(p, m),
    }[kind]
    hard = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(n, t)
    dense = ((0.7 * hard + 0.3 * 4.0 * soft * trained) * weights).sum()
    (3 * dense).backward()
    torch.testing.assert_close(total, dense.detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        divergences, (soft * trained).detach(), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(nll, hard.detach(), atol=1e-5, rtol=1e-5)
    for our_tensor, dense_tensor in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            our_tensor.grad, dense_tensor.grad, atol=1e-4, rtol=1e-4
        )


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_folder: Path,
    make_model: Callable[[Shape], Llama],
) -> Path:
    """Folders `teacher`, and a smaller `student/model`, both with the vocabulary of the
    run.
    """
    folder, ids = (
        tmp_path_factory.mktemp("models"),
        Chat(tokenizer_folder).tokenizer.get_vocab_size(),
    )
    for name, width in (("teacher", 48), ("student/model", 32)):
        section = Model(layers=2, width=width, heads=4, kv_heads=2, ffn_width=48)
        model = make_model(shape_of(section, vocab_size=ids, sequence_length=64))
        save_model(folder / name, model.shape, dict(model.state_dict()))
    return folder


@pytest.fixture
def rows(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    models: Path,
    tmp_path: Path,
) -> dict[str, Path]:
    """Inputs of `teacher` and `sft`: rows of several conversations."""
    write_jsonl(
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
    inputs = {
        "tokenizer": tokenizer_folder,
        "mix": mix_folder,
        "pretrain": models / "student",
    }
    run_stage(
        "sft_data",
        inputs,
        {"data": [{"path": str(tmp_path / "sft.jsonl")}], "sequence_length": 64},
        tmp_path / "rows",
    )
    return {**inputs, "sft_data": tmp_path / "rows" / "data"}


TRAINING = {
    "steps": 25,
    "global_batch_size": 2,
    "micro_batch_size": 1,
    "log_every": 1,
    "seed": 3,
    "schedule": {"warmup_steps": 1},
    "optimizer": {"learning_rate": 0.01},
}


def stage_alone(
    stage: str, inputs: dict[str, Path], config: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Run a stage on existing rows, which `run_stage` would write again for `sft`."""
    (folder / "work").mkdir(parents=True)
    summary: dict[str, Any] = importlib.import_module(
        f"gristmill.train.stages.{stage}"
    ).run(
        inputs,
        config,
        folder / "data",
        Context(folder / "work", stage, emit=lambda event: None),
    )
    json.dumps(summary, allow_nan=False)
    return summary


def dense_divergence(student: Path, inputs: dict[str, Path], teacher: Path) -> float:
    """Average KL(teacher || student) over the trained tokens, conversation by
    conversation.
    """
    packed = PackedSet(inputs["sft_data"])
    masks, (teacher_model, student_model) = (
        LossMasks(packed),
        (load_model(folder) for folder in (teacher, student)),
    )
    divergences: list[float] = []
    for row in range(packed.rows):
        ids, trained = packed.read(np.array([row]))[0], masks.read(np.array([row]))[0]
        for piece in packed.pieces(np.array([row])).to_pylist():
            span = slice(piece["start"], piece["start"] + piece["length"])
            q, p = (
                F.log_softmax(
                    model(torch.from_numpy(ids[span].astype(np.int64))[None])[0, :-1],
                    dim=-1,
                )
                for model in (teacher_model, student_model)
            )
            divergences += (
                (q.exp() * (q - p))
                .sum(dim=-1)[torch.from_numpy(trained[span][1:].copy())]
                .tolist()
            )
    return float(np.mean(divergences))


@pytest.mark.slow
def test_student_approaches_its_teacher(
    run_stage: Any, rows: dict[str, Path], models: Path, tmp_path: Path
) -> None:
    summary = run_stage(
        "teacher",
        rows,
        {"teacher": str(models / "teacher"), "top_k": "all"},
        tmp_path / "teacher",
    )
    packed = PackedSet(rows["sft_data"])
    assert packed.rows > 2
    assert summary["tokens"] == LossMasks(packed).trained_per_row.sum()
    assert (summary["rest_mass"], summary["top_k"]) == (0.0, "all")
    inputs = {**rows, "teacher": tmp_path / "teacher" / "data"}
    distill = {"teacher": str(models / "teacher"), "top_k": "all", "weight": 1.0}
    single_step = {
        **TRAINING,
        "steps": 1,
        "global_batch_size": packed.rows,
        "distill": distill,
    }
    first = stage_alone("sft", inputs, single_step, tmp_path / "every")["first_loss"]
    before = dense_divergence(models / "student/model", rows, models / "teacher")
    assert first == pytest.approx(before, rel=1e-5)
    stage_alone("sft", inputs, {**TRAINING, "distill": distill}, tmp_path / "sft")
    lines = read_metrics(tmp_path / "sft")
    assert all(line["loss"] == pytest.approx(line["divergence"]) for line in lines)
    after = dense_divergence(tmp_path / "sft/data/model", rows, models / "teacher")
    assert after < before / 3
    assert lines[-1]["divergence"] < lines[0]["divergence"] / 3
    stage_alone("sft", inputs, TRAINING, tmp_path / "labels")
    assert (
        dense_divergence(tmp_path / "labels/data/model", rows, models / "teacher")
        > 2 * after
    )


def test_teacher_saves_the_likeliest_ids_and_the_remaining_mass(
    run_stage: Any, rows: dict[str, Path], models: Path, tmp_path: Path
) -> None:
    config = {
        "teacher": str(models / "teacher"),
        "temperature": 2.0,
        "micro_batch_size": 2,
    }
    parts: list[Taught] = []
    for name, top_k in (("five", 5), ("all", "all")):
        summary = run_stage(
            "teacher", rows, {**config, "top_k": top_k}, tmp_path / name
        )
        masks = LossMasks(PackedSet(rows["sft_data"]))
        parts.append(
            TeacherFiles(tmp_path / name / "data", masks).read(np.array([2, 0]))
        )
        assert summary["loss"] > 0
    top_five, full = parts
    assert top_five.ids is not None
    assert top_five.rest is not None
    assert top_five.logps.shape == (int(masks.trained_per_row[[2, 0]].sum()), 5)
    torch.testing.assert_close(full.logps.exp().sum(dim=1), torch.ones(len(full.logps)))
    torch.testing.assert_close(top_five.logps, full.logps.topk(5, dim=1).values)
    assert torch.equal(top_five.ids, full.logps.topk(5, dim=1).indices)
    torch.testing.assert_close(
        top_five.logps.exp().sum(dim=1) + top_five.rest.exp(),
        torch.ones(len(top_five.rest)),
    )


def test_stale_distributions_are_rejected_with_the_difference(
    run_stage: Any, rows: dict[str, Path], models: Path, tmp_path: Path
) -> None:
    shutil.copytree(models / "teacher", tmp_path / "model")
    teacher = str(tmp_path / "model")
    run_stage("teacher", rows, {"teacher": teacher, "top_k": 4}, tmp_path / "teacher")
    inputs = {**rows, "teacher": tmp_path / "teacher" / "data"}
    turns = AssistantTurns(PackedSet(rows["sft_data"]), 0, torch.ones(1), 1.0)
    student = read_shape(models / "student/model")

    def assert_rejected(
        message: str, dtype: torch.dtype = torch.float32, **keys: Any
    ) -> None:
        with pytest.raises(StaleReferenceError, match=f"{message}.*`--force teacher`"):
            check_teacher(
                Distill.model_validate({"teacher": teacher, "top_k": 4, **keys}),
                turns.fingerprint,
                inputs,
                dtype,
                student,
            )

    kind = Distill.model_validate(
        {"teacher": teacher, "top_k": 4, "kind": "reverse", "weight": 0.1}
    )
    check_teacher(kind, turns.fingerprint, inputs, torch.float32, student)
    assert_rejected(r"temperature was 1\.0 and is 3\.0", temperature=3.0)
    assert_rejected(r"top_k was 4 and is all", top_k="all")
    assert_rejected(r"precision was float32 and is bfloat16", dtype=torch.bfloat16)
    shutil.copy(models / "student/model/model.safetensors", tmp_path / "model")
    assert_rejected(r"weights was \w{64} and is \w{64}")


def test_teacher_with_another_vocabulary_is_rejected(
    run_stage: Any,
    rows: dict[str, Path],
    models: Path,
    tmp_path: Path,
    tokenizer_folder: Path,
    tiny_shape: Shape,
    make_model: Callable[[Shape], Llama],
) -> None:
    save_model(
        tmp_path / "other", tiny_shape, dict(make_model(tiny_shape).state_dict())
    )
    with pytest.raises(TeacherError, match=r"other predicts 100 ids"):
        run_stage(
            "teacher", rows, {"teacher": str(tmp_path / "other")}, tmp_path / "one"
        )
    shutil.copytree(models / "teacher", tmp_path / "renamed")
    text = (tokenizer_folder / "tokenizer.json").read_text()
    vocabulary = json.loads(text)["model"]["vocab"]
    first, second = (
        token for token, number in vocabulary.items() if number in (300, 301)
    )
    swapped = json.loads(text)
    swapped["model"]["vocab"] |= {first: vocabulary[second], second: vocabulary[first]}
    (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(TeacherError, match="2 tokens"):
        run_stage(
            "teacher", rows, {"teacher": str(tmp_path / "renamed")}, tmp_path / "two"
        )
    with pytest.raises(TeacherError, match=r"nowhere has no config\.json"):
        run_stage(
            "teacher", rows, {"teacher": str(tmp_path / "nowhere")}, tmp_path / "three"
        )
