"""A two-class fastText classifier (Joulin et al. 2016) whose training gives the same bytes every time.

fastText 0.9.3 with one thread initialises a tenth of its input matrix and leaves the rest as the allocator gave it:
trained twice, it differs, or stops at a NaN. More threads initialise all of it, but race. So it is trained with one
thread in a process of its own, in which the C library hands out memory that is zero: run as a program, this module
is that process.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.mixtures.quality import Classifier

LABEL_PREFIX = "__label__"
POSITIVE, NEGATIVE = "positive", "negative"
END_OF_LINE = "</s>"
ZEROED_MEMORY = {"MALLOC_PERTURB_": "255", "GLIBC_TUNABLES": "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0"}
"""glibc fills new memory with the complement of this byte: zero (mallopt(3), M_PERTURB)."""
PROBE_BYTES = 1 << 16
BATCH_LINES = 1000


class ClassifierError(RuntimeError):
    """The classifier cannot be trained."""


def normalise(text: str, max_characters: int) -> str:
    """A document as one line of lower-case words; only the first `max_characters` are looked at.

    fastText's own marks (a label's prefix, the end of a line) are broken up where they stand in a text.
    """
    line = text[:max_characters].lower().replace(LABEL_PREFIX, "label ").replace(END_OF_LINE, "s")
    return " ".join(line.split())


def train(examples: Iterable[tuple[bool, str]], section: Classifier, seed: int, work: Path | None) -> bytes:
    """Train a classifier and return the model's file.

    Args:
        examples: (whether positive, normalised line), in the order in which they are learnt from.
        section: its settings.
        seed: of fastText.
        work: local folder for temporary files; the system's if None.

    Raises:
        ClassifierError: training failed, or this platform cannot train reproducibly.
    """
    settings = {
        "epoch": section.epochs, "wordNgrams": section.word_ngrams, "dim": section.dimensions,
        "bucket": section.buckets, "lr": section.learning_rate, "seed": seed & 0x7FFFFFFF, "thread": 1, "verbose": 0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=work) as folder:
        lines, model = Path(folder) / "lines.txt", Path(folder) / "model.bin"
        with lines.open("w", encoding="utf-8", newline="\n") as sink:
            sink.writelines(f"{LABEL_PREFIX}{POSITIVE if good else NEGATIVE} {line}\n" for good, line in examples)
        command = [sys.executable, "-m", __name__, str(lines), str(model), json.dumps(settings)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ZEROED_MEMORY})
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ClassifierError(
                f"the quality classifier could not be trained: {reason}; settings {settings}. "
                "If it met a NaN, lower learning_rate"
            )
        return model.read_bytes()


def score(model: Any, lines: Sequence[str]) -> np.ndarray:
    """Probability of the positive class for n normalised lines: float64 of shape (n,), in [0, 1]."""
    scores = np.empty(len(lines), np.float64)
    for start in range(0, len(lines), BATCH_LINES):
        batch = list(lines[start : start + BATCH_LINES])
        for row, (labels, shares) in enumerate(zip(*model.predict(batch, k=2), strict=True), start):
            scores[row] = dict(zip(labels, shares, strict=True)).get(LABEL_PREFIX + POSITIVE, 0.0)
    return np.clip(scores, 0.0, 1.0)


def area_under_curve(positive: np.ndarray, negative: np.ndarray) -> float:
    """Exact AUC: the chance that a positive scores over a negative, ties counting half (Mann & Whitney 1947).

    Args:
        positive: scores of the positive examples, shape (p,), p > 0.
        negative: scores of the negative examples, shape (n,), n > 0.
    """
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([positive, negative]))
    wins = ranks[: len(positive)].sum() - len(positive) * (len(positive) + 1) / 2
    return float(wins / (len(positive) * len(negative)))


def memory_is_zeroed() -> bool:
    """Whether this process's allocator hands out used memory as zeros."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    used = library.malloc(PROBE_BYTES)
    ctypes.memset(used, 0xAB, PROBE_BYTES)
    library.free(used)
    again = library.malloc(PROBE_BYTES)
    content = ctypes.string_at(again, PROBE_BYTES)
    library.free(again)
    return content == bytes(PROBE_BYTES)


def main(lines: str, model: str, settings: str) -> None:
    """Train in this process, which must have been started with ZEROED_MEMORY."""
    if not memory_is_zeroed():
        raise SystemExit("fastText trains reproducibly only where malloc can hand out zeros: Linux with glibc")
    import fasttext

    fasttext.train_supervised(input=lines, **json.loads(settings)).save_model(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
