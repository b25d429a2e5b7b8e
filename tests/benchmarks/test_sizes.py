"""The benchmark of whole trainings: what its rows say, and that our side measures what it says."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.areas import surroundings
from benchmarks.train import bench_sizes, whole_training
from gristmill.mixtures.model import Model
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_writing import write_packed_set
from gristmill.train.models.shape import shape_of

SIZE = bench_sizes.Size("tiny", Model(layers=1, width=16, heads=2), 64, 16, 2, 4, 1, published="llm.c 41 %")
FOUND: dict[str, Any] = {
    "tokens_per_second": 520_000.0, "mfu": 0.45, "mfu_causal": 0.4, "data_wait_share": 0.0012, "flops": 4.45e14,
    "matmul": 7.12e14, "peak_memory_bytes": 61_000_000_000, "checkpoint_seconds": [1.5, 0.25]}


def test_a_training_measures_its_speed_its_memory_and_what_its_checkpoints_cost(
    tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    steps = bench_sizes.WINDOWS * SIZE.window_steps
    ids = np.random.default_rng(0).integers(0, SIZE.vocab, (SIZE.rows * steps, SIZE.length))
    write_packed_set(tmp_path, ids, {"all": len(ids)}, {"vocab_size": SIZE.vocab, "eos": 0, "pad": 1, "sha256": ""})
    found = whole_training.ours(PackedSet(tmp_path), shape_of(SIZE.model, SIZE.vocab, SIZE.length),
                                {**vars(SIZE), "windows": bench_sizes.WINDOWS})
    assert found.keys() == FOUND.keys()
    assert (found["mfu"], found["mfu_causal"]) == ("unknown", "unknown")  # a CPU's peak is in no table
    assert len(found["checkpoint_seconds"]) == 2  # after the third and the sixth of eight windows
    assert all(seconds > 0 for seconds in found["checkpoint_seconds"])
    assert min(found[key] for key in ("tokens_per_second", "flops", "matmul", "peak_memory_bytes")) > 0


def test_rows_stand_beside_transformers_and_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = {"tokens_per_second": 400_000.0, "peak_memory_bytes": 122_000_000_000}
    monkeypatch.setattr(bench_sizes, "_measured", lambda side, *_: (FOUND if side == "ours" else peer, ""))
    monkeypatch.setattr(bench_sizes.importlib.util, "find_spec", lambda name: name)
    speed, arithmetic, memory = bench_sizes.rows_of(SIZE)
    assert (speed["name"], speed["ratio"], speed["mfu"]) == ("tiny, vs transformers", 1.3, 0.45)
    assert arithmetic["ratio"] == pytest.approx(0.625)
    assert arithmetic["note"] == ("MFU 45.0% (40.0% with causal attention halved); data wait 0.12%; checkpoint pauses "
                                  "1.50 s, 0.25 s; published MFU: llm.c 41 %")
    assert (memory["ours"], memory["peer"], memory["ratio"]) == (61.0, 122.0, 0.5)


def test_a_peer_that_fails_is_said_and_our_own_failure_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sizes.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(bench_sizes, "_measured", lambda side, *_: (
        (FOUND, "") if side == "ours" else (None, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory")))
    speed, _, memory = bench_sizes.rows_of(SIZE)
    assert (speed["peer"], speed["ratio"], memory["peer"]) == (None, None, None)
    assert speed["note"] == "transformers: torch.OutOfMemoryError: CUDA out of memory"
    monkeypatch.setattr(bench_sizes, "_measured", lambda *_: (None, "no room"))
    with pytest.raises(RuntimeError, match="tiny could not be measured: no room"):
        list(bench_sizes.rows_of(SIZE))


def test_a_page_of_trainings_says_which_torch_it_was_measured_with() -> None:
    assert f", torch {metadata.version('torch')}" in surroundings("sizes")
    assert "torch" not in surroundings("jobs")


@pytest.mark.parametrize("size", [*bench_sizes.ON_GPU, *bench_sizes.ON_CPU], ids=lambda size: size.name)
def test_sizes_are_what_their_names_say(size: bench_sizes.Size) -> None:
    name, length = size.name.split(", T=")
    shape = shape_of(size.model, size.vocab, size.length)
    unit = {"M": 1e6, "B": 1e9}[name[-1]]
    assert shape.parameters / unit == pytest.approx(float(name[:-1]), rel=0.04)
    assert size.length == int(length)
    assert size.rows % size.micro_rows == 0
