from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.optimizer import Optimizer
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.optim.optimizer import make_optimizers
from gristmill.train.planning import memory
from gristmill.train.planning.devices import (
    UnknownDeviceError,
    find_device,
    named_device,
)
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.planning.memory import Form, Load, rank_memory
from gristmill.train.planning.parallel_forms import (
    Step,
    forms,
    rank_forms,
    sharding_seconds,
)
from tests.train.counted_step import count_step


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
        batches: sharding_seconds(
            LLAMA_3_8B, Form(shard=8), Load(1, 2048, batches), h100
        )
        for batches in (2, 32)
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


def test_estimates_agree_with_a_counted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "COMPUTE_BYTES", 4)  # of a CPU
    shape = llama(2, 64, 4, 2, 96, 300, tied=True)
    model, ids = Llama(shape), torch.randint(0, 300, (2, 32))
    flops, activation_bytes = count_step(model, ids)
    assert flops_per_token(shape, 32).whole * ids.numel() == flops
    estimate = rank_memory(shape, Form(), Load(2, 32, 1))
    weights = list(model.parameters())
    assert estimate.parameters == sum(weight.nbytes for weight in weights)
    assert estimate.gradients == sum(
        weight.grad.nbytes for weight in weights if weight.grad is not None
    )
    (optimizer,) = make_optimizers(model, Optimizer())
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert estimate.optimizer == sum(
        moment.nbytes for moment in moments if moment.numel() > 1
    )
    assert estimate.activations == pytest.approx(activation_bytes, rel=0.2)
