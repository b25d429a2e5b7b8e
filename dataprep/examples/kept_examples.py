"""Examples that `sft_prepare` and `dpo_prepare` kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath

import pyarrow as pa
from pydantic import TypeAdapter

from gristmill.core.files import read_json, read_json_lines, write_json_lines
from gristmill.dataprep.conservation import ConservationError
from gristmill.dataprep.documents import (
    ID_BYTES,
    Inputs,
    kept_rows,
    read_table,
    shard_names,
)
from gristmill.dataprep.examples.conversations import Example
from gristmill.dataprep.examples.read_examples import (
    ExamplesError,
    Kind,
    Quarantined,
    RecordCounts,
    made_path,
    read_set,
)
from gristmill.mixtures.hub_paths import without_commit
from gristmill.mixtures.schema.posttraining import Instructions, PreferencePairs

QUARANTINED = "refused.jsonl"
"""File of a stage's quarantined records: one line each with set, place and reason."""
DOCUMENTS, RECORDS, PREPARED = "documents", "records", "prepared.json"
RECORDS_SCHEMA = pa.schema(
    [
        pa.field("id", pa.binary(ID_BYTES), nullable=False),
        ("set", pa.dictionary(pa.int32(), pa.string())),
        ("record", pa.large_string()),
    ]
)


@dataclass(frozen=True)
class PreparedStep:
    """Step of a preparation.

    Attributes:
        stage: name of the step.
        judges: view of the examples that it judges.
    """

    stage: str
    judges: str


@dataclass(frozen=True)
class PreparedCounts(RecordCounts):
    """Outcome of the records of a prepared set.

    Attributes:
        prepared_dropped: number of examples by the rule that dropped them.
        quarantined: examples on which a step raised an error.
    """

    prepared_dropped: Mapping[str, int]
    quarantined: int


@dataclass(frozen=True)
class PreparedSet(RecordCounts):
    """Outcome of a set's preparation.

    Attributes:
        name, path: of the set.
        dropped: number of examples by the rule that dropped them.
        quarantined: examples on which a step raised an error.
        kept: examples that are left.
    """

    name: str
    path: str
    dropped: Mapping[str, int]
    quarantined: int
    kept: int

    def counts(self) -> PreparedCounts:
        """Outcome of the records."""
        common = {item.name: getattr(self, item.name) for item in fields(RecordCounts)}
        return PreparedCounts(
            **common, prepared_dropped=self.dropped, quarantined=self.quarantined
        )


@dataclass(frozen=True)
class Preparation:
    """Content of `prepared.json`: the steps in their order, and the outcome of each
    set.
    """

    steps: list[PreparedStep]
    sets: list[PreparedSet]


def read_preparation(prepared: Path) -> Preparation:
    """Steps and sets of the output of `sft_prepare` or `dpo_prepare`."""
    return TypeAdapter(Preparation).validate_python(read_json(prepared / PREPARED))


def set_names(paths: Sequence[str], reserved: Sequence[str] = ()) -> list[str]:
    """Names of sets: the name of their file or folder, numbered if two are equal.

    Args:
        paths: of the sets, as in the manifest.
        reserved: names that no set may have.
    """
    names: list[str] = []
    for path in paths:
        file_name = PurePosixPath(without_commit(path).rstrip("/:")).name
        stem = (
            re.sub(r"[^A-Za-z0-9_-]+", "-", file_name.split(".")[0]).strip("-") or "set"
        )
        conflicts = [
            name
            for name in (*names, *reserved)
            if name == stem or re.fullmatch(rf"{re.escape(stem)}-\d+", name)
        ]
        names.append(f"{stem}-{len(conflicts) + 1}" if conflicts else stem)
    return names


def check_records(where: str, counts: RecordCounts, left: int) -> None:
    """Raise ConservationError unless every record of a set is quarantined, beyond the
    limit, dropped before or left.

    Args:
        where: stage and set.
        counts: outcome of the records before.
        left: number of examples that are left.
    """
    dropped_before = 0
    if isinstance(counts, PreparedCounts):
        dropped_before = sum(counts.prepared_dropped.values()) + counts.quarantined
    parts = {
        "refused": counts.refused,
        "beyond_limit": counts.beyond_limit,
        "dropped before": dropped_before,
        "left": left,
    }
    accounted = sum(parts.values())
    if accounted != counts.records:
        raise ConservationError(
            f"{where}: {counts.records} records were read but {accounted} are "
            f"accounted for ({', '.join(f'{part} {n}' for part, n in parts.items())}); "
            "nothing was committed"
        )


def write_quarantined(
    path: Path, quarantined: Iterable[tuple[str, Sequence[Quarantined]]]
) -> None:
    """Write the quarantined records of all sets, passed as (name of the set, its
    quarantined records).
    """
    write_json_lines(
        path,
        (
            {"set": set_name, **vars(record)}
            for set_name, records in quarantined
            for record in records
        ),
    )


@dataclass(frozen=True)
class UsableSet:
    """A set of examples to encode.

    Attributes:
        examples: in the order of their ids.
        quarantined: records that are not examples.
        counts: outcome of its records; of a prepared set `PreparedCounts`.
        places: id of an example -> file and line, or row of a table, from 1.
    """

    examples: Sequence[Example]
    quarantined: Sequence[Quarantined]
    counts: RecordCounts
    places: Mapping[str, str]


def usable_sets(
    data: Sequence[Instructions | PreferencePairs],
    kind: Kind,
    inputs: Inputs,
) -> Iterator[UsableSet]:
    """Read the examples of each set to encode, from its files or from its preparation.

    Args:
        data: the sets of the section.
        kind: sft or dpo.
        inputs: of the stage, with the output of the stage that prepared the sets, if
            any, and the sets that the manifest generates.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: too many records of a
            set are quarantined, or it has none; names all such sets.
        ConservationError: not every record is accounted for.
    """
    prepared = inputs.get(f"{kind}_prepare")
    if prepared is None:
        problems = []
        sets = []
        for entry in data:
            try:
                read = read_set(
                    made_path(entry.path, inputs),
                    kind,
                    entry.format,
                    entry.limit,
                    entry.max_quarantined,
                )
            except ExamplesError as error:
                problems.append(str(error))
            else:
                sets.append(
                    UsableSet(
                        read.examples, read.quarantined, read.counts(), read.places()
                    )
                )
        if problems:
            raise ExamplesError("\n".join(problems))
        yield from sets
        return
    quarantined: dict[str, list[Quarantined]] = {}
    for record in read_json_lines(prepared / QUARANTINED):
        quarantined.setdefault(record["set"], []).append(
            Quarantined(record["place"], record["reason"])
        )
    kept = survivors(prepared)
    documents = prepared_inputs(prepared)["ingest"]
    places: dict[str, str] = {}
    for shard in shard_names(documents):
        for row in read_table(documents / shard, ["id", "locator"]).to_pylist():
            places[row["id"].hex()] = row["locator"]
    for prepared_set in read_preparation(prepared).sets:
        examples = kept.get(prepared_set.name, [])
        if len(examples) != prepared_set.kept:
            raise ConservationError(
                f"{prepared}: {len(examples)} examples of {prepared_set.name} are "
                f"left, but its counts say {prepared_set.kept}; run the stage again"
            )
        refused = quarantined.get(prepared_set.name, [])
        yield UsableSet(examples, refused, prepared_set.counts(), places)


def prepared_inputs(prepared: Path) -> dict[str, Path]:
    """Inputs for reading a prepared set's annotations: its documents as `ingest`, and
    every step in order.
    """
    steps = read_preparation(prepared).steps
    return {
        "ingest": prepared / DOCUMENTS / steps[0].judges,
        **{step.stage: prepared / step.stage for step in steps},
    }


def survivors(prepared: Path) -> dict[str, list[Example]]:
    """Examples that every step kept, by set, in the order of their ids."""
    inputs = prepared_inputs(prepared)
    examples: dict[str, list[Example]] = {}
    for shard in shard_names(inputs["ingest"]):
        rows = read_table(prepared / RECORDS / shard, ["set", "record"]).take(
            kept_rows(inputs, shard)
        )
        for row in rows.to_pylist():
            examples.setdefault(row["set"], []).append(json.loads(row["record"]))
    return examples
