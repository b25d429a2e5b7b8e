"""The section `engine`: what does not fit the runner is refused, with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.mixtures.manifest import Engine


@pytest.mark.parametrize("section", [
    {},
    {"mode": "processes", "workers": 8},
    {"runner": "dask", "address": "tcp://127.0.0.1:8786"},
    {"runner": "dask", "options": {"dask_scheduler_file": "/shared/scheduler.json"}},
    {"runner": "FlinkRunner", "options": {"flink_master": "flink:8081"}},
])
def test_what_fits_together_is_accepted(section: dict[str, Any]) -> None:
    assert Engine.model_validate(section).model_dump(include=set(section)) == section


@pytest.mark.parametrize(("section", "message"), [
    ({"runner": "dask"}, "runner dask needs the scheduler's address: {runner: dask, address: tcp://host:8786}"),
    ({"address": "tcp://127.0.0.1:8786"}, "address is for runner dask, not for local"),
    ({"runner": "FlinkRunner", "mode": "threads"}, "mode is for runner local, not for FlinkRunner"),
    ({"options": {"parallelism": 2}}, r"options \(parallelism\) are for a runner other than local"),
    ({"mode": "quick"}, "Input should be 'auto', 'memory', 'threads' or 'processes'"),
])
def test_what_does_not_is_an_error_that_says_what_to_write(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Engine.model_validate(section)
