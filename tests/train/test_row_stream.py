"""`gristmill.stream`: the rows of our own trainings, in their order and with their resume, for any other loop."""

from __future__ import annotations

import json
import pickle
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
from gristmill.mixtures.model import Model
from gristmill.mixtures.posttraining import Dpo
from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.order import ReadOnceError
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import DTYPES, MANIFEST, PIECES_SCHEMA, PackedSetError, train_name
from gristmill.tokenize.packed_writing import write_rows
from gristmill.train.data.conversation_tokens import Conversation
from gristmill.train.data.example_rows import Piece, packed_rows, write_example_rows
from gristmill.train.data.pairs import Pair
from gristmill.train.data.preference_rows import PairRows
from gristmill.train.data.row_stream import RowStream, StreamError, stream
from gristmill.train.loop.batch_plan import RowPlan, extend_digest, plan_of
from gristmill.train.loop.prefetch import read_batch
from gristmill.train.loop.resuming import OtherRowsError
from gristmill.train.models.model_config import shape_of
from gristmill.train.objectives.losses import IGNORED, next_tokens
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.preference_objective import Preferences
from gristmill.train.objectives.sft_objective import AssistantTurns

LENGTH = 24
TOKENIZER = {"vocab_size": 100, "eos": 0, "pad": 1, "sha256": "t"}
SECTION = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48}


def same(ours: Any, theirs: Any) -> bool:
    """Whether two things of tensors, dicts, lists and tuples are equal, byte by byte."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty rows of two sources, each of one to three pieces and perhaps padding."""
    folder, generator = tmp_path_factory.mktemp("documents"), np.random.default_rng(5)
    tokens = np.full((20, LENGTH), TOKENIZER["pad"])
    pieces = []
    for row in range(20):
        cuts = np.sort(generator.choice(np.arange(1, LENGTH + 1), size=1 + row % 3, replace=False)).tolist()
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
    shard = write_rows(
        folder / train_name(0), tokens.astype(DTYPES["uint16"]), pa.Table.from_pylist(pieces, schema=PIECES_SCHEMA)
    )
    write_json(
        folder / MANIFEST,
        {
            "format": 4,
            "dtype": "uint16",
            "sequence_length": LENGTH,
            "sources": ["prose", "code"],
            "validation": {},
            "tokenizer": TOKENIZER,
            "train": {"rows": 20, "rows_per_source": [10, 10], "shards": [shard]},
        },
    )
    return folder


@pytest.fixture
def turns(tmp_path: Path) -> Path:
    def piece(number: int, length: int) -> Piece:
        trained = np.arange(length) % 3 != number % 3
        trained[0] = False
        return Piece(number.to_bytes(16, "big"), (np.arange(length) * 7 + number * 13) % 100, trained)

    sets = {
        "first": packed_rows([piece(n, length) for n, length in enumerate([5, 9, 8, 20, 3, 12, 7])], LENGTH, True),
        "second": packed_rows([piece(90, 24)], LENGTH, True),
    }
    write_example_rows(tmp_path / "rows", sets, LENGTH, TOKENIZER, 1)
    return tmp_path / "rows"


def objective(folder: Path, seed: int, document_mask: bool) -> NextToken:
    shape = shape_of(Model.model_validate({**SECTION, "document_mask": document_mask}), 100, LENGTH)
    return NextToken(PackedSet(folder), seed, torch.ones(100), shape)


def test_a_training_of_ours_records_that_it_has_read_what_the_stream_gives(
    run_stage: Any, tokenizer_folder: Path, mix_folder: Path, pretrain_config: dict[str, Any], tmp_path: Path
) -> None:
    run_stage("pretrain", {"mix": mix_folder, "tokenizer": tokenizer_folder}, pretrain_config, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "data" / "metrics.jsonl").read_text().splitlines()]
    recorded = {line["step"]: line["rows_digest"] for line in lines if "rows_digest" in line}
    assert len(recorded) == 12
    batches = stream(mix_folder, batch_size=6, seed=11, provenance=True)
    packed, digest = PackedSet(mix_folder), batches.fingerprint
    for step, batch in enumerate(islice(batches, 12), start=1):
        rows = np.array([one["row"] for one in batch["provenance"]])
        digest = extend_digest(digest, rows)
        assert digest == recorded[step]
        assert batch["input_ids"].numpy().tobytes() == packed.read(rows).tobytes()
        assert rows.tolist() == batches.rows(step - 1).tolist()


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (2, 4)])
def test_batches_are_byte_by_byte_those_of_our_loop_with_its_targets_and_positions(
    documents: Path, rank: int, size: int, document_mask: bool
) -> None:
    loop, plan = objective(documents, 3, document_mask), RowPlan(((0, 0, 6),))
    theirs = stream(documents, rank=rank, world_size=size, batch_size=6, seed=3, document_mask=document_mask)
    titan = stream(
        documents, rank=rank, world_size=size, batch_size=6, seed=3, document_mask=document_mask, layout="torchtitan"
    )
    for step, batch, (inputs, labels) in zip(range(9), theirs, titan, strict=False):
        (part,) = read_batch(loop, plan, step, 6, rank, size).parts
        ids = part.tokens.long()
        targets = next_tokens(ids, torch.arange(LENGTH) < part.filled[:, None])
        assert same(batch["input_ids"], ids)
        assert same(inputs["input"], ids)
        assert same(labels, targets)
        shifted = torch.cat((batch["labels"][:, 1:], torch.full((len(ids), 1), IGNORED)), dim=1)  # as transformers does
        assert same(shifted, targets)
        assert ("position_ids" in batch, "positions" in inputs) == (document_mask, document_mask)
        if document_mask:
            real = part.positions >= 0
            assert same(batch["position_ids"][real], part.positions[real].long())
            assert same(batch["position_ids"], inputs["positions"])
            assert batch["position_ids"].min() == 0
            assert (batch["labels"][~real] == IGNORED).all()
            # Padding is apart from the document before it.
            first = (~real).int().argmax(dim=1)[(~real).any(dim=1)]
            assert batch["position_ids"][(~real).any(dim=1), first].tolist() == [0] * len(first)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 12), st.integers(0, 99))
def test_the_ranks_shares_are_one_order_and_any_number_of_ranks_resumes_it(
    documents: Path, per_rank: int, before: int, after: int, steps: int, seed: int
) -> None:
    batch = per_rank * max(before, after)
    whole = [
        one["provenance"] for one in islice(stream(documents, batch_size=batch, seed=seed, provenance=True), steps + 3)
    ]

    def shares(size: int, state: dict[str, Any] | None, count: int) -> tuple[list[list[Any]], dict[str, Any]]:
        """The batches of all ranks put together again, and their state, which is the same on each."""
        found: list[list[Any]] = [[None] * batch for _ in range(count)]
        states = []
        for rank in range(size):
            one = stream(documents, batch_size=batch, seed=seed, rank=rank, world_size=size, provenance=True)
            if state is not None:
                one.load_state_dict(state)
            for number, part in enumerate(islice(one, count)):
                found[number][rank::size] = part["provenance"]
            states.append({**one.state_dict(), "world_size": 0})
        assert all(other == states[0] for other in states)
        return found, states[0]

    first, state = shares(before, None, steps)
    assert first == whole[:steps]
    second, _ = shares(after, json.loads(json.dumps(state)), 3)
    assert second == whole[steps:]


@settings(max_examples=15)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 25), st.booleans())
def test_rows_one_by_one_are_the_rows_of_the_batches_and_resume_at_any_row(
    documents: Path, size: int, per_rank: int, taken: int, sized: bool
) -> None:
    def made(**more: Any) -> RowStream:
        return stream(documents, rank=size - 1, world_size=size, document_mask=True, provenance=True, **more)

    batches = made(batch_size=per_rank * size)
    rows = made(batch_size=per_rank * size, each="row") if sized else made()
    whole = [row for batch in islice(batches, 25) for row in batch["provenance"]]
    iterator = iter(rows)
    found = list(islice(iterator, taken))
    state = rows.state_dict()
    assert [row["provenance"] for row in found] == whole[:taken]
    assert state["position"] == taken * size
    again = made()
    again.load_state_dict(state)
    rest = list(islice(again, 7))
    assert same(rest, list(islice(iterator, 7)))
    if found:
        assert found[0]["input_ids"].shape == (LENGTH,)
        collated = RowStream.collate(found)
        assert same(collated["input_ids"][-1], found[-1]["input_ids"])
        assert collated["provenance"] == whole[:taken]


def test_provenance_names_source_and_documents_with_their_places(documents: Path) -> None:
    batches = stream(documents, batch_size=5, provenance=True)
    for batch in islice(batches, 4):
        for ids, told in zip(batch["input_ids"], batch["provenance"], strict=True):
            row = told["row"]
            assert told["source"] == ("prose", "code")[row % 2]
            assert [piece["id"] for piece in told["documents"]] == [
                bytes([row, number] * 8).hex() for number in range(1 + row % 3)
            ]
            assert [piece["offset"] for piece in told["documents"]] == [7 * n for n in range(1 + row % 3)]
            last = told["documents"][-1]
            assert (ids[last["start"] + last["length"] :] == TOKENIZER["pad"]).all()
    assert batches.provenance(np.array([row])) == [told]


def test_epochs_follow_one_another_and_end_where_asked_with_the_last_whole_batch(documents: Path) -> None:
    def rows(**more: Any) -> list[int]:
        found = stream(documents, provenance=True, seed=1, **more)
        parts = found if found.each == "row" else (row for batch in found for row in batch_rows(batch))
        return [row["provenance"]["row"] if found.each == "row" else row for row in parts]

    def batch_rows(batch: Any) -> list[int]:
        return [one["row"] for one in batch["provenance"]]

    once, twice = rows(epochs=1), rows(epochs=2)
    assert sorted(once) == list(range(20))
    assert twice[:20] == once
    assert sorted(twice[20:]) == list(range(20))
    assert twice[20:] != once
    assert rows(epochs=1, batch_size=6) == once[:18]
    assert rows(epochs=1, world_size=3, rank=2) == once[2:18:3]
    endless = stream(documents, provenance=True, seed=1, batch_size=6)
    assert [row for batch in islice(endless, 6) for row in batch_rows(batch)] == twice[:36]
    finite = stream(documents, batch_size=6, epochs=1)
    assert same(list(finite), list(finite))  # each pass begins anew


def test_a_set_with_phases_is_read_once_and_withheld_rows_never(documents: Path, tmp_path: Path) -> None:
    folder = tmp_path / "phases"
    folder.mkdir()
    for file in documents.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    manifest = read_json(folder / MANIFEST)
    manifest["train"]["stages"], manifest["format"] = [[6, 6], [4, 4]], 5
    write_json(folder / MANIFEST, manifest)
    found = [one["provenance"]["row"] for one in stream(folder, provenance=True)]
    assert sorted(found[:12]) == list(range(12))
    assert sorted(found) == list(range(20))
    with pytest.raises(ReadOnceError, match="read once"):
        stream(folder, epochs=2)
    del manifest["train"]["stages"]
    manifest["train"]["shards"][0]["withheld"] = [3, 4]
    write_json(folder / MANIFEST, {**manifest, "format": 4})
    without = [one["provenance"]["row"] for one in stream(folder, provenance=True, epochs=1)]
    assert sorted(without) == [row for row in range(20) if row not in (3, 4)]


def loader_of(folder: Path, workers: int, **more: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    batches = stream(folder, batch_size=4, document_mask=True, seed=2, **more)
    return StatefulDataLoader(batches, batch_size=None, num_workers=workers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stateful_loader_resumes_in_the_middle_with_workers_and_without(documents: Path, workers: int) -> None:
    pytest.importorskip("torchdata")
    whole = list(islice(stream(documents, batch_size=4, document_mask=True, seed=2, provenance=True), 11))
    for taken in (0, 1, 4):
        first = loader_of(documents, workers, provenance=True)
        iterator = iter(first)
        assert same([next(iterator) for _ in range(taken)], whole[:taken])
        state = pickle.loads(pickle.dumps(first.state_dict()))
        again = loader_of(documents, workers, provenance=True)
        again.load_state_dict(state)
        assert same(list(islice(again, 7)), whole[taken : taken + 7])
        del iterator, first, again


@pytest.mark.parametrize("each", ["batch", "row"])
def test_a_plain_loader_with_workers_gives_what_a_plain_loop_gives_and_begins_where_it_is_put(
    documents: Path, each: Any
) -> None:
    whole = list(islice(stream(documents, batch_size=4, world_size=2, rank=1), 8))
    for workers, begin in ((0, 0), (2, 0), (2, 3)):
        one = stream(documents, batch_size=4, world_size=2, rank=1, each=each)
        one.seek(begin * 4)
        loader = DataLoader(one, batch_size=None if each == "batch" else 2, num_workers=workers)
        assert same(list(islice(loader, 5)), whole[begin : begin + 5])


def test_a_finite_loader_gives_every_batch_once_whatever_its_workers(documents: Path) -> None:
    whole = list(stream(documents, batch_size=4, epochs=1))
    assert len(whole) == 5
    for workers in (2, 3):
        loader = DataLoader(stream(documents, batch_size=4, epochs=1), batch_size=None, num_workers=workers)
        assert same(list(loader), whole)


def test_loaders_that_keep_their_workers_or_start_new_processes_begin_every_pass_anew(documents: Path) -> None:
    whole = list(stream(documents, batch_size=4, epochs=1))
    loader = DataLoader(
        stream(documents, batch_size=4, epochs=1), batch_size=None, num_workers=2, persistent_workers=True
    )
    assert same(list(loader), whole)
    assert same(list(loader), whole)
    one = stream(documents, batch_size=4, epochs=1)
    one.seek(8)
    there = pickle.loads(pickle.dumps(one))  # as a process that is spawned gets it
    assert same(list(there), whole[2:])
    assert same(list(there), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_that_came_to_its_end_begins_anew(documents: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def made() -> Any:
        return stateful.StatefulDataLoader(
            stream(documents, batch_size=4, epochs=1), batch_size=None, num_workers=workers
        )

    loader, whole = made(), list(stream(documents, batch_size=4, epochs=1))
    assert same(list(loader), whole)
    assert same(list(loader), whole)
    again = made()
    again.load_state_dict(loader.state_dict())
    assert same(list(again), whole)
    assert same(list(again), whole)


def test_a_state_of_other_rows_or_of_other_workers_is_refused(documents: Path, turns: Path) -> None:
    one = stream(documents, batch_size=4)
    next(iter(one))
    state = one.state_dict()
    with pytest.raises(OtherRowsError, match="by seed 0, but this stream has seed 1"):
        stream(documents, batch_size=4, seed=1).load_state_dict(state)
    with pytest.raises(OtherRowsError, match="by fingerprint"):
        stream(turns, batch_size=4).load_state_dict(state)
    of_worker = {**state, "worker": 1, "workers": 2}
    with pytest.raises(OtherRowsError, match="batches of 4 rows on 1 ranks, but these are of 8 on 1"):
        stream(documents, batch_size=8).load_state_dict(of_worker)
    one.load_state_dict(of_worker)
    with pytest.raises(OtherRowsError, match="worker 1 of 2 cannot be taken up by worker 0 of 1"):
        iter(one)
    with pytest.raises(StreamError, match="not -1, but 0 or more"):
        one.seek(-1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2: ranks are 0 to world_size - 1"),
        ({"each": "batch"}, "needs batch_size"),
        ({"batch_size": 2, "world_size": 3}, "batch_size 2 is the rows of all 3 ranks together: give 3 or more"),
        ({"batch_size": 4, "world_size": 3, "each": "row"}, "must be a multiple of world_size 3"),
        ({"epochs": 0}, "epochs must be 1 or more, not 0"),
        ({"layout": "numpy"}, "layout must be transformers or torchtitan, not 'numpy'"),
        ({"layout": "torchtitan", "provenance": True}, "carries no provenance"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_what_to_give(
    documents: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(StreamError, match=message):
        stream(documents, **wrong)


def test_workers_share_batches_only_where_they_know_how_many_rows_these_have(documents: Path) -> None:
    with pytest.raises(StreamError, match="2 workers of a loader share the batches"):
        next(iter(DataLoader(stream(documents), batch_size=4, num_workers=2)))
    with pytest.raises(PackedSetError, match=r"no packed\.json there"):
        stream(documents / "nowhere")
    with pytest.raises(StreamError, match="has no batches"):
        stream(documents).rows(0)


@pytest.mark.slow
def test_fine_tuning_rows_have_the_masks_and_positions_of_our_loop(turns: Path) -> None:
    loop, plan = AssistantTurns(PackedSet(turns), 4, torch.ones(100), 1.0), RowPlan(((0, 0, 2),))
    batches = stream(turns, batch_size=2, seed=4)
    for step, batch in enumerate(islice(batches, 5)):
        (part,) = read_batch(loop, plan, step, 2, 0, 1).parts
        assert same(batch["input_ids"], part.ids)
        assert same(batch["labels"], part.ids.masked_fill(~part.trained, IGNORED))
        if part.positions is not None:
            assert same(batch["position_ids"][part.positions >= 0], part.positions[part.positions >= 0].long())
    rows = list(islice(stream(turns, batch_size=2, seed=4, each="row"), 10))
    assert {tuple(row["input_ids"].shape) for row in rows} == {(LENGTH,)}
    assert same(
        next(iter(DataLoader(stream(turns, seed=4), batch_size=4)))["labels"],
        torch.stack([row["labels"] for row in rows[:4]]),
    )


@pytest.mark.slow
def test_preference_pairs_come_in_the_order_of_our_loop_with_losses_on_the_answers(
    make_pair_rows: Callable[..., PairRows], tmp_path: Path
) -> None:
    def one(number: int) -> Pair:
        def said(length: int) -> Conversation:
            trained = np.arange(length) >= 4
            return Conversation(np.arange(length) + 10 * number, trained, False, f"{number:032x}")

        record = {"id": f"{number:032x}", "prompt": f"p {number}", "chosen": "c", "rejected": "r"}
        return Pair(record, said(9 + number), said(7))

    rows = make_pair_rows({"a": [one(n) for n in range(5)], "b": [one(n) for n in range(5, 7)]}, LENGTH)
    section = Dpo.model_validate({"data": [{"path": "a"}, {"path": "b"}], "steps": 3})
    draws = [np.flatnonzero(rows.sets == number) for number in (0, 1)]
    loop = Preferences(rows, draws, np.zeros((7, 2), np.float32), section, 8, 1.0, torch.device("cpu"))
    pairs = stream(tmp_path / "pairs", batch_size=3, seed=8, provenance=True)
    for step, batch in enumerate(islice(pairs, 4)):
        (part,) = read_batch(loop, RowPlan(((0, 0, 3),)), step, 3, 0, 1).parts
        assert same(torch.cat((batch["chosen_input_ids"], batch["rejected_input_ids"])), part.ids)
        labels = torch.cat((batch["chosen_labels"], batch["rejected_labels"]))
        assert same(labels[:, 1:], part.targets[:, :-1])
        assert [told["example"] for told in batch["provenance"]] == loop.describe(pairs.rows(step))["examples"]
    assert pairs.fingerprint == loop.fingerprint
    with pytest.raises(StreamError, match="preference pairs, which come in batches"):
        stream(tmp_path / "pairs")


@pytest.mark.parametrize("key", ["manifest", "none"])
def test_the_folder_of_a_run_has_seed_and_document_mask_of_its_training(
    documents: Path, tmp_path: Path, key: str
) -> None:
    made = tmp_path / "store" / "mix" / "run--1234"
    (made / "data").mkdir(parents=True)
    for file in documents.iterdir():
        (made / "data" / file.name).write_bytes(file.read_bytes())
    training = {"pretrain": {"seed": 6, "model": {"document_mask": True}}} if key == "manifest" else {}
    write_json(
        tmp_path / "run" / "run.json",
        {
            "stages": {"mix": {"fingerprint": "1234", "folder": str(made)}, "pretrain": {"fingerprint": "12"}},
            "manifest": {"seed": 9, **training},
        },
    )
    found = stream(tmp_path / "run", batch_size=2)
    expected = stream(documents, batch_size=2, seed=6 if training else 9, document_mask=bool(training))
    assert same(list(islice(found, 3)), list(islice(expected, 3)))
    with pytest.raises(StreamError, match="this run has no output of sft_data; it has mix"):
        stream(tmp_path / "run", stage="sft_data")


def test_it_is_as_our_loop_also_behind_a_ramp_of_batch_sizes(documents: Path) -> None:
    """Positions follow one another without a gap, so a stream put behind a step reads on as the training does."""
    plan = plan_of(
        Pretrain.model_validate(
            {"steps": 9, "global_batch_size": 6, "seed": 3, "batch_ramp": [{"until_step": 4, "global_batch_size": 2}]}
        ),
        LENGTH,
    )
    one = stream(documents, batch_size=6, seed=3, provenance=True)
    one.seek(plan.positions(4)[0])
    order = PackedSet(documents).order(3)
    found = [[told["row"] for told in batch["provenance"]] for batch in islice(one, 3)]
    assert found == [plan.rows(order, step).tolist() for step in (4, 5, 6)]


def ranks_of_torchtitan(folder: Path, rank: int, workers: int) -> Any:
    """What torchtitan 0.3 makes of a dataset: `components/dataloader.py`, ParallelAwareDataloader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    class ParallelAwareDataloader(StatefulDataLoader):
        def state_dict(self) -> dict[str, Any]:
            return {f"dp_rank_{rank}": pickle.dumps(super().state_dict()), "world_size": 2}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert state_dict["world_size"] == 2
            super().load_state_dict(pickle.loads(state_dict[f"dp_rank_{rank}"]))

    rows = stream(
        folder, rank=rank, world_size=2, batch_size=6, each="row", seed=5, document_mask=True, layout="torchtitan"
    )
    return ParallelAwareDataloader(rows, batch_size=3, num_workers=workers, snapshot_every_n_steps=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_of_torchtitan_trains_from_it_and_resumes(documents: Path, workers: int) -> None:
    pytest.importorskip("torchdata")
    loop = objective(documents, 5, True)
    for rank in (0, 1):
        loader = ranks_of_torchtitan(documents, rank, workers)
        found, state = [], {}
        for number, batch in enumerate(islice(loader, 6)):
            found.append(batch)
            if number == 2:
                state = loader.state_dict()
        for step, (inputs, labels) in enumerate(found):
            (part,) = read_batch(loop, RowPlan(((0, 0, 6),)), step, 3, rank, 2).parts
            assert same(inputs["input"], part.tokens.long())
            assert same(labels, next_tokens(inputs["input"], torch.arange(LENGTH) < part.filled[:, None]))
            assert sorted(inputs) == ["input", "positions"]
        again = ranks_of_torchtitan(documents, rank, workers)
        again.load_state_dict(state)
        assert same(list(islice(again, 3)), found[3:])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("s3fs")
    from gristmill.core.s3_files import S3Files

    moto = pytest.importorskip("moto.server")
    one = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    one.start()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{one.get_host_and_port()[1]}",
    }.items():
        monkeypatch.setenv(name, value)
    S3Files.clear_instance_cache()
    yield "s3://tokens/mix"
    one.stop()
    S3Files.clear_instance_cache()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_in_an_object_store_gives_what_it_gives_on_a_disk(
    server: str, documents: Path, tmp_path: Path, workers: int
) -> None:
    from gristmill.core.files import as_path

    folder = as_path(server)
    folder.fs.makedirs("tokens", exist_ok=True)  # type: ignore[attr-defined]
    for file in documents.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    away = stream(
        server,
        batch_size=4,
        document_mask=True,
        provenance=True,
        reading={"cache_bytes": 0, "cache_folder": str(tmp_path / "cache"), "read_ahead_steps": 3},
    )
    here = stream(documents, batch_size=4, document_mask=True, provenance=True)
    assert same(next(iter(away)), next(iter(here)))  # opened in this process, before the workers are made
    assert same(list(islice(DataLoader(away, batch_size=None, num_workers=workers), 7)), list(islice(here, 7)))
    away.close()
