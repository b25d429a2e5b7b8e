"""Two-class fastText classifier (Joulin et al. 2016) with reproducible training.

fastText 0.9.3 with one thread initialises only a tenth of its input matrix and leaves
the rest to the allocator: two trainings differ, or one stops at a NaN. With several
threads all of it is initialised, but the threads race. Training therefore runs with one
thread in a subprocess in which the C library returns zeroed memory; this module is the
program of that subprocess.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gristmill.core.files import foreign_file
from gristmill.mixtures.steps.quality import Classifier

if TYPE_CHECKING:  # the training subprocess does not need the kernels
    from gristmill.dataprep.fasttext.fasttext_predict import Predictor

LABEL_PREFIX = "__label__"
POSITIVE, NEGATIVE = "positive", "negative"
END_OF_LINE = "</s>"
ZEROED_MEMORY = {
    "MALLOC_PERTURB_": "255",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0",
}
"""glibc fills new memory with the complement of this byte: zero (mallopt(3),
M_PERTURB).
"""
PROBE_BYTES = 1 << 16
KNOWN_LINES = 8
"""Training lines that a saved model is verified with."""
SHOWN_CHARACTERS = 60
MAX_CHARACTERS = 2000
"""Characters of a text that a classifier trained here reads, unless the manifest sets
another number.
"""


TRAINED_DOCUMENTS = 40_000
FEWEST_EPOCHS, MOST_EPOCHS = 5, 50
"""Bounds of the epochs; within them, training sees TRAINED_DOCUMENTS documents in
total.
"""


class ClassifierError(RuntimeError):
    """The classifier cannot be trained."""


def as_line(text: str, section: Classifier) -> str:
    """Convert a text to the classifier's input: one line of words.

    A classifier trained here reads the first 2,000 characters in lower case, with
    fastText's own marks (label prefix, end of line) replaced. A user's model reads the
    full text unchanged, with each run of whitespace as one space (DCLM replaces line
    breaks by spaces, which is equivalent for fastText). The section may override both.
    """
    line = text[: characters_seen(section)]
    if is_lowered(section):
        line = line.lower()
    if section.model is None:
        line = line.replace(LABEL_PREFIX, "label ").replace(END_OF_LINE, "s")
    return " ".join(line.split())


def characters_seen(section: Classifier) -> int | None:
    """Number of characters of a text that are read; None for all."""
    return section.max_characters or (
        None if section.model is not None else MAX_CHARACTERS
    )


def is_lowered(section: Classifier) -> bool:
    """Return True if texts are converted to lower case."""
    return section.model is None if section.lower is None else section.lower


def epochs_of(section: Classifier, documents: int) -> int:
    """Passes over the training documents; small sets need more passes."""
    if section.epochs is not None:
        return section.epochs
    return min(
        MOST_EPOCHS, max(FEWEST_EPOCHS, -(-TRAINED_DOCUMENTS // max(documents, 1)))
    )


def train(
    examples: Iterable[tuple[bool, str]],
    section: Classifier,
    seed: int,
    work: Path | None,
) -> bytes:
    """Train a classifier and return the content of its model file.

    Args:
        examples: (True if positive, line), in training order.
        section: settings.
        seed: of fastText.
        work: local folder for temporary files; the system's if None.

    Raises:
        ClassifierError: training failed, or this platform cannot train reproducibly.
    """
    settings: dict[str, float] = {
        "wordNgrams": section.word_ngrams,
        "dim": section.dimensions,
        "bucket": section.buckets,
        "lr": section.learning_rate,
        "seed": seed & 0x7FFFFFFF,
        "thread": 1,
        "verbose": 0,
    }
    with tempfile.TemporaryDirectory(dir=work) as folder:
        lines = Path(folder) / "lines.txt"
        model = Path(folder) / "model.bin"
        number = 0
        with lines.open("w", encoding="utf-8", newline="\n") as sink:
            for is_positive, line in examples:
                sink.write(
                    f"{LABEL_PREFIX}{POSITIVE if is_positive else NEGATIVE} {line}\n"
                )
                number += 1
        settings["epoch"] = epochs_of(section, number)
        command = [
            sys.executable,
            "-m",
            __name__,
            str(lines),
            str(model),
            json.dumps(settings),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **ZEROED_MEMORY}
        )
        if done.returncode:
            reason = (
                done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            )[-1]
            raise ClassifierError(
                f"the quality classifier could not be trained: {reason}; settings "
                f"{settings}. If it met a NaN, lower learning_rate"
            )
        return model.read_bytes()


def score_texts(model: Predictor, texts: pa.Array, section: Classifier) -> np.ndarray:
    """Probability of the positive class for n texts: float64 of shape (n,), in [0,
    1].
    """
    from gristmill.dataprep.fasttext.fasttext_predict import lines_of
    from gristmill.dataprep.fasttext.normalise_lines import one_line_each

    is_users_model = section.model is not None
    label = section.label if is_users_model else LABEL_PREFIX + POSITIVE
    lines, skipped = one_line_each(
        texts, characters_seen(section), is_lowered(section), marks=is_users_model
    )
    scores = model.shares(lines, label)
    skipped_rows = np.flatnonzero(skipped)
    if len(skipped_rows):
        lines = lines_of(
            [as_line(text, section) for text in texts.take(skipped_rows).to_pylist()]
        )
        scores[skipped_rows] = model.shares(lines, label)
    return np.clip(scores, 0.0, 1.0)


def check_label(model: Predictor, section: Classifier) -> None:
    """Raise ClassifierError if a user's model lacks the label that its section
    names.
    """
    labels = model.labels
    if section.model is not None and section.label not in labels:
        raise ClassifierError(
            f"{section.model} has no label {section.label!r}; it has "
            f"{', '.join(sorted(labels)[:10])}"
            "; name one of them as quality.classifier.label"
        )


def memory_is_zeroed() -> bool:
    """Return True if this process's allocator returns freed memory as zeros."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.restype = None
    library.free.argtypes = [ctypes.c_void_p]
    first_block = library.malloc(PROBE_BYTES)
    ctypes.memset(first_block, 0xAB, PROBE_BYTES)
    library.free(first_block)
    second_block = library.malloc(PROBE_BYTES)
    content = ctypes.string_at(second_block, PROBE_BYTES)
    library.free(second_block)
    return content == bytes(PROBE_BYTES)


def main(lines: str, model: str, settings: str) -> None:
    """Train in this process, which must have been started with ZEROED_MEMORY."""
    if not memory_is_zeroed():
        raise SystemExit(
            "fastText trains reproducibly only where malloc can hand "
            "out zeros: Linux with glibc"
        )
    try:
        import fasttext
    except ImportError as error:
        raise SystemExit(
            "training a classifier needs fasttext, which is not installed; install it, "
            "with a C++ compiler at hand, with: pip install 'gristmill[fasttext]'"
        ) from error

    trained = fasttext.train_supervised(input=lines, **json.loads(settings))
    first_lines = Path(lines).read_text(encoding="utf-8").splitlines()[:KNOWN_LINES]
    save_model(trained, Path(model), [line.partition(" ")[2] for line in first_lines])


def save_model(trained: Any, path: Path, known: Sequence[str]) -> None:
    """Write a fastText model and verify it, since fastText's writer ignores a full
    disk.

    Args:
        trained: the model.
        path: of the file.
        known: lines that the file must score as the model does. Its output matrix, the
            end of the file, is compared too.

    Raises:
        IncompleteFileError: the file does not match the model.
    """
    import fasttext

    def check(file: Path) -> None:
        saved = fasttext.load_model(str(file))
        if not np.array_equal(
            saved.get_output_matrix(), trained.get_output_matrix(), equal_nan=True
        ):
            raise ValueError("its matrix of labels is not the model's")
        for line in known:
            if _scores(saved, line) != _scores(trained, line):
                raise ValueError(
                    f"it does not score {line[:SHOWN_CHARACTERS]!r} as the model does"
                )

    with foreign_file(path, check) as file:
        trained.save_model(str(file))


def _scores(model: Any, line: str) -> list[tuple[str, float]]:
    """Labels of a line with their probabilities, the likeliest first."""
    # with one string, fastText 0.9.3 fails on NumPy 2
    labels, shares = model.predict([line], -1)
    return list(zip(labels[0], shares[0].tolist(), strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
