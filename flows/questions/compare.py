"""Side-by-side comparison of two runs: manifests, outputs, funnels, mixtures, losses
and held-out measurements.

Runs are read from their records and the outputs named there, so runs of an older
manifest, or of data that has changed since, can be compared too.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gristmill.core.store import Store, read_runs
from gristmill.flows.pages.page_elements import (
    Fields,
    Inline,
    Span,
    section_of,
    table,
)
from gristmill.flows.pages.terminal_pages import print_parts, print_sections
from gristmill.flows.planning.quantities import counted
from gristmill.flows.questions.status import Record, run_state
from gristmill.flows.questions.what_changed import (
    ABSENT,
    changed_keys,
    keyed_manifest,
)
from gristmill.flows.report.evaluation import HeldOutRow, held_out_rows
from gristmill.flows.report.facts import Facts, read_facts
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.report.training import loss_rows
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.schema.prepare import name_steps, written_steps
from gristmill.mixtures.schema.sources import INGEST

FROM_LAST = re.compile(r"last(?:-(\d+))?")
NOTHING = "-"
SIDES = ("first", "second")
LONGEST_VALUE = 200


@dataclass(frozen=True)
class Pair:
    """A figure of both runs; None if a run does not have it."""

    first: Any
    second: Any


@dataclass(frozen=True)
class ComparedRun:
    """Name and state of a run."""

    run: str
    state: str


@dataclass(frozen=True)
class ChangedKey:
    """A key of the manifest that differs, and both values; None for an absent key."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True)
class ComparedStage:
    """A stage: True if both runs used the same output, its fingerprints, and the
    seconds that it took.
    """

    stage: str
    same: bool
    fingerprint: Pair
    seconds: Pair


ComparedRow = Mapping[str, str | Pair]
"""Keys of a row of figures -> their values, and name of a figure -> both values."""


@dataclass(frozen=True)
class RunComparison:
    """Everything that both of two runs recorded, side by side; the rows of figures are
    those of TOPICS.
    """

    runs: list[ComparedRun]
    manifest: list[ChangedKey]
    stages: list[ComparedStage]
    funnel: list[ComparedRow]
    mixture: list[ComparedRow]
    training: list[ComparedRow]
    evaluation: list[ComparedRow]


class UnknownRunError(LookupError):
    """The run name matches no run, or several; the message lists candidates."""


def find_run(store: Store, name: str) -> Record:
    """Return the record of a run, given its name, a unique part of the name, `last` or
    `last-1` (the one before).

    Raises:
        UnknownRunError: no run matches, or several do.
    """
    records = {record["run"]: record for _, record in read_runs(store)}
    runs = list(records)
    if not runs:
        raise UnknownRunError(
            f"{store.root} has no runs yet; start one with: gristmill run MANIFEST"
        )
    from_last = FROM_LAST.fullmatch(name)
    if from_last:
        offset = int(from_last[1] or 0)
        if offset >= len(runs):
            raise UnknownRunError(
                f"{name}: {store.root} has only {counted(len(runs), 'run')}; see: "
                "gristmill runs"
            )
        return records[runs[-1 - offset]]
    matches = [run for run in runs if name in run]
    if name in records or len(matches) == 1:
        return records.get(name) or records[matches[0]]
    kind = "part of the names of several runs" if matches else "not a run"
    raise UnknownRunError(
        f"{name!r} is {kind} of {store.root} (such as "
        f"{', '.join((matches or runs)[-3:])}); see: gristmill runs"
    )


def facts_of(store: Store, record: Record) -> Facts:
    """Return the facts of a run, as in `gather_facts`; topics whose output is not
    committed are empty.
    """
    folders = {}
    for stage in stages_of(record):
        fingerprint = record["stages"][stage]["fingerprint"]
        folder = store.folder(stage, record["name"], fingerprint)
        if folder.state() == "committed":
            folders[stage] = folder
    kinds = {stage: STAGES[stage] for stage in folders if stage in STAGES}
    return read_facts(folders, kinds, steps_of(record))


def stages_of(record: Record) -> list[str]:
    """Return the stages of a run in execution order; the record sorts them by name."""
    order = [INGEST, *steps_of(record), *STAGES]
    return sorted(
        record["stages"],
        key=lambda stage: order.index(stage) if stage in order else len(order),
    )


def steps_of(record: Record) -> list[str]:
    """Return the names of a run's steps of `prepare`, in order."""
    return name_steps(written_steps(record["manifest"].get("prepare", [])))


def compare_runs(store: Store, first: Record, second: Record) -> RunComparison:
    """Compare two runs in everything that both recorded."""
    records = (first, second)
    facts = (facts_of(store, first), facts_of(store, second))
    differences = changed_keys(
        keyed_manifest(first["manifest"]), keyed_manifest(second["manifest"])
    )
    seconds = [{row.stage: row.seconds for row in side.stages} for side in facts]
    stages = []
    for stage in dict.fromkeys([*stages_of(first), *stages_of(second)]):
        entries = [record["stages"].get(stage, {}) for record in records]
        identities = [
            entry.get("identity", entry.get("fingerprint")) for entry in entries
        ]
        stages.append(
            ComparedStage(
                stage,
                identities[0] == identities[1],
                Pair(*(identity and identity[:16] for identity in identities)),
                Pair(*(side.get(stage) for side in seconds)),
            )
        )
    changes = [
        ChangedKey(key, *(None if value is ABSENT else value for value in values))
        for key, *values in differences
    ]
    return RunComparison(
        [ComparedRun(record["run"], run_state(record)) for record in records],
        changes,
        stages,
        **{
            name: _joined(topic, [topic.rows(side) for side in facts])
            for name, topic in TOPICS.items()
        },
    )


def _joined(topic: Topic, sides: Sequence[Sequence[object]]) -> list[ComparedRow]:
    """Join the rows of both sides by their keys."""
    by_keys = [
        {tuple(getattr(row, key) for key in topic.keys): row for row in rows}
        for rows in sides
    ]
    return [
        {
            **dict(zip(topic.keys, keys, strict=True)),
            **{
                name: Pair(*(getattr(rows.get(keys), name, None) for rows in by_keys))
                for name in topic.figures
            },
        }
        for keys in dict.fromkeys(itertools.chain(*by_keys))
    ]


def _held_out(facts: Facts) -> list[HeldOutRow]:
    return [row for row in held_out_rows(facts) if row.perplexity is not None]


Format = Callable[[Any], str]


class Topic(NamedTuple):
    """Figures of a run: title, keys of a row, figure -> its format, and the rows of a
    run.
    """

    title: str
    keys: tuple[str, ...]
    figures: Mapping[str, Format]
    rows: Callable[[Facts], Sequence[object]]


TOPICS = {
    "funnel": Topic(
        "Documents",
        ("stage",),
        dict.fromkeys(("kept", "bytes_kept", "tokens_kept"), "{:,.0f}".format),
        lambda facts: facts.funnel,
    ),
    "mixture": Topic(
        "Mixture",
        ("source",),
        {
            "tokens": "{:,}".format,
            "share": "{:.2%}".format,
            "epochs": "{:.2f}".format,
        },
        mixture_rows,
    ),
    "training": Topic(
        "Training",
        ("stage",),
        {
            "steps": "{:,}".format,
            "first": "{:.4f}".format,
            "last": "{:.4f}".format,
        },
        loss_rows,
    ),
    "evaluation": Topic(
        "Held-out text",
        ("model", "source"),
        {
            "bits_per_byte": "{0.value:.4f}".format,
            "perplexity": "{0.value:.1f}".format,
            "token_accuracy": "{:.1%}".format,
        },
        _held_out,
    ),
}
"""Field of a comparison -> its figures."""


def print_comparison(comparison: RunComparison) -> None:
    """Print the comparison as tables that fit the terminal: one cell where both runs
    agree, `first -> second` where they differ, and no table of what neither run has.
    """
    changes = [
        [change.key, _value(change.first), _value(change.second)]
        for change in comparison.manifest
    ]
    outputs = [
        [
            row.stage,
            "the same"
            if row.same
            else pair(row.fingerprint, lambda text: str(text)[:8]),
            pair(row.seconds, "{:.1f}".format),
        ]
        for row in comparison.stages
    ]
    first, second = (f"{run.run} ({run.state})" for run in comparison.runs)
    print_parts(
        Fields([("first:", first), ("second:", second)]),
        None if changes else "Both have the same manifest.",
    )
    print_sections(
        section_of("Manifest", table(dict.fromkeys(["key", *SIDES], ""), changes)),
        section_of(
            "Outputs", table({"stage": "", "output": "", "seconds": ">"}, outputs)
        ),
    )
    for name, topic in TOPICS.items():
        rows = [
            [
                *(row[key] for key in topic.keys),
                *(pair(row[figure], form) for figure, form in topic.figures.items()),
            ]
            for row in getattr(comparison, name)
        ]
        columns = dict.fromkeys(topic.keys, "") | {
            figure.replace("_", " "): ">" for figure in topic.figures
        }
        print_sections(section_of(topic.title, table(columns, rows)))


def pair(values: Pair, form: Format) -> Inline:
    """Return `a` if both are written alike, else a marked `a -> b`."""
    first, second = (
        NOTHING if value is None else form(value)
        for value in (values.first, values.second)
    )
    return first if first == second else Span(f"{first} -> {second}", "hit")


def _value(value: Any) -> str:
    if value is None:
        return NOTHING
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
