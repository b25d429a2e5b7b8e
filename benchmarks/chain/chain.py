"""`gristmill bench chain`: raw JSONL to packed shards, against whole chains of others, on two cores and one corpus.

The chain reads, judges by the rules of Gopher, C4 and FineWeb, removes near duplicates, identifies languages, scores by
a classifier, encodes and mixes; each time by the command that a user types, with Prefect's recording, in a process of
its own. Two settings: those under which the verdicts are datatrove's (its dialect with spaCy's words, every candidate
pair of MinHash a duplicate), for the rows against datatrove; and gristmill's own. datatrove's pipeline is that of its
FineWeb example, MinHash in its four steps, with two workers. Peers that do less are compared with a chain of ours that
does the same steps (`Peer.same`).

Every peer has every corpus. The corpora are of real, distinct text (`installed_texts.pages`). A corpus, and what is made of it, is removed once its rows are there.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chain.kernels_alone import seconds_per_mb
from benchmarks.chain.our_chain import OWN, VERDICTS, WORKERS, Chain, Models, Run, make_models, write_chain
from benchmarks.chain.pages import Corpus, remove_corpus, write_corpus
from benchmarks.chain.peers import PEERS, Peer, PeerError, described, fresh
from benchmarks.chain.verdicts import compare, datatroves, ours
from benchmarks.installed_texts import PAGES_CORPUS
from benchmarks.measuring import Row, row

DOCUMENTS = (5_000, 70_000)
"""About 8 MB and 107 MB."""
FEW, WARM = 60, 600
"""Pages of a corpus that is nearly nothing, and of one on which kernels are compiled before anything is measured."""
MB_PER_CORE_SECOND, FIXED_SECONDS, SECOND_RUN_SECONDS, PEAK_GIBIBYTES, EXPONENT = 10.0, 8.0, 3.0, 2.0, 1.05
"""The bounds."""
MEGA, GIGA, GIBI = 1e6, 1e9, 1 << 30


def rows(
    documents: Sequence[int] = DOCUMENTS,
    flame: Path | None = None,
    folder: Path | None = None,
) -> Iterator[Row]:
    """Measure.

    Args:
        documents: sizes of corpora.
        flame: receives a flame graph of the chain, an SVG, on the largest corpus that peers have.
        folder: where to work; a temporary one if None. Models and corpora in it are used again.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="gristmill-chain-") as temporary:
            yield from rows(documents, flame, Path(temporary))
        return
    models = make_models(folder / "models")
    if models is None:
        yield row("chain", None, None, "MB/s", "there is no language model here, and none can be fetched")
        return
    warm = write_corpus(folder / "corpus-warm", WARM)
    for name, settings in (("verdicts", VERDICTS), ("own", OWN)):
        run_afresh(folder / f"warm-{name}", warm, models, settings)
    yield from fixed_rows(folder, models)
    sizes = sorted(documents)
    compared = [write_corpus(folder / f"corpus-{number}", number) for number in sizes]
    for peer in PEERS:
        yield from peer_rows(folder, peer, compared, models)
    if flame is not None:
        from benchmarks.chain.flame import draw_flame

        yield draw_flame(write_chain(fresh(folder / "flame"), compared[-1], models, OWN), flame)
        shutil.rmtree(folder / "flame")
    yield from scale_rows(folder, sizes, models)


def run_afresh(
    folder: Path, corpus: Corpus, models: Models, settings: Mapping[str, Any], packed: bool = True, look: bool = False
) -> tuple[Chain, Run]:
    """A chain and its first run, in an empty store; `look` as of `Chain.run`."""
    chain = write_chain(fresh(folder), corpus, models, settings, packed)
    return chain, chain.run(look=look)


def fixed_rows(folder: Path, models: Models) -> Iterator[Row]:
    """What a run costs on nearly nothing: starting, importing, loading kernels, recording."""
    corpus = write_corpus(folder / "corpus-few", FEW)
    for name, options, settings in (
        ("", (), OWN),
        (", without Prefect", ("--no-ui",), OWN),
        (", datatrove's verdicts", (), VERDICTS),
    ):
        chain = write_chain(fresh(folder / "few"), corpus, models, settings)
        run = chain.run(*options)
        slowest = sorted(chain.stage_seconds().items(), key=lambda item: -item[1])
        yield bounded(
            f"chain_fixed_cost{name}",
            run.seconds,
            FIXED_SECONDS,
            "s",
            (
                f"{FEW} documents, {run.cpu_seconds:.1f} s of CPU; "
                f"{', '.join(f'{stage} {seconds:.1f}' for stage, seconds in slowest[:4])}"
            ),
        )
    yield bounded(
        "chain_second_run, nearly nothing", chain.run().seconds, SECOND_RUN_SECONDS, "s", "everything is committed"
    )


def peer_rows(folder: Path, peer: Peer, corpora: Sequence[Corpus], models: Models) -> Iterator[Row]:
    """A peer beside ours on each corpus."""
    row_name = f"chain_vs_{peer.name.replace('-', '_')}"
    python = peer.interpreter()
    if python is None or not corpora:
        yield row(row_name, None, None, "MB/s", "not installed: make peers" if python is None else "no corpus")
        return
    for corpus in corpora:
        chain, run = run_afresh(folder / f"like-{peer.name}", corpus, models, peer.same, peer.packed)
        size, name = corpus.text_bytes / MEGA, f"{row_name}, {corpus.documents:,} documents"
        said = f"{size:.0f} MB of {PAGES_CORPUS} in {run.seconds:.1f} s, {chain.kept():,} kept"
        try:
            done = peer.work(python, corpus, models, fresh(folder / peer.name))
        except PeerError as error:
            yield row(name, size / run.seconds, None, "MB/s", f"{said}; {error}")
            return
        rate = size / sum(done.seconds.values())
        yield row(
            name,
            size / run.seconds,
            rate,
            "MB/s",
            f"{said}; peer ({peer.does}): {described(done.seconds)}, {done.kept:,} kept",
        )
        if peer.name == "datatrove":
            yield from agreement_rows(chain, folder / peer.name, corpus)
    for used in (chain.folder, folder / peer.name):
        shutil.rmtree(used)


def agreement_rows(chain: Chain, out: Path, corpus: Corpus) -> Iterator[Row]:
    """Whether both keep the same documents."""
    found = compare(ours(chain, corpus.documents), datatroves(out, corpus.documents))
    yield row("chain_verdicts_vs_datatrove, rules", found.rules, 1.0, "of documents", found.why)
    yield row(
        "chain_verdicts_vs_datatrove, near duplicates",
        found.alike,
        1.0,
        "of documents",
        "of those that both sides' rules kept: both found a duplicate of it, or neither",
    )
    yield row(
        "chain_verdicts_vs_datatrove, kept in the end",
        found.last,
        1.0,
        "of documents",
        f"{found.numbers[0]:,} are kept here, {found.numbers[1]:,} there",
    )


def scale_rows(folder: Path, sizes: Sequence[int], models: Models) -> Iterator[Row]:
    """How the chain grows, with its own settings: rate, memory, exponent, files, what is no kernel's, a second run."""
    corpora, runs = list[Corpus](), list[Run]()
    for documents in sizes:
        corpus = write_corpus(folder / f"corpus-{documents}", documents)
        chain, run = run_afresh(folder / "own", corpus, models, OWN, look=True)
        size, name = corpus.text_bytes / MEGA, f"{documents:,} documents"
        slowest = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in chain.stage_seconds().items())
        yield row(
            f"chain_per_core, {name}",
            size / run.cpu_seconds,
            MB_PER_CORE_SECOND,
            "MB/s",
            (
                f"{size:.0f} MB in {run.seconds:.1f} s and {run.cpu_seconds:.1f} s of CPU; {slowest}; peer: the bound, "
                "for 1 GB"
            ),
        )
        yield row(
            f"chain_wall, {name}",
            size / run.seconds,
            MB_PER_CORE_SECOND * WORKERS,
            "MB/s",
            f"{WORKERS} cores; peer: {WORKERS} times that bound",
        )
        yield bounded(
            f"chain_peak_memory, {name}",
            run.peak_bytes / GIBI,
            PEAK_GIBIBYTES,
            "GiB",
            "all processes together, mapped files included",
        )
        corpora, runs = [*corpora, corpus], [*runs, run]
        if documents != sizes[-1]:
            remove_corpus(corpus)
    for one, next_one in zip(range(len(runs)), range(1, len(runs)), strict=False):
        grown = math.log(runs[next_one].cpu_seconds / runs[one].cpu_seconds)
        texts = math.log(corpora[next_one].text_bytes / corpora[one].text_bytes)
        yield bounded(
            f"chain_exponent, {corpora[one].documents:,} to {corpora[next_one].documents:,} documents",
            grown / texts,
            EXPONENT,
            "of CPU time by size",
            "",
        )
    files, stored = chain.files()
    yield row(
        "chain_files",
        files / (corpus.text_bytes / GIGA),
        None,
        "files per GB",
        f"{files} files of {stored / GIGA:.2f} GB hold {corpus.text_bytes / GIGA:.2f} GB of text",
    )
    alone = seconds_per_mb(corpus, models, OWN)
    inside = sum(alone.values()) * size
    yield row(
        "chain_outside_kernels",
        1 - inside / run.cpu_seconds,
        None,
        "of CPU time",
        "kernels alone, MB/s: " + (", ".join(f"{what} {1 / seconds:.0f}" for what, seconds in alone.items())),
    )
    yield bounded(f"chain_second_run, {name}", chain.run().seconds, SECOND_RUN_SECONDS, "s", "everything is committed")
    remove_corpus(corpus)
    shutil.rmtree(chain.folder)


def bounded(name: str, value: float, bound: float, unit: str, note: str) -> Row:
    """A row of what should be little: the ratio is how many times it goes into the bound."""
    said = "; ".join(filter(None, (note, "peer: the bound")))
    return {**row(name, value, bound, unit, said), "ratio": bound / value}
