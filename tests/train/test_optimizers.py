"""Every optimizer against its published update, in one process and on matrices split
between two.
"""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from benchmarks.checkout import ROOT
from benchmarks.train.forked_ranks import fork_ranks, load_all
from gristmill.mixtures.schema.optimizer import OPTIMIZERS, Optimizer, OptimizerKind
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.lion import Lion
from gristmill.train.optim.optimizer import make_optimizers, update

KINDS = list(OPTIMIZERS)
GOOD, BAD = torch.tensor(False), torch.tensor(True)


class Small(nn.Module):
    """An embedding, a matrix of a layer and a gain, which optimizers treat differently;
    one splits unevenly.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(33, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 24, bias=False)])
        self.norm = nn.RMSNorm(8)


class Deep(Small):
    """Three matrices of one shape, which no even number of processes divides, and one
    of another.
    """

    def __init__(self) -> None:
        super().__init__()
        shapes = [(8, 24), (8, 24), (24, 8)]
        self.layers.extend(nn.Linear(*shape, bias=False) for shape in shapes)


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(parameter.shape, generator=generator)
        for parameter in model.parameters()
    ]


def run_steps(
    kind: str, steps: int, held_back: tuple[int, ...] = ()
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Run some steps with fixed gradients; before those in `held_back`, a bad step is
    skipped.
    """
    if kind == "adamw8bit":
        pytest.importorskip("torchao")
    model = Small()
    optimizers = make_optimizers(model, Optimizer(kind=kind))  # type: ignore[arg-type]
    for step in range(steps):
        if step in held_back:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, math.nan)
            update(optimizers, 0.5, BAD)
        for parameter, gradient in zip(
            model.parameters(), gradients(model, step), strict=True
        ):
            parameter.grad = gradient.clone()
        update(optimizers, 0.01, GOOD)
    return model, optimizers


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_update_leaves_weights_moments_and_step_counts_unchanged(
    kind: str,
) -> None:
    """This includes the first step, before moments exist."""
    (undisturbed, first), (disturbed, second) = (
        run_steps(kind, 4),
        run_steps(kind, 4, held_back=(0, 2)),
    )
    for a, b in zip(undisturbed.parameters(), disturbed.parameters(), strict=True):
        assert torch.equal(a, b)
    for ours, theirs in zip(first, second, strict=True):
        a, b = ours.state_dict()["state"], theirs.state_dict()["state"]
        for number in a:
            assert a[number].keys() == b[number].keys()
            for name in a[number]:
                assert str(a[number][name]) == str(b[number][name]), (number, name)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_before_the_first_step_has_a_step_count_of_zero(kind: str) -> None:
    """PyTorch initialises moments by a step without gradients, which leaves the step
    count at 1.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if kind == "adamw8bit":
        pytest.importorskip("torchao")
    model = Small()
    optimizers = make_optimizers(model, Optimizer(kind=kind))  # type: ignore[arg-type]
    states = get_optimizer_state_dict(model, optimizers)["state"].values()
    assert [state["step"].item() for state in states if "step" in state] == [0.0] * sum(
        "step" in state
        for optimizer in optimizers
        for state in optimizer.state.values()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_only_matrices_decay(kind: str) -> None:
    if kind == "adamw8bit":
        pytest.importorskip("torchao")
    model = Small()
    decays = {
        parameter: group["weight_decay"]
        for optimizer in make_optimizers(model, Optimizer(kind=kind))  # type: ignore[arg-type]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert [decays[parameter] for parameter in model.parameters()] == [0.1, 0.1, 0.0]


def test_lion_steps_along_the_sign_of_the_interpolated_mean() -> None:
    """Chen et al. 2023, algorithm 2, twice, by hand: m = 0 and g = 2, then m = 0.02 and
    g = -0.1.

    Step 1: c = 0.1 * 2 > 0. Step 2: c = 0.9 * 0.02 + 0.1 * -0.1 = 0.008 > 0 although
    the gradient is negative.
    """
    weight = nn.Parameter(torch.tensor([[1.0]]))
    section = Optimizer(kind="lion", learning_rate=0.1, weight_decay=0.5)
    optimizer = Lion([weight], section)
    weight.grad = torch.tensor([[2.0]])
    optimizer.step()
    assert weight.item() == pytest.approx(1.0 * (1 - 0.05) - 0.1)
    assert optimizer.state[weight]["exp_avg"].item() == pytest.approx(0.02)
    weight.grad = torch.tensor([[-0.1]])
    optimizer.step()
    assert weight.item() == pytest.approx(0.85 * 0.95 - 0.1)
    assert optimizer.state[weight]["exp_avg"].item() == pytest.approx(
        0.99 * 0.02 - 0.001
    )


def test_adafactor_equals_that_of_pytorch() -> None:
    """Compares with torch.optim.Adafactor, which supports unsharded matrices only."""
    model, _ = run_steps("adafactor", 5)
    peer = Small()
    parameters = list(peer.parameters())
    optimizer = torch.optim.Adafactor(
        [
            {"params": parameters[:2], "weight_decay": 0.1},
            {"params": parameters[2:], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    for step in range(5):
        for parameter, gradient in zip(parameters, gradients(peer, step), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_muon_orthogonalises_layer_matrices_and_updates_others_by_adamw() -> None:
    """From zero momentum, B = g, and the step is U S' V^T with all of S' near 1 (Jordan
    et al. 2024), times 0.2 sqrt(24), which gives it the size of AdamW's (Liu et al.
    2025).
    """
    (model, _), (adamw, _), before = (
        run_steps("muon", 1),
        run_steps("adamw", 1),
        Small(),
    )
    direction = (
        before.layers[0].weight * (1 - 0.01 * 0.1) - model.layers[0].weight
    ) / (0.01 * 0.2 * math.sqrt(24))
    singular = torch.linalg.svdvals(direction)
    assert 0.5 < singular.min() <= singular.max() < 1.3
    matrix = gradients(before, 0)[1]
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    assert (
        torch.nn.functional.cosine_similarity(
            direction.flatten(), (u @ vt).flatten(), dim=0
        )
        > 0.95
    )
    assert torch.equal(model.embed_tokens.weight, adamw.embed_tokens.weight)
    assert torch.equal(model.norm.weight, adamw.norm.weight)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if OPTIMIZERS[kind].on_matrices]
)
def test_model_of_matrices_alone_has_no_adamw(kind: OptimizerKind) -> None:
    """Adapters are such a model."""
    layer = nn.Linear(4, 4, bias=False)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    weight = layer.weight
    before = weight.detach().clone()
    optimizers = make_optimizers(model, Optimizer(kind=kind))
    for _ in range(2):  # soap_muon makes its basis in the first step
        weight.grad = torch.ones(4, 4)
        update(optimizers, 0.01, GOOD)
    assert len(optimizers) == 1
    assert not torch.equal(weight, before)


def test_no_group_is_empty_if_all_matrices_of_adamw_are_embeddings() -> None:
    """PyTorch does not load a checkpoint of several optimizers with an empty group."""
    model = Small()
    section = Optimizer(kind="muon", weight_decay=0.3, decay_embeddings=False)
    _, adamw = make_optimizers(model, section)
    decays = {
        parameter: group["weight_decay"]
        for group in adamw.param_groups
        for parameter in group["params"]
    }
    assert decays == {model.embed_tokens.weight: 0.0, model.norm.weight: 0.0}
    assert all(group["params"] for group in adamw.param_groups)


def test_adamw8bit_stores_moments_in_8_bits_and_stays_near_adamw() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    start, gradient = torch.randn(64, 64), torch.randn(64, 64)
    results = []
    for kind in ("adamw8bit", "adamw"):
        model = nn.Linear(64, 64, bias=False)
        model.weight.data.copy_(start)
        optimizers = make_optimizers(model, Optimizer(kind=kind))  # type: ignore[arg-type]
        for step in range(3):
            model.weight.grad = gradient * (1.0 + step)
            update(optimizers, 0.01, GOOD)
        results.append(
            (model.weight.detach(), optimizers[0].state[model.weight]["exp_avg"])
        )
    (eight, moment), (full, _) = results
    assert moment.codes.dtype == torch.uint8
    assert ((start - eight) - (start - full)).abs().mean() < 0.05 * (
        start - full
    ).abs().mean()


def test_clipping_scales_to_the_norm_and_reports_the_one_before() -> None:
    model = nn.Linear(1, 2, bias=False)
    model.weight.grad = torch.tensor([[30.0], [40.0]])
    assert clip_gradients(model, 2.0).item() == 50.0
    assert model.weight.grad.flatten().tolist() == pytest.approx([1.2, 1.6])


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon"])
def test_embeddings_can_be_left_out_of_the_decay(kind: str) -> None:
    """Without gradients a step of rate 0.1 and decay 0.5 shrinks what decays by 5 %."""
    model = Small()
    section = Optimizer(kind=kind, weight_decay=0.5, decay_embeddings=False)  # type: ignore[arg-type]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizers = make_optimizers(model, section)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    update(optimizers, 0.1, GOOD)
    embedding, matrix, gain = (
        parameter / was
        for parameter, was in zip(model.parameters(), before, strict=True)
    )
    torch.testing.assert_close(matrix, torch.full_like(matrix, 0.95))
    assert torch.equal(embedding, torch.ones_like(embedding))
    assert torch.equal(gain, torch.ones_like(gain))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_embeddings_learn_at_a_rate_of_their_own(kind: str) -> None:
    """AdamW's first step is the rate in size; decay per step is rate times decay, 0.1 x
    0.5, for both.
    """
    model = Small()
    section = Optimizer(kind=kind, weight_decay=0.5, embedding_rate_scale=6.0)  # type: ignore[arg-type]
    embedding, gain = model.embed_tokens.weight, model.norm.weight
    before = embedding.detach().clone(), gain.detach().clone()
    optimizers = make_optimizers(model, section)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update(optimizers, 0.1, GOOD)
    torch.testing.assert_close(embedding, before[0] * 0.95 - 0.6)
    torch.testing.assert_close(gain, before[1] - 0.1)


def test_every_kind_of_the_manifest_has_facts() -> None:
    assert list(get_args(OptimizerKind)) == KINDS


def test_betas_default_by_kind() -> None:
    assert Optimizer(kind="lion").decays == (0.9, 0.99)
    assert Optimizer(kind="lion", betas=(0.9, 0.9)).decays == (0.9, 0.9)
    with pytest.raises(ValueError, match=r"betas .*adafactor"):
        Optimizer(kind="adafactor", betas=(0.9, 0.9))


def test_missing_torchao_is_an_error_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gristmill\[quant\]'"):
        make_optimizers(Small(), Optimizer(kind="adamw8bit"))


def _run_rank(folder: str) -> None:
    """Run three steps of every kind, sharded and clipped; rank 0 saves the results."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh, results = init_device_mesh("cpu", (size,)), {}
    for kind in [kind for kind in KINDS if kind != "adamw8bit"]:
        model = Deep()
        for owner in [model.embed_tokens, *model.layers, model.norm]:
            weight = distribute_tensor(owner.weight.detach(), mesh, [Shard(0)])
            owner.weight = nn.Parameter(weight)
        section = Optimizer(kind=kind)  # type: ignore[arg-type]
        optimizers = make_optimizers(model, section)
        for step in range(3):
            for parameter, gradient in zip(
                model.parameters(), gradients(model, step), strict=True
            ):
                parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            norm = clip_gradients(model, section.clip_norm)
            update(optimizers, 0.01, torch.tensor(step == 1))
        weights = [parameter.full_tensor().detach() for parameter in model.parameters()]
        results[kind] = [norm, *weights]
    if rank == 0:
        torch.save(results, f"{folder}/{size}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_optimizers_equal_unsharded_ones(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.train.test_optimizers", str(tmp_path)],
        check=True,
        cwd=ROOT,
    )
    alone, shared = (torch.load(tmp_path / f"{size}.pt") for size in (1, 2))
    for kind in alone:
        # Muon's products are in bfloat16, and are summed in another order.
        tolerance = 2e-3 if kind.startswith(("muon", "normuon")) else 1e-6
        for a, b in zip(alone[kind], shared[kind], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=tolerance)


if __name__ == "__main__":
    load_all()
    for size in (1, 2):
        fork_ranks(size, partial(_run_rank, sys.argv[1]))
