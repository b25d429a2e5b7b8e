from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gristmill.flows.planning.plan_engines import MEASURED, EngineCost, pays_from
from tests.commands import call

ROOT = Path(__file__).parents[2]


def test_cluster_takes_as_long_as_this_machine_at_the_size_from_which_it_pays() -> None:
    local, cluster = EngineCost(10.0, 160.0), EngineCost(30.0, 200.0)
    least = pays_from(local, 2, cluster, 8)
    assert least is not None
    assert cluster.seconds(least, 8) == pytest.approx(local.seconds(least, 2))
    assert cluster.seconds(2 * least, 8) < local.seconds(2 * least, 2)
    assert pays_from(local, 2, cluster, 2) is None
    assert pays_from(local, 2, EngineCost(5.0, 200.0), 8) == 0.0


def test_plan_compares_clusters_with_the_workers_of_the_manifest(
    tmp_path: Path,
) -> None:
    demo = str(ROOT / "mixtures" / "demo.yaml")
    workers = "--set=engine.workers=3"
    outcome = call("plan", demo, f"--store={tmp_path}", "--json", "--engines", workers)
    plans = {plan["engine"]: plan for plan in json.loads(outcome.stdout)}
    assert list(plans["local"]["hours"]) == ["3"]
    assert plans["local"]["pays_from_bytes"] == {}
    for engine in ("ray", "dask", "spark"):
        assert list(plans[engine]["hours"]) == ["6", "12", "48"]
        assert plans[engine]["hours"]["48"] < plans["local"]["hours"]["3"]


def test_costs_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "bench-engines.md").read_text()
    for engine, cost in MEASURED.items():
        row = rf"^\| {engine}, \d+ to \d+ MB: {{}} \| ([\d.]+) "
        figures = [
            float(re.findall(row.format(figure), page, re.MULTILINE)[-1])
            for figure in ("start", "core")
        ]
        assert cost == pytest.approx(figures, rel=0.05)
