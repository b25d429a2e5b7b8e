"""Which windows the corpus has more than once, and where each stands first: the shuffles of `dedup_substrings`.

A shard sends each distinct window once, with its own first copy and how many there are, so that a text on a million
pages is no more work than any other.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.groups import group_starts, sort_rows, spread_groups
from gristmill.dataprep.jobs.engine import Done, Task
from gristmill.dataprep.passages.substring_plan import Plan, find_hashes
from gristmill.dataprep.passages.windows import Windows, find_anchors, find_windows, near
from gristmill.dataprep.shuffle import open_batches, write_partitions

CLAIM = ("id_high", "id_low", "document", "begin")
"""The first copy of a window is the one where these are smallest: by the document's id, then by place."""


def send_anchors(task: Task, plan: Plan) -> Done:
    """Send the distinct anchors of a shard to the partitions of their hashes."""
    texts, _ = plan.read(task)
    windows = find_windows(texts.texts, plan.section.min_words)
    anchors, copies = np.unique(windows.hashes[find_anchors(windows, plan.spread)], return_counts=True)
    shard = np.full(len(anchors), task.payload["shard"])
    path = plan.send("anchors", task.name, {"hash": anchors, "copies": copies, "shard": shard})
    return Done([path], {"windows": len(windows.hashes), "sent": len(anchors)})


def find_repeated_anchors(task: Task, plan: Plan) -> Done:
    """Tell the shards which anchors of a partition are repeated."""
    rows = plan.receive("anchors", task.payload["partition"])
    order = sort_rows(rows["hash"])
    starts = group_starts(rows["hash"][order])
    repeated = _sums(rows["copies"][order], starts) >= 2
    chosen = order[repeated[spread_groups(starts, len(order))]] if len(order) else order
    path = plan.reply("repeated_anchors", task.name, {"hash": rows["hash"][chosen]}, rows["shard"][chosen])
    return Done([path])


def send_windows(task: Task, plan: Plan) -> Done:
    """Send the distinct windows around repeated anchors, each with its first copy in the shard."""
    texts, numbers = plan.read(task)
    windows, chosen = windows_near_repeats(texts.texts, task, plan)
    text = windows.text[chosen]
    high, low = texts.ids()
    rows = {
        "hash": windows.hashes[chosen], "id_high": high[text], "id_low": low[text], "document": numbers[text],
        "begin": windows.begins[chosen],
    }  # fmt: skip
    order = sort_rows(*rows.values())
    rows = {name: values[order] for name, values in rows.items()}
    starts = group_starts(rows["hash"])
    sent = {name: values[starts] for name, values in rows.items()}
    sent["copies"] = np.diff(np.append(starts, len(order)))
    return Done([plan.send("windows", task.name, sent)], {"sent": len(starts)})


def windows_near_repeats(texts: pa.Array, task: Task, plan: Plan) -> tuple[Windows, np.ndarray]:
    """All windows of a shard's texts, and which of them (int64, ascending) can be part of a repeated passage."""
    windows = find_windows(texts, plan.section.min_words)
    anchors = np.flatnonzero(find_anchors(windows, plan.spread))
    known = plan.replies("repeated_anchors", task.payload["shard"])["hash"]
    marked = np.zeros(len(windows.hashes), bool)
    marked[anchors[find_hashes(known, windows.hashes[anchors]) >= 0]] = True
    return windows, np.flatnonzero(near(windows, marked, plan.spread - 1))


def find_repeated_windows(task: Task, plan: Plan) -> Done:
    """Tell the shards which windows of a partition are repeated, and where each stands first."""
    rows = plan.receive("windows", task.payload["partition"])
    order = sort_rows(rows["hash"], *(rows[name] for name in CLAIM))
    rows = {name: values[order] for name, values in rows.items()}
    starts = group_starts(rows["hash"])
    copies = _sums(rows["copies"], starts)
    group = spread_groups(starts, len(order))
    chosen = np.flatnonzero((copies >= 2)[group]) if len(order) else order
    first = starts[group[chosen]]
    reply = {"hash": rows["hash"][chosen], "copies": copies[group[chosen]]}
    reply |= {f"first_{name}": rows[name][first] for name in CLAIM}
    shards = np.searchsorted(plan.numbering.starts, rows["document"][chosen], side="right") - 1
    return Done([plan.reply("repeated_windows", task.name, reply, shards)], {"repeated": int((copies >= 2).sum())})


def lend(task: Task, plan: Plan) -> Done:
    """Write the texts of a shard that hold first copies of repeated windows, for those who have the later ones."""
    texts, numbers = plan.read(task)
    first = plan.replies("repeated_windows", task.payload["shard"])["first_document"]
    lenders = np.flatnonzero(np.isin(numbers, first))
    table = pa.table({"document": pa.array(numbers[lenders]), "text": texts.texts.take(pa.array(lenders))})
    path = plan.path("lent", task.name)
    write_partitions(path, table, np.zeros(len(table), np.int64), 1)
    return Done([path])


def borrow(plan: Plan, shard: int, documents: np.ndarray) -> tuple[pa.Array, np.ndarray]:
    """The texts of some documents of a shard that lends them.

    Args:
        documents: int64 of shape (n,), in any order and repeated.

    Returns:
        the distinct texts; and for each document its place among them.
    """
    batch = open_batches(plan.path("lent", plan.numbering.shards[shard])).get_batch(0)
    distinct, place = np.unique(documents, return_inverse=True)
    rows = np.searchsorted(batch["document"].to_numpy(), distinct)
    return batch["text"].take(pa.array(rows)), place


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    sums: np.ndarray = np.add.reduceat(values, starts) if len(starts) else np.empty(0, np.int64)
    return sums
