"""The form that every job has: one linear chain. A runner may silently lose what is anything else.

Beam's Dask runner, for one, computes the last branch of a pipeline and no other, gives every tagged output
everything, and drops what a DoFn yields when its bundle ends; all without an error.
"""

from __future__ import annotations

from typing import Any

RULE = "a job is one linear chain, because runners may silently lose anything else"


class NotLinearError(ValueError):
    """A pipeline is not one linear chain."""


def check_linear(pipeline: Any) -> None:
    """Raise NotLinearError unless every step of a Beam pipeline has one input, one output and one consumer.

    Raises:
        NotLinearError: a second source, branch or sink; a tagged output; a side input; a DoFn that finishes bundles.
    """
    from apache_beam.pipeline import PipelineVisitor

    consumers: dict[Any, str] = {}
    sources: list[str] = []

    class Visitor(PipelineVisitor):
        """Looks at the steps that do the work, inside whatever they are composed of."""

        def visit_transform(self, step: Any) -> None:
            _check_step(step)
            inputs = [value for value in step.inputs if value.producer is not None]
            if not inputs:
                sources.append(step.full_label)
            for value in inputs:
                if value in consumers:
                    _refuse(step, f"reads what {consumers[value]!r} reads too")
                consumers[value] = step.full_label

    pipeline.visit(Visitor())
    if len(sources) > 1:
        raise NotLinearError(f"the pipeline has {len(sources)} sources ({', '.join(sources)}); {RULE}")


def _check_step(step: Any) -> None:
    from apache_beam import DoFn

    if len(step.inputs) > 1:
        _refuse(step, f"has {len(step.inputs)} inputs")
    if set(step.outputs) - {None, "None"}:
        _refuse(step, f"has tagged outputs ({', '.join(sorted(str(tag) for tag in step.outputs))})")
    if step.side_inputs:
        _refuse(step, "has side inputs")
    function = getattr(step.transform, "fn", None)
    if isinstance(function, DoFn) and type(function).finish_bundle is not DoFn.finish_bundle:
        _refuse(step, f"has a DoFn that finishes bundles ({type(function).__name__}.finish_bundle)")


def _refuse(step: Any, why: str) -> None:
    raise NotLinearError(f"the step {step.full_label!r} {why}; {RULE}")
