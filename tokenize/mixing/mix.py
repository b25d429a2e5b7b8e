"""The stage `mix`: a packed training set with an exact share of every source, and held-out rows of each.

    condition -> hold out -> quota -> one token stream per source -> rows -> a stratified, shuffled order -> shards

Weights are shares of tokens: of those of documents, in every packing, so padding counts for nobody.
Which documents are taken, and how often, depends on hash(seed, copy, id) alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import check_conservation
from gristmill.dataprep.documents import shard_names
from gristmill.dataprep.files import write_json
from gristmill.dataprep.jobs.engine import Task, run_tasks
from gristmill.mixtures.mix import Mix
from gristmill.tokenize.encoding.encode import tokens_name
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.mixing.candidates import VALIDATION_KEY, Candidates, collect, count
from gristmill.tokenize.mixing.layouts import Layout, Packing, account, compare, end_of, lay_out
from gristmill.tokenize.mixing.ledger import write_ledger
from gristmill.tokenize.mixing.pack import (
    Plan,
    layout_of,
    save,
    train_stream,
    validation_stream,
    write_train_shard,
    write_validation_shard,
)
from gristmill.tokenize.mixing.quotas import MixError, Supply, plan_rows
from gristmill.tokenize.mixing.streams import Stream, make_stream, upto
from gristmill.tokenize.order import order_key
from gristmill.tokenize.packed import DTYPES, FORMAT, MANIFEST, dtype_name, train_name, validation_name

SHARD_BYTES = 64_000_000
"""Of tokens, where the manifest does not say `shard_rows`: large enough to stream, small enough to redo."""


@dataclass(frozen=True)
class Laid:
    """A source's documents, laid out.

    Attributes:
        pass_tokens: tokens of all its documents once, ends of text counted.
        stream: the documents that are taken.
        end: up to where in it.
        layout: the rows that they are packed into.
    """

    pass_tokens: int
    stream: Stream
    end: int
    layout: Layout

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.layout.rows

    @property
    def tokens(self) -> int:
        """Tokens of documents in them."""
        return self.layout.tokens


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Plan the mixture and write the packed set (see `packed.py` for its files).

    Args:
        inputs: `ingest`, the annotating stages, `tokenizer`, `tokenize`.
        config: `mix` (the section), `sources` (name -> weight, max_epochs, where; in order), `seed`.
        out: output folder.
        context: where to run.

    Raises:
        gristmill.tokenize.mixing.quotas.MixError: a share cannot be filled, or a condition is wrong.
    """
    section = Mix.model_validate(config["mix"])
    sources: dict[str, dict[str, Any]] = config["sources"]
    seed, length = config["seed"], section.sequence_length
    tokenizer = load(inputs["tokenizer"])
    candidates = collect(inputs, {name: source["where"] for name, source in sources.items()}, section.validation)
    held_out = _lay_validation(candidates, list(sources), section)
    train = _lay_train(candidates, sources, section, seed)
    if section.validation:
        _warn_of_empty_validation(held_out, context)
    plan = Plan(
        folder=str(context.work / "plan"), out=str(out), dtype=dtype_name(tokenizer.vocab_size),
        parts=tuple(str(inputs["tokenize"] / tokens_name(shard)) for shard in shard_names(inputs["ingest"])),
        sequence_length=length, eos=tokenizer.eos, pad=tokenizer.pad, seed=seed,
        rows_per_source={name: laid.rows for name, laid in train.items()},
    )
    _save_plan(context.work / "plan", candidates, train, held_out)
    token_bytes = str(inputs["tokenizer"] / "token_bytes.npy")
    validation = run_tasks("validation", _validation_tasks(held_out),
                           partial(write_validation_shard, plan=plan, token_bytes=token_bytes), context)
    shards = run_tasks("train", _train_tasks(plan, section), partial(write_train_shard, plan=plan), context)
    write_ledger(out, candidates, _used(candidates, train, held_out))
    summary = _describe(candidates, sources, train, held_out, validation, section)
    write_json(out / MANIFEST, {
        "format": FORMAT, "dtype": plan.dtype, "sequence_length": length, "seed": seed, "sources": list(sources),
        "tokenizer": {"vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos, "pad": tokenizer.pad,
                      "sha256": tokenizer.sha256},
        "train": {"rows": sum(plan.rows_per_source.values()), "rows_per_source": list(plan.rows_per_source.values()),
                  "shards": shards},
        **{key: summary[key] for key in ("packing", "packings", "validation", "requested", "realised")},
    })
    return summary


def _lay_train(
    candidates: Candidates, sources: Mapping[str, Mapping[str, Any]], section: Mix, seed: int
) -> dict[str, Laid]:
    tokens = candidates.documents.tokens
    chosen = {name: np.flatnonzero(candidates.trains & (candidates.source == number))
              for number, name in enumerate(sources)}
    passes = {name: int(tokens[these].sum()) + len(these) for name, these in chosen.items()}
    rows = plan_rows(section.tokens, section.sequence_length, {
        name: Supply(source["weight"], source["max_epochs"], passes[name]) for name, source in sources.items()})
    key, laid = order_key(seed, "mix", "documents"), {}
    for name, source in sources.items():
        most = int(Fraction(source["max_epochs"]) * passes[name])
        quota, packing = rows[name] * section.sequence_length, packing_of(section)
        found = _take(candidates, chosen[name], key, quota, most, packing)
        if found is None:
            raise MixError(_describe_short(name, quota, most, packing))
        laid[name] = Laid(passes[name], *found)
    return laid


def packing_of(section: Mix) -> Packing:
    """How a section packs its training rows."""
    return Packing(section.sequence_length, section.packing == "best_fit", section.document_starts == "aligned")


def _take(
    candidates: Candidates, chosen: np.ndarray, key: int, quota: int, most: int, packing: Packing
) -> tuple[Stream, int, Layout] | None:
    """Pack documents until `quota` tokens are in rows, reading `most` tokens at the most; None if that is too few."""
    least = quota
    while True:
        stream = _stream(candidates, chosen, key, min(least, most))
        end = end_of(stream, 0, quota, packing)
        if end is not None and end <= most:
            return upto(stream, end), end, lay_out(stream, 0, end, packing)
        if least >= most:
            return None
        least *= 2  # a longer stream begins as the shorter one does


def _describe_short(name: str, quota: int, most: int, packing: Packing) -> str:
    return (f"sources.{name}: {most} tokens may be read (max_epochs), but rows that begin with a document drop what "
            f"does not fit into them, so these do not fill {quota} tokens ({quota // packing.sequence_length} rows of "
            f"{packing.sequence_length}); raise its max_epochs, lower its weight or mix.tokens, or set "
            + ("mix.document_starts to any" if packing.best_fit else "mix.packing to best_fit"))


def _lay_validation(candidates: Candidates, sources: list[str], section: Mix) -> dict[str, Laid]:
    laid = {}
    for number, name in enumerate(sources):
        chosen = np.flatnonzero(candidates.held_out & (candidates.source == number))
        tokens = int(candidates.documents.tokens[chosen].sum()) + len(chosen)
        rows = min(section.max_validation_rows, tokens // section.sequence_length)
        end = rows * section.sequence_length
        stream = _stream(candidates, chosen, VALIDATION_KEY, end)
        laid[name] = Laid(tokens, stream, end, lay_out(stream, 0, end, Packing(section.sequence_length)))
    return laid


def _stream(candidates: Candidates, chosen: np.ndarray, key: int, least_tokens: int) -> Stream:
    documents = candidates.documents
    return make_stream(chosen, documents.words[chosen], documents.tokens[chosen], key, least_tokens)


def _warn_of_empty_validation(held_out: Mapping[str, Laid], context: Context) -> None:
    empty = [name for name, laid in held_out.items() if not laid.rows]
    if empty:
        context.warn(f"no validation rows for {', '.join(empty)}: the documents that were held out fill no row; raise "
                     "mix.validation to measure a loss on these sources")


def _save_plan(
    folder: Path, candidates: Candidates, train: Mapping[str, Laid], held_out: Mapping[str, Laid]
) -> None:
    save(folder, "documents", candidates.documents)
    for number, name in enumerate(train):
        for saved, laid in ((train_stream(number), train[name]), (validation_stream(number), held_out[name])):
            save(folder, saved, laid.stream)
            save(folder, layout_of(saved), laid.layout)


def _validation_tasks(held_out: Mapping[str, Laid]) -> list[Task]:
    return [Task(f"validation-{number:05d}", {"file": validation_name(name), "source": number, "rows": laid.rows})
            for number, (name, laid) in enumerate(held_out.items())]


def _train_tasks(plan: Plan, section: Mix) -> list[Task]:
    row_bytes = plan.sequence_length * DTYPES[plan.dtype].itemsize
    most, total = section.shard_rows or max(1, SHARD_BYTES // row_bytes), sum(plan.rows_per_source.values())
    return [Task(f"train-{shard:05d}", {"file": train_name(shard), "first": first, "rows": min(most, total - first)})
            for shard, first in enumerate(range(0, total, most))]


def _describe(
    candidates: Candidates, sources: Mapping[str, Mapping[str, Any]], train: Mapping[str, Laid],
    held_out: Mapping[str, Laid], validation: list[dict[str, Any]], section: Mix,
) -> dict[str, Any]:
    """The summary: the ledger, per source what was asked for and what came of it, and what packings would cost."""
    counts = count(candidates, _used(candidates, train, held_out), list(sources))
    check_conservation(counts, "mix")
    total, packing = sum(laid.tokens for laid in train.values()), packing_of(section)
    weights = sum(Fraction(source["weight"]) for source in sources.values())
    requested = {name: {"weight": source["weight"], "share": float(Fraction(source["weight"]) / weights),
                        "tokens": float(total * Fraction(source["weight"]) / weights),
                        "max_epochs": source["max_epochs"], "where": source["where"]}
                 for name, source in sources.items()}
    realised = {name: _realised(laid, total, packing) for name, laid in train.items()}
    return {
        "counts": counts, "rows": sum(laid.rows for laid in train.values()), "tokens": total,
        "padding_tokens": sum(part["padding_tokens"] for part in realised.values()), "packing": packing.name,
        "packings": _packings(train, section.sequence_length), "requested": requested, "realised": realised,
        "validation": {name: {**written, "documents": len(laid.stream.document), "tokens": laid.tokens,
                              "cut_tokens": laid.pass_tokens - laid.tokens}
                       for (name, laid), written in zip(held_out.items(), validation, strict=True)},
    }


def _used(candidates: Candidates, train: Mapping[str, Laid], held_out: Mapping[str, Laid]) -> np.ndarray:
    """Which documents are in a row: bool of shape (n,)."""
    used = np.zeros(len(candidates.source), dtype=bool)
    for laid in (*train.values(), *held_out.values()):
        used[laid.stream.document] = True
    return used


def _packings(train: Mapping[str, Laid], length: int) -> dict[str, dict[str, Any]]:
    """What every packing makes of the same tokens of documents, over all sources (see `layouts.account`)."""
    total: dict[str, dict[str, Any]] = {}
    for laid in train.values():
        for name, costs in compare(laid.stream, 0, laid.end, length).items():
            sums = total.setdefault(name, dict.fromkeys(costs, 0))
            total[name] = {key: sums[key] + value for key, value in costs.items()}
    return total


def _realised(laid: Laid, total_tokens: int, packing: Packing) -> dict[str, Any]:
    """What a source gave: see `layouts.account`; `cut_tokens` are the rest of its last document."""
    documents = laid.stream.document
    return {
        **account(laid.stream, 0, laid.end, laid.layout, packing),
        "share": laid.tokens / total_tokens, "available_tokens": laid.pass_tokens,
        "documents": len(np.unique(documents)), "copies": len(documents),
        "epochs": round(laid.end / laid.pass_tokens, 4) if laid.pass_tokens else 0.0,
        "cut_tokens": laid.stream.tokens - laid.end,
    }
