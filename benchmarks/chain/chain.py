"""`gristmill bench chain`: raw JSONL to packed shards, against whole chains of others,
on two cores and one corpus.

The chain reads, judges by the rules of Gopher, C4 and FineWeb, removes near duplicates,
identifies languages, scores by a classifier, encodes and mixes; each time by a user's
command, with Prefect's recording, in a process of its own. There are two settings:
those with datatrove's verdicts (its dialect with spaCy's words, every candidate pair of
MinHash a duplicate), for the rows against datatrove; and gristmill's own. datatrove's
pipeline is that of its FineWeb example, MinHash in its four steps, with two workers.
Peers that do less are compared with a chain of ours with the same steps (`Peer.same`).

Every peer gets every corpus (`pages.py`): some 110 MB are real, distinct prose, and what
a larger one has beyond that is the same sentences in another order. A corpus and its
outputs are removed after the last row of it.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.chain.kernels_alone import seconds_per_mb
from benchmarks.chain.our_chain import (
    OWN,
    VERDICTS,
    WORKERS,
    Chain,
    Models,
    Run,
    make_models,
    write_chain,
)
from benchmarks.chain.pages import CORPUS, Corpus, remove_corpus, write_corpus
from benchmarks.chain.peers import PEERS, Peer, PeerError, fresh
from benchmarks.chain.verdicts import compare, datatrove_verdicts, our_verdicts
from benchmarks.measuring import Row, cost_row, row
from gristmill.mixtures.base import RawSection

DOCUMENTS = (29_600, 121_500)
"""About 62 MB and 317 MB."""
FEW, WARM = 60, 600
"""Pages of a nearly empty corpus, and of one that compiles kernels before any
measurement.
"""
MB_PER_CORE_SECOND, FIXED_SECONDS, SECOND_RUN_SECONDS, PEAK_GIBIBYTES, EXPONENT = (
    10.0,
    3.0,
    3.0,
    2.0,
    1.05,
)
"""The bounds."""
AIMS = {60: (50, 0.5), 300: (100, 0.35)}
"""Least MB of a corpus -> the aims: times as fast as datatrove, and the share of
processor time outside of the kernels.
"""
BOUND_NOTE = "peer: the bound"
MEGA, GIGA, GIBI = 1e6, 1e9, 1 << 30


def rows(
    documents: Sequence[int] = DOCUMENTS,
    flame: Path | None = None,
    folder: Path | None = None,
) -> Iterator[Row]:
    """Measure fixed cost, peers and growth.

    Args:
        documents: sizes of corpora.
        flame: receives a flame graph of the chain, an SVG, on the largest corpus.
        folder: work folder; a temporary one if None. Models and corpora in it are used
            again.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="gristmill-chain-") as temporary:
            yield from rows(documents, flame, Path(temporary))
        return
    models = make_models(folder / "models")
    if models is None:
        yield row(
            "chain",
            None,
            None,
            "MB/s",
            "there is no language model here, and none can be fetched",
        )
        return
    warmup_corpus = write_corpus(folder / "corpus-warm", WARM)
    for name, settings in (("verdicts", VERDICTS), ("own", OWN)):
        first_run(folder / f"warm-{name}", warmup_corpus, models, settings)
    yield from fixed_rows(folder, models)
    sizes = sorted(documents)
    corpora = [write_corpus(folder / f"corpus-{number}", number) for number in sizes]
    for peer in PEERS:
        yield from peer_rows(folder, peer, corpora, models)
    if flame is not None:
        from benchmarks.chain.flame import draw_flame

        yield draw_flame(
            write_chain(fresh(folder / "flame"), corpora[-1], models, OWN), flame
        )
        shutil.rmtree(folder / "flame")
    yield from scale_rows(folder, sizes, models)


def first_run(
    folder: Path,
    corpus: Corpus,
    models: Models,
    settings: RawSection,
    packed: bool = True,
    sample_memory: bool = False,
) -> tuple[Chain, Run]:
    """Run a chain in an empty store; see `write_chain` and `Chain.run`."""
    chain = write_chain(fresh(folder), corpus, models, settings, packed)
    return chain, chain.run(sample_memory=sample_memory)


def fixed_rows(folder: Path, models: Models) -> Iterator[Row]:
    """Measure a run on a nearly empty corpus: starting, importing, loading kernels,
    recording.
    """
    corpus = write_corpus(folder / "corpus-few", FEW)
    for name, options, settings in (
        ("", (), OWN),
        (", without Prefect", ("--no-ui",), OWN),
        (", datatrove's verdicts", (), VERDICTS),
    ):
        chain = write_chain(fresh(folder / "few"), corpus, models, settings)
        run = chain.run(*options)
        slowest = sorted(chain.stage_seconds().items(), key=lambda item: -item[1])[:4]
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in slowest)
        note = (
            f"{FEW} documents, {run.cpu_seconds:.1f} s of CPU; {stages}; {BOUND_NOTE}"
        )
        # 2.5 and 3.2 s, idle, 2026-11-30, 2 cores
        yield cost_row(
            f"chain_fixed_cost{name}",
            run.seconds,
            FIXED_SECONDS,
            "s",
            note,
            floor=0.8,
        )
    yield second_run_row("nearly nothing", chain)


def second_run_row(name: str, chain: Chain) -> Row:
    """Measure a run whose outputs are all committed."""
    note = f"everything is committed; {BOUND_NOTE}"
    return cost_row(
        f"chain_second_run, {name}",
        chain.run().seconds,
        SECOND_RUN_SECONDS,
        "s",
        note,
        floor=1.0,
    )


def peer_rows(
    folder: Path, peer: Peer, corpora: Sequence[Corpus], models: Models
) -> Iterator[Row]:
    """Measure a peer beside ours on each corpus."""
    row_name = f"chain_vs_{peer.name.replace('-', '_')}"
    python = peer.interpreter()
    if python is None:
        yield row(row_name, None, None, "MB/s", "not installed: make peers")
        return
    for corpus in corpora:
        chain, run = first_run(
            folder / f"like-{peer.name}", corpus, models, peer.same, peer.packed
        )
        size, name = (
            corpus.text_bytes / MEGA,
            f"{row_name}, {corpus.documents:,} documents",
        )
        note = (
            f"{size:.0f} MB of {CORPUS} in {run.seconds:.1f} s, {chain.kept():,} kept"
        )
        try:
            done = peer.work(python, corpus, models, fresh(folder / peer.name))
        except PeerError as error:
            yield row(name, size / run.seconds, None, "MB/s", f"{note}; {error}")
            return
        steps = ", ".join(
            f"{step} {seconds:.0f} s" for step, seconds in done.seconds.items()
        )
        note = f"{note}; peer ({peer.does}): {steps}, {done.kept:,} kept"
        yield row(
            name, size / run.seconds, size / sum(done.seconds.values()), "MB/s", note
        )
        if peer.name == "datatrove":
            yield from aim_rows(corpus, sum(done.seconds.values()) / run.seconds)
            yield from agreement_rows(chain, folder / peer.name, corpus)
    shutil.rmtree(chain.folder)
    shutil.rmtree(folder / peer.name)


def aims(corpus: Corpus) -> tuple[int, float] | None:
    """Return the aims on a corpus; None on a smaller one."""
    met = [size for size in AIMS if corpus.text_bytes >= size * MEGA]
    return AIMS[max(met)] if met else None


def aim_rows(corpus: Corpus, times: float) -> Iterator[Row]:
    """Compare how often ours runs in datatrove's time with the aim."""
    aim = aims(corpus)
    if aim is not None:
        name = f"chain_times_datatrove, {corpus.documents:,} documents"
        yield row(name, times, aim[0], "times", "peer: the aim")


def agreement_rows(chain: Chain, out: Path, corpus: Corpus) -> Iterator[Row]:
    """Measure agreement on the kept documents."""
    agreement = compare(
        our_verdicts(chain, corpus.documents), datatrove_verdicts(out, corpus.documents)
    )
    name, unit = "chain_verdicts_vs_datatrove", "of documents"
    yield row(f"{name}, rules", agreement.rules, 1.0, unit, agreement.differences)
    note = (
        "of those that both sides' rules kept: both found a duplicate of it, or neither"
    )
    yield row(f"{name}, near duplicates", agreement.alike, 1.0, unit, note)
    note = f"{agreement.kept_by_us:,} are kept here, {agreement.kept_by_peer:,} there"
    yield row(f"{name}, kept in the end", agreement.kept, 1.0, unit, note)


def scale_rows(folder: Path, sizes: Sequence[int], models: Models) -> Iterator[Row]:
    """Measure growth with our own settings: rate, memory, exponent, files, work outside
    kernels, a second run.
    """
    previous: tuple[Corpus, Run] | None = None
    exponents = []
    for documents in sizes:
        corpus = write_corpus(folder / f"corpus-{documents}", documents)
        chain, run = first_run(folder / "own", corpus, models, OWN, sample_memory=True)
        size, name = corpus.text_bytes / MEGA, f"{documents:,} documents"
        stages = ", ".join(
            f"{stage} {seconds:.1f} s"
            for stage, seconds in chain.stage_seconds().items()
        )
        yield row(
            f"chain_per_core, {name}",
            size / run.cpu_seconds,
            MB_PER_CORE_SECOND,
            "MB/s",
            f"{size:.0f} MB in {run.seconds:.1f} s and {run.cpu_seconds:.1f} s of "
            f"CPU; {stages}; {BOUND_NOTE}, for 1 GB",
        )
        note = f"{WORKERS} cores; peer: {WORKERS} times that bound"
        yield row(
            f"chain_wall, {name}",
            size / run.seconds,
            MB_PER_CORE_SECOND * WORKERS,
            "MB/s",
            note,
        )
        note = f"all processes together, mapped files included; {BOUND_NOTE}"
        yield cost_row(
            f"chain_peak_memory, {name}",
            run.peak_bytes / GIBI,
            PEAK_GIBIBYTES,
            "GiB",
            note,
            floor=1.0,
        )
        yield outside_row(chain, corpus, models, run)
        if previous is not None:
            exponents.append(exponent_row(*previous, corpus, run))
        previous = corpus, run
        if documents != sizes[-1]:
            remove_corpus(corpus)
    yield from exponents
    files, stored = chain.files()
    note = (
        f"{files} files of {stored / GIGA:.2f} GB hold "
        f"{corpus.text_bytes / GIGA:.2f} GB of text"
    )
    yield row(
        "chain_files", files / (corpus.text_bytes / GIGA), None, "files per GB", note
    )
    yield second_run_row(name, chain)
    remove_corpus(corpus)
    shutil.rmtree(chain.folder)


def outside_row(chain: Chain, corpus: Corpus, models: Models, run: Run) -> Row:
    """Return the share of a run's processor time outside of the kernels."""
    kernels = seconds_per_mb(chain, corpus, models, OWN)
    size = corpus.text_bytes / MEGA
    share = 1 - sum(kernels.values()) * size / run.cpu_seconds
    note = "kernels alone, MB/s of raw text: " + ", ".join(
        f"{kernel} {1 / seconds:.0f}" for kernel, seconds in kernels.items()
    )
    name, unit = (
        f"chain_outside_kernels, {corpus.documents:,} documents",
        "of CPU time",
    )
    aim = aims(corpus)
    if aim is None:
        return row(name, share, None, unit, note)
    return cost_row(name, share, aim[1], unit, f"{note}; peer: the aim")


def exponent_row(
    corpus: Corpus, run: Run, larger_corpus: Corpus, larger_run: Run
) -> Row:
    """Return the exponent of CPU time by size between two corpora."""
    exponent = math.log(larger_run.cpu_seconds / run.cpu_seconds) / math.log(
        larger_corpus.text_bytes / corpus.text_bytes
    )
    name = (
        f"chain_exponent, {corpus.documents:,} to {larger_corpus.documents:,} documents"
    )
    return cost_row(name, exponent, EXPONENT, "of CPU time by size", BOUND_NOTE)
