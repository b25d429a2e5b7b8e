"""Distillation: divergences by hand and against PyTorch's, what the stage `teacher` keeps, what a student learns."""

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
from gristmill.mixtures.model import Model
from gristmill.mixtures.posttraining import Distill, Divergence
from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import load_model, read_shape, save_model
from gristmill.train.objectives import losses
from gristmill.train.objectives.distillation import Taught, TeacherRows, distilled_nll, divergence, kept_of
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.reference_logps import StaleReferenceError
from gristmill.train.objectives.sft_objective import AssistantTurns
from gristmill.train.stages.sft import taught_turns
from gristmill.train.stages.teacher import TeacherError

WORDS = ("json", "text", "file", "name", "list", "code", "line", "type")
KINDS: tuple[Divergence, ...] = ("forward", "reverse", "jsd")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("forward", 0.5 * math.log(3 / 2) + 0.5 * math.log(3 / 4)),
        ("reverse", (math.log(2 / 3) + 2 * math.log(4 / 3)) / 3),
        # The mixture of beta 1/4 is (3/8, 5/16, 5/16).
        ("jsd", 0.125 * (math.log(4 / 3) + math.log(4 / 5)) + 0.25 * (math.log(8 / 9) + 2 * math.log(16 / 15))),
    ],
)
def test_divergences_by_hand(kind: Divergence, expected: float) -> None:
    """The teacher says 1/2, 1/4, 1/4, the student nothing in particular: 1/3 each."""
    teacher = torch.tensor([[0.5, 0.25, 0.25]]).log()
    student = torch.full((1, 3), 7.0)
    whole = divergence(student, kept_of(teacher, 1.0, None), 1.0, kind, 0.25)
    assert whole.tolist() == [pytest.approx(expected, abs=1e-7)]
    # At a temperature of 1/2 the teacher says 2/3, 1/6, 1/6; the student still nothing.
    colder = divergence(student, kept_of(teacher, 0.5, None), 0.5, "forward", 0.5)
    assert colder.tolist() == [pytest.approx(2 / 3 * math.log(2) + 1 / 3 * math.log(1 / 2), abs=1e-7)]


def test_ids_that_were_not_kept_are_one_outcome() -> None:
    """Of 1/2, 3/8, 1/8 the first is kept; the student says 1/4, 1/4, 1/2, so 1/4 and any other 3/4."""
    taught = kept_of(torch.tensor([[0.375, 0.5, 0.125]]).log(), 1.0, 1)
    assert taught.ids is not None
    assert taught.rest is not None
    assert (taught.ids.tolist(), taught.logps.exp().tolist(), taught.rest.exp().tolist()) == (
        [[1]],
        [[0.5]],
        [pytest.approx(0.5)],
    )
    found = divergence(torch.tensor([[0.25, 0.25, 0.5]]).log(), taught, 1.0, "forward", 0.5)
    assert found.tolist() == [pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-7)]


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(KINDS), st.integers(2, 12), st.integers(1, 12), st.floats(0.3, 4.0), st.integers(0, 2**31))
def test_a_divergence_of_kept_ids_is_at_most_the_whole_one_and_zero_from_itself(
    kind: Divergence, v: int, k: int, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randn(6, v, generator=generator) * 3 for _ in range(2))
    whole, part = (
        divergence(student, kept_of(teacher, temperature, kept), temperature, kind, 0.3) for kept in (None, k)
    )
    assert (part <= whole + 1e-5).all()
    assert (part >= -1e-5).all()
    if k >= v:
        assert torch.equal(part, whole)
    itself = divergence(teacher, kept_of(teacher, temperature, k), temperature, kind, 0.3)
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
def test_the_chunked_loss_and_its_gradients_are_a_dense_computations(
    kind: Divergence, n: int, t: int, v: int, chunk: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, matrix, weights, teacher = (
        torch.randn(size, generator=generator) for size in ((n, t, 5), (v, 5), (n, t), (n, t, v))
    )
    targets = torch.randint(0, v, (n, t), generator=generator)
    targets[torch.rand(n, t, generator=generator) < 0.4] = IGNORED
    trained, mixing = targets != IGNORED, Distill(teacher="pretrain", temperature=2.0, kind=kind, weight=0.3)
    ours, theirs = ([part.clone().requires_grad_() for part in (hidden, matrix)] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_LOGITS", chunk)
        total, nll, apart = distilled_nll(*ours, targets, weights, kept_of(teacher[trained], 2.0, None), mixing)
    (3 * total).backward()
    logits = theirs[0] @ theirs[1].T
    p, q = (F.log_softmax(part / 2.0, dim=-1) for part in (logits, teacher))
    m = (0.5 * p.exp() + 0.5 * q.exp()).log()

    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return F.kl_div(other, one, reduction="none", log_target=True).sum(dim=-1)

    soft = {"forward": kl(q, p), "reverse": kl(p, q), "jsd": 0.5 * kl(q, m) + 0.5 * kl(p, m)}[kind]
    hard = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(n, t)
    dense = ((0.7 * hard + 0.3 * 4.0 * soft * trained) * weights).sum()
    (3 * dense).backward()
    torch.testing.assert_close(total, dense.detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(apart, (soft * trained).detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(nll, hard.detach(), atol=1e-5, rtol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, make_model: Callable[[Shape], Llama]
) -> Path:
    """`teacher`, and a smaller `student/model`, both with the run's vocabulary."""
    folder, ids = tmp_path_factory.mktemp("models"), Chat(tokenizer_folder).tokenizer.get_vocab_size()
    for name, width in (("teacher", 48), ("student/model", 32)):
        section = Model(layers=2, width=width, heads=4, kv_heads=2, ffn_width=48)
        model = make_model(shape_of(section, vocab_size=ids, sequence_length=64))
        save_model(folder / name, model.shape, dict(model.state_dict()))
    return folder


@pytest.fixture
def rows(run_stage: Any, tokenizer_folder: Path, mix_folder: Path, models: Path, tmp_path: Path) -> dict[str, Path]:
    """What `teacher` and `sft` read: conversations in rows, several in each."""
    (tmp_path / "sft.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"What is a {word}?"},
                        {"role": "assistant", "content": f"A {word}."},
                    ]
                }
            )
            + "\n"
            for word in WORDS
        )
    )
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder, "pretrain": models / "student"}
    run_stage(
        "sft_data", inputs, {"data": [{"path": str(tmp_path / "sft.jsonl")}], "sequence_length": 64}, tmp_path / "rows"
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


def stage_alone(stage: str, inputs: dict[str, Path], config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a stage on rows that are made already, which `run_stage` would make anew for `sft`."""
    (folder / "work").mkdir(parents=True)
    summary: dict[str, Any] = importlib.import_module(f"gristmill.train.stages.{stage}").run(
        inputs, config, folder / "data", Context(folder / "work", stage, emit=lambda event: None)
    )
    json.dumps(summary, allow_nan=False)
    return summary


def dense_divergence(student: Path, inputs: dict[str, Path], teacher: Path) -> float:
    """Mean KL(teacher || student) over the trained tokens, each conversation alone, without any of the above."""
    packed = PackedSet(inputs["sft_data"])
    masks, (one, other) = LossMasks(packed), (load_model(folder) for folder in (teacher, student))
    found: list[float] = []
    for row in range(packed.rows):
        ids, trained = packed.read(np.array([row]))[0], masks.read(np.array([row]))[0]
        for piece in packed.pieces(np.array([row])).to_pylist():
            place = slice(piece["start"], piece["start"] + piece["length"])
            q, p = (
                F.log_softmax(model(torch.from_numpy(ids[place].astype(np.int64))[None])[0, :-1], dim=-1)
                for model in (one, other)
            )
            found += (q.exp() * (q - p)).sum(dim=-1)[torch.from_numpy(trained[place][1:].copy())].tolist()
    return float(np.mean(found))


def test_a_student_approaches_its_teacher_and_its_first_divergence_is_the_dense_one(
    run_stage: Any, rows: dict[str, Path], models: Path, tmp_path: Path
) -> None:
    made = run_stage("teacher", rows, {"teacher": str(models / "teacher"), "top_k": "all"}, tmp_path / "teacher")
    packed = PackedSet(rows["sft_data"])
    assert packed.rows > 2
    assert made["tokens"] == LossMasks(packed).trained_per_row.sum()
    assert (made["rest_mass"], made["top_k"]) == (0.0, "all")
    inputs = {**rows, "teacher": tmp_path / "teacher" / "data"}
    wanted = {"teacher": str(models / "teacher"), "top_k": "all", "weight": 1.0}
    every = {**TRAINING, "steps": 1, "global_batch_size": packed.rows, "distill": wanted}
    first = stage_alone("sft", inputs, every, tmp_path / "every")["first_loss"]
    before = dense_divergence(models / "student/model", rows, models / "teacher")
    assert first == pytest.approx(before, rel=1e-5)
    stage_alone("sft", inputs, {**TRAINING, "distill": wanted}, tmp_path / "sft")
    lines = [json.loads(line) for line in (tmp_path / "sft/data/metrics.jsonl").read_text().splitlines()]
    assert all(line["loss"] == pytest.approx(line["divergence"]) for line in lines)
    after = dense_divergence(tmp_path / "sft/data/model", rows, models / "teacher")
    assert after < before / 3
    assert lines[-1]["divergence"] < lines[0]["divergence"] / 3
    stage_alone("sft", inputs, TRAINING, tmp_path / "labels")
    assert dense_divergence(tmp_path / "labels/data/model", rows, models / "teacher") > 2 * after


def test_what_is_kept_is_the_likeliest_ids_with_the_mass_of_the_others(
    run_stage: Any, rows: dict[str, Path], models: Path, tmp_path: Path
) -> None:
    told = {"teacher": str(models / "teacher"), "temperature": 2.0, "micro_batch_size": 2}
    parts: list[Taught] = []
    for name, kept in (("five", 5), ("all", "all")):
        made = run_stage("teacher", rows, {**told, "top_k": kept}, tmp_path / name)
        masks = LossMasks(PackedSet(rows["sft_data"]))
        parts.append(TeacherRows(tmp_path / name / "data", masks).read(np.array([2, 0])))
        assert made["loss"] > 0
    few, whole = parts
    assert few.ids is not None
    assert few.rest is not None
    assert few.logps.shape == (int(masks.trained_per_row[[2, 0]].sum()), 5)
    torch.testing.assert_close(whole.logps.exp().sum(dim=1), torch.ones(len(whole.logps)))
    torch.testing.assert_close(few.logps, whole.logps.topk(5, dim=1).values)
    assert torch.equal(few.ids, whole.logps.topk(5, dim=1).indices)
    torch.testing.assert_close(few.logps.exp().sum(dim=1) + few.rest.exp(), torch.ones(len(few.rest)))


def test_distributions_of_something_else_are_refused_by_what_differs(
    run_stage: Any, rows: dict[str, Path], models: Path, tmp_path: Path
) -> None:
    shutil.copytree(models / "teacher", tmp_path / "model")
    teacher = str(tmp_path / "model")
    run_stage("teacher", rows, {"teacher": teacher, "top_k": 4}, tmp_path / "teacher")
    inputs = {**rows, "teacher": tmp_path / "teacher" / "data"}
    turns = AssistantTurns(PackedSet(rows["sft_data"]), 0, torch.ones(1), 1.0)
    student = read_shape(models / "student/model")

    def refused(message: str, dtype: torch.dtype = torch.float32, **keys: Any) -> None:
        with pytest.raises(StaleReferenceError, match=f"something else: {message}. Run again with `--force teacher`"):
            taught_turns(
                Distill.model_validate({"teacher": teacher, "top_k": 4, **keys}), turns, inputs, dtype, student
            )

    kind = Distill.model_validate({"teacher": teacher, "top_k": 4, "kind": "reverse", "weight": 0.1})
    assert taught_turns(kind, turns, inputs, torch.float32, student).order.total == turns.order.total
    refused(r"temperature was 1\.0 and is 3\.0", temperature=3.0)
    refused(r"top_k was 4 and is all", top_k="all")
    refused(r"precision was float32 and is bfloat16", dtype=torch.bfloat16)
    shutil.copy(models / "student/model/model.safetensors", tmp_path / "model")
    refused(r"weights was \w{64} and is \w{64}")


def test_a_teacher_of_another_vocabulary_is_refused(
    run_stage: Any,
    rows: dict[str, Path],
    models: Path,
    tmp_path: Path,
    tokenizer_folder: Path,
    tiny_shape: Shape,
    make_model: Callable[[Shape], Llama],
) -> None:
    save_model(tmp_path / "other", tiny_shape, dict(make_model(tiny_shape).state_dict()))
    with pytest.raises(TeacherError, match=r"other predicts 100 ids, but the run's tokenizer has \d+; a teacher needs"):
        run_stage("teacher", rows, {"teacher": str(tmp_path / "other")}, tmp_path / "one")
    shutil.copytree(models / "teacher", tmp_path / "renamed")
    text = (tokenizer_folder / "tokenizer.json").read_text()
    vocabulary = json.loads(text)["model"]["vocab"]
    first, second = (token for token, number in vocabulary.items() if number in (300, 301))
    swapped = json.loads(text)
    swapped["model"]["vocab"] |= {first: vocabulary[second], second: vocabulary[first]}
    (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(TeacherError, match="gives 2 tokens another id than the run's tokenizer does"):
        run_stage("teacher", rows, {"teacher": str(tmp_path / "renamed")}, tmp_path / "two")
    with pytest.raises(TeacherError, match=r"nowhere has no config\.json"):
        run_stage("teacher", rows, {"teacher": str(tmp_path / "nowhere")}, tmp_path / "three")
