"""Weights on disk: safetensors bytes, shards that transformers loads, and low peak
memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.checkout import ROOT
from gristmill.mixtures.schema.evaluation import Export
from gristmill.mixtures.schema.model import Model
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.tensor_files import (
    INDEX_FILE,
    NAMES,
    WEIGHTS_FILE,
    ModelTensors,
    Planned,
    TensorFile,
    ready,
    write_model,
    write_tensors,
)
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import WeightsError, load_model, save_model
from gristmill.train.stages.export import write_folder

SIZES = st.lists(
    st.tuples(st.sampled_from(list(NAMES)), st.lists(st.integers(0, 5), max_size=3)),
    max_size=8,
)


def tensors_of(sizes: list[tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    return {
        f"t{number}": (torch.arange(torch.Size(size).numel()).reshape(size) * 3 % 7).to(
            dtype
        )
        for number, (dtype, size) in enumerate(sizes)
    }


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(SIZES)
def test_tensor_files_round_trip_with_safetensors(
    tmp_path: Path, sizes: list[tuple[torch.dtype, list[int]]]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = tensors_of(sizes)
    write_tensors(
        tmp_path / "ours", {name: ready(tensor) for name, tensor in tensors.items()}
    )
    theirs = load_file(tmp_path / "ours")
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    save_file(tensors, tmp_path / "theirs")
    ours = TensorFile(tmp_path / "theirs")
    assert set(theirs) == set(ours.names()) == set(tensors)
    for name, tensor in tensors.items():
        for loaded in (theirs[name], ours.read(name)):
            assert loaded.dtype == tensor.dtype
            assert torch.equal(loaded, tensor)


def test_unplanned_tensor_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a .*\(2,\) .*\(3,\)"):
        write_tensors(
            tmp_path / "f", {"a": Planned(torch.float32, (3,), lambda: torch.zeros(2))}
        )
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-4],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content.replace(b"[9]", b"[8]"),
        lambda content: content.replace(b"F32", b"F99"),
        lambda content: content.replace(b"shape", b"sharp"),
    ],
)
def test_damaged_file_is_rejected_when_it_is_opened(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    write_tensors(file, {"a": ready(torch.zeros(9))})
    assert ModelTensors(tmp_path).read("a").shape == (9,)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(WeightsError):
        ModelTensors(tmp_path)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "b"}}']
)
def test_index_without_its_files_is_rejected(index: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"a": ready(torch.zeros(9))})
    with pytest.raises(WeightsError):
        ModelTensors(tmp_path)["b"]
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError):
        ModelTensors(tmp_path)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 200))
def test_shards_keep_the_size_limit_and_are_indexed(
    tmp_path: Path, counts: list[int], max_bytes: int
) -> None:
    for path in tmp_path.glob("model*"):
        path.unlink()
    tensors = {
        f"t{number:02d}": ready(torch.full((count,), number, dtype=torch.int8))
        for number, count in enumerate(counts)
    }
    write_model(tmp_path, tensors, max_bytes)
    if not (tmp_path / INDEX_FILE).exists():
        assert sum(counts) <= max_bytes or sum(count > 0 for count in counts) == 1
        return
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(counts)
    files = sorted(set(index["weight_map"].values()))
    assert sorted(path.name for path in tmp_path.glob("model-*")) == files
    shards = [
        [
            counts[int(name[1:])]
            for name, file in index["weight_map"].items()
            if file == file_name
        ]
        for file_name in files
    ]
    assert index["weight_map"].keys() == tensors.keys()
    assert all(sum(shard) <= max_bytes or len(shard) == 1 for shard in shards)


def test_sharded_export_loads_like_a_single_file(
    tmp_path: Path,
    make_model: Callable[[Shape], Llama],
    tokenizer_folder: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    shape = shape_of(
        Model(layers=3, width=32, heads=4, kv_heads=2, ffn_width=48), 400, 24
    )
    save_model(tmp_path / "trained", shape, dict(make_model(shape).named_parameters()))
    ids = torch.arange(20)[None] * 7 % 400
    logits = {}
    for name, max_bytes in (("single", 10**9), ("several", 30_000)):
        folder = tmp_path / name
        _, parameters, size = write_folder(
            tmp_path / "trained",
            tokenizer_folder,
            Export(max_shard_bytes=max_bytes),
            folder,
        )
        files = sorted(folder.glob("*.safetensors"))
        assert size == sum(path.stat().st_size for path in files)
        assert parameters == sum(
            parameter.numel() for parameter in load_model(folder).parameters()
        )
        with torch.no_grad():
            logits[name] = load_model(folder)(ids)
    assert len(files) > 1
    assert (folder / INDEX_FILE).exists() != (folder / WEIGHTS_FILE).exists()
    assert torch.equal(logits["single"], logits["several"])
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(theirs(ids).logits, logits["single"], atol=1e-4, rtol=0)


MEASURE = """
import sys
from pathlib import Path
import torch
from gristmill.train.stages import export
from gristmill.train.models import tensor_files
from gristmill.train.models.weights import read_shape

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

torch.zeros(1).to(torch.bfloat16)
source, out = Path(sys.argv[1]), Path(sys.argv[2])
shape = read_shape(source)
before = peak()
for dtype, name in ((torch.float32, "whole"), (torch.bfloat16, "half")):
    tensors = export.exported_tensors(source, shape, dtype)
    tensor_files.write_model(out / name, tensors, 1 << 26)
print(peak() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from Linux"
)
@pytest.mark.slow
def test_export_never_holds_the_whole_model_in_memory(
    tmp_path: Path, make_model: Callable[[Shape], Llama]
) -> None:
    """At most seven of 25 matrices of up to 8 MB are held at once, as read, converted
    and written.
    """
    shape = shape_of(
        Model(layers=12, width=512, heads=4, kv_heads=4, ffn_width=4096), 400, 24
    )
    with torch.device("meta"):
        sizes = {
            name: parameter.shape for name, parameter in Llama(shape).named_parameters()
        }
    save_model(
        tmp_path / "trained",
        shape,
        {name: torch.zeros(size) for name, size in sizes.items()},
    )
    weights = (tmp_path / "trained" / WEIGHTS_FILE).stat().st_size
    assert weights > 300e6
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            MEASURE,
            str(tmp_path / "trained"),
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(process.stdout) < weights / 6
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()


GATHER = """
import torch
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.engine import Parallel
from benchmarks.train.forked_ranks import fork_ranks, load_all
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.distributed.fsdp import sharded_model, whole_tensors
from gristmill.train.distributed.process_groups import make_world, process_group

def gather():
    shape = shape_of(Model(layers=2, width=32, heads=4, kv_heads=2, tied_embeddings=False), 100, 24)
    with process_group() as joined:
        for form in ({}, {"tensor": 2}, {"context": 2}):
            world = make_world(Parallel.model_validate(form), joined.device)
            model = sharded_model(shape, drawn(shape, 0), world, torch.float32)
            found = whole_tensors(model)
            if not joined.is_first:
                assert found == {}, form
                continue
            assert set(found) > {"model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight"}, form
            for name, tensor in found.items():
                assert torch.equal(tensor, drawn(shape, 0)(name, tensor.shape)), (form, name)

load_all()
fork_ranks(2, gather)
"""


@pytest.mark.slow
def test_only_the_first_process_gathers_the_whole_model() -> None:
    process = subprocess.run(
        [sys.executable, "-c", GATHER],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stderr[-3000:]
