"""`gristmill.stream`: rows of our trainings for other loops, with order and resume."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from gristmill.core.files import read_json, write_json
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import (
    MANIFEST,
    PIECES_SCHEMA,
    PackedSetError,
)
from gristmill.tokenize.shuffle import ReadOnceError
from gristmill.train.data.conversation_tokens import Conversation
from gristmill.train.data.example_rows import packed_rows, write_example_rows
from gristmill.train.data.pairs import Pair
from gristmill.train.data.preference_rows import PairRows
from gristmill.train.data.row_stream import RowStream, StreamError, stream
from gristmill.train.loop.batch_plan import RowPlan, extend_digest, plan_of
from gristmill.train.loop.prefetch import read_batch
from gristmill.train.models.model_config import shape_of
from gristmill.train.objectives.losses import IGNORED, next_tokens
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.preference_objective import Preferences
from gristmill.train.objectives.sft import AssistantTurns
from gristmill.train.resuming import OtherRowsError
from tests.jsonl import read_metrics
from tests.packed_sets import write_packed_set

LENGTH = 24
TOKENIZER = {"vocab_size": 100, "eos": 0, "pad": 1, "sha256": "t"}
SECTION = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48}


def equal(ours: Any, theirs: Any) -> bool:
    """Compare nested dicts, lists and tuples of tensors byte by byte."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(
            equal(ours[name], theirs[name]) for name in ours
        )
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty rows of two sources, each with one to three pieces and optional
    padding.
    """
    folder, generator = tmp_path_factory.mktemp("documents"), np.random.default_rng(5)
    tokens = np.full((20, LENGTH), TOKENIZER["pad"])
    pieces = []
    for row in range(20):
        cuts = np.sort(
            generator.choice(np.arange(1, LENGTH + 1), size=1 + row % 3, replace=False)
        ).tolist()
        for number, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
            tokens[row, start:end] = generator.integers(2, 100, end - start)
            pieces.append(
                {
                    "row": row,
                    "start": start,
                    "length": end - start,
                    "source": row % 2,
                    "copy": 0,
                    "id": bytes([row, number] * 8),
                    "offset": 7 * number,
                }
            )
    write_packed_set(
        folder,
        tokens,
        {"prose": 10, "code": 10},
        TOKENIZER,
        pieces=pa.Table.from_pylist(pieces, schema=PIECES_SCHEMA),
    )
    return folder


@pytest.fixture
def turns(tmp_path: Path) -> Path:
    def piece(number: int, length: int) -> Conversation:
        trained = np.arange(length) % 3 != number % 3
        trained[0] = False
        return Conversation(
            (np.arange(length) * 7 + number * 13) % 100,
            trained,
            False,
            number.to_bytes(16, "big").hex(),
        )

    sets = {
        "first": packed_rows(
            [piece(n, length) for n, length in enumerate([5, 9, 8, 20, 3, 12, 7])],
            LENGTH,
            True,
        ),
        "second": packed_rows([piece(90, 24)], LENGTH, True),
    }
    write_example_rows(tmp_path / "rows", sets, LENGTH, TOKENIZER, 1)
    return tmp_path / "rows"


def objective(folder: Path, seed: int, document_mask: bool) -> NextToken:
    shape = shape_of(
        Model.model_validate({**SECTION, "document_mask": document_mask}), 100, LENGTH
    )
    return NextToken(PackedSet(folder), seed, torch.ones(100), shape)


@pytest.mark.slow
def test_stream_gives_the_rows_that_our_training_records(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage(
        "pretrain",
        {"mix": mix_folder, "tokenizer": tokenizer_folder},
        pretrain_config,
        tmp_path,
    )
    lines = read_metrics(tmp_path)
    recorded = {
        line["step"]: line["rows_digest"] for line in lines if "rows_digest" in line
    }
    assert len(recorded) == 12
    batches = stream(mix_folder, batch_size=6, seed=11, provenance=True)
    packed, digest = PackedSet(mix_folder), batches.fingerprint
    for step, batch in enumerate(islice(batches, 12), start=1):
        rows = np.array([document["row"] for document in batch["provenance"]])
        digest = extend_digest(digest, rows)
        assert digest == recorded[step]
        assert batch["input_ids"].numpy().tobytes() == packed.read(rows).tobytes()
        assert rows.tolist() == batches.rows(step - 1).tolist()


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (2, 4)])
def test_batches_equal_those_of_our_loop_with_targets_and_positions(
    documents: Path, rank: int, world_size: int, document_mask: bool
) -> None:
    loop, plan = objective(documents, 3, document_mask), RowPlan(((0, 0, 6),))
    batches = stream(
        documents,
        rank=rank,
        world_size=world_size,
        batch_size=6,
        seed=3,
        document_mask=document_mask,
    )
    for step, batch in zip(range(9), batches, strict=False):
        (part,) = read_batch(loop, plan, step, 6, rank, world_size).parts
        input_ids = part.tokens.long()
        targets = next_tokens(input_ids, torch.arange(LENGTH) < part.filled[:, None])
        assert equal(batch["input_ids"], input_ids)
        shifted = torch.cat(
            (batch["labels"][:, 1:], torch.full((len(input_ids), 1), IGNORED)), dim=1
        )  # as transformers does
        assert equal(shifted, targets)
        assert ("position_ids" in batch) == document_mask
        if document_mask:
            real = part.positions >= 0
            assert equal(batch["position_ids"][real], part.positions[real].long())
            assert batch["position_ids"].min() == 0
            assert (batch["labels"][~real] == IGNORED).all()
            # Padding is apart from the document before it.
            first = (~real).int().argmax(dim=1)[(~real).any(dim=1)]
            assert batch["position_ids"][(~real).any(dim=1), first].tolist() == [
                0
            ] * len(first)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(0, 99),
)
def test_ranks_share_one_order_and_resume_with_another_world_size(
    documents: Path, per_rank: int, before: int, after: int, steps: int, seed: int
) -> None:
    batch = per_rank * max(before, after)
    provenance = [
        rows["provenance"]
        for rows in islice(
            stream(documents, batch_size=batch, seed=seed, provenance=True), steps + 3
        )
    ]

    def read_on_ranks(
        size: int, state: dict[str, Any] | None, count: int
    ) -> tuple[list[list[Any]], dict[str, Any]]:
        """Batches joined from all ranks, and the state that all ranks share."""
        by_step: list[list[Any]] = [[None] * batch for _ in range(count)]
        states = []
        for rank in range(size):
            rows = stream(
                documents,
                batch_size=batch,
                seed=seed,
                rank=rank,
                world_size=size,
                provenance=True,
            )
            if state is not None:
                rows.load_state_dict(state)
            for number, part in enumerate(islice(rows, count)):
                by_step[number][rank::size] = part["provenance"]
            states.append({**rows.state_dict(), "world_size": 0})
        assert all(saved == states[0] for saved in states)
        return by_step, states[0]

    head, state = read_on_ranks(before, None, steps)
    assert head == provenance[:steps]
    tail, _ = read_on_ranks(after, json.loads(json.dumps(state)), 3)
    assert tail == provenance[steps:]


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 25), st.booleans())
def test_single_rows_equal_those_of_batches_and_resume_at_any_row(
    documents: Path, size: int, per_rank: int, head_length: int, sized: bool
) -> None:
    def make_stream(**more: Any) -> RowStream:
        return stream(
            documents,
            rank=size - 1,
            world_size=size,
            document_mask=True,
            provenance=True,
            **more,
        )

    batches = make_stream(batch_size=per_rank * size)
    rows = (
        make_stream(batch_size=per_rank * size, each="row") if sized else make_stream()
    )
    provenance = [row for batch in islice(batches, 25) for row in batch["provenance"]]
    iterator = iter(rows)
    head = list(islice(iterator, head_length))
    state = rows.state_dict()
    assert [row["provenance"] for row in head] == provenance[:head_length]
    assert state["position"] == head_length * size
    resumed = make_stream()
    resumed.load_state_dict(state)
    tail = list(islice(resumed, 7))
    assert equal(tail, list(islice(iterator, 7)))
    if head:
        assert head[0]["input_ids"].shape == (LENGTH,)
        collated = RowStream.collate(head)
        assert equal(collated["input_ids"][-1], head[-1]["input_ids"])
        assert collated["provenance"] == provenance[:head_length]


def test_provenance_names_source_documents_and_places(documents: Path) -> None:
    batches = stream(documents, batch_size=5, provenance=True)
    for batch in islice(batches, 4):
        for ids, provenance in zip(
            batch["input_ids"], batch["provenance"], strict=True
        ):
            row = provenance["row"]
            assert provenance["source"] == ("prose", "code")[row % 2]
            assert [piece["id"] for piece in provenance["documents"]] == [
                bytes([row, number] * 8).hex() for number in range(1 + row % 3)
            ]
            assert [piece["offset"] for piece in provenance["documents"]] == [
                7 * n for n in range(1 + row % 3)
            ]
            last = provenance["documents"][-1]
            assert (ids[last["start"] + last["length"] :] == TOKENIZER["pad"]).all()
    assert batches.provenance(np.array([row])) == [provenance]


def test_epochs_are_shuffled_and_end_with_the_last_whole_batch(documents: Path) -> None:
    def rows(**more: Any) -> list[int]:
        batches = stream(documents, provenance=True, seed=1, **more)
        parts = (
            batches
            if batches.each == "row"
            else (row for batch in batches for row in batch_rows(batch))
        )
        return [
            row["provenance"]["row"] if batches.each == "row" else row for row in parts
        ]

    def batch_rows(batch: Any) -> list[int]:
        return [record["row"] for record in batch["provenance"]]

    first_epoch, two_epochs = rows(epochs=1), rows(epochs=2)
    assert sorted(first_epoch) == list(range(20))
    assert two_epochs[:20] == first_epoch
    assert sorted(two_epochs[20:]) == list(range(20))
    assert two_epochs[20:] != first_epoch
    assert rows(epochs=1, batch_size=6) == first_epoch[:18]
    assert rows(epochs=1, world_size=3, rank=2) == first_epoch[2:18:3]
    endless = stream(documents, provenance=True, seed=1, batch_size=6)
    assert [
        row for batch in islice(endless, 6) for row in batch_rows(batch)
    ] == two_epochs[:36]
    finite = stream(documents, batch_size=6, epochs=1)
    assert equal(list(finite), list(finite))  # each pass begins anew


def test_phased_set_is_read_once_and_withheld_rows_are_skipped(
    documents: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "phases"
    folder.mkdir()
    for file in documents.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    manifest = read_json(folder / MANIFEST)
    manifest["train"]["stages"], manifest["format"] = [[6, 6], [4, 4]], 5
    write_json(folder / MANIFEST, manifest)
    rows = [item["provenance"]["row"] for item in stream(folder, provenance=True)]
    assert sorted(rows[:12]) == list(range(12))
    assert sorted(rows) == list(range(20))
    with pytest.raises(ReadOnceError, match="read once"):
        stream(folder, epochs=2)
    del manifest["train"]["stages"]
    manifest["train"]["shards"][0]["withheld"] = [3, 4]
    write_json(folder / MANIFEST, {**manifest, "format": 4})
    kept_rows = [
        item["provenance"]["row"] for item in stream(folder, provenance=True, epochs=1)
    ]
    assert sorted(kept_rows) == [row for row in range(20) if row not in (3, 4)]


def loader_of(folder: Path, workers: int, **more: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    batches = stream(folder, batch_size=4, document_mask=True, seed=2, **more)
    return StatefulDataLoader(batches, batch_size=None, num_workers=workers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_stateful_loader_resumes_midway(documents: Path, workers: int) -> None:
    pytest.importorskip("torchdata")
    batches = list(
        islice(
            stream(
                documents, batch_size=4, document_mask=True, seed=2, provenance=True
            ),
            11,
        )
    )
    for start in (0, 1, 4):
        loader = loader_of(documents, workers, provenance=True)
        iterator = iter(loader)
        assert equal([next(iterator) for _ in range(start)], batches[:start])
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        resumed = loader_of(documents, workers, provenance=True)
        resumed.load_state_dict(state)
        assert equal(list(islice(resumed, 7)), batches[start : start + 7])
        del iterator, loader, resumed


@pytest.mark.slow
@pytest.mark.parametrize("each", ["batch", "row"])
def test_plain_loader_equals_a_plain_loop_and_starts_at_its_seek_position(
    documents: Path, each: Any
) -> None:
    expected = list(islice(stream(documents, batch_size=4, world_size=2, rank=1), 8))
    for workers, start in ((0, 0), (2, 0), (2, 3)):
        batches = stream(documents, batch_size=4, world_size=2, rank=1, each=each)
        batches.seek(start * 4)
        loader = DataLoader(
            batches, batch_size=None if each == "batch" else 2, num_workers=workers
        )
        assert equal(list(islice(loader, 5)), expected[start : start + 5])


def test_finite_loader_gives_every_batch_once(documents: Path) -> None:
    expected = list(stream(documents, batch_size=4, epochs=1))
    assert len(expected) == 5
    for workers in (2, 3):
        loader = DataLoader(
            stream(documents, batch_size=4, epochs=1),
            batch_size=None,
            num_workers=workers,
        )
        assert equal(list(loader), expected)


def test_persistent_workers_and_spawned_processes_restart_every_pass(
    documents: Path,
) -> None:
    expected = list(stream(documents, batch_size=4, epochs=1))
    loader = DataLoader(
        stream(documents, batch_size=4, epochs=1),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
    )
    assert equal(list(loader), expected)
    assert equal(list(loader), expected)
    batches = stream(documents, batch_size=4, epochs=1)
    batches.seek(8)
    unpickled = pickle.loads(pickle.dumps(batches))  # like in a spawned process
    assert equal(list(unpickled), expected[2:])
    assert equal(list(unpickled), expected)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_exhausted_stateful_loader_restarts(documents: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make_loader() -> Any:
        return stateful.StatefulDataLoader(
            stream(documents, batch_size=4, epochs=1),
            batch_size=None,
            num_workers=workers,
        )

    loader, expected = make_loader(), list(stream(documents, batch_size=4, epochs=1))
    assert equal(list(loader), expected)
    assert equal(list(loader), expected)
    restored = make_loader()
    restored.load_state_dict(loader.state_dict())
    assert equal(list(restored), expected)
    assert equal(list(restored), expected)


def test_state_of_other_rows_or_workers_is_rejected(
    documents: Path, turns: Path
) -> None:
    batches = stream(documents, batch_size=4)
    next(iter(batches))
    state = batches.state_dict()
    with pytest.raises(OtherRowsError, match=r"seed 0.* seed 1"):
        stream(documents, batch_size=4, seed=1).load_state_dict(state)
    with pytest.raises(OtherRowsError, match="fingerprint"):
        stream(turns, batch_size=4).load_state_dict(state)
    of_worker = {**state, "worker": 1, "workers": 2}
    with pytest.raises(OtherRowsError, match=r"4 rows .* 8 "):
        stream(documents, batch_size=8).load_state_dict(of_worker)
    batches.load_state_dict(of_worker)
    with pytest.raises(OtherRowsError, match=r"worker 1 of 2 .*worker 0 of 1"):
        iter(batches)
    with pytest.raises(StreamError, match="-1"):
        batches.seek(-1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2"),
        ({"each": "batch"}, "batch_size"),
        ({"batch_size": 2, "world_size": 3}, "batch_size 2 .* 3 "),
        ({"batch_size": 4, "world_size": 3, "each": "row"}, "multiple of world_size 3"),
        ({"epochs": 0}, "epochs .* 0"),
    ],
)
def test_invalid_settings_are_rejected(
    documents: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(StreamError, match=message):
        stream(documents, **settings)


def test_stream_without_batch_size_rejects_several_workers(documents: Path) -> None:
    with pytest.raises(StreamError, match="2 workers"):
        next(iter(DataLoader(stream(documents), batch_size=4, num_workers=2)))
    with pytest.raises(PackedSetError, match=r"packed\.json"):
        stream(documents / "nowhere")
    with pytest.raises(StreamError, match="batches"):
        stream(documents).rows(0)


@pytest.mark.slow
def test_sft_rows_have_masks_and_positions_of_our_loop(turns: Path) -> None:
    loop, plan = (
        AssistantTurns(PackedSet(turns), 4, torch.ones(100), 1.0),
        RowPlan(((0, 0, 2),)),
    )
    batches = stream(turns, batch_size=2, seed=4)
    for step, batch in enumerate(islice(batches, 5)):
        (part,) = read_batch(loop, plan, step, 2, 0, 1).parts
        assert equal(batch["input_ids"], part.ids)
        assert equal(batch["labels"], part.ids.masked_fill(~part.trained, IGNORED))
        if part.positions is not None:
            assert equal(
                batch["position_ids"][part.positions >= 0],
                part.positions[part.positions >= 0].long(),
            )
    rows = list(islice(stream(turns, batch_size=2, seed=4, each="row"), 10))
    assert {tuple(row["input_ids"].shape) for row in rows} == {(LENGTH,)}
    assert equal(
        next(iter(DataLoader(stream(turns, seed=4), batch_size=4)))["labels"],
        torch.stack([row["labels"] for row in rows[:4]]),
    )


@pytest.mark.slow
def test_preference_pairs_equal_those_of_our_loop(
    make_pair_rows: Callable[..., PairRows], tmp_path: Path
) -> None:
    def one(number: int) -> Pair:
        def said(length: int) -> Conversation:
            trained = np.arange(length) >= 4
            return Conversation(
                np.arange(length) + 10 * number, trained, False, f"{number:032x}"
            )

        record = {
            "id": f"{number:032x}",
            "prompt": f"p {number}",
            "chosen": "c",
            "rejected": "r",
        }
        return Pair(record, said(9 + number), said(7))

    rows = make_pair_rows(
        {"a": [one(n) for n in range(5)], "b": [one(n) for n in range(5, 7)]}, LENGTH
    )
    section = Dpo.model_validate({"data": [{"path": "a"}, {"path": "b"}], "steps": 3})
    draws = [np.flatnonzero(rows.sets == number) for number in (0, 1)]
    loop = Preferences(
        rows, draws, np.zeros((7, 2), np.float32), section, 8, 1.0, torch.device("cpu")
    )
    pairs = stream(tmp_path / "pairs", batch_size=3, seed=8, provenance=True)
    for step, batch in enumerate(islice(pairs, 4)):
        (part,) = read_batch(loop, RowPlan(((0, 0, 3),)), step, 3, 0, 1).parts
        assert equal(
            torch.cat((batch["chosen_input_ids"], batch["rejected_input_ids"])),
            part.ids,
        )
        labels = torch.cat((batch["chosen_labels"], batch["rejected_labels"]))
        assert equal(labels[:, 1:], part.targets[:, :-1])
        assert [item["example"] for item in batch["provenance"]] == loop.describe(
            pairs.rows(step)
        )["examples"]
    assert pairs.fingerprint == loop.fingerprint
    with pytest.raises(StreamError, match="preference pairs"):
        stream(tmp_path / "pairs")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["manifest", "none"])
def test_stream_of_a_run_has_its_seed_and_document_mask(
    documents: Path, tmp_path: Path, key: str
) -> None:
    mix = tmp_path / "store" / "mix" / "run--1234"
    (mix / "data").mkdir(parents=True)
    for file in documents.iterdir():
        (mix / "data" / file.name).write_bytes(file.read_bytes())
    training = (
        {"pretrain": {"seed": 6, "model": {"document_mask": True}}}
        if key == "manifest"
        else {}
    )
    write_json(
        tmp_path / "run" / "run.json",
        {
            "stages": {
                "mix": {"fingerprint": "1234", "folder": str(mix)},
                "pretrain": {"fingerprint": "12"},
            },
            "manifest": {"seed": 9, **training},
        },
    )
    batches = stream(tmp_path / "run", batch_size=2)
    expected = stream(
        documents, batch_size=2, seed=6 if training else 9, document_mask=bool(training)
    )
    assert equal(list(islice(batches, 3)), list(islice(expected, 3)))
    with pytest.raises(StreamError, match=r"sft_data.* mix"):
        stream(tmp_path / "run", stage="sft_data")


def test_stream_equals_our_loop_after_a_batch_size_ramp(documents: Path) -> None:
    """Positions have no gaps, so a stream that starts after a step reads the rows of
    the training.
    """
    plan = plan_of(
        Pretrain.model_validate(
            {
                "steps": 9,
                "global_batch_size": 6,
                "seed": 3,
                "batch_ramp": [{"until_step": 4, "global_batch_size": 2}],
            }
        ),
        LENGTH,
    )
    batches = stream(documents, batch_size=6, seed=3, provenance=True)
    batches.seek(plan.positions(4)[0])
    order = PackedSet(documents).order(3)
    rows = [
        [record["row"] for record in batch["provenance"]]
        for batch in islice(batches, 3)
    ]
    assert rows == [plan.rows(order, step).tolist() for step in (4, 5, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_that_makes_batches_equals_our_loop_and_resumes(
    documents: Path, workers: int
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader_of(rank: int) -> Any:
        rows = stream(
            documents,
            rank=rank,
            world_size=2,
            batch_size=6,
            each="row",
            seed=5,
            document_mask=True,
        )
        return stateful.StatefulDataLoader(
            rows, batch_size=3, num_workers=workers, snapshot_every_n_steps=2
        )

    loop = objective(documents, 5, True)
    for rank in (0, 1):
        loader = loader_of(rank)
        batches, state = [], {}
        for number, batch in enumerate(islice(loader, 6)):
            batches.append(batch)
            if number == 2:
                state = loader.state_dict()
        for step, batch in enumerate(batches):
            (part,) = read_batch(loop, RowPlan(((0, 0, 6),)), step, 3, rank, 2).parts
            assert equal(batch["input_ids"], part.tokens.long())
            assert equal(
                batch["labels"],
                part.tokens.long().masked_fill(
                    torch.arange(LENGTH) >= part.filled[:, None], IGNORED
                ),
            )
            assert sorted(batch) == ["input_ids", "labels", "position_ids"]
        resumed = loader_of(rank)
        resumed.load_state_dict(state)
        assert equal(list(islice(resumed, 3)), batches[3:])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("s3fs")
    from gristmill.core.s3 import S3Files

    moto = pytest.importorskip("moto.server")
    moto_server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto_server.start()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{moto_server.get_host_and_port()[1]}",
    }.items():
        monkeypatch.setenv(name, value)
    S3Files.clear_instance_cache()
    yield "s3://tokens/mix"
    for thread in threading.enumerate():
        if thread.name.startswith("read-ahead"):
            thread.join()  # it would ask a server that is gone for minutes
    moto_server.stop()
    S3Files.clear_instance_cache()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_remote_set_gives_the_batches_of_a_local_one(
    server: str, documents: Path, tmp_path: Path, workers: int
) -> None:
    from gristmill.core.files import as_path

    folder = as_path(server)
    folder.fs.call_s3("create_bucket", Bucket="tokens")  # type: ignore[attr-defined]
    for file in documents.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    remote = stream(
        server,
        batch_size=4,
        document_mask=True,
        provenance=True,
        reading={
            "cache_bytes": 0,
            "cache_folder": str(tmp_path / "cache"),
            "read_ahead_steps": 3,
        },
    )
    local = stream(documents, batch_size=4, document_mask=True, provenance=True)
    # opened in this process, before workers start
    assert equal(next(iter(remote)), next(iter(local)))
    assert equal(
        list(islice(DataLoader(remote, batch_size=None, num_workers=workers), 7)),
        list(islice(local, 7)),
    )
    remote.close()
