"""Which documents of each source are taken, in which order, and the rows that they are packed into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.mixtures.mix import Mix
from gristmill.tokenize.mixing.candidates import VALIDATION_KEY, Candidates
from gristmill.tokenize.mixing.layouts import Layout, Packing, end_of, join_layouts, lay_out
from gristmill.tokenize.mixing.quotas import Quotas, Request, Supply, plan_rows
from gristmill.tokenize.mixing.shares import MixError, exact, plan_stages
from gristmill.tokenize.mixing.streams import Stream, make_stream, upto
from gristmill.tokenize.order import order_key


@dataclass(frozen=True)
class Laid:
    """A source's documents, laid out.

    Attributes:
        pass_tokens: tokens of one pass over its documents, ends of text and repeats counted.
        stream: the documents that are taken.
        end: up to where in it.
        layout: the rows that they are packed into, stage after stage.
        rows_per_stage: how many of them each stage has.
    """

    pass_tokens: int
    stream: Stream
    end: int
    layout: Layout
    rows_per_stage: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.layout.rows

    @property
    def tokens(self) -> int:
        """Tokens of documents in them."""
        return self.layout.tokens

    def tokens_per_stage(self) -> list[int]:
        """Tokens of documents in the rows of each stage."""
        passed = np.concatenate([[0], np.cumsum(self.layout.length, dtype=np.int64)])
        borders = passed[self.layout.first[np.cumsum([0, *self.rows_per_stage])]]
        tokens: list[int] = np.diff(borders).tolist()
        return tokens


def packing_of(section: Mix) -> Packing:
    """How a section packs its training rows."""
    return Packing(section.sequence_length, section.packing == "best_fit", section.document_starts == "aligned")


def lay_train(
    candidates: Candidates, sources: Mapping[str, Mapping[str, Any]], section: Mix, seed: int
) -> tuple[Quotas, dict[str, Laid]]:
    """Plan the quotas and lay out every source's training documents.

    Args:
        candidates: all documents.
        sources: name -> its keys of the mixture, in order.
        section: the mixture.
        seed: of the draws.

    Raises:
        MixError: a share cannot be filled.
    """
    tokens = candidates.documents.tokens
    chosen = {name: candidates.training(number) for number, name in enumerate(sources)}
    passes = {name: int(((tokens[these] + 1) * candidates.repeats[these]).sum()) for name, these in chosen.items()}
    own_weights = {name: source["weight"] for name, source in sources.items()}
    quotas = plan_rows(Request(
        section.tokens, section.sequence_length, plan_stages(section, own_weights, passes),
        {name: Supply(source["max_epochs"], passes[name], source["min_tokens"], source["max_tokens"])
         for name, source in sources.items()},
    ), section.short == "redistribute")  # fmt: skip
    laid = {}
    for number, (name, source) in enumerate(sources.items()):
        most = int(exact(source["max_epochs"]) * passes[name])
        wanted = [rows[number] * section.sequence_length for rows in quotas.rows]
        laid[name] = _take(candidates, chosen[name], name, seed, wanted, most, packing_of(section), passes[name])
    return quotas, laid


def _take(
    candidates: Candidates, chosen: np.ndarray, name: str, seed: int, quotas: Sequence[int], most: int,
    packing: Packing, pass_tokens: int,
) -> Laid:
    """Pack a source's documents until each stage has its quota of tokens in rows, reading `most` at the most."""
    least, key = sum(quotas), order_key(seed, "mix", "documents")
    while True:
        stream = _stream(candidates, chosen, key, min(least, most), candidates.repeats)
        ends = _ends_of_stages(stream, quotas, packing)
        if ends is not None and ends[-1] <= most:
            break
        if least >= most:
            raise MixError(_describe_short(name, sum(quotas), most, packing))
        least *= 2  # A longer stream begins as the shorter one does.
    layouts = [lay_out(stream, begin, end, packing) for begin, end in zip([0, *ends], ends, strict=False)]
    rows = tuple(layout.rows for layout in layouts)
    return Laid(pass_tokens, upto(stream, ends[-1]), ends[-1], join_layouts(layouts), rows)


def _ends_of_stages(stream: Stream, quotas: Sequence[int], packing: Packing) -> list[int] | None:
    """Up to where in a stream each stage goes; None if the stream is too short for the last one."""
    ends: list[int] = []
    for quota in quotas:
        end = end_of(stream, ends[-1] if ends else 0, quota, packing)
        if end is None:
            return None
        ends.append(end)
    return ends


def _describe_short(name: str, quota: int, most: int, packing: Packing) -> str:
    return (f"sources.{name}: {most} tokens may be read (max_epochs), but rows that begin with a document drop what "
            f"does not fit into them, so these do not fill {quota} tokens ({quota // packing.sequence_length} rows of "
            f"{packing.sequence_length}); raise its max_epochs, lower its weight or mix.tokens, or set "
            + ("mix.document_starts to any" if packing.best_fit else "mix.packing to best_fit"))


def lay_validation(candidates: Candidates, sources: Sequence[str], section: Mix) -> dict[str, Laid]:
    """Lay out every source's held-out documents, each once; neither seed nor weights nor packing matter to them."""
    laid = {}
    for number, name in enumerate(sources):
        chosen = np.flatnonzero(candidates.held_out & (candidates.source == number))
        tokens = int(candidates.documents.tokens[chosen].sum()) + len(chosen)
        rows = min(section.max_validation_rows, tokens // section.sequence_length)
        end = rows * section.sequence_length
        stream = _stream(candidates, chosen, VALIDATION_KEY, end)
        laid[name] = Laid(tokens, stream, end, lay_out(stream, 0, end, Packing(section.sequence_length)), (rows,))
    return laid


def _stream(
    candidates: Candidates, chosen: np.ndarray, key: int, least_tokens: int, repeats: np.ndarray | None = None
) -> Stream:
    documents = candidates.documents
    return make_stream(chosen, documents.words[chosen], documents.tokens[chosen], key, least_tokens,
                       None if repeats is None else repeats[chosen])
