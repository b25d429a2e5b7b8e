"""Stage `mix`: a packed training set with an exact share of every source, and held-out
rows of each.

    condition -> hold out -> quota -> one token stream per source -> rows in a
    stratified, shuffled order -> shards

Each arrow is a job whose tasks read only a document shard, a segment of the streams or
a shard of rows: `candidates.py`, `streams.py`, `row_layout.py`, `write_shards.py`,
`ledger.py`. The main process holds the token counts of the segments: 24 bytes for each
of at most 4,096 segments, per pass and stream.

Weights are shares of tokens. hash(seed, copy, id) alone decides whether and how often a
document is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypedDict

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.runners.shuffle import must_send
from gristmill.dataprep.runners.tasks import Task, planning_context, run_tasks
from gristmill.mixtures.schema.mix import Mix
from gristmill.mixtures.schema.sources import MixedSource
from gristmill.tokenize.encoding.encode import tokens_name
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, load
from gristmill.tokenize.importing.token_sources import corpus_shards
from gristmill.tokenize.mixing.candidates import collect
from gristmill.tokenize.mixing.exclude import read_excluded
from gristmill.tokenize.mixing.ledger import find_emptied, last_taken, write_ledger
from gristmill.tokenize.mixing.mix_summary import (
    MixSummary,
    describe,
    describe_redistribution,
    redistributed,
)
from gristmill.tokenize.mixing.quotas import Quotas, plan_quotas
from gristmill.tokenize.mixing.send_tokens import send_tokens
from gristmill.tokenize.mixing.source_filters import VALIDATION_KEY
from gristmill.tokenize.mixing.streams import (
    Draws,
    make_streams,
)
from gristmill.tokenize.packed_files import (
    FORMAT,
    FORMAT_WITH_PHASES,
    MANIFEST,
    PackedManifest,
    ShardEntry,
    train_name,
    validation_name,
)
from gristmill.tokenize.packing.fill_in_middle import rearranging
from gristmill.tokenize.packing.packing import packing_of
from gristmill.tokenize.packing.row_layout import (
    Layout,
    Shards,
    find_ends,
    lay_out,
    place,
)
from gristmill.tokenize.packing.write_shards import (
    RowPlan,
    WrittenShard,
    write_shard,
)
from gristmill.tokenize.shuffle import order_key

SUMMARY_KEYS = ("packing_cost", "requested", "realised", "redistributed")
"""Parts of the summary that packed.json repeats."""
MOST_PARTS = 2048
"""Token parts that the writers of shards map; the tokens of more are sent. Linux allows
a process 65,530 maps (vm.max_map_count), shared by all threads.
"""
SHARD_BYTES = 64_000_000
"""Bytes of tokens per shard if `shard_rows` is not set: large enough to stream, small
enough to redo.
"""


class MixRecipe(TypedDict):
    """Recipe of the stage."""

    mix: dict[str, object]
    """The section (`mixtures.schema.mix.Mix`)."""
    sources: dict[str, dict[str, object]]
    """Settings of each source (`mixtures.schema.sources.MixedSource`), in order."""
    seed: int


def run(inputs: Inputs, config: MixRecipe, out: Path, context: Context) -> MixSummary:
    """Plan the mixture and write the packed set (see `packed_files.py` for its files).

    Args:
        inputs: `tokenizer`; `ingest`, the annotating stages and `tokenize`;
            `import_tokens`.
        config: the mixture.
        out: output folder.
        context: where to run.

    Raises:
        gristmill.tokenize.mixing.quotas.MixError: a share cannot be filled, or an
            expression is wrong.
    """
    section = Mix.model_validate(config["mix"])
    length = section.sequence_length
    sources = {
        name: MixedSource.model_validate(settings)
        for name, settings in config["sources"].items()
    }
    seed = config["seed"]
    names = list(sources)
    tokenizer = load(inputs["tokenizer"])
    draws = Draws(len(names), order_key(seed, "mix", "documents"), VALIDATION_KEY)
    rearranged = rearranging(
        section.fim, names, seed, tokenizer.special_ids, tokenizer.eos
    )
    candidates = collect(
        inputs, sources, section.validation, draws, seed, context, rearranged
    )
    planning = planning_context(candidates.documents, context)
    streams = make_streams(
        candidates.entries, context.work, candidates.bits, draws, planning
    )
    stream_tokens = streams.bases.tokens[0].sum(axis=0).tolist()
    pass_tokens = dict(zip(names, stream_tokens, strict=False))
    quotas = plan_quotas(section, sources, pass_tokens)
    streams, ends = find_ends(streams, section, quotas, planning)
    # Whole rows of one pass, independent of seed and packing.
    held_out_ends = [
        min(section.max_validation_rows, tokens // length) * length
        for tokens in stream_tokens[len(names) :]
    ]
    layouts = lay_out(streams, ends, held_out_ends, section, planning)
    held_out = dict(zip(names, layouts[len(names) :], strict=True))
    rows_per_phase = (layout.rows_per_phase for layout in layouts[: len(names)])
    _warn(names, section, quotas, held_out, context)
    dtype = tokenizer.dtype
    shards = Shards(
        seed,
        tuple(names),
        tuple(zip(*rows_per_phase, strict=True)),
        section.shard_rows or max(1, SHARD_BYTES // (length * dtype.itemsize)),
        tuple(candidates.most),
    )
    parts = tuple(
        str(corpus["tokenize"] / tokens_name(shard))
        for corpus, shard in corpus_shards(inputs)
    )
    placed, requests = place(
        streams,
        layouts,
        shards,
        packing_of(section),
        len(parts)
        if must_send(planning, len(parts) * shards.number) or len(parts) > MOST_PARTS
        else 0,
        planning,
        rearranged,
    )
    plan = RowPlan(
        placed=placed,
        out=str(out),
        dtype=dtype.name,
        parts=parts,
        sent=None
        if requests is None
        else send_tokens(requests, parts, dtype.name, shards.number, context),
        sequence_length=length,
        eos=tokenizer.eos,
        pad=tokenizer.pad,
        excluded=() if section.exclude is None else read_excluded(section.exclude),
    )
    token_bytes = str(inputs["tokenizer"] / "token_bytes.npy")
    results = run_tasks(
        "rows",
        _row_tasks(held_out, shards),
        partial(write_shard, plan=plan, token_bytes=token_bytes),
        context,
    )
    written = [WrittenShard(**result) for result in results]
    entries = [shard.entry for shard in written[len(names) :]]
    counts, laid_out, tables = write_ledger(
        candidates,
        streams,
        last_taken(streams, [layout.end for layout in layouts]),
        find_emptied(out, written, plan.excluded),
        names,
        out,
        planning,
    )
    summary = describe(
        sources,
        quotas,
        section,
        counts,
        laid_out,
        stream_tokens,
        layouts,
        written[: len(names)],
        sum(len(entry.get("withheld", ())) for entry in entries),
    )
    described = asdict(summary)
    write_json(
        out / MANIFEST,
        {
            **_manifest(section, shards, tokenizer, entries, tables, summary),
            "seed": seed,
            "shares": described["stages"],
            **{key: described[key] for key in SUMMARY_KEYS},
        },
    )
    return summary


def _manifest(
    section: Mix,
    shards: Shards,
    tokenizer: TextTokenizer,
    entries: list[ShardEntry],
    tables: int,
    summary: MixSummary,
) -> PackedManifest:
    """packed.json, without the shares and costs of the summary.

    Args:
        entries: of the training shards.
        tables: of the ledger.
    """
    manifest: PackedManifest = {
        "format": FORMAT if len(shards.phases) == 1 else FORMAT_WITH_PHASES,
        "dtype": tokenizer.dtype.name,
        "sequence_length": section.sequence_length,
        "sources": list(shards.sources),
        "tokenizer": tokenizer.described(),
        "packing": summary.packing,
        "train": {
            "rows": summary.rows,
            "rows_per_source": [sum(rows) for rows in zip(*shards.phases, strict=True)],
            "stages": [list(rows) for rows in shards.phases],
            "shards": entries,
        },
        "validation": {**summary.validation},
    }
    if tables > 1:
        manifest["ledgers"] = tables
    return manifest


def _warn(
    sources: Sequence[str],
    section: Mix,
    quotas: Quotas,
    held_out: Mapping[str, Layout],
    context: Context,
) -> None:
    unused = [
        name
        for name, rows in zip(sources, quotas.per_source(), strict=True)
        if not rows
    ]
    if unused:
        context.warn(
            f"no training rows of {', '.join(unused)}: a weight of 0, or too small for "
            "one row"
        )
    moved = redistributed(sources, quotas, section.sequence_length)
    if moved:
        context.warn(describe_redistribution(moved))
    empty = [name for name, packed in held_out.items() if not packed.rows]
    if empty and section.validation:
        context.warn(
            f"no validation rows for {', '.join(empty)}: the documents that were held "
            "out fill no row; raise mix.validation to measure a loss on these sources"
        )


def _row_tasks(held_out: Mapping[str, Layout], shards: Shards) -> list[Task]:
    """Tasks of the held-out shards, a source each, and of the training shards."""
    total = sum(map(sum, shards.phases))
    return [
        *(
            Task(
                f"validation-{number:05d}",
                {
                    "held_out": True,
                    "file": validation_name(name),
                    "partition": shards.training + number,
                    "rows": layout.rows,
                },
            )
            for number, (name, layout) in enumerate(held_out.items())
        ),
        *(
            Task(
                f"train-{shard:05d}",
                {
                    "held_out": False,
                    "file": train_name(shard),
                    "partition": shard,
                    "first": first,
                    "rows": min(shards.shard_rows, total - first),
                },
            )
            for shard, first in enumerate(range(0, total, shards.shard_rows))
        ),
    ]
