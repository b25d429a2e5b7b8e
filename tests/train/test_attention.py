"""Attention within documents: a packed row gives the logits of its documents alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.mixtures.schema.model import RopeScaling
from gristmill.train.distributed import process_groups
from gristmill.train.models import attention
from gristmill.train.models.attention import (
    Segments,
    attend,
    block_mask,
    document_numbers,
    see_documents,
)
from gristmill.train.models.model_config import Shape
from gristmill.train.models.transformer import Llama

MakeModel = Callable[[Shape], Llama]
ROWS = ((5, 12, 7), (24,), (1, 1, 22), (10, 4))
"""Lengths of the documents of each row of 24 tokens; the last one has ten tokens of
padding.
"""


def positions_of(rows: Sequence[Sequence[int]], length: int = 24) -> torch.Tensor:
    """Number each token within its document, -1 for padding, as `PackedSet` does."""
    table = torch.full((len(rows), length), -1, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        row_positions = torch.cat([torch.arange(doc_length) for doc_length in lengths])
        table[row, : len(row_positions)] = row_positions
    return table


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(
        0, 100, (len(ROWS), 24), generator=torch.Generator().manual_seed(5)
    )


@pytest.mark.parametrize("least_mean_length", [1, 1000])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True},
        {"rope_scaling": RopeScaling(kind="yarn", factor=2.0, original_length=8)},
    ],
)
def test_packed_row_gives_the_logits_and_gradients_of_its_documents(
    least_mean_length: int,
    changes: dict[str, Any],
    ids: torch.Tensor,
    tiny_shape: Shape,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "LEAST_MEAN_LENGTH", least_mean_length)
    form = see_documents(positions_of(ROWS))
    assert isinstance(form, Segments) == (least_mean_length == 1)
    # so that rounding hides no mistake
    model = make_model(replace(tiny_shape, **changes)).double()
    packed = model(ids, positions=positions_of(ROWS))
    together, apart = (
        torch.zeros((), dtype=torch.float64),
        torch.zeros((), dtype=torch.float64),
    )
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            alone = model(ids[row : row + 1, part])[0]
            torch.testing.assert_close(packed[row, part], alone, atol=1e-6, rtol=1e-6)
            together, apart = (
                together + packed[row, part].square().sum(),
                apart + alone.square().sum(),
            )
            start += length
    parameters = list(model.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(together, parameters),
        torch.autograd.grad(apart, parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_without_positions_tokens_attend_to_earlier_documents(
    ids: torch.Tensor, tiny_shape: Shape, make_model: MakeModel
) -> None:
    model = make_model(tiny_shape)
    assert not torch.allclose(
        model(ids)[0, 5:], model(ids, positions=positions_of(ROWS))[0, 5:], atol=1e-3
    )


def test_documents_are_numbered_by_positions_and_padding_separately() -> None:
    assert document_numbers(torch.tensor([[0, 1, 2, 0, 0, 1, -1, -1]])).tolist() == [
        [1, 1, 1, 2, 3, 3, 4, 4]
    ]


def test_flex_attention_equals_plain_attention() -> None:
    """Uncompiled: masked products of whole blocks, as on a GPU."""
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(len(ROWS), 4, 24, 8, generator=generator)
    keys, values = (
        torch.randn(len(ROWS), 2, 24, 8, generator=generator) for _ in range(2)
    )
    positions = positions_of(ROWS)
    plain = attend(queries, keys, values, see_documents(positions, dense=True))
    flexible = attend(queries, keys, values, block_mask(document_numbers(positions)))
    torch.testing.assert_close(flexible, plain, atol=1e-6, rtol=1e-5)


def test_hopper_kernels_are_chosen_while_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The query of the device is resolved while compiling; the kernel itself needs a
    GPU.
    """
    devices = []

    @torch.compiler.assume_constant_result
    def is_hopper(device: torch.device) -> bool:
        devices.append(device)
        return True

    monkeypatch.setattr(attention, "_is_hopper", is_hopper)
    never = torch.compiler.assume_constant_result(lambda: False)
    monkeypatch.setattr(attention, "_has_onednn_products", never)
    queries = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(queries, queries, queries, None),
        attend(queries, queries, queries, None),
    )
    assert len(devices) == 2  # once while compiling, once without


@pytest.mark.parametrize(
    "query", [attention._is_hopper, attention._has_onednn_products]
)
def test_query_of_the_device_is_marked_as_constant_like_by_pytorch(
    query: Callable[..., bool],
) -> None:
    def marked() -> None:
        """Empty function."""

    assert vars(torch.compiler.assume_constant_result(marked)) == vars(query)


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("vendor", "capability", "chosen"),
    [
        ("AuthenticAMD", "AVX512", "medium"),
        ("AuthenticAMD", "AVX2", "highest"),
        ("GenuineIntel", "AVX512", "highest"),
    ],
)
def test_onednn_multiplies_on_amd_with_avx512(
    vendor: str,
    capability: str,
    chosen: str,
    precision: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(process_groups, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    torch.set_float32_matmul_precision("highest")
    process_groups.multiply_with_avx512()
    assert torch.get_float32_matmul_precision() == chosen


@pytest.mark.parametrize("length", [8, 300])
def test_kernel_beside_onednns_products_gives_the_same(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = torch.randn(2, 4, length, 8, generator=torch.Generator().manual_seed(3))
    plain = attend(queries, queries, queries, None)
    always = torch.compiler.assume_constant_result(lambda: True)
    monkeypatch.setattr(attention, "_has_onednn_products", always)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(queries, queries, queries, None), plain)
    torch.testing.assert_close(attend(queries, queries, queries, None), plain)
