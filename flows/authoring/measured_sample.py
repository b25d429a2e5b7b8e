"""`gristmill look`: measurements on a sample of undescribed data.

No stage is run and no output is kept: some documents are read as in `ingest` and
measured by the functions of the stages (`langid`, `dedup`, `filter`), so the results
are those of the stages.

On a new machine the kernels are compiled first, each in a process of its own while the
sample is read. Measurements that are not ready in time are named, and work in the next
call.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.annotate_batches import measure_texts
from gristmill.dataprep.documents import read_table, spread
from gristmill.dataprep.filters.rule_sets import (
    columns_read,
    measure,
)
from gristmill.dataprep.thresholds import failures, first_failures
from gristmill.dataprep.whatif_thresholds import short_name
from gristmill.flows.authoring.look_at_data import Look
from gristmill.flows.authoring.try_function import evenly_spaced, take_sample
from gristmill.flows.pages.page_elements import (
    Entry,
    Heading,
    Listing,
    Note,
    Span,
    Table,
    table,
)
from gristmill.flows.planning.quantities import counted, size
from gristmill.mixtures.steps.dedup import MinHash
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.rules import GopherQuality, Rules

SAMPLE_BYTES = 16_000_000
"""Bytes of text in a sample; every measurement takes a few seconds on it."""
SHOWN_DOCUMENTS = 10
SHOWN_CHARACTERS = 300
SHOWN_FAILURES = 3
SHOWN_LANGUAGES = 8
SHOWN_REASONS = 1
FETCH_SECONDS = 10
"""Timeout of each way to fetch a missing language model."""
LANGUAGES, DUPLICATES = "languages", "duplicates"
NOT_COMPILED = "the kernels that measure them are not compiled yet; look again"
ANY_TEXT = (
    "The river ran past the old mill and turned its wheel all day, and nobody had to "
    "look after it. " * 8
)
OTHER_SETS = ("c4", "fineweb", "curator", "running_text")
"""Rule sets for prose besides Gopher's."""


def rule_sets_for(is_code: bool, path_field: str | None = None) -> dict[str, Rules]:
    """Return the rule sets that judge a sample: name -> rules with default thresholds.

    Gopher's rules are those of a manifest that names no dialect; `gristmill dialects`
    compares all. Those of FineWeb and NeMo Curator are measured alone; these projects
    run them after Gopher's.
    """
    if is_code:
        return {"code": Rules.model_validate({"code": {"path_field": path_field}})}
    gopher = Rules.model_validate({"gopher_quality": {}, "gopher_repetition": {}})
    return {f"gopher ({GopherQuality().dialect})": gopher} | {
        name: Rules.model_validate({name: {}}) for name in OTHER_SETS
    }


def try_measuring(name: str, is_code: bool) -> str | None:
    """Compile the kernels of a measurement by running it on one document; return the
    missing requirement, or None.
    """
    texts = pa.chunked_array([[ANY_TEXT, ANY_TEXT[5:]]], pa.large_string())
    if name == LANGUAGES:
        return find_languages(texts, FETCH_SECONDS)[1]
    if name == DUPLICATES:
        find_duplicates(texts.combine_chunks())
    else:
        rows = pa.table(
            {
                "text": texts,
                "locator": ["a", "b"],
                "metadata": pa.nulls(2, pa.string()),
                "language": ["en", "en"],
                "script": pa.nulls(2, pa.string()),
            }
        )
        judge_by_rules(name, rule_sets_for(is_code)[name], rows)
    return None


@dataclass(frozen=True)
class UnreadableRecord:
    """An unreadable record, with its number in the file."""

    file: str
    record: int
    error: str


@dataclass(frozen=True)
class SampleSize:
    """Size and origin of the sample (the key `from` in JSON), and unreadable records:
    the first ones, and their number.
    """

    documents: int
    bytes: int
    from_: str
    unreadable: list[UnreadableRecord]
    unreadable_in_all: int


@dataclass(frozen=True)
class Languages:
    """Language -> documents, most first; and the error if the model is missing."""

    found: dict[str, int]
    missing: str | None


@dataclass(frozen=True)
class Duplicates:
    """Documents of the sample that `dedup` would drop: copies, and near-duplicates."""

    exact: int
    near: int


@dataclass(frozen=True)
class RulesVerdict:
    """Shares of documents and of bytes that a rule set keeps, and rule -> documents
    that it drops, most first.
    """

    name: str
    documents: float
    bytes: float
    dropped: dict[str, int]


@dataclass(frozen=True)
class Example:
    """The beginning of a document."""

    locator: str
    language: str | None
    characters: int
    text: str


@dataclass(frozen=True)
class MeasuredSample:
    """Measurements of a sample.

    Attributes:
        duplicates: None if not compiled in time.
        not_ready: names of measurements not compiled in time.
    """

    sample: SampleSize
    languages: Languages
    duplicates: Duplicates | None
    rules: list[RulesVerdict]
    not_ready: list[str]
    examples: list[Example]
    seconds: float


def measure_sample(
    path: str,
    look: Look,
    documents: int,
    seconds: float,
) -> MeasuredSample:
    """Read some documents of a source and measure them.

    Args:
        path: a file, glob, folder or URL.
        look: findings about it.
        documents: maximum number of documents to read; reading also stops after
            SAMPLE_BYTES of text.
        seconds: time limit for compiling kernels.

    Raises:
        gristmill.dataprep.readers.sources.SourceError: the path has no readable data.
    """
    started = time.monotonic()
    rule_sets = rule_sets_for(look.is_code, look.path_field)
    # Child processes fill the disk cache of kernels that this process reads; those that
    # compile longest begin first. A compiler keeps what it allocates: without garbage
    # collection it takes a sixth less time.
    names = [LANGUAGES, *rule_sets, DUPLICATES]
    num_processes = min(len(os.sched_getaffinity(0)), len(names))
    with multiprocessing.get_context("fork").Pool(num_processes, gc.disable) as pool:
        kernels = {
            name: pool.apply_async(try_measuring, (name, look.is_code))
            for name in names
        }
        with take_sample(path, None, documents, SAMPLE_BYTES) as sample:
            (folder,) = sample.inputs.values()
            columns = ["id", "source", "locator", "text", "metadata"]
            rows = pa.concat_tables(
                [read_table(folder / shard, columns) for shard in sample.shards],
                promote_options="permissive",
            )
        for kernel in kernels.values():
            kernel.wait(max(started + seconds - time.monotonic(), 0.0))
        ready = [name for name in names if kernels[name].ready()]
        missing = kernels[LANGUAGES].get() if LANGUAGES in ready else NOT_COMPILED
    pool.join()
    languages: list[str | None] = [None] * len(rows)
    if missing is None:
        languages, missing = find_languages(rows["text"], 0)
    rows = rows.append_column("language", pa.array(languages, pa.string()))
    rows = rows.append_column("script", pa.nulls(len(rows), pa.string()))
    counts = Counter(language for language in languages if language is not None)
    duplicates = None
    if DUPLICATES in ready:
        duplicates = find_duplicates(rows["text"].combine_chunks())
    examples = rows.take(evenly_spaced(range(len(rows)), SHOWN_DOCUMENTS)).to_pylist()
    return MeasuredSample(
        SampleSize(
            len(rows),
            int(text_sizes(rows).sum()),
            sample.described,
            [
                UnreadableRecord(file, record.number, record.error)
                for file, record in sample.failures[:SHOWN_FAILURES]
            ],
            len(sample.failures),
        ),
        Languages(dict(counts.most_common()), missing),
        duplicates,
        [
            judge_by_rules(name, rules, rows)
            for name, rules in rule_sets.items()
            if name in ready
        ],
        [name for name in names if name not in ready],
        [
            Example(
                row["locator"],
                row["language"],
                len(row["text"]),
                row["text"][:SHOWN_CHARACTERS],
            )
            for row in examples
        ],
        time.monotonic() - started,
    )


def find_languages(
    texts: pa.ChunkedArray, fetch_seconds: float
) -> tuple[list[str | None], str | None]:
    """Return the language of each of n texts, and the error if the model is
    unavailable.

    Args:
        texts: the documents.
        fetch_seconds: timeout of each way to fetch a missing model; 0 means not to
            fetch it.
    """
    from gristmill.core.files import sha256_file
    from gristmill.dataprep.fasttext.fasttext_models import (
        ModelError,
        find_model,
        ways_to_fetch,
    )
    from gristmill.dataprep.fasttext.fasttext_predict import load_model
    from gristmill.dataprep.langid import langid

    try:
        fetchers = ways_to_fetch(fetch_seconds, fetch_seconds) if fetch_seconds else {}
        path = find_model(fetchers=fetchers)
    except ModelError as error:
        return [None] * len(texts), str(error)
    model = load_model(str(path), sha256_file(path))
    measured, errors = measure_texts(
        texts, partial(langid.measure, model, LanguageId())
    )
    return spread(
        pa.array(measured["language"].tolist(), pa.string()), errors
    ).to_pylist(), None


def find_duplicates(texts: pa.Array) -> Duplicates:
    """Count the texts that `dedup` would drop with default settings: copies, and
    near-duplicates of longer texts.
    """
    from gristmill.core.arrays import binary_numbers
    from gristmill.dataprep.dedup.candidate_pairs import candidate_pairs
    from gristmill.dataprep.dedup.shingles import shingle_sets, similarities
    from gristmill.dataprep.dedup.sketches import sketch_texts

    section = MinHash()
    distinct = texts.unique()
    sketches = sketch_texts(distinct, section)
    numbers = np.repeat(np.arange(len(distinct)), section.bands)
    unsigned = numbers.astype(np.uint64)
    bands = binary_numbers(sketches["bands"]).ravel()
    pairs = candidate_pairs(bands, numbers, unsigned, unsigned, len(distinct))
    sets = shingle_sets(distinct, section.ngram)
    pairs = pairs[similarities(sets, pairs[:, 0], pairs[:, 1]) >= section.threshold]
    lengths = np.asarray(sketches["length"])
    # The longest text of each group survives, then the longest of the others.
    neighbours: dict[int, list[int]] = {}
    for text, near in [*pairs.tolist(), *pairs[:, ::-1].tolist()]:
        neighbours.setdefault(text, []).append(near)
    kept: set[int] = set()
    for text in sorted(neighbours, key=lambda number: (-lengths[number], number)):
        if kept.isdisjoint(neighbours[text]):
            kept.add(text)
    return Duplicates(len(texts) - len(distinct), len(neighbours) - len(kept))


def text_sizes(rows: pa.Table) -> np.ndarray:
    """Return the bytes of each text; int64."""
    return pc.binary_length(rows["text"]).to_numpy().astype(np.int64)


def judge_by_rules(name: str, rules: Rules, rows: pa.Table) -> RulesVerdict:
    """Judge documents by some rules."""
    sets, sizes = rules.sets, text_sizes(rows)
    columns = ["text", *dict.fromkeys(columns_read(sets))]
    statistics, errors = measure_texts(
        rows.select(columns), partial(measure, rules=rules)
    )
    is_measured = [error is None for error in errors]
    reasons = first_failures(failures(statistics, sets), sum(is_measured))
    kept = np.zeros(len(rows), bool)
    kept[is_measured] = [reason is None for reason in reasons]
    dropped = Counter(reason for reason in reasons if reason is not None)
    return RulesVerdict(
        name,
        float(kept.mean()),
        float(sizes[kept].sum() / max(sizes.sum(), 1)),
        dict(dropped.most_common()),
    )


def verdict_table(name: str, verdicts: Sequence[RulesVerdict]) -> Table:
    """Return a table of verdicts; `name` is the header of the first column."""
    rows = []
    for verdict in verdicts:
        reasons = [
            f"{short_name(rule)} {number:,}"
            for rule, number in list(verdict.dropped.items())[:SHOWN_REASONS]
        ]
        shares = (verdict.documents, verdict.bytes)
        rows.append((verdict.name, *shares, ", ".join(reasons)))
    return table({name: "", "kept": ".1%", "bytes": ".1%", "drops most by": ""}, rows)


def print_look(name: str, look: Look, measured: MeasuredSample) -> None:
    """Print the findings in lines that fit a narrow terminal."""
    from gristmill.flows.pages.terminal_pages import print_parts

    sample, languages = measured.sample, measured.languages
    total = sample.documents
    ignored = ", ".join(f"{number:,} {kind}" for kind, number in look.ignored.items())
    unreadable = [
        f"{entry.file}, record {entry.record}: {entry.error}"
        for entry in sample.unreadable
    ]
    num_hidden = sample.unreadable_in_all - len(unreadable)
    unreadable += [f"{counted(num_hidden, 'record')} more"] if num_hidden > 0 else []
    numbers = list(languages.found.items())
    shares = [f"{code} {n / total:.1%}" for code, n in numbers[:SHOWN_LANGUAGES]]
    hidden = [number for _, number in numbers[SHOWN_LANGUAGES:]]
    shares += [f"{len(hidden)} others {sum(hidden) / total:.1%}"] if hidden else []
    duplicates = [
        f"{kind} {number:,} ({number / total:.1%})"
        for kind, number in (
            vars(measured.duplicates).items() if measured.duplicates else ()
        )
    ]
    not_ready = (
        f"not measured yet: {', '.join(measured.not_ready)}. The first look on a "
        "machine compiles the kernels and caches them: look again, on a busy machine "
        "with --seconds 120"
    )
    documents = [
        Entry(
            Span(example.locator, "strong"),
            [Span(" ".join(example.text.split()))],
            f"{example.characters:,} characters"
            + (f", {example.language}" if example.language else ""),
        )
        for example in measured.examples
    ]
    print_parts(
        Note(f"{name}: {look.describe()}", "plain"),
        Heading("Files"),
        table(
            {"format": "", "files": ",", "size": ">"},
            [(kind, files, size(stored)) for kind, files, stored in look.formats],
        ),
        Note(f"not read: {ignored}", "warning") if ignored else None,
        Heading(f"Sample: {counted(total, 'document')}, {size(sample.bytes)}"),
        Note(f"from {sample.from_}", "plain"),
        [Note(f"unreadable: {entry}", "warning") for entry in unreadable],
        Heading("Languages"),
        Note(
            f"not measured: {languages.missing}"
            if languages.missing
            else ", ".join(shares),
            "plain",
        ),
        [
            Heading("Duplicates in the sample (the whole has more)"),
            ", ".join(duplicates),
        ]
        if duplicates
        else None,
        Heading("Kept by rule sets"),
        verdict_table("rules", measured.rules),
        Note(not_ready, "warning") if measured.not_ready else None,
        Heading(counted(len(documents), "document")),
        Listing("", documents),
    )
