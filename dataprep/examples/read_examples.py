"""Reader of instructions (SFT), preferences (DPO) and prompts (RL): one shape for all
input forms.

    prompts       prompt or question, a text or messages; the reference answer under
                  `answer`, if any
    any of SFT    the messages before the last answer are the prompt; that answer is the
                  reference, unless a row has an `answer`

Unless a manifest names the form, a row's keys determine it.

`conversations.py` has the keys of an example and its messages; the input forms are
there and in `preferences.py`. Rows come from JSON lines (optionally compressed), a
`.json` file with one list, or Parquet. `python-docs://` derives all kinds from the
docstrings of the standard library.

No record is lost: records = examples + quarantined records + records beyond the limit.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gristmill.core.files import as_path, canonical_json
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.examples.conversations import (
    Example,
    Row,
    check_answered,
    first_key,
    form_of,
    refuse_media,
    sft_example,
    sft_messages,
    turns,
    with_system,
    with_tools,
)
from gristmill.dataprep.examples.preferences import dpo_example
from gristmill.dataprep.licences.statements import of_record
from gristmill.dataprep.readers.compression import (
    CorruptFileError,
    RecordTooLongError,
    Unended,
)
from gristmill.dataprep.readers.json_array import json_lines
from gristmill.dataprep.readers.jsonl import parse_json
from gristmill.dataprep.readers.parquet import table_rows
from gristmill.dataprep.readers.pythondocs import (
    DOCS,
    QUESTIONS_VERSION,
    preferences,
    questions,
)
from gristmill.dataprep.readers.sources import SourceError, SourceFile, find_files
from gristmill.mixtures.schema.rl import RecordColumns
from gristmill.mixtures.schema.sources import DocumentFiles
from gristmill.mixtures.steps.examples import MADE, output_name

PROMPT_KEYS = ("prompt", "question")
"""Keys of a prompt; `question` is GSM8K's."""
ANSWER = "answer"
PROMPT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Keys that TRL's GRPOTrainer does not pass to rewards as columns."""
NO_COLUMNS = RecordColumns()
SHOWN_REASONS, SHOWN_PLACES = 10, 4
OWN_ID = re.compile(r"[0-9a-f]{32}")
VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""Values in a reason, quoted or numeric; reasons that differ only in them are of one
kind.
"""

Kind = Literal["sft", "dpo", "prompts"]


class ExamplesError(SourceError):
    """Unusable examples; the message has the file and line of each."""


@dataclass(frozen=True)
class Quarantined:
    """A record that is not an example.

    Attributes:
        place: file and line, or row of a table or index in a list, from 1.
        reason: problem of the record.
    """

    place: str
    reason: str


@dataclass(frozen=True)
class Origin:
    """Origin of an example.

    Attributes:
        place: as of a quarantined record.
        url: page that it was derived from, if its record has `url`.
        licence: of its record, if given.
        record: id in its record, if it has the form of gristmill's ids.
    """

    place: str
    url: str | None = None
    licence: str | None = None
    record: str | None = None

    @classmethod
    def of(cls, place: str, record: Row) -> Origin:
        """Origin of a record."""
        url = record.get("url")
        statement = of_record(record)
        record_id = record.get("id")
        return cls(
            place,
            url if isinstance(url, str) else None,
            statement.licence if statement else None,
            record_id
            if isinstance(record_id, str) and OWN_ID.fullmatch(record_id)
            else None,
        )


@dataclass(frozen=True)
class RecordCounts:
    """Outcome of a set's records; all others are examples.

    Attributes:
        records: number of records read.
        refused: quarantined records.
        refused_reasons: number of them by reason, the most frequent reasons.
        beyond_limit: examples beyond the set's limit.
    """

    records: int
    refused: int
    refused_reasons: Mapping[str, int]
    beyond_limit: int


@dataclass(frozen=True)
class ExampleSet:
    """Examples read from a set.

    Attributes:
        examples: in the order of their ids.
        origins: one per example.
        quarantined: in the order of the files.
        records: number of records read.
    """

    examples: Sequence[Example]
    origins: Sequence[Origin]
    quarantined: Sequence[Quarantined]
    records: int

    def places(self) -> dict[str, str]:
        """File and line of each example, by id."""
        ids = (example["id"] for example in self.examples)
        return {id: origin.place for id, origin in zip(ids, self.origins, strict=True)}

    def counts(self) -> RecordCounts:
        """Outcome of the records."""
        reasons = Counter(record.reason for record in self.quarantined)
        num_quarantined = len(self.quarantined)
        return RecordCounts(
            records=self.records,
            refused=num_quarantined,
            refused_reasons=dict(reasons.most_common(SHOWN_REASONS)),
            beyond_limit=self.records - num_quarantined - len(self.examples),
        )


def prompt_example(
    row: Row,
    form: str = "auto",
    answer: str = ANSWER,
    columns: RecordColumns = NO_COLUMNS,
) -> Example:
    """Convert a row to a prompt for reinforcement learning (without `id`).

    Args:
        row: as read.
        form: `prompts`, a form of `sft_messages`, or `auto`.
        answer: key of the reference answer.
        columns: keys whose values are kept under `columns`.

    Raises:
        ValueError: its form is unknown or is not `form`, or it lacks one of the
            columns; the message says why.
    """
    refuse_media("the record", row)
    form = prompt_form_of(row) if form == "auto" else form
    if form == "prompts":
        key = first_key(row, PROMPT_KEYS) or PROMPT_KEYS[0]
        messages = turns(key, row.get(key), "user")
    else:
        messages = sft_messages(row, form)
    messages = with_system(row, messages)
    value = row.get(answer)
    reference: str | None = None
    if isinstance(value, str) and value.strip():
        reference = value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        reference = str(value)
    elif value is not None:
        raise ValueError(f"{answer} must be a text or a number, not {value!r}")
    if messages[-1]["role"] == "assistant":
        *messages, answer_message = messages
        reference = answer_message["content"] if reference is None else reference
    if not messages:
        raise ValueError("there is no message in front of the answer")
    check_answered("the prompt", [*messages, {"role": "assistant", "content": "..."}])
    example: Example = {"prompt": messages}
    if reference is not None:
        example["answer"] = reference
    example = with_tools(row, example)
    missing = [name for name in columns.needed if name not in row]
    if missing:
        raise ValueError(
            f"has no {missing[0]!r}, which rl.rewards takes; its keys "
            f"are {', '.join(row)}"
        )
    optional = [
        name
        for name in row
        if name in columns.optional or (columns.all and name not in PROMPT_COLUMNS)
    ]
    kept: dict[str, object] = {}
    for name in (*columns.needed, *optional):
        try:
            canonical_json(row[name])
        except (TypeError, ValueError) as error:
            if name in columns.needed:
                raise ValueError(
                    f"columns of rl.rewards hold what JSON cannot: {error}"
                ) from error
        else:
            kept[name] = row[name]
    if kept:
        example["columns"] = kept
    return example


def prompt_form_of(row: Row) -> str:
    """Determine the form of a row from its keys.

    Raises:
        ValueError: the keys match no form.
    """
    if first_key(row, PROMPT_KEYS) and not first_key(row, ("completion", "response")):
        return "prompts"
    try:
        return form_of(row)
    except ValueError:
        raise ValueError(
            f"no known form: its keys are {', '.join(row) or 'none'}; needed are "
            "prompt (or question), or messages, or what instructions have"
        ) from None


def read_set(
    path: str,
    kind: Kind,
    form: str = "auto",
    limit: int | None = None,
    max_quarantined: float = 0.0,
    answer: str = "answer",
    columns: RecordColumns = NO_COLUMNS,
) -> ExampleSet:
    """Read all examples of a file, glob, folder, URL or `python-docs://`.

    Args:
        path: JSON lines or a JSON array (.json, .jsonl, .gz, .zst, .bz2), Parquet, or
            `python-docs://`.
        kind: `sft`, `dpo` or `prompts`.
        form: a form of `sft_messages` or `prompt_example`, one of DPO_FORMS, or `auto`:
            determined by each row's keys.
        limit: number of examples to keep, the first by id.
        max_quarantined: share of the records that may be quarantined.
        answer: for prompts, the key of the reference answer.
        columns: for prompts, the keys to keep.

    Raises:
        ExamplesError: there are no examples, too many records are quarantined (lists
            them by reason), or a file is truncated or damaged.
    """
    contents: list[tuple[Example, Origin]] = []
    quarantined: list[Quarantined] = []
    if path == DOCS:
        documented: Iterable[Example] = preferences() if kind == "dpo" else questions()
        if kind == "prompts":
            documented = (prompt_example(item, columns=columns) for item in documented)
        for number, content in enumerate(documented, start=1):
            contents.append((content, Origin(f"{path}{number}")))
    else:
        convert: Callable[[Row], Example] = {
            "sft": partial(sft_example, form=form),
            "dpo": partial(dpo_example, form=form),
            "prompts": partial(
                prompt_example, form=form, answer=answer, columns=columns
            ),
        }[kind]
        for place, row in _rows(path):
            try:
                record = _record(row)
                contents.append((convert(record), Origin.of(place, record)))
            except CorruptFileError as error:
                raise ExamplesError(
                    f"{place}: {error}; the number of records lost after it is "
                    "unknown: replace the file"
                ) from error
            except ValueError as error:
                quarantined.append(Quarantined(place, str(error)))
    records = len(contents) + len(quarantined)
    if not records:
        raise ExamplesError(f"{path}: holds no examples")
    if len(quarantined) > max_quarantined * records or not contents:
        raise ExamplesError(
            f"{path}: {len(quarantined)} of {records} records are not {kind} "
            f"examples; correct or remove them, or raise the max_quarantined of this "
            f"path from {max_quarantined:g}:\n  " + "\n  ".join(_by_reason(quarantined))
        )
    examples: list[tuple[Example, Origin]] = [
        ({"id": example_id(content), **content}, origin) for content, origin in contents
    ]
    kept = sorted(examples, key=lambda item: item[0]["id"])[:limit]
    return ExampleSet(
        [example for example, _ in kept],
        [origin for _, origin in kept],
        quarantined,
        records,
    )


def read_records(path: str) -> Iterator[tuple[str, Row]]:
    """Yield the unconverted records of a file, glob, folder or URL, each with its
    place.

    Args:
        path: as of `read_set`.

    Raises:
        ExamplesError: a record is not an object or cannot be read, or the path matches
            nothing.
    """
    for place, row in _rows(path):
        try:
            yield place, _record(row)
        except (CorruptFileError, ValueError) as error:
            raise ExamplesError(f"{place}: {error}") from error


def _by_reason(quarantined: Sequence[Quarantined]) -> Iterator[str]:
    """One line per kind of reason, the most frequent first; reasons of one kind differ
    only in values.
    """
    kinds: dict[str, list[Quarantined]] = {}
    for record in quarantined:
        kinds.setdefault(VALUES.sub("", record.reason), []).append(record)
    for records in sorted(kinds.values(), key=len, reverse=True)[:SHOWN_REASONS]:
        line = f"{records[0].place}: {records[0].reason}"
        if len(records) > 1:
            places = ", ".join(record.place for record in records[1:SHOWN_PLACES])
            end = " ..." if len(records) > SHOWN_PLACES else ""
            line += f" (and {len(records) - 1:,} like it: {places}{end})"
        yield line
    if len(kinds) > SHOWN_REASONS:
        yield f"and {len(kinds) - SHOWN_REASONS} other reasons"


def examples_listing(path: str) -> list[dict[str, str | int]]:
    """Listing that fingerprints a set of examples: `path`, `size`, `stamp` of each
    file; Python's version; or only the name of a generated set.

    Raises:
        ExamplesError: the path matches nothing.
    """
    # the fingerprint of the generating stage covers its content
    if path.startswith(MADE):
        return [{"path": path, "size": 0, "stamp": ""}]
    if path == DOCS:
        stamps = {"python": sys.version, "questions": str(QUESTIONS_VERSION)}
        return [
            {"path": name, "size": 0, "stamp": stamp} for name, stamp in stamps.items()
        ]
    return [
        {"path": file.name, "size": file.size, "stamp": file.stamp}
        for file in _files(path)
    ]


def made_path(path: str, inputs: Inputs) -> str:
    """Path of a set: for a generated set, its file among a stage's inputs; otherwise
    unchanged.
    """
    if not path.startswith(MADE):
        return path
    name = path.removeprefix(MADE)
    return str(inputs[output_name(name)] / f"{name}.jsonl")


def example_id(content: Example) -> str:
    """Content hash of an example: 32 hexadecimal digits."""
    return hashlib.blake2b(canonical_json(content), digest_size=16).hexdigest()


def _files(path: str) -> list[SourceFile]:
    """Files of a set: the JSON and Parquet files of a folder, or all files that the
    path matches.
    """
    files: dict[str, SourceFile] = {}
    errors = []
    for form in ("jsonl", "parquet"):
        section = DocumentFiles.model_validate({"path": path, "format": form})
        try:
            for file in find_files("examples", section).files:
                files.setdefault(file.name, file)
        except SourceError as error:
            errors.append(str(error))
    if not files:
        raise ExamplesError(errors[0])
    return [files[name] for name in sorted(files)]


def _record(row: Any) -> Row:
    if isinstance(row, ValueError):
        raise row
    if isinstance(row, bytes):
        try:
            row = parse_json(row)
        except ValueError as error:
            if isinstance(row, Unended):
                raise CorruptFileError(
                    f"the file is cut off in its last line: {error}"
                ) from error
            raise
    if not isinstance(row, dict):
        raise ValueError("a JSON object was expected")
    return row


def _rows(path: str) -> Iterator[tuple[str, Any]]:
    """Rows of a set with their places: unparsed JSON, an object, or an error."""
    for file in _files(path):
        if file.name.endswith(".parquet"):
            for number, row in table_rows(as_path(file.location)):
                yield f"{file.name}:{number}", row
            continue
        number = 0
        lines = json_lines(as_path(file.location), file.compression)
        try:
            for number, line in enumerate(lines, start=1):
                if isinstance(line, RecordTooLongError) or (
                    line and not line.isspace()
                ):
                    yield f"{file.name}:{number}", line
        except CorruptFileError as error:
            yield f"{file.name}:{number + 1}", error
