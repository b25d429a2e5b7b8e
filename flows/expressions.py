"""Names in a manifest's expressions, held against what its own stages measure before any of them runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gristmill.mixtures.load import Location, Problem, Written
from gristmill.mixtures.manifest import Manifest


def wrong_expressions(manifest: Manifest, written: Written) -> list[Problem]:
    """Every `where` and `epochs` of the sources that is no SQL, or names a column that nothing here measures."""
    expressions = list(_expressions(manifest))
    if not expressions:
        return []
    from gristmill.dataprep.measured import measured_by
    from gristmill.tokenize.mixing.shares import MixError
    from gristmill.tokenize.mixing.where import check_names

    measured = {step.stage: measured_by(step) for step in manifest.prepare}
    uses = Counter(["tokens", "bytes", *(name for found in measured.values() for name in found)])
    # Of a name that several stages use, each has its own with the stage's name in front.
    names = {*uses, *(f"{stage}_{name}" for stage, found in measured.items() for name in found if uses[name] > 1)}
    problems = []
    for location, expression in expressions:
        key = ".".join(map(str, location))
        try:
            check_names(key, expression, names)
        except MixError as error:
            problems.append(written.problem(location, str(error).removeprefix(f"{key}: ")))
    return problems


def _expressions(manifest: Manifest) -> Iterator[tuple[Location, str]]:
    for name, source in manifest.sources.items():
        for key in ("where", "epochs"):
            if (expression := getattr(source, key)) is not None:
                yield ("sources", name, key), expression
