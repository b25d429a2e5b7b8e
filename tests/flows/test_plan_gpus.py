from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gristmill.flows.cli.main import app
from gristmill.flows.planning.plan_gpus import (
    PackingWaste,
    PlannedData,
    SourceReads,
    print_data,
)
from gristmill.flows.report.mixture import waste_of
from gristmill.flows.report.stage_summaries import PackingCosts

DEMO = str(Path(__file__).parents[2] / "mixtures" / "demo.yaml")


def planned(store: Path, *arguments: str) -> dict[str, Any]:
    outcome = CliRunner().invoke(
        app, ["plan", DEMO, "--store", str(store), "--json", "--gpus", "4", *arguments]
    )
    assert outcome.exit_code == 0, outcome.output
    plan: dict[str, Any] = json.loads(outcome.stdout)
    return plan


@pytest.mark.slow
def test_memory_and_time_of_a_plan_are_consistent(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        "--gpu",
        "H200",
        "--set",
        "pretrain.steps=1000",
        "--set",
        "pretrain.global_batch_size=16",
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
    assert best["cost"] == pytest.approx(
        best["gpu_hours"] * plan["prices"]["per_gpu_hour"]
    )
    assert best["memory"]["total"] == pytest.approx(
        sum(value for name, value in best["memory"].items() if name != "total")
    )
    assert plan["data"] is None


@pytest.mark.slow
def test_unknown_gpu_is_specified_by_its_figures(tmp_path: Path) -> None:
    plan = planned(tmp_path, "--gpu", "mine", "--peak-tflops", "50", "--memory-gb", "1")
    assert plan["gpu"] == {"name": "mine", "flops": 50e12, "memory": 1e9, "link": 32e9}
    # a single process takes more than 1 GB
    assert not any(form["fits"] for form in plan["forms"])
    assert plan["forms"][0]["cost"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "H900"], "no GPU called 'H900' is known"),
        (["--gpu", "mine", "--peak-tflops", "50"], "belong together"),
        (["--prices", "absent.yaml"], "absent.yaml: there is no such file"),
    ],
)
def test_invalid_plan_options_are_rejected_with_one_sentence(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    outcome = CliRunner().invoke(
        app, ["plan", DEMO, "--store", str(tmp_path), "--gpus", "4", *arguments]
    )
    assert outcome.exit_code == 2
    assert sentence in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80])
def test_the_tables_fit_narrow_terminals(tmp_path: Path, columns: int) -> None:
    outcome = CliRunner().invoke(
        app,
        ["plan", DEMO, "--store", str(tmp_path), "--gpus", "8", "--gpu", "A100"],
        env={"COLUMNS": str(columns)},
    )
    assert outcome.exit_code == 0
    assert max(map(len, outcome.stdout.splitlines())) <= columns
    assert "8 x A100" in outcome.stdout


def test_data_table_compares_available_and_read_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """100 document tokens in rows of 104; the other source is read twice, starting
    again at step 6 of 10.
    """
    source = SourceReads(
        share=0.5, tokens_read=50.0, tokens_there=100, epochs=0.5, wraps_at_step=None
    )
    code = replace(source, tokens_there=25, epochs=2.0, wraps_at_step=6)
    print_data(
        Console(width=80),
        PlannedData(
            1.0,
            100,
            {"web": source, "code": code},
            PackingWaste(
                "best_fit",
                **asdict(
                    waste_of(
                        PackingCosts(
                            rows=1,
                            tokens=100,
                            padding_tokens=4,
                            dropped_tokens=25,
                            documents=8,
                            split_documents=2,
                            split_tokens=50,
                        )
                    )
                ),
            ),
        ),
    )
    output = capsys.readouterr().out
    assert "code    50.0%     50   25    2.00              6" in output
    assert "never" in output
    assert " ".join(output.split()).endswith(
        "packing best_fit: 3.8% padding in the rows, 20.0% of the tokens dropped, "
        "25.0% of the documents cut"
    )
