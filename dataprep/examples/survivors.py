"""Reading what `sft_prepare` and `dpo_prepare` left of the examples; needs none of what they ran."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.dataprep.counts import ConservationError
from gristmill.dataprep.documents import ID_BYTES, kept_rows, read_table, shard_names
from gristmill.dataprep.examples.sets import REFUSED
from gristmill.dataprep.files import read_json
from gristmill.dataprep.reading.examples import Example, Kind, Refused, read_set
from gristmill.mixtures.posttraining import Instructions, PreferencePairs

DOCUMENTS, RECORDS, PREPARED = "documents", "records", "prepared.json"
RECORDS_SCHEMA = pa.schema([
    pa.field("id", pa.binary(ID_BYTES), nullable=False), ("set", pa.dictionary(pa.int32(), pa.string())),
    ("record", pa.large_string())])


@dataclass(frozen=True)
class UsableSet:
    """One set of examples to encode.

    Attributes:
        examples: in the order of their ids.
        refused: records that are no examples.
        counts: `records`, `refused`, `beyond_limit`, `refused_reasons`, and of a prepared set `prepared_dropped` (rule
            -> number) and `quarantined`.
    """

    examples: Sequence[Example]
    refused: Sequence[Refused]
    counts: dict[str, Any]


def usable_sets(
    data: Sequence[Instructions | PreferencePairs], kind: Kind, prepared: Path | None
) -> Iterator[UsableSet]:
    """What there is to encode of each set: as it is read, or as its preparation left it.

    Args:
        data: the sets of the section.
        kind: sft or dpo.
        prepared: output of the stage that prepared them, if any did.

    Raises:
        gristmill.dataprep.reading.examples.ExamplesError: more records of a set are refused than may be.
        ConservationError: not every record is accounted for.
    """
    if prepared is None:
        for one in data:
            read = read_set(one.path, kind, one.format, one.limit, one.max_refused)
            yield UsableSet(read.examples, read.refused, read.counts())
        return
    refused: dict[str, list[Refused]] = {}
    for line in (prepared / REFUSED).read_text(encoding="utf-8").splitlines():
        one_line = json.loads(line)
        refused.setdefault(one_line["set"], []).append(Refused(one_line["place"], one_line["reason"]))
    kept = survivors(prepared)
    for found in read_json(prepared / PREPARED)["sets"]:
        counts = {key: found[key] for key in ("records", "refused", "beyond_limit", "refused_reasons", "quarantined")}
        counts["prepared_dropped"] = found["dropped"]
        examples = kept.get(found["name"], [])
        if len(examples) != found["kept"]:
            raise ConservationError(f"{prepared}: {len(examples)} examples of {found['name']} are left, but its counts "
                                    f"say {found['kept']}; run the stage again")
        yield UsableSet(examples, refused.get(found["name"], []), counts)


def prepared_inputs(prepared: Path) -> dict[str, Path]:
    """What reading a prepared set's annotations takes: its documents, as `ingest`, and every step in its order."""
    steps = read_json(prepared / PREPARED)["steps"]
    return {"ingest": prepared / DOCUMENTS / steps[0]["judges"],
            **{step["stage"]: prepared / step["stage"] for step in steps}}


def survivors(prepared: Path) -> dict[str, list[Example]]:
    """The examples that every step kept, by set, in the order of their ids."""
    inputs = prepared_inputs(prepared)
    found: dict[str, list[Example]] = {}
    for shard in shard_names(inputs["ingest"]):
        rows = read_table(prepared / RECORDS / shard, ["set", "record"]).take(pa.array(kept_rows(inputs, shard)))
        for name, record in zip(rows["set"].to_pylist(), rows["record"].to_pylist(), strict=True):
            found.setdefault(name, []).append(json.loads(record))
    return found
