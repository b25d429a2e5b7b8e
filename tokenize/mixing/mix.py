"""The stage `mix`: a packed training set with an exact share of every source, and held-out rows of each.

    condition -> hold out -> quota -> one token stream per source -> rows in a stratified, shuffled order -> shards

Weights are shares of tokens. Which documents are taken, and how often, depends on hash(seed, copy, id) alone.
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
from gristmill.tokenize.mixing.ledger import write_ledger
from gristmill.tokenize.mixing.pack import (
    Plan,
    save,
    train_stream,
    validation_stream,
    write_train_shard,
    write_validation_shard,
)
from gristmill.tokenize.mixing.quotas import Supply, plan_rows
from gristmill.tokenize.mixing.streams import Stream, count_split, make_stream
from gristmill.tokenize.order import order_key
from gristmill.tokenize.packed import DTYPES, FORMAT, MANIFEST, dtype_name, train_name, validation_name

SHARD_BYTES = 64_000_000
"""Of tokens, where the manifest does not say `shard_rows`: large enough to stream, small enough to redo."""


@dataclass(frozen=True)
class Laid:
    """A source's documents, laid out.

    Attributes:
        pass_tokens: tokens of all its documents once, ends of text counted.
        rows: whole rows that are taken.
        stream: what they are cut from.
    """

    pass_tokens: int
    rows: int
    stream: Stream


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
        sequence_length=length, eos=tokenizer.eos, seed=seed,
        rows_per_source={name: laid.rows for name, laid in train.items()},
    )
    _save_plan(context.work / "plan", candidates, train, held_out)
    token_bytes = str(inputs["tokenizer"] / "token_bytes.npy")
    validation = run_tasks("validation", _validation_tasks(held_out),
                           partial(write_validation_shard, plan=plan, token_bytes=token_bytes), context)
    shards = run_tasks("train", _train_tasks(plan, section), partial(write_train_shard, plan=plan), context)
    write_ledger(out, candidates, _used(candidates, train, held_out))
    summary = _describe(candidates, sources, train, held_out, validation, length)
    write_json(out / MANIFEST, {
        "format": FORMAT, "dtype": plan.dtype, "sequence_length": length, "seed": seed, "sources": list(sources),
        "tokenizer": {"vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos, "pad": tokenizer.pad,
                      "sha256": tokenizer.sha256},
        "train": {"rows": sum(plan.rows_per_source.values()), "rows_per_source": list(plan.rows_per_source.values()),
                  "shards": shards},
        **{key: summary[key] for key in ("validation", "requested", "realised")},
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
    return {name: Laid(passes[name], rows[name], _stream(
        candidates, chosen[name], order_key(seed, "mix", "documents"), rows[name] * section.sequence_length))
        for name in sources}


def _lay_validation(candidates: Candidates, sources: list[str], section: Mix) -> dict[str, Laid]:
    laid = {}
    for number, name in enumerate(sources):
        chosen = np.flatnonzero(candidates.held_out & (candidates.source == number))
        tokens = int(candidates.documents.tokens[chosen].sum()) + len(chosen)
        rows = min(section.max_validation_rows, tokens // section.sequence_length)
        stream = _stream(candidates, chosen, VALIDATION_KEY, rows * section.sequence_length)
        laid[name] = Laid(tokens, rows, stream)
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
        save(folder, train_stream(number), train[name].stream)
        save(folder, validation_stream(number), held_out[name].stream)


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
    held_out: Mapping[str, Laid], validation: list[dict[str, Any]], length: int,
) -> dict[str, Any]:
    """The summary: the ledger, and per source what was asked for and what came of it."""
    counts = count(candidates, _used(candidates, train, held_out), list(sources))
    check_conservation(counts, "mix")
    total = sum(laid.rows for laid in train.values())
    weights = sum(Fraction(source["weight"]) for source in sources.values())
    requested = {name: {"weight": source["weight"], "share": float(Fraction(source["weight"]) / weights),
                        "tokens": float(total * length * Fraction(source["weight"]) / weights),
                        "max_epochs": source["max_epochs"], "where": source["where"]}
                 for name, source in sources.items()}
    return {
        "counts": counts, "rows": total, "tokens": total * length, "requested": requested,
        "realised": {name: _realised(laid, total, length) for name, laid in train.items()},
        "validation": {name: {**written, "documents": len(laid.stream.document), "tokens": laid.rows * length,
                              "cut_tokens": laid.pass_tokens - laid.rows * length}
                       for (name, laid), written in zip(held_out.items(), validation, strict=True)},
    }


def _used(candidates: Candidates, train: Mapping[str, Laid], held_out: Mapping[str, Laid]) -> np.ndarray:
    """Which documents are in a row: bool of shape (n,)."""
    used = np.zeros(len(candidates.source), dtype=bool)
    for laid in (*train.values(), *held_out.values()):
        used[laid.stream.document] = True
    return used


def _realised(laid: Laid, total_rows: int, length: int) -> dict[str, Any]:
    """What a source gave; `split_documents` lie in several rows, `cut_tokens` are what no row holds of the last."""
    tokens, documents = laid.rows * length, laid.stream.document
    return {
        "rows": laid.rows, "tokens": tokens, "share": laid.rows / total_rows, "available_tokens": laid.pass_tokens,
        "documents": len(np.unique(documents)), "copies": len(documents),
        "epochs": round(tokens / laid.pass_tokens, 4) if laid.pass_tokens else 0.0,
        "split_documents": count_split(laid.stream, laid.rows, length), "cut_tokens": laid.stream.tokens - tokens,
    }
