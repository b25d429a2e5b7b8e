"""Examples that `sft_prepare` and `dpo_prepare` kept, and the near-duplicates that they
dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import atomic_write, read_json
from gristmill.dataprep.conservation import ConservationError
from gristmill.dataprep.documents import ID_BYTES, kept_rows, read_table, shard_names
from gristmill.dataprep.examples.read_examples import (
    Example,
    Kind,
    Quarantined,
    made_path,
    read_set,
)
from gristmill.mixtures.posttraining import Instructions, PreferencePairs

QUARANTINED = "refused.jsonl"
"""File of a stage's quarantined records: one line each with set, place and reason."""


def set_names(paths: Sequence[str], reserved: Sequence[str] = ()) -> list[str]:
    """Names of sets: the name of their file or folder, numbered if two are equal.

    Args:
        paths: of the sets, as in the manifest.
        reserved: names that no set may have.
    """
    names: list[str] = []
    for path in paths:
        file_name = PurePosixPath(path.rstrip("/:")).name
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


def check_records(where: str, counts: Mapping[str, Any]) -> None:
    """Raise ConservationError unless every record of a set is quarantined, beyond the
    limit, dropped or used.

    Args:
        where: stage and set.
        counts: `records`, `refused`, `beyond_limit`, `unrenderable`, `dropped` (too
            long), `used`; for a prepared set also `prepared_dropped` (rule -> number)
            and `quarantined`.
    """
    dropped_before = sum(counts.get("prepared_dropped", {}).values()) + counts.get(
        "quarantined", 0
    )
    parts = ("refused", "beyond_limit", "unrenderable", "dropped", "used")
    accounted = dropped_before + sum(counts[part] for part in parts)
    if accounted != counts["records"]:
        raise ConservationError(
            f"{where}: {counts['records']} records were read but {accounted} are "
            f"accounted for ({', '.join(f'{part} {counts[part]}' for part in parts)}, "
            f"dropped before {dropped_before}); nothing was committed"
        )


def write_quarantined(
    path: Path, quarantined: Iterable[tuple[str, Sequence[Quarantined]]]
) -> None:
    """Write the quarantined records of all sets, passed as (name of the set, its
    quarantined records).
    """
    with atomic_write(path) as sink:
        for set_name, records in quarantined:
            for record in records:
                line = {"set": set_name, "place": record.place, "reason": record.reason}
                sink.write(
                    json.dumps(line, ensure_ascii=False, sort_keys=True).encode()
                    + b"\n"
                )


DOCUMENTS, RECORDS, PREPARED = "documents", "records", "prepared.json"
RECORDS_SCHEMA = pa.schema(
    [
        pa.field("id", pa.binary(ID_BYTES), nullable=False),
        ("set", pa.dictionary(pa.int32(), pa.string())),
        ("record", pa.large_string()),
    ]
)


@dataclass(frozen=True)
class UsableSet:
    """A set of examples to encode.

    Attributes:
        examples: in the order of their ids.
        quarantined: records that are not examples.
        counts: `records`, `refused`, `beyond_limit`, `refused_reasons`, and for a
            prepared set `prepared_dropped` (rule -> number) and `quarantined`.
        places: id of an example -> file and line, or row of a table, from 1.
    """

    examples: Sequence[Example]
    quarantined: Sequence[Quarantined]
    counts: dict[str, Any]
    places: Mapping[str, str]


def usable_sets(
    data: Sequence[Instructions | PreferencePairs],
    kind: Kind,
    inputs: Mapping[str, Path],
) -> Iterator[UsableSet]:
    """Read the examples of each set to encode, from its files or from its preparation.

    Args:
        data: the sets of the section.
        kind: sft or dpo.
        inputs: of the stage, with the output of the stage that prepared the sets, if
            any, and the sets that the manifest generates.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: too many records of a
            set are quarantined.
        ConservationError: not every record is accounted for.
    """
    prepared = inputs.get(f"{kind}_prepare")
    if prepared is None:
        for entry in data:
            read = read_set(
                made_path(entry.path, inputs),
                kind,
                entry.format,
                entry.limit,
                entry.max_quarantined,
            )
            yield UsableSet(
                read.examples, read.quarantined, read.counts(), read.places()
            )
        return
    quarantined: dict[str, list[Quarantined]] = {}
    for line in (prepared / QUARANTINED).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        quarantined.setdefault(record["set"], []).append(
            Quarantined(record["place"], record["reason"])
        )
    kept, places = survivors(prepared), _places(prepared)
    for summary in read_json(prepared / PREPARED)["sets"]:
        counts = {
            key: summary[key]
            for key in (
                "records",
                "refused",
                "beyond_limit",
                "refused_reasons",
                "quarantined",
            )
        }
        counts["prepared_dropped"] = summary["dropped"]
        examples = kept.get(summary["name"], [])
        if len(examples) != summary["kept"]:
            raise ConservationError(
                f"{prepared}: {len(examples)} examples of {summary['name']} are left, "
                f"but its counts say {summary['kept']}; run the stage again"
            )
        yield UsableSet(examples, quarantined.get(summary["name"], []), counts, places)


def _places(prepared: Path) -> dict[str, str]:
    """Places of the examples of prepared sets, by id."""
    documents = prepared_inputs(prepared)["ingest"]
    places: dict[str, str] = {}
    for shard in shard_names(documents):
        rows = read_table(documents / shard, ["id", "locator"])
        places |= {
            id.hex(): place
            for id, place in zip(
                *(rows[name].to_pylist() for name in ("id", "locator"))
            )
        }
    return places


def prepared_inputs(prepared: Path) -> dict[str, Path]:
    """Inputs for reading a prepared set's annotations: its documents as `ingest`, and
    every step in order.
    """
    steps = read_json(prepared / PREPARED)["steps"]
    return {
        "ingest": prepared / DOCUMENTS / steps[0]["judges"],
        **{step["stage"]: prepared / step["stage"] for step in steps},
    }


def survivors(prepared: Path) -> dict[str, list[Example]]:
    """Examples that every step kept, by set, in the order of their ids."""
    inputs = prepared_inputs(prepared)
    examples: dict[str, list[Example]] = {}
    for shard in shard_names(inputs["ingest"]):
        rows = read_table(prepared / RECORDS / shard, ["set", "record"]).take(
            pa.array(kept_rows(inputs, shard))
        )
        for name, record in zip(
            rows["set"].to_pylist(), rows["record"].to_pylist(), strict=True
        ):
            examples.setdefault(name, []).append(json.loads(record))
    return examples


CLUSTERS = "clusters.parquet"
SHOWN = 5
EXCERPT = 300
"""Characters of an example's text that are shown."""


def least_alike(prepared: Path) -> list[dict[str, Any]]:
    """Dropped near-duplicates that least resemble the example kept in their place, the
    least similar first.

    Args:
        prepared: output of `sft_prepare` or `dpo_prepare`.

    Returns:
        up to SHOWN examples: `dropped` and `kept` (locators), `jaccard`, `dropped_text`
        and `kept_text` (beginnings of the texts that the step compared). Exact
        duplicates are left out; empty without a `dedup` step.
    """
    documents_view = next(
        (
            step["judges"]
            for step in read_json(prepared / PREPARED)["steps"]
            if step["stage"] == "dedup"
        ),
        None,
    )
    if documents_view is None:
        return []
    columns = ["member_locator", "survivor_locator", "jaccard"]
    table = read_table(prepared / "dedup" / CLUSTERS, columns)
    near_duplicates = table.filter(pc.less(table["jaccard"], 1.0)).sort_by(
        [(name, "ascending") for name in reversed(columns)]
    )
    pairs = near_duplicates.slice(0, SHOWN).to_pylist()
    texts = _texts(
        prepared / DOCUMENTS / documents_view,
        {pair[name] for pair in pairs for name in columns[:2]},
    )
    return [
        {
            "dropped": pair["member_locator"],
            "kept": pair["survivor_locator"],
            "jaccard": pair["jaccard"],
            "dropped_text": texts.get(pair["member_locator"], ""),
            "kept_text": texts.get(pair["survivor_locator"], ""),
        }
        for pair in pairs
    ]


def _texts(documents: Path, locators: set[str]) -> dict[str, str]:
    """Beginnings of some documents, by locator."""
    texts: dict[str, str] = {}
    for shard in shard_names(documents) if locators else ():
        table = read_table(documents / shard, ["locator", "text"])
        rows = table.filter(
            pc.is_in(
                table["locator"], pa.array(sorted(locators), table["locator"].type)
            )
        )
        texts |= {
            row["locator"]: row["text"][:EXCERPT]
            + ("..." if len(row["text"]) > EXCERPT else "")
            for row in rows.to_pylist()
        }
    return texts
