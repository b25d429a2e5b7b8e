"""How often personal data is found, and how often something else is taken for it.

The text is that of `pii_samples.py`. A value counts as found where every byte of it is replaced as what it is; a
replacement is false where it touches no value of its kind; reserved examples (`me@example.com`) are nobody's. The peer
is datatrove's `PIIFormatter`, which knows mail addresses and IPv4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from benchmarks.dataprep.pii_samples import Sentence, sentences
from gristmill.dataprep.cleaning.masking import mask
from gristmill.dataprep.cleaning.pii import KINDS
from gristmill.mixtures.clean import Mask, PiiKind

SEED = 20
PER_SPELLING = 200
MEGABYTE = 1e6
NOT_COVERED = "datatrove's PIIFormatter does not know this kind"
NOT_INSTALLED = "datatrove is not installed"

Find = Callable[[Sequence[str]], list[list[tuple[int, int]]]]
"""Texts -> the places of each that are replaced."""


def rows() -> Iterator[dict[str, Any]]:
    """Measure, three rows per kind: recall, precision, false replacements per MB of text."""
    samples = sentences(SEED, PER_SPELLING)
    size = sum(len(sample.text) for sample in samples) / MEGABYTE
    for kind in KINDS:
        ours = score(samples, kind, partial(found_by_us, kind=kind))
        peer, note = None, NOT_COVERED if find_spec("datatrove") else NOT_INSTALLED
        if find_spec("datatrove") and kind in ("email", "ip"):
            peer, note = score(samples, kind, partial(found_by_datatrove, kind=kind)), ""
        for name, unit, one, other in (
            ("recall", "share", ours[0], peer and peer[0]),
            ("precision", "share", ours[1], peer and peer[1]),
            ("false replacements", "per MB", ours[2] / size, peer and peer[2] / size),
        ):
            ratio = None if not other else one / other
            row = {"name": f"pii {kind}, {name}", "ours": one, "peer": other, "unit": unit, "ratio": ratio}
            yield {**row, "note": note} if note else row


def score(samples: Sequence[Sentence], kind: PiiKind, find: Find) -> tuple[float, float, int]:
    """Recall, precision, and the number of false replacements."""
    hits = right = wrong = 0
    for sample, spans in zip(samples, find([sample.text for sample in samples]), strict=True):
        own = sample.kind == kind
        hits += own and any(begin <= sample.begin and sample.end <= end for begin, end in spans)
        touching = sum(own and begin < sample.end and sample.begin < end for begin, end in spans)
        right, wrong = right + touching, wrong + len(spans) - touching
    return hits / sum(sample.kind == kind for sample in samples), right / max(right + wrong, 1), wrong


def found_by_us(texts: Sequence[str], kind: PiiKind) -> list[list[tuple[int, int]]]:
    """What the stage `clean` replaces as this kind, with all kinds switched on."""
    edits, _, _ = mask(pa.array(texts, pa.large_string()), Mask(kinds=KINDS, style="tag"))
    return [
        [(edit["begin"], edit["end"]) for edit in of_one if edit["text"] == f"<{kind.upper()}>"]
        for of_one in edits.to_pylist()
    ]


def found_by_datatrove(texts: Sequence[str], kind: PiiKind) -> list[list[tuple[int, int]]]:
    """What datatrove's formatter replaces as this kind."""
    from datatrove.pipeline.formatters import PIIFormatter

    formatter = PIIFormatter()
    replacer = formatter.emails_replacer if kind == "email" else formatter.ip_replacer
    return [
        [found.span() for found in replacer.regex.finditer(text)
         if replacer.validator is None or replacer.validator(found[0])]
        for text in texts
    ]  # fmt: skip
