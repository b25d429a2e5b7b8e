from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.flows.cli import app

DEMO = str(Path(__file__).parents[2] / "mixtures" / "demo.yaml")


def planned(store: Path, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", DEMO, "--store", str(store), "--json", "--gpus", "4", *arguments])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_plan_adds_up(tmp_path: Path) -> None:
    found = planned(tmp_path, "--gpu", "H200", "--set", "pretrain.steps=1000", "--set", "pretrain.global_batch_size=16")
    training, best = found["training"], found["forms"][0]
    assert training["tokens"] == 1000 * 16 * 256
    assert training["flops"] == pytest.approx(training["tokens"] * found["model"]["flops_per_token"]["exact"])
    assert best["fits"]
    assert best["gpu_hours"] == pytest.approx(best["seconds_per_step"] * 1000 / 3600 * 4)
    assert best["cost"] == pytest.approx(best["gpu_hours"] * found["prices"]["per_gpu_hour"])
    assert best["memory"]["total"] == pytest.approx(sum(
        value for name, value in best["memory"].items() if name != "total"))
    assert found["data"] is None


def test_a_gpu_that_is_in_no_table_is_given_by_its_figures(tmp_path: Path) -> None:
    found = planned(tmp_path, "--gpu", "mine", "--peak-tflops", "50", "--memory-gb", "1")
    assert found["gpu"] == {"name": "mine", "flops": 50e12, "memory": 1e9, "link": 32e9}
    assert not any(form["fits"] for form in found["forms"])  # a process alone takes more than 1 GB
    assert found["forms"][0]["cost"] is None


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--gpu", "H900"], "no GPU called 'H900' is known"),
    (["--gpu", "mine", "--peak-tflops", "50"], "belong together"),
    (["--prices", "absent.yaml"], "absent.yaml: there is no such file"),
])
def test_what_cannot_be_planned_is_said_in_a_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["plan", DEMO, "--store", str(tmp_path), "--gpus", "4", *arguments])
    assert done.exit_code == 2
    assert sentence in done.output


def test_the_tables_fit_eighty_columns(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", DEMO, "--store", str(tmp_path), "--gpus", "8", "--gpu", "A100"],
                              env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "8 x A100" in done.stdout
