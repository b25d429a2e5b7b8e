"""Names in a manifest's expressions, held against what its own stages measure before any of them runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gristmill.mixtures.load import Location, Problem, Written
from gristmill.mixtures.manifest import Manifest


def wrong_keys(manifest: Manifest, written: Written) -> list[Problem]:
    """Every `keep` of `dedup` that is malformed, or names a column that nothing before it measures."""
    problems: list[Problem] = []
    for number, step in enumerate(manifest.prepare):
        if step.dedup is None:
            continue
        from gristmill.dataprep.duplicates.clusters import parse_keep
        from gristmill.dataprep.duplicates.keep_columns import check_names
        from gristmill.dataprep.measured import measured_by

        before = [name for earlier in manifest.prepare[:number] for name in measured_by(earlier)]
        try:
            check_names(parse_keep(step.dedup.keep), before)
        except ValueError as error:
            problems.append(written.problem(("prepare", number, "dedup", "keep"),
                                            str(error).removeprefix("dedup.keep: ")))
    return problems


def wrong_expressions(manifest: Manifest, written: Written) -> list[Problem]:
    """Every `where` and `epochs` of the sources that is not of the grammar, or names a column that nothing measures."""
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
