"""`gristmill bench scale`: raw JSON lines to packed shards at tens of gigabytes, on one
host and on two.

Documents are paragraphs of real text (the public test data, or documentation of the
installed packages), drawn by seeds: some 4.8 kB each, of which one in ten is a copy of an
earlier one. They are written in compressed files of 100 MB of text. The second host
has the same store, and processes, a network and a name of its own; each then has one
worker.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import zstandard

from benchmarks.chain.chain import BOUND_NOTE, GIBI, GIGA, exponent_row
from benchmarks.chain.our_chain import (
    OWN,
    WORKERS,
    Chain,
    Models,
    Run,
    make_models,
    write_chain,
)
from benchmarks.chain.pages import Corpus, remove_corpus
from benchmarks.installed_texts import paragraphs
from benchmarks.measuring import Row, cost_row, row
from benchmarks.public_data import prose

DOCUMENTS = (650_000, 6_500_000)
"""About 3 GB and 31 GB; the larger needs 60 GB of disk."""
FILE_DOCUMENTS = 25_000
PARAGRAPHS_PER_DOCUMENT = 8
COPIED = 0.1
LEAST_CHARACTERS, MOST_CHARACTERS = 200, 1500
"""Of a paragraph."""
INSTALLED_PARAGRAPHS, WORDS_OF_INSTALLED = 20_000, 60
PEAK_GIBIBYTES = 3.0
"""The bound for all processes of a host together."""
HOST = (
    *("unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"),
    *("sh", "-c", 'hostname "$0" && ip link set lo up && exec "$@"'),
)
"""Command of a host of its own; its name follows, and then the command that it runs."""


def rows(
    documents: Sequence[int] = DOCUMENTS, folder: Path | None = None
) -> Iterator[Row]:
    """Measure time, memory, files and growth on one host, and the largest corpus on two.

    Args:
        documents: sizes of corpora.
        folder: work folder; a temporary one if None.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="gristmill-scale-") as temporary:
            yield from rows(documents, Path(temporary))
        return
    models = make_models(folder / "models")
    if models is None:
        note = "there is no language model here, and none can be fetched"
        yield row("scale", None, None, "MB/s", note)
        return
    smaller: tuple[Corpus, Run] | None = None
    for number in sorted(documents):
        corpus = write_corpus(folder / f"texts-{number}", number)
        chain = write_chain(folder / f"chain-{number}", corpus, models, OWN)
        run = chain.run(sample_memory=True)
        yield from run_rows(f"one host, {number:,} documents", corpus, chain, run)
        if smaller is not None:
            yield exponent_row(*smaller, corpus, run)
        smaller = corpus, run
        if number == max(documents):
            yield from two_host_rows(folder, corpus, chain, models)
        remove_corpus(corpus)
        shutil.rmtree(chain.folder)


def run_rows(name: str, corpus: Corpus, chain: Chain, run: Run) -> Iterator[Row]:
    """Rows of one run."""
    size = corpus.text_bytes / 1e6
    stages = ", ".join(
        f"{stage} {seconds:.0f} s" for stage, seconds in chain.stage_seconds().items()
    )
    yield row(
        f"scale, {name}",
        size / run.seconds,
        None,
        "MB/s",
        f"{size:,.0f} MB of text in {run.seconds:,.0f} s and {run.cpu_seconds:,.0f} s "
        f"of CPU, {chain.kept():,} kept; {stages}",
    )
    yield cost_row(
        f"scale, {name}: memory",
        run.peak_bytes / GIBI,
        PEAK_GIBIBYTES,
        "GiB",
        f"all processes of a host together, mapped files included; {BOUND_NOTE}",
    )
    files, stored = chain.files()
    yield row(
        f"scale, {name}: files",
        files / (corpus.text_bytes / GIGA),
        None,
        "files per GB",
        f"{files:,} files of {stored / GIGA:.1f} GB",
    )


def two_host_rows(
    folder: Path, corpus: Corpus, alone: Chain, models: Models
) -> Iterator[Row]:
    """Rows of a run on two hosts, and whether it leaves the same bytes.

    Outputs of the run on one host are removed before: only the records of their files are kept.
    """
    files_alone = alone.committed_files()
    shutil.rmtree(alone.store)
    hosts = [
        write_chain(folder / f"chain-{host}", corpus, models, OWN)
        for host in ("host-a", "host-b")
    ]
    store = hosts[0].store
    options = ("--store", str(store), "--set", "engine.nodes=2", "--no-ui")

    def run_host(chain: Chain) -> Run:
        command = (*HOST, chain.folder.name, sys.executable)
        one_worker = ("--set", f"engine.workers={WORKERS // 2}")
        return chain.run(*options, *one_worker, command=command, sample_memory=True)

    with ThreadPoolExecutor(len(hosts)) as pool:
        runs = list(pool.map(run_host, hosts))
    # each counts the processor time of both, which are children of this process
    together = Run(
        max(run.seconds for run in runs),
        max(run.cpu_seconds for run in runs),
        max(run.peak_bytes for run in runs),
    )
    name = f"two hosts, {corpus.documents:,} documents"
    verdict = (
        "the same bytes" if hosts[0].committed_files() == files_alone else "OTHER BYTES"
    )
    for measured in run_rows(name, corpus, hosts[0], together):
        yield replace(measured, note=f"{measured.note}; {verdict}")
    for chain in hosts:
        shutil.rmtree(chain.folder)


def write_corpus(folder: Path, documents: int) -> Corpus:
    """Write documents 0 to `documents` - 1 as JSON lines, the same in every run."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(math.ceil(documents / FILE_DOCUMENTS))
    with ProcessPoolExecutor(WORKERS) as pool:
        sizes = pool.map(partial(write_file, folder, documents), numbers)
        text_bytes = sum(sizes)
    record = {"documents": documents, "text_bytes": text_bytes}
    folder.with_suffix(".json").write_text(json.dumps(record))
    return Corpus(folder, documents, text_bytes)


def write_file(folder: Path, documents: int, number: int) -> int:
    """Write one file of documents; returns their bytes of text."""
    first = number * FILE_DOCUMENTS
    text_bytes = 0
    compressor = zstandard.ZstdCompressor(level=1)
    with (
        open(folder / f"{number:05d}.jsonl.zst", "wb") as sink,
        compressor.stream_writer(sink) as lines,
    ):
        for place in range(first, min(first + FILE_DOCUMENTS, documents)):
            text, size = draw(place)
            text_bytes += size
            lines.write(f'{{"id": "{place}", "text": "{text}"}}\n'.encode())
    return text_bytes


def draw(number: int) -> tuple[str, int]:
    """Text of a document, escaped for JSON, and its size in bytes."""
    source = random.Random(number)
    while source.random() < COPIED and number:
        number = source.randrange(number)
        source = random.Random(number)
    drawn = source.sample(escaped_paragraphs(), PARAGRAPHS_PER_DOCUMENT)
    separators = 2 * (len(drawn) - 1)
    return r"\n\n".join(text for text, _ in drawn), separators + sum(
        size for _, size in drawn
    )


@cache
def escaped_paragraphs() -> list[tuple[str, int]]:
    """Paragraphs, escaped for JSON, and their sizes in bytes."""
    return [
        (json.dumps(text, ensure_ascii=False)[1:-1], len(text.encode()))
        for text in dict.fromkeys(read_paragraphs())
    ]


def read_paragraphs() -> Iterator[str]:
    """Paragraphs of prose of the public test data, or of installed packages."""
    texts = list(prose())
    if not texts:
        yield from paragraphs(INSTALLED_PARAGRAPHS, WORDS_OF_INSTALLED)
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            if len(paragraph) >= LEAST_CHARACTERS:
                yield paragraph.strip()[:MOST_CHARACTERS]
