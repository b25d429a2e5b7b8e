"""Linear pipelines run as plain functions, with the results and counters of Beam's own
runner.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.metrics import Metrics

from gristmill.dataprep.runners.linear_pipeline import (
    Counts,
    UnknownStepError,
    as_metrics,
    do_steps,
    read_chain,
)


class Halve(beam.DoFn):
    """Yields each even number's half twice, and counts odd numbers."""

    def setup(self) -> None:
        self.times = 2

    def process(self, element: int) -> Iterator[tuple[int, bytes]]:  # type: ignore[override]
        if element % 2:
            Metrics.counter("toy", "odd").inc()
        else:
            for _ in range(self.times):
                yield element // 2 % 3, str(element // 2).encode()


def run_in_turn(pipeline: Any) -> tuple[list[Any], Counts]:
    """Run a chain in this process, grouping by a dict."""
    chain, counts = read_chain(pipeline), Counts()
    values = list(chain.values)
    for number, steps in enumerate(chain.stages):
        if number:
            groups: dict[Any, list[Any]] = {}
            for key, value in values:
                groups.setdefault(key, []).append(value)
            values = list(groups.items())
        values = list(do_steps(steps, SimpleNamespace(add=counts.update), values))
    return values, counts


def test_chain_with_a_shuffle_yields_groups_and_counters() -> None:
    pipeline = beam.Pipeline()
    _ = (
        pipeline
        | beam.Create([1, 2, 3, 4, 8, 10])
        | beam.Map(lambda number: number + 0)
        | beam.ParDo(Halve())
        | beam.GroupByKey()
        | beam.Map(lambda pair, end: (pair[0], sorted(pair[1]), end), "end")
    )
    values, counts = run_in_turn(pipeline)
    assert sorted(values) == [
        (1, [b"1", b"1", b"4", b"4"], "end"),
        (2, [b"2", b"2", b"5", b"5"], "end"),
    ]
    assert counts == {("toy", "odd"): 2}
    (counter,) = as_metrics(counts).query()["counters"]
    assert (counter.key.metric.namespace, counter.key.metric.name, counter.result) == (
        "toy",
        "odd",
        2,
    )


def test_counting_leaves_beams_state_tracker_alone() -> None:
    from apache_beam.runners.worker import statesampler

    before = statesampler.get_current_tracker()
    pipeline = beam.Pipeline()
    _ = pipeline | beam.Create([1]) | beam.ParDo(Halve())
    run_in_turn(pipeline)
    assert statesampler.get_current_tracker() is before


class Windowed(beam.DoFn):
    def process(
        self, element: int, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[int]:  # type: ignore[override]
        yield element


def test_unsupported_steps_are_rejected() -> None:
    pipeline = beam.Pipeline()
    _ = pipeline | beam.Create([1]) | "w" >> beam.ParDo(Windowed())
    with pytest.raises(UnknownStepError, match="window"):
        read_chain(pipeline)
    pipeline = beam.Pipeline()
    _ = (
        pipeline | "a" >> beam.Create([1]),
        pipeline | "b" >> beam.Create([2]),
    ) | "both" >> beam.Flatten()
    with pytest.raises(
        UnknownStepError, match=r"'both' .*Create, ParDo, GroupByKey and Reshuffle"
    ):
        read_chain(pipeline)
