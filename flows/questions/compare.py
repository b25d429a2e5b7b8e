"""Side-by-side comparison of two runs: manifests, outputs, funnels, mixtures, losses
and held-out measurements.

Runs are read from their records and the outputs named there, so runs of an older
manifest, or of data that has changed since, can be compared too.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from rich.text import Text

from gristmill.core.store import Store, read_runs
from gristmill.flows.pages.page_elements import Table
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.questions.status import Record, run_state
from gristmill.flows.questions.what_changed import (
    ABSENT,
    changed_keys,
    keyed_manifest,
)
from gristmill.flows.report.evaluation import held_out_rows
from gristmill.flows.report.facts import Facts, read_facts
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.report.training import loss_rows
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.schema.prepare import name_steps, written_steps
from gristmill.mixtures.schema.sources import INGEST

FROM_LAST = re.compile(r"last(?:-(\d+))?")
NOTHING = "-"
ARROW = " -> "
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


@dataclass(frozen=True)
class ComparedCounts:
    """Documents, bytes and tokens kept after a stage."""

    stage: str
    kept: Pair
    bytes_kept: Pair
    tokens_kept: Pair


@dataclass(frozen=True)
class ComparedSource:
    """Tokens, share and epochs of a source of the mixture."""

    source: str
    tokens: Pair
    share: Pair
    epochs: Pair


@dataclass(frozen=True)
class ComparedTraining:
    """Steps of a training, and its first and last loss."""

    stage: str
    steps: Pair
    first: Pair
    last: Pair


@dataclass(frozen=True)
class ComparedEvaluation:
    """Measurements of a model on the held-out text of a source."""

    model: str
    source: str
    bits_per_byte: Pair
    perplexity: Pair
    token_accuracy: Pair


@dataclass(frozen=True)
class RunComparison:
    """Everything that both of two runs recorded, side by side."""

    runs: list[ComparedRun]
    manifest: list[ChangedKey]
    stages: list[ComparedStage]
    funnel: list[ComparedCounts]
    mixture: list[ComparedSource]
    training: list[ComparedTraining]
    evaluation: list[ComparedEvaluation]


Row = TypeVar(
    "Row", ComparedCounts, ComparedSource, ComparedTraining, ComparedEvaluation
)


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
                f"{name}: there are only {len(runs)} runs in "
                f"{store.root}; see: gristmill runs"
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
    return RunComparison(
        [ComparedRun(record["run"], run_state(record)) for record in records],
        [
            ChangedKey(
                key, None if old is ABSENT else old, None if new is ABSENT else new
            )
            for key, old, new in differences
        ],
        stages,
        _joined(ComparedCounts, 1, [side.funnel for side in facts]),
        _joined(ComparedSource, 1, [mixture_rows(side) for side in facts]),
        _joined(ComparedTraining, 1, [loss_rows(side) for side in facts]),
        _joined(
            ComparedEvaluation,
            2,
            [
                [row for row in held_out_rows(side) if row.perplexity is not None]
                for side in facts
            ],
        ),
    )


def _joined(
    kind: type[Row], num_keys: int, sides: Sequence[Sequence[object]]
) -> list[Row]:
    """Join rows of both sides by their keys, the first fields of `kind`; its other
    fields are pairs.
    """
    names = [field.name for field in fields(kind)]
    by_keys = [
        {tuple(getattr(row, key) for key in names[:num_keys]): row for row in rows}
        for rows in sides
    ]
    joined = []
    for identity in dict.fromkeys(itertools.chain(*by_keys)):
        values: list[Any] = list(identity)
        for name in names[num_keys:]:
            figures = (getattr(rows.get(identity), name, None) for rows in by_keys)
            values.append(Pair(*figures))
        joined.append(kind(*values))
    return joined


Format = Callable[[Any], str]
TOPICS: list[tuple[str, str, list[str], list[tuple[str, str, Format]]]] = [
    (
        "funnel",
        "Documents",
        ["stage"],
        [
            ("kept", "kept", "{:,}".format),
            ("MB kept", "bytes_kept", lambda size: f"{size / 1e6:.1f}"),
            ("tokens", "tokens_kept", "{:,.0f}".format),
        ],
    ),
    (
        "mixture",
        "Mixture",
        ["source"],
        [
            ("tokens", "tokens", "{:,}".format),
            ("share", "share", "{:.2%}".format),
            ("epochs", "epochs", "{:.2f}".format),
        ],
    ),
    (
        "training",
        "Training",
        ["stage"],
        [
            ("steps", "steps", "{:,}".format),
            ("first loss", "first", "{:.4f}".format),
            ("last loss", "last", "{:.4f}".format),
        ],
    ),
    (
        "evaluation",
        "Held-out text",
        ["model", "source"],
        [
            ("bits/byte", "bits_per_byte", "{0.value:.4f}".format),
            ("perplexity", "perplexity", "{0.value:.1f}".format),
            ("token accuracy", "token_accuracy", "{:.1%}".format),
        ],
    ),
]
"""Topic of a comparison, its title, its keys, and its columns: name, key of the value,
format.
"""


def print_comparison(comparison: RunComparison) -> None:
    """Print the comparison as tables that fit the terminal: one cell where both runs
    agree, `first -> second` where they differ, and no table of what neither run has.
    """
    console = plain_console()
    for side, run in zip(("first", "second"), comparison.runs, strict=True):
        console.print(f"{side + ':':7} {run.run} ({run.state})", soft_wrap=True)
    if not comparison.manifest:
        console.print(Text("Both have the same manifest.", style="dim"))
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
    print_table(console, Table(["key", "first", "second"], changes), "Manifest")
    outputs_table = Table(["stage", "output", "seconds"], outputs, {2})
    print_table(console, outputs_table, "Outputs", highlight=ARROW)
    for topic, title, keys, columns in TOPICS:
        header = [*keys, *(name for name, _, _ in columns)]
        rows = [
            [
                *(getattr(row, key) for key in keys),
                *(pair(getattr(row, key), form) for _, key, form in columns),
            ]
            for row in getattr(comparison, topic)
        ]
        topic_table = Table(header, rows, set(range(len(keys), len(header))))
        print_table(console, topic_table, title, highlight=ARROW)


def pair(values: Pair, form: Format) -> str:
    """`a` if both are written alike, else `a -> b`."""
    first, second = (
        NOTHING if value is None else form(value)
        for value in (values.first, values.second)
    )
    return first if first == second else f"{first}{ARROW}{second}"


def _value(value: Any) -> str:
    if value is None:
        return NOTHING
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
