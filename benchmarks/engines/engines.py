"""Cost of each engine for a whole chain over real text, against the local runner with
two workers.

The chain is that of `bench chain` with gristmill's own settings: ingest, filter, dedup,
langid, quality, tokenize, mix; by a user's command without Prefect, with the engine
already running on the loopback address. Its corpus is real, distinct text; the largest
is also read as pages of HTML in web archives, as many bytes of them. Times of
processors and memory are those of all processes of the command and of the engine
(`process_watch.py`).
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chain.our_chain import (
    LOCAL,
    OWN,
    WORKERS,
    Models,
    make_models,
    write_chain,
)
from benchmarks.chain.pages import Corpus, write_archives, write_corpus
from benchmarks.chain.peers import fresh
from benchmarks.engines.clusters import running
from benchmarks.engines.process_watch import Usage, Watch, wait_for_rest
from benchmarks.measuring import Row, cost_row, row
from gristmill.dataprep.runners.errors import MissingEngineError
from gristmill.mixtures.base import Options

MEGABYTES = (60,)
"""Smallest corpus whose work outweighs the start of its processes."""
DOCUMENTS_PER_MEGABYTE = 480
HTML_PAGES_PER_MEGABYTE = 26
WARM = 600
"""Pages of a corpus that compiles kernels before any measurement."""
MOST_MEMORY = 1.5
"""Most memory against the local runner."""
MEGA, GIGA, HOUR = 1e6, 1e9, 3600


@dataclass(frozen=True)
class Bounds:
    """Bounds of an engine.

    Attributes:
        cluster: its name in `clusters.ENGINES`.
        cpu: most processor time against the local runner, by the MB of the corpus from
            which it holds.
        first_byte_seconds: most time from the command to the first byte of a document.
    """

    cluster: str
    cpu: Mapping[int, float]
    first_byte_seconds: float | None


BOUNDS = {
    "ray": Bounds("ray-host", {300: 1.3, 800: 1.15}, 10.0),
    "dask": Bounds("dask-host", {300: 1.3, 800: 1.15}, 10.0),
    "spark": Bounds("spark-host", {300: 1.3, 800: 1.15}, 20.0),
    "flink": Bounds("flink-host", {300: 2.0}, None),
}
"""Engines in the order of their rows."""


@dataclass(frozen=True)
class Measured:
    """Usage of a run of the chain, and its output: path -> checksum and size."""

    usage: Usage
    files: Mapping[str, object]


def rows(
    megabytes: Sequence[int] = MEGABYTES,
    engines: Sequence[str] = tuple(BOUNDS),
    folder: Path | None = None,
) -> Iterator[Row]:
    """Measure processor time by part, memory and start of each engine, and the growth
    of the processor time.

    Args:
        megabytes: sizes of corpora.
        engines: their names.
        folder: work folder; a temporary one if None. Models and corpora in it are used
            again.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="gristmill-engines-") as temporary:
            yield from rows(megabytes, engines, Path(temporary))
        return
    models = make_models(folder / "models")
    if models is None:
        yield row("engines", None, None, "s", "there is no language model here")
        return
    measure(folder / "warm", write_corpus(folder / "corpus-warm", WARM), models)
    previous: dict[str, tuple[Corpus, Measured]] = {}
    for size in sorted(megabytes):
        corpus = write_corpus(folder / f"corpus-{size}", size * DOCUMENTS_PER_MEGABYTE)
        local = measure(folder / "local", corpus, models)
        sides = {"local": local}
        for name in engines:
            measured = measure_engine(name, folder / name, corpus, models)
            if measured is None:
                yield row(
                    f"{name}, {size} MB", None, None, "s", "not installed: make engines"
                )
                continue
            sides[name] = measured
            yield from engine_rows(name, corpus, measured, local)
        for name, measured in sides.items():
            if name in previous:
                yield from growth_rows(name, *previous[name], corpus, measured)
            previous[name] = corpus, measured
    yield from archive_rows(max(megabytes), tuple(previous), folder, models)


def archive_rows(
    megabytes: int, engines: Sequence[str], folder: Path, models: Models
) -> Iterator[Row]:
    """Measure what a core-hour of the local runner and of each engine cleans of web
    archives.
    """
    corpus, html_bytes = write_archives(
        fresh(folder / "archives"), megabytes * HTML_PAGES_PER_MEGABYTE
    )
    local = measure(folder / "local", corpus, models)
    for name in engines:
        if name == "local":
            continue
        measured = measure_engine(name, folder / name, corpus, models)
        if measured is not None:
            yield core_hour_row(
                f"{name}, {html_bytes / MEGA:.0f} MB of HTML in web archives",
                html_bytes,
                measured.usage,
                local.usage,
            )


def measure_engine(
    name: str, folder: Path, corpus: Corpus, models: Models
) -> Measured | None:
    """Run the chain on an engine that is started for it; None if it is not installed."""
    try:
        with running(BOUNDS[name].cluster, fresh(folder)) as cluster:
            wait_for_rest()
            measured = measure(folder / "chain", corpus, models, cluster.engine)
    except MissingEngineError:
        return None
    shutil.rmtree(folder)
    return measured


def core_hour_row(title: str, num_bytes: int, usage: Usage, local: Usage) -> Row:
    """Return the row of the bytes that a core-hour cleans."""
    return row(
        f"{title}: text per core-hour",
        num_bytes / GIGA / usage.cpu_seconds * HOUR,
        num_bytes / GIGA / local.cpu_seconds * HOUR,
        "GB",
    )


def measure(
    folder: Path,
    corpus: Corpus,
    models: Models,
    engine: Options = LOCAL,
) -> Measured:
    """Run the chain in an empty store with an engine, the local runner by default."""
    chain = write_chain(fresh(folder), corpus, models, OWN, engine=engine)
    with Watch(chain.store / "ingest") as watch:
        chain.run("--no-ui")
    return Measured(watch.usage(), chain.committed_files())


def engine_rows(
    name: str, corpus: Corpus, measured: Measured, local: Measured
) -> Iterator[Row]:
    """Return the rows of an engine on a corpus."""
    size = corpus.text_bytes / MEGA
    title = f"{name}, {size:.0f} MB"
    bounds = BOUNDS[name]
    ours, peer = measured.usage, local.usage
    verdict = "the same bytes" if measured.files == local.files else "OTHER BYTES"
    limits = [limit for start, limit in bounds.cpu.items() if size > 0.9 * start]
    yield cost_row(
        f"{title}: CPU",
        ours.cpu_seconds,
        peer.cpu_seconds,
        "s",
        f"{verdict}; {ours.seconds:.1f} s by the clock, local {peer.seconds:.1f} s",
        floor=1 / min(limits) if limits else None,
    )
    yield core_hour_row(title, corpus.text_bytes, ours, peer)
    for part, seconds in sorted(ours.part_seconds.items(), key=lambda item: -item[1]):
        yield row(
            f"{title}: CPU of {part}",
            seconds,
            peer.part_seconds.get(part),
            "s",
            f"{ours.part_processes[part]} processes",
        )
    yield cost_row(
        f"{title}: memory",
        ours.peak_bytes / MEGA,
        peer.peak_bytes / MEGA,
        "MB",
        ", ".join(
            f"{part} {size / MEGA:.0f}" for part, size in ours.peak_parts.items()
        ),
        floor=1 / MOST_MEMORY,
    )
    if bounds.first_byte_seconds is not None:
        yield cost_row(
            f"{title}: first byte",
            ours.first_byte_seconds,
            bounds.first_byte_seconds,
            "s",
            f"peer: the bound; local {peer.first_byte_seconds:.1f} s",
            floor=1.0,
        )


def growth_rows(
    name: str,
    corpus: Corpus,
    measured: Measured,
    larger_corpus: Corpus,
    larger: Measured,
) -> Iterator[Row]:
    """Return the exponent of processor time by size between two corpora, and the time
    of an empty corpus and of a core per GB by a line through both.
    """
    small, large = corpus.text_bytes / MEGA, larger_corpus.text_bytes / MEGA
    title = f"{name}, {small:.0f} to {large:.0f} MB"
    exponent = math.log(
        larger.usage.cpu_seconds / measured.usage.cpu_seconds
    ) / math.log(large / small)
    yield row(f"{title}: exponent", exponent, None, "of CPU by size")
    slope = (larger.usage.seconds - measured.usage.seconds) / (large - small)
    start = measured.usage.seconds - slope * small
    yield row(f"{title}: start", start, None, "s")
    yield row(f"{title}: core", slope * WORKERS * 1000, None, "s per GB")
