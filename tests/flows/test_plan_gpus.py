from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call

DEMO = str(Path(__file__).parents[2] / "mixtures" / "demo.yaml")


def planned(store: Path, *arguments: str) -> dict[str, Any]:
    outcome = call(
        "plan", DEMO, f"--store={store}", "--json", "--gpus", "4", *arguments
    )
    plan: dict[str, Any] = json.loads(outcome.stdout)
    return plan


@pytest.mark.slow
def test_memory_and_time_of_a_plan_are_consistent(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        "--gpu=H200",
        "--set=pretrain.steps=1000",
        "--set=pretrain.global_batch_size=16",
        "--price=2.5",
    )
    training, best = plan["training"], plan["forms"][0]
    assert training["tokens"] == 1000 * 16 * 256
    assert training["flops"] == pytest.approx(
        training["tokens"] * plan["model"]["flops_per_token"]["exact"]
    )
    assert best["fits"]
    assert best["gpu_hours"] == pytest.approx(
        best["seconds_per_step"] * 1000 / 3600 * 4
    )
    assert best["cost"] == pytest.approx(best["gpu_hours"] * 2.5)
    assert best["memory"]["total"] == pytest.approx(
        sum(value for name, value in best["memory"].items() if name != "total")
    )


@pytest.mark.slow
def test_unknown_gpu_is_specified_by_its_figures(tmp_path: Path) -> None:
    plan = planned(tmp_path, "--gpu=mine", "--peak-tflops=50", "--memory-gb=1")
    assert plan["gpu"] == {"name": "mine", "flops": 50e12, "memory": 1e9, "link": 32e9}
    # a single process takes more than 1 GB
    assert not any(form["fits"] for form in plan["forms"])
    assert plan["forms"][0]["cost"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu=H900"], "no GPU called 'H900' is known"),
        (["--gpu=mine", "--peak-tflops=50"], "belong together"),
    ],
)
def test_invalid_plan_options_are_rejected_with_one_sentence(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    outcome = call("plan", DEMO, f"--store={tmp_path}", "--gpus=4", *arguments, code=2)
    assert sentence in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80])
def test_the_tables_fit_narrow_terminals(tmp_path: Path, columns: int) -> None:
    outcome = call(
        "plan",
        DEMO,
        f"--store={tmp_path}",
        "--gpus=8",
        "--gpu=A100",
        env={"COLUMNS": str(columns)},
    )
    assert max(map(len, outcome.stdout.splitlines())) <= columns
    assert "8 x A100" in outcome.stdout
