"""User-defined optimizers and schedules: arguments, exact resume, and errors of wrong
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.schema.optimizer import Optimizer
from gristmill.mixtures.user_code import OwnFunction, take_code
from gristmill.train.optim.optimizer import make_optimizers, update
from tests.train.test_resume import train, write_stage
from tests.train.trained import assert_same_output, losses_of, steps_of

ADAM = """
import torch
class MyAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["count"] += 1
                (b1, b2), n = group["betas"], state["count"]
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["m"], (state["v"] / (1 - b2**n)).sqrt().add_(group["eps"]),
                           value=-group["lr"] / (1 - b1**n))
def sgd(params, momentum=0.0):
    return torch.optim.SGD(params, momentum=momentum)
"""


@pytest.fixture
def configured(
    stage_config: Any, pretrain_config: dict[str, Any], tmp_path: Path
) -> Any:
    """Settings of a pre-training with code of own.py: (source, section) -> settings."""

    def settings(source: str, **section: Any) -> dict[str, Any]:
        (tmp_path / "own.py").write_text(source)
        config: dict[str, Any] = stage_config(
            "pretrain", pretrain={**pretrain_config, **section}
        )
        return config

    return settings


def own_section(name: str, **section: Any) -> dict[str, Any]:
    return {"use": f"./own.py:{name}", **section}


MY_ADAM = own_section("MyAdam", learning_rate=0.01, **{"with": {"weight_decay": 0.1}})


@pytest.mark.slow
def test_reimplemented_adamw_trains_like_the_built_in_one(
    run_stage: Any, configured: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    run_stage("pretrain", inputs, configured(ADAM, optimizer=MY_ADAM), tmp_path / "own")
    run_stage("pretrain", inputs, configured(ADAM), tmp_path / "built-in")
    ours, theirs = (
        [line["learning_rate"] for line in steps_of(tmp_path / name)]
        for name in ("own", "built-in")
    )
    assert ours == theirs
    assert losses_of(tmp_path / "own") == pytest.approx(
        losses_of(tmp_path / "built-in"), abs=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [
        MY_ADAM,
        own_section("sgd", learning_rate=0.5),
        own_section("sgd", learning_rate=0.1, **{"with": {"momentum": 0.9}}),
    ],
)
def test_optimizer_resumes_to_the_same_bits(
    run_stage: Any,
    configured: Any,
    inputs: dict[str, Path],
    tmp_path: Path,
    stop_pretraining: Any,
    section: dict[str, Any],
) -> None:
    # parameters are DTensors then
    config = configured(ADAM, optimizer=section, precision="bf16")
    run_stage("pretrain", inputs, config, tmp_path / "whole")
    stop_pretraining(inputs, config, tmp_path / "cut", times=3)
    run_stage("pretrain", inputs, config, tmp_path / "cut")
    assert_same_output(tmp_path / "cut", tmp_path / "whole")
    losses = losses_of(tmp_path / "whole")
    assert losses[-1] < losses[0] - 0.05


def test_bad_step_changes_neither_weights_nor_state(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ADAM)
    section = Optimizer(
        use=take_code(OwnFunction("./own.py:MyAdam"), tmp_path), learning_rate=0.1
    )
    model = torch.nn.Linear(3, 2)
    (optimizer,) = make_optimizers(model, section)
    weights: list[torch.Tensor] = []
    for bad in (True, False, True, False):
        model(torch.ones(1, 3)).sum().backward()
        update([optimizer], 0.1, torch.tensor(bad))
        weights.append(model.weight.detach().clone())
        if len(weights) == 1:
            assert not optimizer.state
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert [state["count"] for state in optimizer.state.values()] == [2, 2]


@pytest.mark.parallel
def test_two_ranks_train_alike(
    run_stage: Any, configured: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = configured(ADAM, optimizer=MY_ADAM)
    run_stage("pretrain", inputs, config, tmp_path / "one")
    write_stage(tmp_path / "two", "pretrain", inputs, config, 4)
    train(tmp_path / "two", 2)
    assert losses_of(tmp_path / "two") == pytest.approx(
        losses_of(tmp_path / "one"), abs=1e-4
    )


BASE = (
    "import torch\nclass Opt(torch.optim.Optimizer):\n    def __init__(self, "
    "params): super().__init__(params, {})\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "section", "message"),
    [
        (
            "class Opt: ...",
            {},
            r"own.py, line 1: Opt\(\) cannot be called with \(params\)",
        ),
        ("def Opt(params): return params", {}, "own.py, line 1: Opt returned list"),
        (
            "import torch\ndef Opt(params): return torch.optim.SGD(params[:1])",
            {},
            "own.py, line 2: .*model.layers.0.input_layernorm.weight",
        ),
        (
            "import torch\ndef Opt(params, x): return torch.optim.SGD(params)",
            {},
            "missing a required argument: 'x'",
        ),
        (
            "import torch\ndef Opt(params):\n    raise KeyError('beta')",
            {},
            r"own:Opt failed: KeyError: 'beta' \(own.py, line 3\)",
        ),
        (
            BASE + "    def step(self): ...",
            {},
            r"own.py, line 2: Opt.step\(\) cannot be called with: closure",
        ),
        (
            BASE + "    def step(self, closure=None): 1 / 0",
            {},
            r"own:Opt failed: ZeroDivisionError: .* \(own.py, line 4\)",
        ),
        (
            "def Opt(params): ...",
            {"weight_decay": 0.3},
            "optimizer.weight_decay",
        ),
        (
            "def Opt(params): ...",
            {"with": {"lr": 0.3}},
            "optimizer.with.lr: .*optimizer.learning_rate",
        ),
    ],
)
def test_wrong_optimizer_is_rejected_with_file_and_line(
    run_stage: Any,
    configured: Any,
    inputs: dict[str, Path],
    tmp_path: Path,
    source: str,
    section: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises((ValueError, ManifestError), match=message):
        run_stage(
            "pretrain",
            inputs,
            configured(source, optimizer=own_section("Opt", **section)),
            tmp_path / "run",
        )


def test_options_without_code_are_rejected(configured: Any) -> None:
    with pytest.raises(ManifestError, match=r"`with` .*`use`"):
        configured("", schedule={"with": {"teeth": 3}})


@pytest.mark.slow
def test_schedule_sets_the_learning_rate_of_every_step(
    run_stage: Any, configured: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = configured(
        "def line(step, steps, low): return low + (1 - low) * step / steps\n",
        steps=8,
        schedule=own_section("line", **{"with": {"low": 0.5}}),
    )
    assert (
        "warmup_steps" not in config["schedule"]
        or config["schedule"]["warmup_steps"] is None
    )
    run_stage("pretrain", inputs, config, tmp_path / "run")
    rates = [line["learning_rate"] for line in steps_of(tmp_path / "run")]
    assert rates == pytest.approx(
        [0.01 * (0.5 + 0.5 * step / 8) for step in range(1, 9)]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def f(step): return 1.0",
            r"own.py, line 1: f\(step\) cannot be called with \(step, steps\)",
        ),
        (
            "def f(step, steps): return float('nan')",
            r"own.py, line 1: f returned nan in step 1 of 12",
        ),
        (
            "def f(step, steps): return 2.0 - step",
            r"own.py, line 1: f returned -1.0 in step 3 of 12",
        ),
        ("def f(step, steps): return None", r"f returned None in step 1 of 12"),
        (
            "def f(step, steps):\n    return 1 / (step - 5)**2",
            r"own:f failed: ZeroDivisionError: .* \(own.py, line 2\)",
        ),
        (
            "import random\ndef f(step, steps): return random.random()",
            r"f returned 0\.\d+ and then 0\.\d+ in step 1",
        ),
    ],
)
def test_wrong_schedule_fails_with_file_and_line_and_keeps_checkpoints(
    run_stage: Any,
    configured: Any,
    inputs: dict[str, Path],
    tmp_path: Path,
    source: str,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        run_stage(
            "pretrain",
            inputs,
            configured(source, schedule=own_section("f")),
            tmp_path / "run",
            checkpoint_every=4,
        )
    saved = [
        path.parent.name
        for path in (tmp_path / "run" / "work" / "checkpoints").glob("*/complete.json")
    ]
    assert saved == (["step-00000004"] if "step - 5" in source else [])


def test_other_keys_of_a_schedule_are_rejected_beside_code(configured: Any) -> None:
    with pytest.raises(ManifestError, match=r"schedule\.warmup_steps"):
        configured("def f(step, steps): ...", schedule=own_section("f", warmup_steps=3))
