"""Checks of the section `engine`: runner, address and options fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.mixtures.schema import engine
from gristmill.mixtures.schema.engine import Engine, visible_gpus


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"mode": "processes", "workers": 8},
        {"runner": "dask", "address": "tcp://127.0.0.1:8786"},
        {
            "runner": "dask",
            "options": {"scheduler_file": "/shared/scheduler.json"},
        },
        {"runner": "ray", "address": "auto", "options": {"num_cpus": 2}},
        {
            "runner": "spark",
            "address": "spark://spark:7077",
            "options": {"spark.executor.memory": "4g"},
        },
        {
            "runner": "flink",
            "address": "flink:8081",
            "options": {"parallelism": 8},
        },
        {"runner": "flink", "options": {"job_endpoint": "flink:8099"}},
        {"runner": "FlinkRunner", "options": {"flink_master": "flink:8081"}},
    ],
)
def test_consistent_section_is_accepted(section: dict[str, Any]) -> None:
    assert Engine.model_validate(section).model_dump(include=set(section)) == section


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"runner": "dask"}, "dask .*address: 'tcp://host:8786'"),
        (
            {"address": "tcp://127.0.0.1:8786"},
            "address is for .*ray, dask, spark, flink, not for local",
        ),
        (
            {"runner": "FlinkRunner", "mode": "threads"},
            "mode is for runner local, not for FlinkRunner",
        ),
        ({"options": {"parallelism": 2}}, r"options \(parallelism\).* local"),
        (
            {"runner": "flnk"},
            "flnk.*local, ray, dask, spark, flink, dataflow",
        ),
        ({"runner": "ray"}, "ray .*address: 'auto'"),
        (
            {"runner": "ray", "address": "auto", "options": {"cpus": 2}},
            "ray .*cpus.*num_cpus",
        ),
        (
            {"runner": "dask", "address": "tcp://dask:8786", "options": {"n": 2}},
            "dask .*n;.*scheduler_file",
        ),
        ({"runner": "flink"}, "flink .*address: 'host:8081'"),
        ({"runner": "spark"}, "spark .*address: 'spark://host:7077'"),
        (
            {"runner": "spark", "address": "yarn", "options": {"parallelism": 2}},
            "spark.executor.memory.*parallelism",
        ),
        (
            {"runner": "dataflow", "options": {"project": "p", "region": "r"}},
            "dataflow .*temp_location, sdk_container_image",
        ),
        (
            {"mode": "quick"},
            "Input should be 'auto', 'memory', 'threads' or 'processes'",
        ),
    ],
)
def test_option_that_does_not_fit_the_runner_is_rejected_with_the_fix(
    section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Engine.model_validate(section)


def test_ranks_default_to_the_number_of_visible_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == 3
    for visible, number in {
        "0,2": 2,
        "": 0,
        "-1": 0,
        "1,-1,2": 1,
        "0,1,2,3": 3,
    }.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus(tmp_path) == number
    monkeypatch.setattr(engine, "visible_gpus", lambda: 8)
    assert Engine().num_ranks == 8
    assert Engine(nodes=2).num_ranks == 16
    assert Engine(ranks=2).num_ranks == 2
    monkeypatch.setattr(engine, "visible_gpus", lambda: 0)
    assert Engine().num_ranks == Engine(nodes=2).num_ranks == 1
