"""`gristmill bench chain`: raw JSONL to packed shards, against whole chains of others, on two cores and one corpus.

The chain reads, judges by the rules of Gopher, C4 and FineWeb, removes near duplicates, identifies languages, scores by
a classifier, encodes and mixes; each time by the command that a user types, with Prefect's recording, in a process of
its own. Two settings: those under which the verdicts are datatrove's (its dialect with spaCy's words, every candidate
pair of MinHash a duplicate), for the rows against datatrove; and gristmill's own. datatrove's pipeline is that of its
FineWeb example, MinHash in its four steps, with two workers.

What a peer cannot do in a reasonable time it does on the smallest corpus only, and its rate there stands for the
others: datatrove's grows with no size. `--whole-peers` lets it run on all.
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
from benchmarks.chain.pages import Corpus, write_corpus
from benchmarks.chain.peers import PEERS, Peer, PeerError, described, fresh
from benchmarks.chain.verdicts import compare, datatroves, ours
from benchmarks.measuring import Row, row

DOCUMENTS = (20_000, 100_000, 300_000)
"""61, 305 and 915 MB of text."""
FEW, WARM = 10, 600
"""Pages of a corpus that is nearly nothing, and of one on which kernels are compiled before anything is measured."""
MB_PER_CORE_SECOND, FIXED_SECONDS, SECOND_RUN_SECONDS, PEAK_GIBIBYTES, EXPONENT = 10.0, 8.0, 3.0, 2.0, 1.05
"""The bounds."""
MEGA, GIGA, GIBI = 1e6, 1e9, 1 << 30


def rows(
    documents: Sequence[int] = DOCUMENTS, whole_peers: bool = False, flame: Path | None = None,
    folder: Path | None = None,
) -> Iterator[Row]:
    """Measure.

    Args:
        documents: sizes of corpora.
        whole_peers: let every peer have all of them, which takes hours.
        flame: receives a flame graph of the chain on the largest corpus, an SVG.
        folder: where to work and what to keep; a temporary one if None.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="gristmill-chain-") as temporary:
            yield from rows(documents, whole_peers, flame, Path(temporary))
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
    corpora = [write_corpus(folder / f"corpus-{number}", number) for number in sizes]
    yield from peer_rows(folder, corpora, models, whole_peers)
    yield from scale_rows(folder, corpora, models)
    if flame is not None:
        from benchmarks.chain.flame import draw_flame

        yield draw_flame(write_chain(fresh(folder / "flame"), corpora[-1], models, OWN), flame)


def run_afresh(folder: Path, corpus: Corpus, models: Models, settings: Mapping[str, Any]) -> tuple[Chain, Run]:
    """A chain and its first run, in an empty store."""
    chain = write_chain(fresh(folder), corpus, models, settings)
    return chain, chain.run()


def fixed_rows(folder: Path, models: Models) -> Iterator[Row]:
    """What a run costs on nearly nothing: starting, importing, loading kernels, recording."""
    corpus = write_corpus(folder / "corpus-few", FEW)
    for name, options, settings in (("", (), OWN), (", without Prefect", ("--no-ui",), OWN),
                                    (", datatrove's verdicts", (), VERDICTS)):
        chain = write_chain(fresh(folder / "few"), corpus, models, settings)
        run = chain.run(*options)
        slowest = sorted(chain.stage_seconds().items(), key=lambda item: -item[1])
        yield bounded(f"chain_fixed_cost{name}", run.seconds, FIXED_SECONDS, "s", (
            f"{FEW} documents, {run.cpu_seconds:.1f} s of CPU; "
            f"{', '.join(f'{stage} {seconds:.1f}' for stage, seconds in slowest[:4])}"))
    yield bounded("chain_second_run, nearly nothing", chain.run().seconds, SECOND_RUN_SECONDS, "s",
                  "everything is committed")


def peer_rows(folder: Path, corpora: Sequence[Corpus], models: Models, whole: bool) -> Iterator[Row]:
    """Every peer: on the smallest corpus, and by its rate there on the others, unless `whole`."""
    rates: dict[str, float] = {}
    for corpus in corpora:
        chain, run = run_afresh(folder / f"verdicts-{corpus.documents}", corpus, models, VERDICTS)
        size = corpus.text_bytes / MEGA
        for peer in PEERS:
            name = f"chain_vs_{peer.name.replace('-', '_')}, {corpus.documents:,} documents"
            mine = size / run.seconds
            if not whole and peer.name in rates:
                yield row(name, mine, rates[peer.name], "MB/s", (
                    f"{size:.0f} MB of text in {run.seconds:.1f} s; peer: its rate on the smallest corpus"))
                continue
            try:
                seconds = run_peer(peer, corpus, models, folder)
            except PeerError as error:
                yield row(name, mine, None, "MB/s", str(error))
                continue
            rates[peer.name] = size / sum(seconds.values())
            yield row(name, mine, rates[peer.name], "MB/s", (
                f"{size:.0f} MB of text in {run.seconds:.1f} s; peer ({peer.does}): {described(seconds)}"))
            if peer.name == "datatrove":
                yield from agreement_rows(chain, folder / peer.name, corpus)
        keep_only_manifests(chain)


def run_peer(peer: Peer, corpus: Corpus, models: Models, folder: Path) -> dict[str, float]:
    """Let a peer do its chain; returns seconds by step.

    Raises:
        PeerError: it is not installed, or failed.
    """
    python = peer.interpreter()
    if python is None:
        raise PeerError(f"{peer.name} is not installed")
    return peer.work(python, corpus, models, fresh(folder / peer.name))


def agreement_rows(chain: Chain, out: Path, corpus: Corpus) -> Iterator[Row]:
    """Whether both keep the same documents."""
    found = compare(ours(chain, corpus.documents), datatroves(out, corpus.documents))
    yield row("chain_verdicts_vs_datatrove, rules", found.rules, 1.0, "of documents", found.why)
    yield row("chain_verdicts_vs_datatrove, near duplicates", found.alike, 1.0, "of documents",
              "of those that both sides' rules kept: both found a duplicate of it, or neither")
    yield row("chain_verdicts_vs_datatrove, kept in the end", found.last, 1.0, "of documents",
              f"{found.numbers[0]:,} are kept here, {found.numbers[1]:,} there")


def scale_rows(folder: Path, corpora: Sequence[Corpus], models: Models) -> Iterator[Row]:
    """How the chain grows, with its own settings: rate, memory, exponent, files, what is no kernel's, a second run."""
    runs = []
    for corpus in corpora:
        chain, run = run_afresh(folder / "own", corpus, models, OWN)
        runs.append(run)
    size = corpus.text_bytes / MEGA
    name = f"{corpus.documents:,} documents"
    slowest = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in chain.stage_seconds().items())
    yield row(f"chain_per_core, {name}", size / run.cpu_seconds, MB_PER_CORE_SECOND, "MB/s", (
        f"{size:.0f} MB in {run.seconds:.1f} s and {run.cpu_seconds:.1f} s of CPU; {slowest}; peer: the bound"))
    yield row(f"chain_wall, {name}", size / run.seconds, MB_PER_CORE_SECOND * WORKERS, "MB/s", "peer: the bound")
    yield bounded(f"chain_peak_memory, {name}", run.peak_bytes / GIBI, PEAK_GIBIBYTES, "GiB", ", ".join(
        f"{each.peak_bytes / GIBI:.2f} at {one.documents:,}" for one, each in zip(corpora, runs, strict=True)))
    if len(runs) > 1:
        grown = math.log(runs[-1].cpu_seconds / runs[-2].cpu_seconds)
        yield bounded("chain_exponent", grown / math.log(corpora[-1].text_bytes / corpora[-2].text_bytes), EXPONENT,
                      "of time by size", "CPU seconds of the two largest corpora")
    files, stored = chain.files()
    yield row("chain_files", files / (corpus.text_bytes / GIGA), None, "files per GB",
              f"{files} files of {stored / GIGA:.2f} GB hold {corpus.text_bytes / GIGA:.2f} GB of text")
    alone = seconds_per_mb(corpus, models, OWN)
    inside = sum(alone.values()) * size
    yield row("chain_outside_kernels", 1 - inside / run.cpu_seconds, None, "of CPU time", "kernels alone, MB/s: " + (
        ", ".join(f"{what} {1 / seconds:.0f}" for what, seconds in alone.items())))
    yield bounded(f"chain_second_run, {name}", chain.run().seconds, SECOND_RUN_SECONDS, "s", "everything is committed")
    shutil.rmtree(chain.folder)


def bounded(name: str, value: float, bound: float, unit: str, note: str) -> Row:
    """A row of what should be little: the ratio is how many times it goes into the bound."""
    return {**row(name, value, bound, unit, f"{note}; peer: the bound"), "ratio": bound / value}


def keep_only_manifests(chain: Chain) -> None:
    """Make room."""
    shutil.rmtree(chain.store)
