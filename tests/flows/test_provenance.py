"""Provenance of data through training, on packed sets made by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.core.store import StageFolder
from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    MisalignedError,
    document_id,
    write_table,
)
from gristmill.flows.questions.spike_documents import with_origins
from gristmill.flows.questions.training_reads import (
    Reading,
    TraceError,
    answers_of_step,
)
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.mixtures.schema.rl import Rl
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import LEDGER, LEDGER_SCHEMA
from gristmill.tokenize.row_provenance import describe_documents
from gristmill.tokenize.shuffle import Order
from gristmill.train.loop.batch_plan import plan_of
from gristmill.train.rl.prompts import prompt_plan_of
from gristmill.train.rl.rollout_tables import gather_batches, keep_batch
from tests.packed_sets import write_packed_set

TOKENIZER = {"vocab_size": 1000, "eos": 0, "pad": 1, "sha256": "0" * 64}
ROWS = np.arange(40 * 8).reshape(40, 8)


def reading(
    folder: Path,
    packed: PackedSet | None = None,
    order: Order | None = None,
    **section: Any,
) -> Reading:
    """Return a pre-training of 6 steps of 4 rows that has not started."""
    settings_ = Pretrain.model_validate(
        {"steps": 6, "global_batch_size": 4, "seed": 1, **section}
    )
    if order is None:
        assert packed is not None
        order = packed.order(settings_.seed or 0)
    return Reading(
        "pretrain", StageFolder(folder), settings_, plan_of(settings_, 8), order, packed
    )


def packed_set(folder: Path, rows: np.ndarray = ROWS) -> PackedSet:
    write_packed_set(folder, rows, {"prose": len(rows) - 10, "code": 10}, TOKENIZER)
    return PackedSet(folder)


def reinforcement(folder: Path, prompts: int, **section: Any) -> Reading:
    """Return a reinforcement learning that has not started."""
    settings_ = Rl.model_validate(
        {
            "data": [{"path": "p.jsonl"}],
            "rewards": [{"kind": "contains", "text": "e"}],
            "seed": 1,
            **section,
        }
    )
    return Reading(
        "rl",
        StageFolder(folder),
        settings_,
        prompt_plan_of(settings_),
        Order([prompts], 1),
        examples=tuple((f"prompt-{number}",) for number in range(prompts)),
    )


def found_by_looking(
    training: Any, steps: int, wanted_rows: list[int]
) -> dict[int, list[int]]:
    """Return the wanted rows that each step reads, by scanning all rows of all
    steps.
    """
    expected: dict[int, list[int]] = {}
    for step in range(1, steps + 1):
        hits = sorted(row for row in training.rows(step).tolist() if row in wanted_rows)
        if hits:
            expected[step] = hits
    return expected


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 13),
    st.data(),
)
def test_steps_of_a_prompt_are_those_trained_on_its_answers(
    prompts: int,
    groups: int,
    steps_per_batch: int,
    epochs: int,
    steps: int,
    data: st.DataObject,
) -> None:
    training = reinforcement(
        Path("nowhere"),
        prompts,
        group_size=2,
        global_batch_size=2 * groups,
        steps=steps,
        steps_per_batch=steps_per_batch,
        epochs_per_batch=epochs,
    )
    wanted_prompts = data.draw(
        st.lists(st.integers(0, prompts - 1), min_size=1, max_size=3, unique=True)
    )
    assert training.steps_that_read(np.array(wanted_prompts)) == found_by_looking(
        training, steps, wanted_prompts
    )


def test_reinforcement_step_shows_the_answers_it_trained_on(
    tmp_path: Path,
) -> None:
    training = reinforcement(
        tmp_path,
        8,
        group_size=2,
        global_batch_size=4,
        steps=8,
        steps_per_batch=2,
        epochs_per_batch=2,
    )
    prompts = [training.rows(step).tolist() for step in (1, 2)]
    batch = [
        {
            "id": f"prompt-{number}",
            "prompt": "say",
            "answer": f"answer {place} to {number}",
            "right": None,
            "ended": True,
            "tokens": 3,
            "reward": float(place),
            "rewards": {"contains": float(place)},
            "advantage": place - 0.5,
        }
        for step_prompts in prompts
        for number in step_prompts
        for place in range(2)
    ]
    assert answers_of_step(training, 1) == []
    keep_batch(tmp_path / "work" / "answers", 0, batch)
    assert answers_of_step(training, 1) == answers_of_step(training, 3) == batch[:4]
    assert answers_of_step(training, 2) == answers_of_step(training, 4) == batch[4:]
    assert answers_of_step(training, 5) == []
    assert [answer["id"] for answer in answers_of_step(training, 2)[::2]] == [
        f"prompt-{row}" for row in prompts[1]
    ]
    (tmp_path / "data").mkdir()
    gather_batches(
        tmp_path / "work" / "answers", 1, tmp_path / "data" / "answers.parquet"
    )
    shutil.rmtree(tmp_path / "work")
    assert answers_of_step(training, 4) == batch[4:]


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(1, 9),
    st.data(),
)
def test_steps_of_a_row_are_those_whose_batch_contains_it(
    counts: list[int], batch: int, steps: int, data: st.DataObject
) -> None:
    training = reading(
        Path("nowhere"), order=Order(counts, 3), steps=steps, global_batch_size=batch
    )
    wanted_rows = data.draw(
        st.lists(st.integers(0, sum(counts) - 1), min_size=1, max_size=3, unique=True)
    )
    assert training.steps_that_read(np.array(wanted_rows)) == found_by_looking(
        training, steps, wanted_rows
    )


def test_only_trained_steps_and_marked_checkpoints_count(
    tmp_path: Path,
) -> None:
    training = reading(tmp_path, packed_set(tmp_path / "set"))
    assert training.steps_done() == 0
    for step, name in ((2, "complete.json"), (4, "half.bin")):
        folder = tmp_path / "work" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / name).write_text("{}")
    assert training.checkpoints() == [2]
    assert training.steps_done() == 2
    (tmp_path / "work" / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4')
    assert training.steps_done() == 3
    assert [training.use(step, 3) for step in (3, 4)] == ["read", "will read"]
    with pytest.raises(TraceError, match="pretrain has 6 steps; there is no step 7"):
        training.rows(7)


def test_documents_are_described_from_their_ledger_entry(tmp_path: Path) -> None:
    """5,000 documents in two shards; the described ones are in different row groups."""
    uuid = "0" * 8 + "-0000-0000-0000-" + "0" * 12
    inputs = {
        name: tmp_path / name for name in ("ingest", "dedup", "quality", "langid")
    }
    ids = []
    for shard in range(2):
        locators = [
            f"https://site.example/{shard}/{n}#part#{uuid}"
            if n == 7
            else f"{shard}.jsonl#{n}"
            for n in range(2500)
        ]
        metadata = [
            '{"url": "https://other.example"}' if n == 2400 else "{}"
            for n in range(2500)
        ]
        shard_ids = [document_id("web", locator, "text") for locator in locators]
        ids.append(shard_ids)
        write_table(
            inputs["ingest"] / f"part-{shard}.parquet",
            pa.table(
                [
                    pa.array(shard_ids, pa.binary(16)),
                    pa.array(["web"] * 2500).dictionary_encode(),
                    pa.array(locators),
                    pa.array(["text"] * 2500, pa.large_string()),
                    pa.array(metadata),
                ],
                schema=DOCUMENT_SCHEMA,
            ),
        )
        verdict_columns = {
            "id": pa.array(shard_ids, pa.binary(16)),
            "keep": [True] * 2500,
        }
        write_table(
            inputs["quality"] / f"part-{shard}.parquet",
            pa.table({**verdict_columns, "quality": np.arange(2500) / 2500}),
        )
        write_table(
            inputs["langid"] / f"part-{shard}.parquet",
            pa.table(
                {
                    **verdict_columns,
                    "language": ["de" if n % 2 else "en" for n in range(2500)],
                    "language_score": [0.9] * 2500,
                }
            ),
        )
        write_table(
            inputs["dedup"] / f"part-{shard}.parquet",
            pa.table(
                {
                    **verdict_columns,
                    "cluster": pa.array(shard_ids, pa.binary(16)),
                    "cluster_size": [3] * 2500,
                    "jaccard": pa.nulls(2500, pa.float64()),
                }
            ),
        )
    packed = packed_set(tmp_path / "set")
    entries = sorted(
        (entry_id, shard, row, 0, False, None)
        for shard, shard_ids in enumerate(ids)
        for row, entry_id in enumerate(shard_ids)
    )
    write_table(
        packed.folder / LEDGER,
        pa.table([list(column) for column in zip(*entries)], schema=LEDGER_SCHEMA),
    )
    wanted_ids = [ids[1][2400], ids[0][7]]
    descriptions = describe_documents(packed, inputs, wanted_ids)
    step = {
        "step": 3,
        "suspects": [wanted_ids[1].hex()],
        "documents": [{"id": wanted_ids[1].hex(), "loss": 9.0}, {"id": "ab"}],
    }
    (joined,) = with_origins([step], packed.folder, inputs)
    assert joined["documents"] == [
        {"loss": 9.0, **descriptions[wanted_ids[1]]},
        {"id": "ab"},
    ]
    assert descriptions == {
        wanted_ids[0]: {
            "id": wanted_ids[0].hex(),
            "source": "web",
            "locator": "1.jsonl#2400",
            "url": "https://other.example",
            "quality": {"quality": 0.96},
            "language": "en",
            "cluster": wanted_ids[0].hex(),
            "cluster_size": 3,
        },
        wanted_ids[1]: {
            "id": wanted_ids[1].hex(),
            "source": "web",
            "locator": f"https://site.example/0/7#part#{uuid}",
            "url": "https://site.example/0/7#part",
            "quality": {"quality": 0.0028},
            "language": "de",
            "cluster": wanted_ids[1].hex(),
            "cluster_size": 3,
        },
    }
    swapped = [
        (entry_id, 1 - shard, *other_fields)
        for entry_id, shard, *other_fields in entries
    ]
    write_table(
        packed.folder / LEDGER,
        pa.table([list(column) for column in zip(*swapped)], schema=LEDGER_SCHEMA),
    )
    with pytest.raises(
        MisalignedError,
        match=r"part-0.parquet: row 2400 is document .* run the mix stage again",
    ):
        describe_documents(packed, inputs, wanted_ids)
