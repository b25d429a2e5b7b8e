"""Job pipelines as plain data: input values and a chain of steps, for engines without a
Beam runner.

A job is one linear chain (`runner.check_linear`) of few kinds of steps. It becomes
plain functions over iterators, for engines that distribute such functions (`spark.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Counts = dict[tuple[str, str], int]
"""Counters of Beam by namespace and name."""


class Counter(Protocol):
    """Accumulator of counts."""

    def add(self, counts: Counts, /) -> None:
        """Add counts."""


class UnknownStepError(ValueError):
    """Error of a pipeline with an unsupported step."""


@dataclass
class Chain:
    """Linear pipeline.

    Attributes:
        values: input values.
        stages: lists of steps between groupings by key; a step is a pickled DoFn with
            its arguments.
    """

    values: Sequence[Any] = ()
    stages: list[list[bytes]] = field(default_factory=lambda: [[]])


def read_chain(pipeline: Any) -> Chain:
    """Convert a linear Beam pipeline to a chain.

    Raises:
        UnknownStepError: the pipeline has steps other than Create, ParDo, GroupByKey
            and Reshuffle.
    """
    from apache_beam import Create, GroupByKey, Impulse, ParDo, Reshuffle
    from apache_beam.internal import pickler
    from apache_beam.pipeline import PipelineVisitor
    from apache_beam.transforms.core import _DoFnParam

    chain = Chain()

    def take(transform: Any) -> bool:
        if isinstance(transform, Create):
            chain.values = list(transform.values)
        elif isinstance(transform, Impulse):
            chain.values = [b""]
        elif isinstance(transform, ParDo):
            parameters = inspect.signature(transform.fn.process).parameters
            unsupported = [
                name
                for name, parameter in parameters.items()
                if isinstance(parameter.default, _DoFnParam)
            ]
            if unsupported:  # a window, a timer, a state
                raise UnknownStepError(
                    f"{transform.label!r} asks Beam for {', '.join(unsupported)}, "
                    "which this engine has not"
                )
            chain.stages[-1].append(
                pickler.dumps((transform.fn, transform.args, transform.kwargs))
            )
        elif isinstance(transform, GroupByKey):
            chain.stages.append([])
        return isinstance(transform, Create | Impulse | ParDo | GroupByKey | Reshuffle)

    class Reader(PipelineVisitor):
        """Visitor that takes supported composites as one step and descends into
        others.
        """

        inside: Any = None

        def enter_composite_transform(self, node: Any) -> None:
            if self.inside is None and take(node.transform):
                self.inside = node

        def leave_composite_transform(self, node: Any) -> None:
            if self.inside is node:
                self.inside = None

        def visit_transform(self, node: Any) -> None:
            if self.inside is None and not take(node.transform):
                raise UnknownStepError(
                    f"the step {node.full_label!r} ({type(node.transform).__name__}) "
                    "is none of "
                    "Create, ParDo, GroupByKey and Reshuffle, which this engine can do"
                )

    pipeline.visit(Reader())
    return chain


def do_steps(
    steps: Sequence[bytes], counter: Counter, values: Iterable[Any]
) -> Iterator[Any]:
    """Apply steps to values, which form one bundle in Beam's terms.

    Args:
        steps: an element of `Chain.stages`.
        counter: receives the counts of all steps at the end.
        values: inputs of the first step.
    """
    from apache_beam.internal import pickler
    from apache_beam.runners.worker import statesampler

    counting = Counting()
    outside = statesampler.get_current_tracker()
    statesampler.set_current_tracker(counting)
    try:
        for step in steps:
            function, arguments, keywords = pickler.loads(step)
            values = _do_step(function, arguments, keywords, values)
        yield from values
    finally:
        statesampler.set_current_tracker(outside)
    counter.add(counting.counts)


def _do_step(
    function: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    values: Iterable[Any],
) -> Iterator[Any]:
    function.setup()
    function.start_bundle()
    for value in values:
        yield from function.process(value, *arguments, **keywords) or ()
    function.finish_bundle()  # yields nothing, see `check_linear`
    function.teardown()


class Counting:
    """Tracker that Beam's counters report to in a worker outside of Beam."""

    def __init__(self) -> None:
        self.counts: Counts = {}

    def update_metric(self, name: Any, value: int) -> None:
        """Add to a counter; other kinds of metrics are dropped."""
        from apache_beam.metrics.cells import CounterCell

        if name.cell_type is CounterCell:
            key = name.metric_name.namespace, name.metric_name.name
            self.counts[key] = self.counts.get(key, 0) + value


def as_metrics(counts: Counts) -> Any:
    """Convert counts to Beam's metrics."""
    from apache_beam.metrics.execution import MetricKey, MetricResult
    from apache_beam.metrics.metric import MetricResults
    from apache_beam.metrics.metricbase import MetricName

    class Metrics(MetricResults):
        """Counters of a job."""

        def query(self, filter: Any = None) -> dict[str, list[Any]]:
            """Counters that match a Beam filter."""
            results = [
                MetricResult(MetricKey("", MetricName(*key)), number, number)
                for key, number in counts.items()
            ]
            return {
                "counters": [
                    result for result in results if self.matches(filter, result.key)
                ],
                "distributions": [],
                "gauges": [],
                "string_sets": [],
                "bounded_tries": [],
            }

    return Metrics()
