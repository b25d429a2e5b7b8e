"""`gristmill.losses` and `gristmill.training`: losses, packing, schedules, optimizers
and the loop alone.
"""

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
from gristmill.mixtures.schema.pretrain import Schedule
from gristmill.train.checkpoint import (
    CHECKPOINTS,
    Checkpoints,
    complete_steps,
)
from gristmill.train.data.conversation_tokens import Conversation
from gristmill.train.data.example_rows import packed_rows
from gristmill.train.optim.schedules import learning_rate
from gristmill.train.resuming import OtherRowsError
from gristmill.training import (
    next_token_losses,
    optimizers_by_name,
    pack,
    schedule,
    stream,
    train_loop,
)

GROUPS = ("gristmill.losses", "gristmill.training")
WITHOUT_EXAMPLE = {
    "PackedDocuments",
    "RowStream",
    "next_token_losses",
    "stream",
    "train_loop",
}
"""Functions whose examples are in docs/stream.md, and run there."""
FUNCTIONS = [
    (group, name)
    for group in GROUPS
    for name in import_module(group).__all__
    if inspect.isfunction(getattr(import_module(group), name))
]


@pytest.mark.parametrize(("group", "name"), FUNCTIONS)
def test_every_public_function_is_annotated_and_its_example_runs(
    group: str, name: str
) -> None:
    function = getattr(import_module(group), name)
    home = import_module(function.__module__)
    doctests = doctest.DocTestFinder(recurse=False).find(
        function, name, module=home, globs=vars(home).copy()
    )
    examples = [example for doctest_ in doctests for example in doctest_.examples]
    assert bool(examples) != (name in WITHOUT_EXAMPLE)
    runner = doctest.DocTestRunner()
    for doctest_ in doctests:
        runner.run(doctest_)
    assert runner.summarize(verbose=False).failed == 0
    signature = inspect.signature(function)
    assert all(
        parameter.annotation is not inspect.Parameter.empty
        for parameter in signature.parameters.values()
    )


@given(st.integers(1, 4), st.integers(1, 9), st.integers(2, 30), st.integers(0, 99))
def test_cross_entropy_and_gradients_equal_those_of_pytorch(
    n: int, t: int, v: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, matrix = (
        torch.randn(*shape, generator=generator, requires_grad=True)
        for shape in ((n, t, 8), (v, 8))
    )
    ids = torch.randint(v, (n, t), generator=generator)
    targets = next_tokens(ids, torch.rand(n, t, generator=generator) < 0.7)
    loss = cross_entropy(hidden, matrix, targets)
    if (targets == IGNORED).all():
        assert loss.item() == 0.0
        return
    expected = F.cross_entropy(
        (hidden @ matrix.T).flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )
    torch.testing.assert_close(loss, expected)
    ours, theirs = (
        torch.autograd.grad(value, (hidden, matrix)) for value in (loss, expected)
    )
    torch.testing.assert_close(ours, theirs)


documents = st.lists(st.lists(st.integers(2, 9), max_size=20), max_size=25)


@given(documents, st.integers(1, 12), st.sampled_from(["best_fit", "stream"]))
def test_packing_keeps_tokens_in_order_and_names_their_documents(
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
        pieces = [
            piece.tolist()
            for piece in np.split(packed.tokens[rows, places], begins)[1:]
        ]
        if method == "stream":
            assert list(chain(*pieces)) == text
        else:
            # Full rows in order, and the remainder: a document that fits into a row is
            # one piece.
            assert sorted(map(len, pieces)) == sorted(
                [length] * (len(text) // length)
                + [len(text) % length] * bool(len(text) % length)
            )
            assert list(chain(*sorted(pieces, key=len, reverse=True))) == text
    total = sum(map(len, texts))
    assert int(real.sum()) == total
    if method == "stream":
        assert len(packed.tokens) == -(-total // length)
    assert packed.fill == (total / packed.tokens.size if packed.tokens.size else 0.0)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_best_fit_equals_that_of_sft_rows(lengths: list[int]) -> None:
    texts = [[number + 2] * size for number, size in enumerate(lengths)]
    rows = packed_rows(
        [
            Conversation(
                np.array(text), np.ones(len(text), dtype=bool), False, "0" * 32
            )
            for text in texts
        ],
        12,
        True,
    )
    packed_tokens = sorted(row[row > 0].tolist() for row in pack(texts, 12).tokens)
    assert packed_tokens == sorted(
        [int(token) for piece in row for token in piece.ids] for row in rows
    )


def test_invalid_packing_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"sequence_length .*0"):
        pack([[1]], 0)
    with pytest.raises(ValueError, match=r"best_fit or stream.* 'greedy'"):
        pack([[1]], 4, "greedy")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["wsd", "cosine", "linear", "constant"])
def test_schedule_equals_that_of_trainings_and_drives_lambda_lr(kind: Any) -> None:
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
    assert rates == [0.5 * factor for factor in expected]
    with pytest.raises(ValueError, match="no_such"):
        schedule(kind, steps=12, no_such=1)


def test_adamw_by_name_equals_that_of_pytorch_with_decay_on_matrices_only() -> None:
    def trained(
        make: Callable[[nn.Module], list[torch.optim.Optimizer]],
    ) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizers = make(model)
        for _ in range(3):
            model(torch.ones(5, 3)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    def reference(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        return [
            torch.optim.AdamW(
                [
                    {
                        "params": [p for p in parameters if p.ndim > 1],
                        "weight_decay": 0.2,
                    },
                    {
                        "params": [p for p in parameters if p.ndim < 2],
                        "weight_decay": 0.0,
                    },
                ],
                lr=0.01,
                betas=(0.9, 0.95),
            )
        ]

    ours = trained(
        lambda model: optimizers_by_name(model, learning_rate=0.01, weight_decay=0.2)
    )
    torch.testing.assert_close(ours, trained(reference))


@pytest.mark.parametrize("kind", ["muon", "normuon"])
def test_kind_without_parameters_is_rejected(kind: Any) -> None:
    """They update the matrices inside `layers`, of which the model has none."""
    with pytest.raises(ValueError, match="empty parameter list"):
        optimizers_by_name(nn.Linear(2, 2), kind, learning_rate=0.1)


class Bigram(nn.Module):
    """A minimal causal model: logits of the next token from the current one."""

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


@pytest.mark.slow
def test_train_loop_equals_a_plain_loop_of_pytorch(
    mix_folder: Path, tmp_path: Path
) -> None:
    model = Bigram()
    summary = train_loop(
        model,
        stream(mix_folder, batch_size=6, seed=11),
        steps=8,
        folder=tmp_path,
        **SETTINGS,
    )
    plain = Bigram()
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.1
    )
    share = schedule("cosine", steps=8, warmup_steps=2)
    expected = []
    for step, batch in zip(
        range(8), stream(mix_folder, batch_size=6, seed=11), strict=False
    ):
        optimizer.param_groups[0]["lr"] = 0.05 * share(step)
        losses = next_token_losses(plain, batch)
        loss = losses.sum() / (batch["labels"][:, 1:] != IGNORED).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses_of(summary) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(model.table, plain.table, rtol=1e-4, atol=1e-5)
    assert (summary["steps"], summary["skipped_steps"]) == (8, 0)


@pytest.mark.slow
def test_train_loop_resumes_exactly(mix_folder: Path, tmp_path: Path) -> None:
    rows = stream(mix_folder, batch_size=6, seed=11)
    uninterrupted, resumed = Bigram(), Bigram()
    expected = train_loop(
        uninterrupted, rows, steps=8, folder=tmp_path / "whole", **SETTINGS
    )

    def stop(step: int) -> dict[str, Any] | None:
        if step == 5:
            raise KeyboardInterrupt
        return {"seen": step}

    with pytest.raises(KeyboardInterrupt):
        train_loop(
            Bigram(),
            rows,
            steps=8,
            folder=tmp_path / "stopped",
            after_step=stop,
            **SETTINGS,
        )
    summary = train_loop(
        resumed, rows, steps=8, folder=tmp_path / "stopped", **SETTINGS
    )
    assert losses_of(summary) == losses_of(expected)
    assert summary["rows_digest"] == expected["rows_digest"]
    assert torch.equal(resumed.table, uninterrupted.table)
    copy_of_set(mix_folder, tmp_path / "other")
    changed_rows = stream(tmp_path / "other", batch_size=6, seed=11)
    with pytest.raises(OtherRowsError, match="has read rows of"):
        train_loop(
            Bigram(), changed_rows, steps=8, folder=tmp_path / "stopped", **SETTINGS
        )


@pytest.mark.slow
def test_interrupted_train_loop_completes_its_checkpoint(
    mix_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted, commit = threading.Event(), Checkpoints._commit

    def slow(self: Checkpoints, *args: Any) -> None:
        interrupted.wait(60)
        commit(self, *args)

    def stop(step: int) -> None:
        if step == 4:
            interrupted.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "_commit", slow)
    with pytest.raises(KeyboardInterrupt):
        train_loop(
            Bigram(),
            stream(mix_folder, batch_size=6),
            steps=8,
            folder=tmp_path,
            after_step=stop,
            **SETTINGS,
        )
    assert complete_steps(tmp_path / CHECKPOINTS) == [3]


def copy_of_set(source: Path, target: Path) -> None:
    """Copy the rows with another tokenizer."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((target / "packed.json").read_text())
    manifest["tokenizer"]["sha256"] = "another"
    (target / "packed.json").write_text(json.dumps(manifest))


@pytest.mark.slow
def test_train_loop_skips_a_nan_step_and_records_its_rows(
    mix_folder: Path, tmp_path: Path
) -> None:
    calls = []

    def losses(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return next_token_losses(model, batch) * (
            float("nan") if len(calls) == 3 else 1.0
        )

    settings = {**SETTINGS, "micro_batch_size": 6}
    with pytest.warns(UserWarning, match="step 3 was skipped"):
        summary = train_loop(
            Bigram(),
            stream(mix_folder, batch_size=6, seed=1),
            steps=5,
            folder=tmp_path,
            losses=losses,
            **settings,
        )
    assert summary["skipped_steps"] == 1
    skipped = json.loads((tmp_path / "skipped_steps.jsonl").read_text())
    assert [entry["row"] for entry in skipped["read"]] == stream(
        mix_folder, batch_size=6, seed=1
    ).rows(2).tolist()


def test_train_loop_needs_a_stream_of_whole_batches(
    mix_folder: Path, tmp_path: Path
) -> None:
    for options in ({}, {"batch_size": 4, "world_size": 2}):
        with pytest.raises(ValueError, match="batch"):
            train_loop(
                Bigram(), stream(mix_folder, **options), steps=2, folder=tmp_path
            )


def test_train_loop_rejects_a_precision(mix_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="precision"):
        train_loop(
            Bigram(),
            stream(mix_folder, batch_size=6),
            steps=2,
            folder=tmp_path / "loop",
            precision="bf16",
        )
    assert not (tmp_path / "loop").exists()


def train_on_a_rank(rank: int, mix_folder: Path, folder: Path, stop_after: int) -> None:
    """Train in one of two processes, with sharded weights."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo", init_method=f"file://{folder}.joined", rank=rank, world_size=2
    )
    model = Bigram()
    fully_shard(model)

    def stop(step: int) -> None:
        if step == stop_after:
            dist.destroy_process_group()
            raise SystemExit(0)

    train_loop(
        model,
        stream(mix_folder, batch_size=6, seed=11),
        steps=8,
        folder=folder,
        after_step=stop,
        **SETTINGS,
    )
    dist.destroy_process_group()


@pytest.mark.parallel
def test_train_loop_on_two_processes_equals_one_and_is_resumed_by_one(
    mix_folder: Path, tmp_path: Path
) -> None:
    expected = train_loop(
        Bigram(),
        stream(mix_folder, batch_size=6, seed=11),
        steps=8,
        folder=tmp_path / "one",
        **SETTINGS,
    )
    torch.multiprocessing.spawn(
        train_on_a_rank, (mix_folder, tmp_path / "two", 5), nprocs=2
    )  # type: ignore[no-untyped-call]
    losses_of_two = [
        json.loads(line)["loss"]
        for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    ]
    rows = stream(mix_folder, batch_size=6, seed=11)
    summary = train_loop(Bigram(), rows, steps=8, folder=tmp_path / "two", **SETTINGS)
    assert summary["rows_digest"] == expected["rows_digest"]
    assert losses_of_two == pytest.approx(losses_of(expected)[:5], rel=1e-5)
    assert losses_of(summary) == pytest.approx(losses_of(expected), rel=1e-5)
