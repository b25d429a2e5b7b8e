"""Learning vocabularies: time, memory and merges against gigatoken's trainer.

Every training is a process of its own with one thread, whose memory is measured and
whose output is dropped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.measuring import Row, row, text_megabytes
from benchmarks.tokenize.texts import books, code, first_texts, languages

TEXTS: dict[str, Callable[[], list[str]]] = {
    "english": books,
    "code": code,
    "multilingual": languages,
}
LEARNT_BYTES = 5_000_000
SIZES = (8_000, 32_000)
"""Vocabularies that are compared with another trainer's."""
SEPARATOR = b"\0<|next|>\0"
MEGA = 1e6


def rows() -> Iterator[Row]:
    """Measure every kind of text."""
    for kind, read in TEXTS.items():
        if not read():
            yield row(
                f"train_bpe_{kind}_vs_gigatoken",
                None,
                None,
                "MB/s",
                "the public test data is not here",
            )
            continue
        for size in SIZES:
            yield from gigatoken_rows(kind, size)


def gigatoken_rows(kind: str, size: int) -> Iterator[Row]:
    """Measure our trainer against gigatoken's."""
    name = f"train_bpe_{kind}_{size // 1000}k_vs_gigatoken"
    ours, peer = in_process(kind, "bpe", size), in_process(kind, "gigatoken", size)
    if peer is None:
        yield row(name, None, None, "MB/s", "gigatoken is not installed")
        return
    assert ours is not None
    our_merges, peer_merges = ours.merges, peer.merges
    pairs = zip(our_merges, peer_merges, strict=False)
    agreeing = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    note = (
        f"merges equal: {'yes' if our_merges == peer_merges else 'no'}; the first "
        f"{agreeing:,} of {len(our_merges):,} agree, the peer has {len(peer_merges):,}"
    )
    yield row(name, ours.rate, peer.rate, "MB/s", note)
    yield row(f"{name}: memory", ours.memory, peer.memory, "MB")


@dataclass(frozen=True)
class Training:
    """Measurements of a training.

    Attributes:
        rate: MB of text per second.
        memory: MB.
        merges: learnt ones.
    """

    rate: float
    memory: float
    merges: list[list[str]]


def in_process(kind: str, trainer: str, size: int) -> Training | None:
    """Train in a process of its own, and return its measurements; None if its package
    is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measurements.json"
        subprocess.run(
            [sys.executable, "-m", __name__, kind, trainer, str(size), str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "RAYON_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        measurements = json.loads(path.read_text())
        return None if measurements is None else Training(**measurements)


def _measure(kind: str, trainer: str, size: int) -> Training | None:
    learnt = first_texts(TEXTS[kind](), LEARNT_BYTES)
    try:
        train = _trainer(trainer, learnt, size)
    except ImportError:
        return None
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before, start = _peak_mb(), time.process_time()
    trained = train()
    seconds = time.process_time() - start
    memory = _peak_mb() - before
    merges = (
        trained
        if isinstance(trained, list)
        else json.loads(trained.to_str())["model"]["merges"]
    )
    return Training(text_megabytes(learnt) / seconds, memory, merges)


def _peak_mb() -> float:
    """Return the peak memory of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return (
        int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
        * 1024
        / MEGA
    )


def _trainer(name: str, texts: Sequence[str], size: int) -> Callable[[], Any]:
    """Return a function that trains, with all imports done.

    Raises:
        ImportError: a package is not installed.
    """
    if name != "gigatoken":
        from gristmill.tokenize.encoding.bpe import train
        from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

        return lambda: train(TokenizerSample({"text": texts}, {}), size)
    import gigatoken

    from gristmill.tokenize.chat_template import SPECIAL_TOKENS
    from gristmill.tokenize.encoding.pretokens import byte_characters

    content, characters = (
        SEPARATOR.join(text.encode() for text in texts),
        byte_characters(),
    )

    def work() -> list[list[str]]:
        _, merges = gigatoken.train_bpe(
            content, size, [*SPECIAL_TOKENS], separator=SEPARATOR
        )
        return [
            ["".join(characters[byte] for byte in side) for side in merge]
            for merge in merges
        ]

    return work


if __name__ == "__main__":
    kind, trainer, size, path = sys.argv[1:]
    training = _measure(kind, trainer, int(size))
    Path(path).write_text(json.dumps(None if training is None else asdict(training)))
