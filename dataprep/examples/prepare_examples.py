"""Stages `sft_prepare` and `dpo_prepare`: run the stages that prepare documents on
examples.

Output:

    documents/<view>/part-*.parquet    examples as documents, one view per text that
                                       steps judge (`view_text`); all views have the
                                       same rows
    records/part-*.parquet             the examples, row by row: `id`, `set`, `record`
                                       (JSON)
    <step>/                            output of each step: annotations, clusters,
                                       matches
    refused.jsonl                      records that are not examples
    prepared.json                      steps in their order, and counts per set

The id of a document is that of its example; repeated examples get different ids.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import pyarrow as pa

from gristmill.core.files import json_object, write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import add_counts, ranked
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, ID_BYTES, Inputs, write_table
from gristmill.dataprep.examples.conversations import Example
from gristmill.dataprep.examples.kept_examples import (
    DOCUMENTS,
    PREPARED,
    QUARANTINED,
    RECORDS,
    RECORDS_SCHEMA,
    Preparation,
    PreparedSet,
    PreparedStep,
    check_records,
    set_names,
    write_quarantined,
)
from gristmill.dataprep.examples.preferences import all_said
from gristmill.dataprep.examples.read_examples import (
    ExamplesError,
    ExampleSet,
    Kind,
    Origin,
    made_path,
    read_set,
)
from gristmill.dataprep.inner_steps import run_step
from gristmill.dataprep.llm.judge_pairs import pair_text
from gristmill.dataprep.readers.records import metadata_json
from gristmill.mixtures.schema.posttraining import Instructions, PreferencePairs
from gristmill.mixtures.schema.prepare import ExampleStep

PAIRS = "judge_pairs"
"""Step that compares the answers of pairs, and the view that it reads."""
BLANK_LINE = "\n\n"
BOTH = "-of-both"
"""Suffix of views of pairs that include the rejected answer."""


def view_of(step: ExampleStep, kind: Kind) -> str:
    """Name of the view that a step judges: `answer` or `conversation`, with BOTH for
    deduplicating pairs, or PAIRS.
    """
    if step.stage == PAIRS:
        return PAIRS
    return step.judged + (BOTH if kind == "dpo" and step.stage == "dedup" else "")


def view_text(view: str, example: Example) -> str:
    """Text of an example: all its messages, or those of the assistant's answers,
    separated by blank lines.

    Args:
        view: name from `view_of`.
        example: a conversation or a preference pair.
    """
    prompt = example.get("prompt", [])
    if view == PAIRS:
        return pair_text(
            all_said(prompt, BLANK_LINE),
            all_said(example["chosen"], BLANK_LINE),
            all_said(example["rejected"], BLANK_LINE),
        )
    if "chosen" not in example:
        answers = example["messages"]
    elif view.endswith(BOTH):
        answers = [*example["chosen"], *example["rejected"]]
    else:
        answers = example["chosen"]
    if view.removesuffix(BOTH) == "answer":
        answers = [message for message in answers if message["role"] == "assistant"]
        return all_said(answers, BLANK_LINE)
    return all_said([*prompt, *answers], BLANK_LINE)


SHARD_BYTES = 16_000_000
"""Target size of a shard; a shard has at least one record."""
SHOWN_REASONS = 3


class PreparationRecipe(TypedDict):
    """Recipe of the stage: the sets and the steps of the section `kind`."""

    kind: Kind
    data: list[dict[str, object]]
    prepare: list[dict[str, object]]


def run(
    inputs: Inputs, config: PreparationRecipe, out: Path, context: Context
) -> dict[str, object]:
    """Read all sets, and run the steps on them.

    Args:
        inputs: generated sets.
        config: sets and steps.
        out: output folder, see the module.
        context: of the stage.

    Returns:
        `Preparation` as JSON, with the summary of each step.

    Raises:
        ExamplesError: too many records of a set are quarantined, a step names an
            unknown set, or a set is left empty.
        ConservationError: records were lost or counted twice.
    """
    kind = config["kind"]
    section = Instructions if kind == "sft" else PreferencePairs
    data = [section.model_validate(item) for item in config["data"]]
    steps = [
        ExampleStep.model_validate(
            {key: value for key, value in step.items() if value is not None}
        )
        for step in config["prepare"]
    ]
    names = set_names([entry.path for entry in data])
    for number, step in enumerate(steps):
        step_sources = list(step.config.sources or ())
        if step.filter is not None:
            step_sources += chain.from_iterable(step.filter.rule_sources.values())
        unknown = [name for name in step_sources if name not in names]
        if unknown:
            raise ExamplesError(
                f"{kind}.prepare[{number}].{step.stage}: there is no set "
                f"{unknown[0]!r} (sets, by their files: {', '.join(names)})"
            )
    read = [
        read_set(
            made_path(entry.path, inputs),
            kind,
            entry.format,
            entry.limit,
            entry.max_quarantined,
        )
        for entry in data
    ]
    quarantined = (example_set.quarantined for example_set in read)
    write_quarantined(out / QUARANTINED, zip(names, quarantined, strict=True))
    prepared_steps = [PreparedStep(step.stage, view_of(step, kind)) for step in steps]
    views = {step.judges for step in prepared_steps}
    write_documents(out, dict(zip(names, read, strict=True)), sorted(views))
    summaries = list(run_steps(steps, prepared_steps, out, context))
    sets = [
        prepared_set(name, entry.path, example_set, summaries)
        for name, entry, example_set in zip(names, data, read, strict=True)
    ]
    for checked_set in sets:
        check_set(kind, checked_set)
    preparation = asdict(Preparation(prepared_steps, sets))
    write_json(out / PREPARED, preparation)
    return {
        "sets": preparation["sets"],
        "steps": [
            {**step, **summary}
            for step, summary in zip(preparation["steps"], summaries, strict=True)
        ],
    }


def write_documents(
    out: Path, sets: Mapping[str, ExampleSet], views: Sequence[str]
) -> None:
    """Write the examples of all sets as documents, and their records; rows are ordered
    by set and id.

    The id of a document is that of its example; for a repeated example it is a hash of
    that id and the number of earlier ones.
    """
    occurrences = Counter[str]()
    for number, rows in enumerate(_shards(sets)):
        ids = []
        for row in rows:
            example = row.example["id"]
            earlier = occurrences[example]
            occurrences[example] += 1
            repetition = f"{example}/{earlier}".encode()
            ids.append(
                hashlib.blake2b(repetition, digest_size=ID_BYTES).digest()
                if earlier
                else bytes.fromhex(example)
            )
        shard = f"part-{number:05d}.parquet"
        columns = {
            "id": pa.array(ids, pa.binary(ID_BYTES)),
            "source": [row.set for row in rows],
            "locator": [row.origin.place for row in rows],
        }
        metadata = [
            metadata_json(
                {"example": row.example["id"]}
                | ({"url": row.origin.url} if row.origin.url else {})
            )
            for row in rows
        ]
        for view in views:
            texts = [view_text(view, row.example) for row in rows]
            write_table(
                out / DOCUMENTS / view / shard,
                pa.table({**columns, "text": texts, "metadata": metadata}).cast(
                    DOCUMENT_SCHEMA
                ),
            )
        records = [json.dumps(row.example, ensure_ascii=False) for row in rows]
        table = {"id": columns["id"], "set": columns["source"], "record": records}
        write_table(out / RECORDS / shard, pa.table(table).cast(RECORDS_SCHEMA))


class _Row(NamedTuple):
    """An example with the name of its set and its origin."""

    set: str
    example: Example
    origin: Origin


def _shards(sets: Mapping[str, ExampleSet]) -> Iterator[list[_Row]]:
    rows: list[_Row] = []
    size = 0
    for name, example_set in sets.items():
        for example, origin in zip(
            example_set.examples, example_set.origins, strict=True
        ):
            rows.append(_Row(name, example, origin))
            size += len(json.dumps(example))
            if size >= SHARD_BYTES:
                yield rows
                rows = []
                size = 0
    if rows:
        yield rows


def run_steps(
    steps: Sequence[ExampleStep],
    prepared_steps: Sequence[PreparedStep],
    out: Path,
    context: Context,
) -> Iterator[dict[str, Any]]:
    """Run every step on the documents that earlier steps kept; yield their
    summaries.
    """
    outputs: dict[str, Path] = {}
    for step, prepared in zip(steps, prepared_steps, strict=True):
        work = context.work / step.stage
        work.mkdir(parents=True, exist_ok=True)
        summary = run_step(
            step.stage,
            {"ingest": out / DOCUMENTS / prepared.judges, **outputs},
            step.config.model_dump(mode="json"),
            out / step.stage,
            replace(context, work=work, stage=f"{context.stage}: {step.stage}"),
        )
        yield json_object(summary)
        outputs[step.stage] = out / step.stage


def prepared_set(
    name: str, path: str, read: ExampleSet, summaries: Sequence[dict[str, Any]]
) -> PreparedSet:
    """Outcome of a set, from the summaries of the steps."""
    counts = [summary["counts"]["sources"].get(name, {}) for summary in summaries]
    dropped = add_counts(step_counts.get("dropped", {}) for step_counts in counts)
    return PreparedSet(
        **vars(read.counts()),
        name=name,
        path=path,
        dropped=dropped,
        quarantined=sum(step_counts.get("quarantined", 0) for step_counts in counts),
        kept=counts[-1].get("kept", 0) if counts else len(read.examples),
    )


def check_set(kind: Kind, prepared: PreparedSet) -> None:
    """Check that every record of a set is accounted for, and that examples are left.

    Raises:
        ConservationError: records were lost or counted twice.
        ExamplesError: no examples are left.
    """
    where = f"{kind}_prepare: {prepared.path}"
    check_records(where, prepared.counts(), prepared.kept)
    if not prepared.kept:
        most_frequent = ranked(prepared.dropped)[:SHOWN_REASONS]
        reasons = ", ".join(f"{rule} {number}" for rule, number in most_frequent)
        raise ExamplesError(
            f"{prepared.path}: {kind}.prepare leaves none of its {prepared.records} "
            f"records: {reasons}; loosen these rules, or remove the set"
        )
