"""What `sft_prepare` and `dpo_prepare` left of sets of examples, and which they took for near-duplicates of others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.counts import ConservationError
from gristmill.dataprep.documents import ID_BYTES, kept_rows, read_table, shard_names
from gristmill.dataprep.examples.read_examples import Example, Kind, Quarantined, made_path, read_set
from gristmill.dataprep.files import atomic_write, read_json
from gristmill.mixtures.posttraining import Instructions, PreferencePairs

QUARANTINED = "refused.jsonl"
"""Of a stage's output: the records that are not examples, a line each with set, place and reason."""


def set_names(paths: Sequence[str], reserved: Sequence[str] = ()) -> list[str]:
    """What sets are called: by the name of their file or folder, numbered where two are equal.

    Args:
        paths: of the sets, as the manifest has them.
        reserved: names that no set may have.
    """
    names: list[str] = []
    for path in paths:
        last = PurePosixPath(path.rstrip("/:")).name
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", last.split(".")[0]).strip("-") or "set"
        taken = [name for name in (*names, *reserved) if name == stem or re.fullmatch(rf"{re.escape(stem)}-\d+", name)]
        names.append(f"{stem}-{len(taken) + 1}" if taken else stem)
    return names


def check_records(where: str, counts: Mapping[str, Any]) -> None:
    """Raise ConservationError unless every record of a set is quarantined, beyond the limit, dropped or used.

    Args:
        where: stage and set.
        counts: `records`, `refused`, `beyond_limit`, `unrenderable`, `dropped` (too long), `used`; of a prepared set
            also `prepared_dropped` (rule -> number) and `quarantined`.
    """
    before = sum(counts.get("prepared_dropped", {}).values()) + counts.get("quarantined", 0)
    parts = ("refused", "beyond_limit", "unrenderable", "dropped", "used")
    accounted = before + sum(counts[part] for part in parts)
    if accounted != counts["records"]:
        raise ConservationError(
            f"{where}: {counts['records']} records were read but {accounted} are accounted for "
            f"({', '.join(f'{part} {counts[part]}' for part in parts)}, dropped before {before}); "
            "nothing was committed"
        )


def write_quarantined(path: Path, quarantined: Iterable[tuple[str, Sequence[Quarantined]]]) -> None:
    """Write the quarantined records of all sets, given as (name of the set, its quarantined records)."""
    with atomic_write(path) as sink:
        for of_set, records in quarantined:
            for one in records:
                line = {"set": of_set, "place": one.place, "reason": one.reason}
                sink.write(json.dumps(line, ensure_ascii=False, sort_keys=True).encode() + b"\n")


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
    """One set of examples to encode.

    Attributes:
        examples: in the order of their ids.
        quarantined: records that are not examples.
        counts: `records`, `refused`, `beyond_limit`, `refused_reasons`, and of a prepared set `prepared_dropped` (rule
            -> number) and `quarantined`.
        places: id of an example -> file and line, or row of a table, from 1.
    """

    examples: Sequence[Example]
    quarantined: Sequence[Quarantined]
    counts: dict[str, Any]
    places: Mapping[str, str]


def usable_sets(
    data: Sequence[Instructions | PreferencePairs], kind: Kind, inputs: Mapping[str, Path]
) -> Iterator[UsableSet]:
    """What there is to encode of each set: as it is read, or as its preparation left it.

    Args:
        data: the sets of the section.
        kind: sft or dpo.
        inputs: of the stage, among them the output of the one that prepared the sets, if any did, and the sets that
            the manifest makes.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set are quarantined than may be.
        ConservationError: not every record is accounted for.
    """
    prepared = inputs.get(f"{kind}_prepare")
    if prepared is None:
        for one in data:
            read = read_set(made_path(one.path, inputs), kind, one.format, one.limit, one.max_quarantined)
            yield UsableSet(read.examples, read.quarantined, read.counts(), read.places())
        return
    quarantined: dict[str, list[Quarantined]] = {}
    for line in (prepared / QUARANTINED).read_text(encoding="utf-8").splitlines():
        one_line = json.loads(line)
        quarantined.setdefault(one_line["set"], []).append(Quarantined(one_line["place"], one_line["reason"]))
    kept, places = survivors(prepared), _places(prepared)
    for found in read_json(prepared / PREPARED)["sets"]:
        counts = {key: found[key] for key in ("records", "refused", "beyond_limit", "refused_reasons", "quarantined")}
        counts["prepared_dropped"] = found["dropped"]
        examples = kept.get(found["name"], [])
        if len(examples) != found["kept"]:
            raise ConservationError(
                f"{prepared}: {len(examples)} examples of {found['name']} are left, but its counts "
                f"say {found['kept']}; run the stage again"
            )
        yield UsableSet(examples, quarantined.get(found["name"], []), counts, places)


def _places(prepared: Path) -> dict[str, str]:
    """Where the examples of prepared sets come from, by their ids."""
    documents = prepared_inputs(prepared)["ingest"]
    places: dict[str, str] = {}
    for shard in shard_names(documents):
        rows = read_table(documents / shard, ["id", "locator"])
        places |= {id.hex(): place for id, place in zip(*(rows[name].to_pylist() for name in ("id", "locator")))}
    return places


def prepared_inputs(prepared: Path) -> dict[str, Path]:
    """What reading a prepared set's annotations takes: its documents, as `ingest`, and every step in its order."""
    steps = read_json(prepared / PREPARED)["steps"]
    return {
        "ingest": prepared / DOCUMENTS / steps[0]["judges"],
        **{step["stage"]: prepared / step["stage"] for step in steps},
    }


def survivors(prepared: Path) -> dict[str, list[Example]]:
    """The examples that every step kept, by set, in the order of their ids."""
    inputs = prepared_inputs(prepared)
    found: dict[str, list[Example]] = {}
    for shard in shard_names(inputs["ingest"]):
        rows = read_table(prepared / RECORDS / shard, ["set", "record"]).take(pa.array(kept_rows(inputs, shard)))
        for name, record in zip(rows["set"].to_pylist(), rows["record"].to_pylist(), strict=True):
            found.setdefault(name, []).append(json.loads(record))
    return found


CLUSTERS = "clusters.parquet"
SHOWN = 5
EXCERPT = 300
"""Characters of an example's text."""


def least_alike(prepared: Path) -> list[dict[str, Any]]:
    """The dropped examples that resemble what was kept in their place the least, those first; at most SHOWN.

    Args:
        prepared: output of `sft_prepare` or `dpo_prepare`.

    Returns:
        per example `dropped` and `kept` (locators), `jaccard`, `dropped_text` and `kept_text` (what the step compared,
        their beginnings). Equal ones are left out; nothing where no step looked for duplicates.
    """
    view = next((step["judges"] for step in read_json(prepared / PREPARED)["steps"] if step["stage"] == "dedup"), None)
    if view is None:
        return []
    columns = ["member_locator", "survivor_locator", "jaccard"]
    table = read_table(prepared / "dedup" / CLUSTERS, columns)
    near = table.filter(pc.less(table["jaccard"], 1.0)).sort_by([(name, "ascending") for name in reversed(columns)])
    found = near.slice(0, SHOWN).to_pylist()
    texts = _texts(prepared / DOCUMENTS / view, {one[name] for one in found for name in columns[:2]})
    return [
        {
            "dropped": one["member_locator"],
            "kept": one["survivor_locator"],
            "jaccard": one["jaccard"],
            "dropped_text": texts.get(one["member_locator"], ""),
            "kept_text": texts.get(one["survivor_locator"], ""),
        }
        for one in found
    ]


def _texts(documents: Path, locators: set[str]) -> dict[str, str]:
    """The beginnings of some documents, by their locators."""
    found: dict[str, str] = {}
    for shard in shard_names(documents) if locators else ():
        table = read_table(documents / shard, ["locator", "text"])
        wanted = table.filter(pc.is_in(table["locator"], pa.array(sorted(locators), table["locator"].type)))
        found |= {
            one["locator"]: one["text"][:EXCERPT] + ("..." if len(one["text"]) > EXCERPT else "")
            for one in wanted.to_pylist()
        }
    return found
