"""Context parallelism: places of tokens, attention, and results equal to those of one
process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.checkout import ROOT
from gristmill.core.files import read_json
from gristmill.train.distributed.context_parallel import RowSplit, RowSplitError
from gristmill.train.models.attention import (
    Segments,
    attend,
    block_mask,
    document_numbers,
    see_documents,
)
from gristmill.train.models.model_config import Shape
from gristmill.train.models.transformer import Llama
from tests.train.row_split_worker import DOCUMENTS, LENGTH, VARIANTS, positions

ROUNDING = 5e-6


def split(rank: int, size: int) -> RowSplit:
    return RowSplit(None, rank, size)  # type: ignore[arg-type]


def test_each_process_has_mirrored_chunks_of_a_row() -> None:
    places = [
        split(rank, 2).places(16, torch.device("cpu")).tolist() for rank in range(2)
    ]
    assert places == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    # With causal attention, all processes compute equally many pairs.
    pairs = [
        sum(
            place + 1
            for place in split(rank, 4).places(64, torch.device("cpu")).tolist()
        )
        for rank in range(4)
    ]
    assert pairs == [520] * 4


@pytest.mark.parametrize(
    ("ranks", "compile"),
    [(2, "off"), (3, "off"), pytest.param(2, "block", marks=pytest.mark.slow)],
)
def test_split_model_equals_the_unsplit_one(
    ranks: int, compile: str, tmp_path: Path
) -> None:
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.train.row_split_worker",
            str(ranks),
            str(tmp_path / "differences.json"),
            compile,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    by_rank = read_json(tmp_path / "differences.json")
    assert len(by_rank) == ranks
    for by_variant in by_rank:
        assert by_variant.keys() == VARIANTS.keys() - (
            {"experts"} if compile == "block" else set()
        )
        for variant, differences in by_variant.items():
            assert differences.keys() == {
                "loss",
                "gradients",
                "nll",
                "scored",
                "logits",
                "loads",
            }
            for name, difference in differences.items():
                assert difference < ROUNDING, (variant, name)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", ["one by one", "by a mask", "by blocks"])
def test_queries_of_one_process_attend_to_all_keys(
    rank: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    trains = form != "by blocks"  # FlexAttention has no gradients on a CPU
    queries, keys, values = (
        torch.randn(
            len(DOCUMENTS),
            heads,
            LENGTH,
            8,
            generator=generator,
            dtype=torch.float64,
            requires_grad=trains,
        )
        for heads in (4, 2, 2)
    )
    places = split(rank, 2).places(LENGTH, torch.device("cpu"))
    monkeypatch.setattr("gristmill.train.models.attention.LEAST_MEAN_LENGTH", 1)
    visible = (
        block_mask(document_numbers(positions()), places=places)
        if form == "by blocks"
        else see_documents(positions(), dense=form == "by a mask", places=places)
    )
    assert isinstance(visible, Segments) == (form == "one by one")
    ours = attend(queries[:, :, places], keys, values, visible)
    theirs = attend(queries, keys, values, see_documents(positions(), dense=True))[
        :, :, places
    ]
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-7)
    if not trains:
        return
    for our_gradient, their_gradient in zip(
        torch.autograd.grad(ours.square().sum(), (queries, keys, values)),
        torch.autograd.grad(theirs.square().sum(), (queries, keys, values)),
        strict=True,
    ):
        torch.testing.assert_close(our_gradient, their_gradient, atol=1e-6, rtol=1e-6)


def test_mask_of_split_queries_takes_linear_memory() -> None:
    """Memory saved for the backward pass grows with queries plus 4,096 keys, not with
    their product.
    """
    saved_bytes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved_bytes[tensor.untyped_storage().data_ptr()] = (
            tensor.untyped_storage().nbytes()
        )
        return tensor

    queries, keys = (
        torch.randn(1, 1, 1024, 8, requires_grad=True),
        torch.randn(1, 1, 4096, 8, requires_grad=True),
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(queries, keys, keys, Segments((((1024, 0, 4096),),)))
    assert sum(saved_bytes.values()) < 4 * (
        2 * 1024 * 8 + 4096 * 8 + 3 * 1024 + 4096 + 1024
    )


def test_objective_beyond_single_tokens_is_rejected(tiny_shape: Shape) -> None:
    with pytest.raises(RowSplitError, match="shard"):
        split(0, 2).answered(
            lambda hidden, matrix: hidden.sum(),
            torch.zeros(1, 4, 2),
            torch.zeros(3, 2),
            8,
        )


def test_padding_tokens_for_experts_are_rejected(tiny_shape: Shape) -> None:
    with torch.device("meta"):
        model = Llama(replace(tiny_shape, experts=2, experts_per_token=1))
    model.row_split = split(0, 2)
    with pytest.raises(RowSplitError, match=r"22 tokens .* 4, .*experts"):
        model(torch.zeros(1, 22, dtype=torch.int64))
