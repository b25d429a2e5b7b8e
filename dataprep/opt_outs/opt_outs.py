"""Stage `opt_outs`: drop documents whose publishers reserve their use for training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import measure_texts
from gristmill.dataprep.cleaning.urls import document_urls
from gristmill.dataprep.conservation import Counted, Counts, add_counts, balance
from gristmill.dataprep.documents import Inputs, read_shard
from gristmill.dataprep.opt_outs.reservations import (
    directives_in,
    disallowed_agents,
    page_reservation,
    reserved_usage,
    site_reservation,
)
from gristmill.dataprep.opt_outs.site_texts import (
    KINDS,
    SiteTexts,
    gather_site_texts,
    read_site_texts,
    site_text,
)
from gristmill.dataprep.runners.tasks import Done, ShardTask, run_tasks, shard_tasks
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.opt_outs import OPT_OUT_RULES, OptOuts

COLUMNS = ["id", "source", "locator", "metadata", "text"]


@dataclass(frozen=True)
class OptOutSummary:
    """Summary of the opt-outs.

    Attributes:
        counts: documents by outcome.
        reserved: rule -> documents with such a reservation, dropped or not.
        addressed: documents with an address.
        with_site_text: of these, those whose host has a text in `files`, by kind.
    """

    counts: Counts
    reserved: Mapping[str, int]
    addressed: int
    with_site_text: Mapping[str, int]


class JudgedShard(Counted):
    """Result of judging a shard; see `OptOutSummary`."""

    reserved: dict[str, int]
    addressed: int
    with_site_text: dict[str, int]


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> OptOutSummary:
    """Find the reservations of every kept document, and drop those of `reservations`.

    Writes one annotation table per document shard, with a column for each rule: the
    reservation, null if there is none.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `opt_outs` section (`mixtures.steps.opt_outs.OptOuts`).

    Raises:
        gristmill.dataprep.opt_outs.site_texts.SiteTextError: a file has no texts of
            sites.
        ConservationError, QuarantineError: see `counts`.
    """
    section = OptOuts.model_validate(config)
    judge = partial(
        judge_shard,
        inputs=inputs,
        section=section,
        site_tables=gather_site_texts(section.files, context),
        out=out,
    )
    tasks = shard_tasks(inputs["ingest"])
    results = run_tasks("opt_outs", tasks, judge, context, holds_gil=True)
    total = add_counts(results)
    return OptOutSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        total["reserved"],
        total["addressed"],
        total["with_site_text"],
    )


def judge_shard(
    task: ShardTask,
    inputs: Inputs,
    section: OptOuts,
    site_tables: Sequence[Path],
    out: Path,
) -> Done[JudgedShard]:
    """Find the reservations of one document shard and write its annotations."""
    shard = read_shard(inputs, task.name, COLUMNS, section.sources)
    documents = shard.judged_documents
    hosts = [host_of(url) for url in document_urls(documents) if url is not None]
    texts = read_site_texts(site_tables, set(hosts))
    measured, errors = measure_texts(
        documents, partial(find_reservations, section=section, texts=texts)
    )
    rules = [rule for rule, is_on in section.reservations if is_on]
    reasons = [
        next((rule for rule in rules if reserved[rule] is not None), None)
        for reserved in pa.table(measured).to_pylist()
    ]
    with_site_text = {
        kind: sum(site_text(texts, host, kind, "") is not None for host in hosts)
        for kind in KINDS
    }
    result = JudgedShard(
        counts=shard.write_measured(out / task.name, reasons, measured, errors),
        reserved={
            rule: len(values) - values.null_count for rule, values in measured.items()
        },
        addressed=len(hosts),
        with_site_text=with_site_text,
    )
    return Done([out / task.name], result)


def host_of(url: str) -> str:
    """Host of an address in lower case, without its port."""
    return urlsplit(url).hostname or ""


def find_reservations(
    documents: pa.Table, section: OptOuts, texts: SiteTexts
) -> dict[str, pa.Array]:
    """Reservations of n documents: rule -> n strings, null for none."""
    metadata = documents["metadata"].to_pylist()
    rows = [
        reservations(json.loads(stated), url or "", section, texts)
        for stated, url in zip(metadata, document_urls(documents), strict=True)
    ]
    return {
        rule: pa.array([row[rule] for row in rows], pa.string())
        for rule in OPT_OUT_RULES
    }


def reservations(
    metadata: Mapping[str, str], url: str, section: OptOuts, texts: SiteTexts
) -> dict[str, str | None]:
    """Reservations of a document by rule, or None; its `url` may be empty."""
    date = str(metadata.get("date", ""))
    robots, ai_txt, tdmrep = (
        site_text(texts, host_of(url), kind, date) for kind in KINDS
    )
    agents, directives = section.agents, section.directives
    page = page_reservation(metadata)
    usage = metadata.get("content_usage")
    return {
        "robots_txt": robots and disallowed_agents(robots, url, agents),
        "content_usage": reserved_usage(usage, robots, url, agents),
        "x_robots_tag": directives_in(metadata.get("x_robots_tag", ""), directives),
        "meta_robots": directives_in(metadata.get("meta_robots", ""), directives),
        "tdm_reservation": page[0] if page and page[1] else None,
        "tdmrep": site_reservation(tdmrep, url) if tdmrep and not page else None,
        "ai_txt": ai_txt and disallowed_agents(ai_txt, url, agents),
    }
