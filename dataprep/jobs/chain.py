"""A job's pipeline as an engine without a runner of Beam's sees it: values, and what is done to them in turn.

A job is one linear chain (`runner.check_linear`), of few kinds of steps. Here it becomes plain functions over
iterators, for whatever spreads such functions over machines (`spark.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Counts = dict[tuple[str, str], int]
"""Counters of Beam by namespace and name."""


class Counter(Protocol):
    """What counts are added to."""

    def add(self, counts: Counts, /) -> None:
        """Add some."""


class UnknownStepError(ValueError):
    """A pipeline has a step that is not one of those that are translated."""


@dataclass
class Chain:
    """A linear pipeline.

    Attributes:
        values: what it begins with.
        stages: the steps up to the first grouping by key, from there to the next one, and so on; each a pickled DoFn
            and what it is called with.
    """

    values: Sequence[Any] = ()
    stages: list[list[bytes]] = field(default_factory=lambda: [[]])


def read_chain(pipeline: Any) -> Chain:
    """Take a linear pipeline of Beam's to pieces.

    Raises:
        UnknownStepError: it has more than Create, ParDo, GroupByKey and Reshuffle.
    """
    from apache_beam import Create, GroupByKey, Impulse, ParDo, Reshuffle
    from apache_beam.internal import pickler
    from apache_beam.pipeline import PipelineVisitor

    chain = Chain()

    def take(transform: Any) -> bool:
        if isinstance(transform, Create):
            chain.values = list(transform.values)
        elif isinstance(transform, Impulse):
            chain.values = [b""]
        elif isinstance(transform, ParDo):
            _check_parameters(transform)
            chain.stages[-1].append(pickler.dumps((transform.fn, transform.args, transform.kwargs)))
        elif isinstance(transform, GroupByKey):
            chain.stages.append([])
        return isinstance(transform, Create | Impulse | ParDo | GroupByKey | Reshuffle)

    class Reader(PipelineVisitor):
        """Takes what is known as a whole, and looks into what is not."""

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
                    f"the step {node.full_label!r} ({type(node.transform).__name__}) is none of "
                    "Create, ParDo, GroupByKey and Reshuffle, which this engine can do"
                )

    pipeline.visit(Reader())
    return chain


def _check_parameters(transform: Any) -> None:
    """Raise UnknownStepError where Beam is to hand a DoFn more than its element: a window, a timer, a state."""
    from apache_beam.transforms.core import _DoFnParam

    wanted = [
        name
        for name, found in inspect.signature(transform.fn.process).parameters.items()
        if isinstance(found.default, _DoFnParam)
    ]
    if wanted:
        raise UnknownStepError(f"{transform.label!r} asks Beam for {', '.join(wanted)}, which this engine has not")


def do_steps(steps: Sequence[bytes], counter: Counter, values: Iterable[Any]) -> Iterator[Any]:
    """What steps make of some values, which are one bundle in Beam's words.

    Args:
        steps: one of `Chain.stages`.
        counter: receives what all have counted, once they are through.
        values: what the first one is given.
    """
    from apache_beam.internal import pickler
    from apache_beam.runners.worker import statesampler

    counting, outside = Counting(), statesampler.get_current_tracker()
    statesampler.set_current_tracker(counting)
    try:
        for step in steps:
            function, arguments, named = pickler.loads(step)
            values = _do_step(function, arguments, named, values)
        yield from values
    finally:
        statesampler.set_current_tracker(outside)
    counter.add(counting.counts)


def _do_step(function: Any, arguments: Sequence[Any], named: Mapping[str, Any], values: Iterable[Any]) -> Iterator[Any]:
    function.setup()
    function.start_bundle()
    for value in values:
        yield from function.process(value, *arguments, **named) or ()
    function.finish_bundle()  # which yields nothing: `check_linear`
    function.teardown()


class Counting:
    """Takes the place of what Beam's counters report to, in a worker that is not Beam's."""

    def __init__(self) -> None:
        self.counts: Counts = {}

    def update_metric(self, name: Any, value: int) -> None:
        """Add to a counter; metrics of other kinds are not kept."""
        from apache_beam.metrics.cells import CounterCell

        if name.cell_type is CounterCell:
            add_counts(self.counts, {(name.metric_name.namespace, name.metric_name.name): value})


def add_counts(total: Counts, more: Mapping[tuple[str, str], int]) -> Counts:
    """Add counters to others, in place."""
    for key, number in more.items():
        total[key] = total.get(key, 0) + number
    return total


def as_metrics(counts: Mapping[tuple[str, str], int]) -> Any:
    """Counters as Beam's results offer them."""
    from apache_beam.metrics.execution import MetricKey, MetricResult
    from apache_beam.metrics.metric import MetricResults
    from apache_beam.metrics.metricbase import MetricName

    class Metrics(MetricResults):
        """What a job has counted."""

        def query(self, filter: Any = None) -> dict[str, list[Any]]:
            """The counters that a filter of Beam's lets pass."""
            found = [MetricResult(MetricKey("", MetricName(*key)), number, number) for key, number in counts.items()]
            return {
                "counters": [one for one in found if self.matches(filter, one.key)],
                "distributions": [],
                "gauges": [],
                "string_sets": [],
                "bounded_tries": [],
            }

    return Metrics()
