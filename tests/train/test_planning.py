from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.mixtures.sections.model import Model
from gristmill.mixtures.sections.optimizers import Optimizer
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.planning.devices import (
    PricesError,
    UnknownDeviceError,
    find_device,
    named_device,
    read_prices,
)
from gristmill.train.planning.flops import (
    CHINCHILLA,
    REPLICATION,
    Law,
    chinchilla_optimum,
    flops_per_token,
    kaplan_optimum,
)
from gristmill.train.planning.memory import Form, Load, rank_memory
from gristmill.train.planning.parallel_forms import Step, forms, rank_forms


def llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    tied: bool = False,
) -> Shape:
    return shape_of(
        Model(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            ffn_width=ffn,
            tied_embeddings=tied,
        ),
        vocab,
        2048,
    )


LLAMA_2_7B = llama(32, 4096, 32, 32, 11008, 32_000)
LLAMA_3_8B = llama(32, 4096, 32, 8, 14336, 128_256)


def test_published_models_have_their_parameters() -> None:
    assert LLAMA_2_7B.parameters == 6_738_415_616
    assert LLAMA_3_8B.parameters == 8_030_261_248


def test_flops_are_6n_without_the_lookup_and_12_l_d_t_of_attention() -> None:
    flops = flops_per_token(LLAMA_2_7B, 2048)
    lookup_and_norms = 32_000 * 4096 + 65 * 4096
    assert flops.matrices == 6 * (LLAMA_2_7B.parameters - lookup_and_norms)
    assert flops.attention == 12 * 32 * 4096 * 2048
    # A causal mask keeps T (T + 1) / 2 of T² pairs.
    assert flops.causal == flops.matrices + flops.attention * 2049 / 4096
    assert flops.six_n == 6 * LLAMA_2_7B.parameters


def test_padding_ids_add_no_flops() -> None:
    assert (
        flops_per_token(llama(2, 64, 4, 4, 128, 1000), 64).matrices
        < flops_per_token(llama(2, 64, 4, 4, 128, 1024), 64).matrices
    )


@pytest.mark.parametrize(
    ("parameters", "flops", "tokens"),
    [
        # Hoffmann et al. 2022, table 3
        (400e6, 1.92e19, 8.0e9),
        (1e9, 1.21e20, 20.2e9),
        (10e9, 1.23e22, 205.1e9),
        (67e9, 5.76e23, 1.5e12),
    ],
)
def test_optimum_agrees_with_the_table_of_chinchilla(
    parameters: float, flops: float, tokens: float
) -> None:
    size, number = chinchilla_optimum(flops)
    assert size == pytest.approx(parameters, rel=0.04)
    assert number == pytest.approx(tokens, rel=0.1)


@pytest.mark.parametrize("law", [CHINCHILLA, REPLICATION], ids=lambda law: law.source)
def test_optimum_of_a_law_minimises_the_loss(law: Law) -> None:
    size, tokens = law.optimum(1e21)
    assert 6 * size * tokens == pytest.approx(1e21)
    for factor in (0.8, 0.97, 1.03, 1.25):
        assert law.loss(size, tokens) < law.loss(size * factor, tokens / factor)


def test_replication_predicts_the_size_of_chinchilla() -> None:
    # 70 B parameters and 1.4 T tokens
    size, _ = REPLICATION.optimum(6 * 70e9 * 1.4e12)
    assert size == pytest.approx(70e9, rel=0.25)


def test_kaplan_optimum_at_one_petaflop_day() -> None:
    assert kaplan_optimum(1e15 * 86_400) == (pytest.approx(1.3e9), pytest.approx(2e10))


def test_devices_are_found_by_common_names() -> None:
    assert named_device("h100").flops == 989e12
    assert named_device("NVIDIA H200 NVL").name == "H200 NVL"
    device = find_device("NVIDIA H100 80GB HBM3")
    assert device is not None
    assert device.name == "H100"
    assert find_device("NVIDIA A100-SXM4-40GB").memory == 40e9  # type: ignore[union-attr]
    with pytest.raises(UnknownDeviceError, match=r"known are GB200.*--peak-tflops"):
        named_device("H900")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("rtx4090", "RTX 4090"),
        ("h100-pcie", "H100 PCIe"),
        ("NVIDIA A10G", None),
        ("NVIDIA H20", None),
        ("NVIDIA H800", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_similar_names_are_distinct_devices(reported: str, name: str | None) -> None:
    device = find_device(reported)
    assert (None if device is None else device.name) == name


def test_every_form_uses_all_gpus_and_divides_model_and_batch() -> None:
    all_forms = list(forms(LLAMA_3_8B, 16, 64, 2048))
    assert Form(1, 16) in all_forms
    assert Form(2, 8) in all_forms
    assert Form(1, 2, 8) in all_forms
    assert Form(1, 2, context=8) in all_forms
    assert all(form.world == 16 for form in all_forms)
    assert all(form.context == 1 for form in forms(LLAMA_3_8B, 16, 64, 2049))
    assert all(LLAMA_3_8B.kv_heads % form.tensor == 0 for form in all_forms)
    assert len(set(all_forms)) == len(all_forms)
    # 16 ranks do not divide 10 rows
    assert all(10 % form.data == 0 for form in forms(LLAMA_3_8B, 16, 10, 2048))


def test_dealt_experts_are_not_gathered() -> None:
    shape = replace(
        llama(12, 768, 12, 12, 2048, 32_000), experts=8, experts_per_token=2
    )
    all_forms = list(forms(shape, 8, 64, 2048))
    assert Form(shard=8, deal_experts=True) in all_forms
    assert Form(2, 2, context=2, deal_experts=True) in all_forms
    assert all(form.tensor == 1 for form in all_forms)
    assert not any(
        form.deal_experts for form in forms(replace(shape, experts=7), 8, 64, 2048)
    )
    load, block = Load(1, 2048, 1), 8 * 3 * 768 * 2048
    gathered, dealt = (
        rank_memory(shape, Form(shard=8, deal_experts=deals), load)
        for deals in (False, True)
    )
    assert dealt.parameters == gathered.parameters
    # Weights and gradients of two blocks in bfloat16, and float32 gradients of the one
    # that is reduced.
    assert gathered.gathered - dealt.gathered == pytest.approx(
        block * (4 * 2 + 4) - block / 8 * (2 * 2 + 4)
    )
    assert Form(shard=8, deal_experts=True).label() == "shard 8, experts dealt"


def test_context_parallel_rank_keeps_its_tokens_and_all_keys_and_values() -> None:
    """Per layer of Llama 2 7B, a token keeps 4 widths, 2 of queries and attention
    output, 2 of keys and values, and 4 times 11,008; and 2 widths for each token of the
    other half.
    """
    load = Load(1, 65_536, 1)
    alone, split = (
        rank_memory(LLAMA_2_7B, Form(context=size), load) for size in (1, 2)
    )
    bytes_per_token = 2 * (8 * 4096 + 4 * 11_008) + 4 * 32
    assert alone.activations == 32 * 65_536 * bytes_per_token
    assert split.activations == 32 * 32_768 * (bytes_per_token + 2 * 2 * 4096)
    assert split.parameters == alone.parameters / 2
    assert split.loss < alone.loss


def test_sharding_divides_state_but_not_gathered_weights() -> None:
    load = Load(1, 2048, 8)
    alone, eight = (rank_memory(LLAMA_2_7B, Form(shard=size), load) for size in (1, 8))
    assert alone.parameters == 4 * LLAMA_2_7B.parameters
    assert alone.optimizer == 8 * LLAMA_2_7B.parameters
    assert eight.parameters == alone.parameters / 8
    assert eight.gradients == alone.gradients / 8
    block = (LLAMA_2_7B.parameters - 2 * 32_000 * 4096 - 4096) / 32
    assert eight.gathered == alone.gathered + 4 * block  # input of a reduction
    assert eight.activations == alone.activations


def test_checkpointing_keeps_layer_inputs_and_activations_of_one_layer() -> None:
    tokens, width = 2048, 4096
    all_kept = rank_memory(LLAMA_2_7B, Form(), Load(1, tokens, 1)).activations
    forgotten = rank_memory(
        LLAMA_2_7B, Form(), Load(1, tokens, 1, checkpointing=True)
    ).activations
    assert forgotten == 32 * tokens * width * 2 + all_kept / 32


def test_7b_fits_on_eight_h100_and_not_on_one() -> None:
    h100 = named_device("H100")
    alone = rank_forms(LLAMA_2_7B, Step(8, 2048), 1, h100, 0.4)
    assert [estimate.fits for estimate in alone] == [False]
    eight = rank_forms(LLAMA_2_7B, Step(64, 2048), 8, h100, 0.4)
    assert eight[0].fits
    assert eight[0].memory.total <= 80e9
    fitting = [estimate.seconds for estimate in eight if estimate.fits]
    assert fitting == sorted(fitting, key=lambda seconds: float(f"{seconds:.2g}"))


def test_gradients_are_reduced_in_every_micro_batch() -> None:
    """Each of 2 or 32 micro-batches gathers weights twice (2 bytes each) and reduces
    gradients (4 bytes).
    """
    h100 = replace(named_device("H100"), link=1e9)
    seconds = {
        rows: next(
            estimate.seconds
            for estimate in rank_forms(
                LLAMA_3_8B, Step(rows * 8, 2048, most_micro_rows=1), 8, h100, 0.4
            )
            if estimate.form == Form(shard=8)
        )
        for rows in (2, 32)
    }
    layers = LLAMA_3_8B.parameters - 2 * 128_256 * 4096 - 4096
    assert seconds[2] == pytest.approx(layers * 7 / 8 * 2 * (2 * 2 + 4) / 1e9)
    assert seconds[32] == pytest.approx(16 * seconds[2])


def test_best_form_of_8b_fits_on_eight_h100() -> None:
    best = rank_forms(LLAMA_3_8B, Step(256, 2048), 8, named_device("H100"), 0.4)[0]
    assert best.fits
    assert best.load.micro_batches > 1
    assert best.memory.gradients == 4 * LLAMA_3_8B.parameters / best.form.weights
    assert best.memory.total <= 80e9


def test_single_gpu_reaches_the_assumed_utilisation() -> None:
    estimate = rank_forms(
        llama(12, 768, 12, 12, 2048, 32_000),
        Step(8, 1024),
        1,
        named_device("H200"),
        0.45,
    )[0]
    assert estimate.utilisation == pytest.approx(0.45)
    tokens = 8 * 1024
    expected = (
        flops_per_token(llama(12, 768, 12, 12, 2048, 32_000), 1024).whole
        * tokens
        / (989e12 * 0.45)
    )
    assert estimate.seconds == pytest.approx(expected)


def test_estimates_agree_with_a_measured_step(one_process: None) -> None:
    from gristmill.train.planning.measured_step import check

    figures = {
        figure.name: figure
        for figure in check(
            llama(2, 64, 4, 2, 96, 300, tied=True), 2, 32, Optimizer(), 1, 0.4
        )
    }
    assert figures["arithmetic"].error == 0
    assert figures["weights"].error == 0
    assert figures["gradients"].error == 0
    assert figures["optimizer"].error == 0
    assert math.isclose(
        figures["activations"].predicted, figures["activations"].measured, rel_tol=0.2
    )
    assert figures["step"].measured > 0


def test_prices_are_read_from_a_file_and_unknown_keys_rejected(tmp_path: Path) -> None:
    assert read_prices().per_gpu_hour.keys() >= {"H100", "H200"}
    path = tmp_path / "prices.yaml"
    path.write_text("as_of: 2026-01-31\ncurrency: EUR\nper_gpu_hour: {H100: 1.5}\n")
    assert (read_prices(path).currency, read_prices(path).per_gpu_hour) == (
        "EUR",
        {"H100": 1.5},
    )
    path.write_text("H100: 1.5\n")
    with pytest.raises(
        PricesError, match=r"prices\.yaml: as_of: field required.*H100: unknown key"
    ):
        read_prices(path)
