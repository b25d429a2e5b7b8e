"""Losses, packing, schedules, optimizers and the loop alone: what `gristmill.losses` and `gristmill.training` offer."""

from __future__ import annotations

import doctest
import inspect
import json
import threading
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gristmill.losses import IGNORED, cross_entropy, next_tokens
from gristmill.mixtures.training import Schedule
from gristmill.train.data.example_rows import Piece, packed_rows
from gristmill.train.loop.checkpoints import CHECKPOINTS, Checkpoints, complete_steps
from gristmill.train.loop.resuming import OtherRowsError
from gristmill.train.optim.schedules import learning_rate
from gristmill.training import next_token_losses, optimizers_by_name, pack, schedule, stream, train_loop

GROUPS = ("gristmill.losses", "gristmill.training")
WITHOUT_EXAMPLE = {"PackedDocuments", "RowStream", "next_token_losses", "stream", "train_loop"}
"""Shown in docs/stream.md, whose examples run too."""
FUNCTIONS = [
    (group, name)
    for group in GROUPS
    for name in import_module(group).__all__
    if inspect.isfunction(getattr(import_module(group), name))
]


@pytest.mark.parametrize(("group", "name"), FUNCTIONS)
def test_every_public_function_is_described_and_its_example_is_true(group: str, name: str) -> None:
    function = getattr(import_module(group), name)
    home = import_module(function.__module__)
    found = doctest.DocTestFinder(recurse=False).find(function, name, module=home, globs=vars(home).copy())
    examples = [example for one in found for example in one.examples]
    assert bool(examples) != (name in WITHOUT_EXAMPLE)
    runner = doctest.DocTestRunner()
    for one in found:
        runner.run(one)
    assert runner.summarize(verbose=False).failed == 0
    signature = inspect.signature(function)
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in signature.parameters.values())


@given(st.integers(1, 4), st.integers(1, 9), st.integers(2, 30), st.integers(0, 99))
def test_cross_entropy_and_its_gradients_are_those_of_all_logits(n: int, t: int, v: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, matrix = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((n, t, 8), (v, 8)))
    ids = torch.randint(v, (n, t), generator=generator)
    targets = next_tokens(ids, torch.rand(n, t, generator=generator) < 0.7)
    loss = cross_entropy(hidden, matrix, targets)
    if (targets == IGNORED).all():
        assert loss.item() == 0.0
        return
    expected = F.cross_entropy((hidden @ matrix.T).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(one, (hidden, matrix)) for one in (loss, expected))
    torch.testing.assert_close(ours, theirs)


documents = st.lists(st.lists(st.integers(2, 9), max_size=20), max_size=25)


@given(documents, st.integers(1, 12), st.sampled_from(["best_fit", "stream"]))
def test_packing_keeps_every_token_in_its_documents_order_and_tells_whose_it_is(
    texts: list[list[int]], length: int, method: Any
) -> None:
    packed = pack(texts, length, method, pad=1)
    assert packed.tokens.shape[1] == length
    real = packed.documents >= 0
    assert (real == (packed.positions >= 0)).all()
    assert (packed.tokens[~real] == 1).all()
    for number, text in enumerate(texts):
        rows, places = np.nonzero(packed.documents == number)
        begins = np.flatnonzero(packed.positions[rows, places] == 0)
        pieces = [piece.tolist() for piece in np.split(packed.tokens[rows, places], begins)[1:]]
        if method == "stream":
            assert list(chain(*pieces)) == text
        else:
            # Whole rows in order, and the rest: a document that fits into a row is one piece.
            assert sorted(map(len, pieces)) == sorted(
                [length] * (len(text) // length) + [len(text) % length] * bool(len(text) % length)
            )
            assert list(chain(*sorted(pieces, key=len, reverse=True))) == text
    total = sum(map(len, texts))
    assert int(real.sum()) == total
    if method == "stream":
        assert len(packed.tokens) == -(-total // length)
    assert packed.fill == (total / packed.tokens.size if packed.tokens.size else 0.0)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_best_fit_is_that_of_fine_tuning_rows(lengths: list[int]) -> None:
    texts = [[number + 2] * size for number, size in enumerate(lengths)]
    rows = packed_rows([Piece(bytes(16), np.array(text), np.ones(len(text), dtype=bool)) for text in texts], 12, True)
    found = sorted(row[row > 0].tolist() for row in pack(texts, 12).tokens)
    assert found == sorted([int(token) for piece in row for token in piece.ids] for row in rows)


def test_wrong_packing_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_length must be 1 or more, not 0"):
        pack([[1]], 0)
    with pytest.raises(ValueError, match="method must be best_fit or stream, not 'greedy'"):
        pack([[1]], 4, "greedy")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["wsd", "cosine", "linear", "constant", "inverse_sqrt", "polynomial", "one_cycle"])
def test_a_schedule_is_that_of_our_trainings_and_drives_lambda_lr(kind: Any) -> None:
    share = schedule(kind, steps=12)
    section = Schedule.model_validate({"kind": kind})
    expected = [learning_rate(section, 1.0, step, 12) for step in range(1, 13)]
    assert [share(done) for done in range(12)] == expected
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    rates = []
    for _ in range(12):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == [0.5 * one for one in expected]
    with pytest.raises(ValueError, match="no_such"):
        schedule(kind, steps=12, no_such=1)
    with pytest.raises(ValueError, match="give warmup_steps in place of warmup_tokens"):
        schedule("wsd", steps=12, warmup_tokens=100)


def test_adamw_by_name_is_pytorchs_with_decay_on_matrices_alone() -> None:
    def trained(make: Callable[[nn.Module], list[torch.optim.Optimizer]]) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizers = make(model)
        for _ in range(3):
            model(torch.ones(5, 3)).square().sum().backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    def reference(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        return [
            torch.optim.AdamW(
                [
                    {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.2},
                    {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
                ],
                lr=0.01,
                betas=(0.9, 0.95),
            )
        ]

    ours = trained(lambda model: optimizers_by_name(model, learning_rate=0.01, weight_decay=0.2))
    torch.testing.assert_close(ours, trained(reference))
    with pytest.raises(ValueError, match="sophia estimates curvature"):
        optimizers_by_name(nn.Linear(2, 2), "sophia")


class Bigram(nn.Module):
    """The smallest causal model: the next token's logits by the token and its position."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(torch.randn(512, 16, generator=generator))
        self.head = nn.Parameter(torch.randn(512, 16, generator=generator))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.table[input_ids] @ self.head.T


SETTINGS: dict[str, Any] = {
    "optimizer": {"learning_rate": 0.05},
    "schedule": {"kind": "cosine", "warmup_steps": 2},
    "micro_batch_size": 4,
    "checkpoint_every": 3,
    "log_every": 1,
}


def losses_of(summary: dict[str, Any]) -> list[float]:
    return [line["loss"] for line in summary["metrics"] if "loss" in line]


def test_the_loop_alone_learns_what_a_plain_loop_of_pytorch_learns(mix_folder: Path, tmp_path: Path) -> None:
    model = Bigram()
    found = train_loop(model, stream(mix_folder, batch_size=6, seed=11), steps=8, folder=tmp_path, **SETTINGS)
    plain = Bigram()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
    share = schedule("cosine", steps=8, warmup_steps=2)
    expected = []
    for step, batch in zip(range(8), stream(mix_folder, batch_size=6, seed=11), strict=False):
        optimizer.param_groups[0]["lr"] = 0.05 * share(step)
        losses = next_token_losses(plain, batch)
        loss = losses.sum() / (batch["labels"][:, 1:] != IGNORED).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses_of(found) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(model.table, plain.table, rtol=1e-4, atol=1e-5)
    assert (found["steps"], found["skipped_steps"]) == (8, 0)


def test_the_loop_alone_resumes_as_if_it_had_not_been_stopped(mix_folder: Path, tmp_path: Path) -> None:
    rows = stream(mix_folder, batch_size=6, seed=11)
    whole, resumed = Bigram(), Bigram()
    expected = train_loop(whole, rows, steps=8, folder=tmp_path / "whole", **SETTINGS)

    def stop(step: int) -> dict[str, Any] | None:
        if step == 5:
            raise KeyboardInterrupt
        return {"seen": step}

    with pytest.raises(KeyboardInterrupt):
        train_loop(Bigram(), rows, steps=8, folder=tmp_path / "stopped", after_step=stop, **SETTINGS)
    found = train_loop(resumed, rows, steps=8, folder=tmp_path / "stopped", **SETTINGS)
    assert losses_of(found) == losses_of(expected)
    assert found["rows_digest"] == expected["rows_digest"]
    assert torch.equal(resumed.table, whole.table)
    copy_of_set(mix_folder, tmp_path / "other")
    others = stream(tmp_path / "other", batch_size=6, seed=11)
    with pytest.raises(OtherRowsError, match="has read rows of"):
        train_loop(Bigram(), others, steps=8, folder=tmp_path / "stopped", **SETTINGS)


def test_the_loop_alone_completes_the_checkpoint_that_it_writes_where_it_is_interrupted(
    mix_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted, commit = threading.Event(), Checkpoints._commit

    def slow(self: Checkpoints, *rest: Any) -> None:
        interrupted.wait(60)
        commit(self, *rest)

    def stop(step: int) -> None:
        if step == 4:
            interrupted.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "_commit", slow)
    with pytest.raises(KeyboardInterrupt):
        train_loop(Bigram(), stream(mix_folder, batch_size=6), steps=8, folder=tmp_path, after_step=stop, **SETTINGS)
    assert complete_steps(tmp_path / CHECKPOINTS) == [3]


def copy_of_set(source: Path, target: Path) -> None:
    """The same rows with another tokenizer."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((target / "packed.json").read_text())
    manifest["tokenizer"]["sha256"] = "another"
    (target / "packed.json").write_text(json.dumps(manifest))


def test_the_loop_alone_skips_a_step_that_is_no_number_and_names_what_it_had_read(
    mix_folder: Path, tmp_path: Path
) -> None:
    calls = []

    def losses(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return next_token_losses(model, batch) * (float("nan") if len(calls) == 3 else 1.0)

    settings = {**SETTINGS, "micro_batch_size": 6}
    with pytest.warns(UserWarning, match="step 3 was skipped"):
        found = train_loop(
            Bigram(), stream(mix_folder, batch_size=6, seed=1), steps=5, folder=tmp_path, losses=losses, **settings
        )
    assert found["skipped_steps"] == 1
    skipped = json.loads((tmp_path / "skipped_steps.jsonl").read_text())
    assert [one["row"] for one in skipped["read"]] == stream(mix_folder, batch_size=6, seed=1).rows(2).tolist()


def test_the_loop_alone_wants_whole_batches(mix_folder: Path, tmp_path: Path) -> None:
    for wrong in ({}, {"batch_size": 4, "world_size": 2}):
        with pytest.raises(ValueError, match="deals batches out itself"):
            train_loop(Bigram(), stream(mix_folder, **wrong), steps=2, folder=tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"optimizer": {"kind": "sophia"}}, "sophia estimates curvature"), ({"precision": "bf16"}, "leave precision out")],
)
def test_the_loop_alone_refuses_what_it_could_not_do(
    mix_folder: Path, tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        train_loop(Bigram(), stream(mix_folder, batch_size=6), steps=2, folder=tmp_path / "loop", **settings)
    assert not (tmp_path / "loop").exists()


def train_on_a_rank(rank: int, mix_folder: Path, folder: Path, stop_after: int) -> None:
    """One of two processes, with its share of the weights."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder}.joined", rank=rank, world_size=2)
    model = Bigram()
    fully_shard(model)

    def stop(step: int) -> None:
        if step == stop_after:
            dist.destroy_process_group()
            raise SystemExit(0)

    train_loop(model, stream(mix_folder, batch_size=6, seed=11), steps=8, folder=folder, after_step=stop, **SETTINGS)
    dist.destroy_process_group()


@pytest.mark.parallel
def test_the_loop_alone_computes_the_same_on_two_processes_and_one_takes_over_from_them(
    mix_folder: Path, tmp_path: Path
) -> None:
    expected = train_loop(
        Bigram(), stream(mix_folder, batch_size=6, seed=11), steps=8, folder=tmp_path / "one", **SETTINGS
    )
    torch.multiprocessing.spawn(train_on_a_rank, (mix_folder, tmp_path / "two", 5), nprocs=2)  # type: ignore[no-untyped-call]
    of_two = [json.loads(line)["loss"] for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    rows = stream(mix_folder, batch_size=6, seed=11)
    found = train_loop(Bigram(), rows, steps=8, folder=tmp_path / "two", **SETTINGS)
    assert found["rows_digest"] == expected["rows_digest"]
    assert of_two == pytest.approx(losses_of(expected)[:5], rel=1e-5)
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-5)
