"""The stage `mix`: a packed training set with an exact share of every source, and held-out rows of each.

    condition -> hold out -> quota -> one token stream per source -> rows in a stratified, shuffled order -> shards

Weights are shares of tokens. Which documents are taken, and how often, depends on hash(seed, copy, id) alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import write_json
from gristmill.dataprep.jobs.engine import Task, run_tasks
from gristmill.mixtures.mix import Mix
from gristmill.tokenize.encoding.encode import tokens_name
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.importing.corpora import corpus_shards
from gristmill.tokenize.mixing.candidates import Candidates, collect, write_ledger
from gristmill.tokenize.mixing.exclude import read_excluded, without_emptied
from gristmill.tokenize.mixing.mix_summary import describe, describe_redistribution, redistributed, used_documents
from gristmill.tokenize.mixing.packing import PackedSource, pack_training, pack_validation
from gristmill.tokenize.mixing.quotas import Quotas, plan_quotas
from gristmill.tokenize.mixing.write_shards import (
    RowPlan,
    layout_of,
    save,
    train_stream,
    validation_stream,
    write_shard,
)
from gristmill.tokenize.packed_files import (
    DTYPES,
    FORMAT,
    FORMAT_WITH_PHASES,
    MANIFEST,
    dtype_name,
    train_name,
    validation_name,
)

SHARD_BYTES = 64_000_000
"""Of tokens, where the manifest does not say `shard_rows`: large enough to stream, small enough to redo."""


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Plan the mixture and write the packed set (see `packed_files.py` for its files).

    Args:
        inputs: `tokenizer`; `ingest`, the annotating stages and `tokenize`; `import_tokens`.
        config: `mix` (the section), `sources` (name -> weight, max_epochs, min_tokens, max_tokens, where, epochs; in
            order), `seed`.
        out: output folder.
        context: where to run.

    Raises:
        gristmill.tokenize.mixing.quotas.MixError: a share cannot be filled, or an expression is wrong.
    """
    section = Mix.model_validate(config["mix"])
    sources: dict[str, dict[str, Any]] = config["sources"]
    seed = config["seed"]
    tokenizer = load(inputs["tokenizer"])
    candidates = collect(inputs, sources, section.validation, seed)
    held_out = pack_validation(candidates, list(sources), section)
    pass_tokens = {name: candidates.pass_tokens(number) for number, name in enumerate(sources)}
    quotas = plan_quotas(section, sources, pass_tokens)
    train = pack_training(candidates, sources, section, quotas, seed)
    _warn(sources, section, quotas, held_out, context)
    plan = RowPlan(
        folder=str(context.work / "plan"), out=str(out), dtype=dtype_name(tokenizer.vocab_size),
        parts=tuple(str(corpus["tokenize"] / tokens_name(shard)) for corpus, shard in corpus_shards(inputs)),
        sequence_length=section.sequence_length, eos=tokenizer.eos, pad=tokenizer.pad, seed=seed,
        sources=tuple(sources), phases=tuple(zip(*(packed.rows_per_phase for packed in train.values()), strict=True)),
        excluded=() if section.exclude is None else read_excluded(section.exclude),
    )
    _save_plan(context.work / "plan", candidates, train, held_out)
    token_bytes = str(inputs["tokenizer"] / "token_bytes.npy")
    tasks = [*_validation_tasks(held_out), *_train_tasks(plan, section)]
    written = run_tasks("rows", tasks, partial(write_shard, plan=plan, token_bytes=token_bytes), context,
                        direct=True)
    validation, shards = written[: len(held_out)], written[len(held_out) :]
    used, emptied = without_emptied(candidates, used_documents(candidates, train, held_out), out, written,
                                    plan.excluded)
    write_ledger(out, candidates, used, emptied)
    # These have served their turn: packed.json and the summary need not hold every id twice.
    for entry in (*shards, *validation):
        entry.pop("touched", None)
    summary = {**describe(candidates, sources, quotas, train, held_out, validation, section, used, emptied),
               "withheld_rows": sum(len(shard.get("withheld", ())) for shard in shards)}
    kept = ("packing", "packings", "validation", "requested", "realised", "redistributed")
    write_json(out / MANIFEST, {
        "format": FORMAT if len(plan.phases) == 1 else FORMAT_WITH_PHASES, "dtype": plan.dtype,
        "sequence_length": section.sequence_length, "seed": seed, "sources": list(sources),
        "tokenizer": tokenizer.described(),
        "train": {"rows": summary["rows"], "rows_per_source": [packed.rows for packed in train.values()],
                  "stages": [list(rows) for rows in plan.phases], "shards": shards},
        "shares": summary["stages"], **{key: summary[key] for key in kept},
    })
    return summary


def _warn(
    sources: Mapping[str, Any], section: Mix, quotas: Quotas, held_out: Mapping[str, PackedSource], context: Context
) -> None:
    unused = [name for name, rows in zip(sources, quotas.per_source(), strict=True) if not rows]
    if unused:
        context.warn(f"no training rows of {', '.join(unused)}: the weights of the mixture give them no row")
    moved = redistributed(list(sources), quotas, section.sequence_length)
    if moved:
        context.warn(describe_redistribution(moved))
    empty = [name for name, packed in held_out.items() if not packed.rows]
    if empty and section.validation:
        context.warn(f"no validation rows for {', '.join(empty)}: the documents that were held out fill no row; raise "
                     "mix.validation to measure a loss on these sources")


def _save_plan(
    folder: Path, candidates: Candidates, train: Mapping[str, PackedSource], held_out: Mapping[str, PackedSource]
) -> None:
    save(folder, "documents", candidates.documents)
    for number, name in enumerate(train):
        for saved, packed in ((train_stream(number), train[name]), (validation_stream(number), held_out[name])):
            save(folder, saved, packed.stream)
            save(folder, layout_of(saved), packed.layout)


def _validation_tasks(held_out: Mapping[str, PackedSource]) -> list[Task]:
    return [Task(f"validation-{number:05d}", {"file": validation_name(name), "source": number, "rows": packed.rows})
            for number, (name, packed) in enumerate(held_out.items())]


def _train_tasks(plan: RowPlan, section: Mix) -> list[Task]:
    row_bytes = plan.sequence_length * DTYPES[plan.dtype].itemsize
    most, total = section.shard_rows or max(1, SHARD_BYTES // row_bytes), sum(map(sum, plan.phases))
    return [Task(f"train-{shard:05d}", {"file": train_name(shard), "first": first, "rows": min(most, total - first)})
            for shard, first in enumerate(range(0, total, most))]
