"""Draw the pictures of the documentation, boxes and arrows, into docs/pictures: `make
pictures`.

Each is an SVG with a background of its own, light or dark by the reader's colour
scheme, so that it is readable on any page. Coordinates are in pixels of a picture 880
wide. The package itself computes the orders, packings and rules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pyarrow as pa

from gristmill.dataprep.filters.gopher import DIALECTS, statistics
from gristmill.mixtures.steps.rules import GopherRules
from gristmill.tokenize.mixing.quotas import round_table
from gristmill.tokenize.packing.pack_documents import pack
from gristmill.tokenize.shuffle import Order, sources_of_rows

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH = 880
STYLE = """
svg { color-scheme: light dark; --ground: #fbf8f3; --ink: #2b2622; --soft: #7a6f64; --line: #b9ab9a; --box: #ffffff;
  --a: #f0d9b5; --b: #cfe3d4; --c: #d3dff2; --d: #f3cfc6 }
@media (prefers-color-scheme: dark) { svg { --ground: #201c19; --ink: #ece5dc; --soft: #a99c8e; --line: #6d6156;
  --box: #2c2723; --a: #5c4420; --b: #24503a; --c: #2b426b; --d: #6b3428 } }
text { font: 14px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; fill: var(--ink) }
.small { font-size: 12px; fill: var(--soft) } .head { font-weight: 600 }
.mono { font: 12px ui-monospace, "Liberation Mono", monospace; white-space: pre }
.ground { fill: var(--ground) } .box { fill: var(--box) } .a { fill: var(--a) } .b { fill: var(--b) } .c {
  fill: var(--c) } .d { fill: var(--d) } .box, .a, .b, .c, .d { stroke: var(--line) }
.arrow { fill: none; stroke: var(--soft); stroke-width: 1.5; marker-end: url(#head) } .dashed { stroke-dasharray: 4 4 }
.tip { fill: var(--soft) }
"""
MIDDLE, START = "middle", "start"


def picture(title: str, height: int, *parts: str) -> str:
    """Return a whole file; `title` is for screen readers."""
    body = "\n".join(parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>
<rect class="ground" width="{WIDTH}" height="{height}" rx="10"/>
{body}
</svg>
"""


def box(
    x: int, y: int, width: int, height: int, head: str, *lines: str, kind: str = "box"
) -> str:
    """Return a box with a heading and smaller lines below it, all centred."""
    top = y + height / 2 - 9 * len(lines) + 5
    texts = [label(x + width / 2, top, head, "head")]
    texts += [
        label(x + width / 2, top + 18 * (at + 1), line, "small")
        for at, line in enumerate(lines)
    ]
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" '
        'rx="6"/>' + "".join(texts)
    )


def label(x: float, y: float, text: str, kind: str = "", anchor: str = MIDDLE) -> str:
    """Return a line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def arrow(*points: tuple[int, int], kind: str = "") -> str:
    """Return a line through points, with a tip at its end."""
    return (
        f'<polyline class="arrow {kind}" '
        f'points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
    )


def cells(
    x: int, y: int, width: int, height: int, parts: list[tuple[int, str, str]]
) -> str:
    """Return a bar of parts, each with its share of `width`, its kind and its text."""
    drawn, total = [], sum(share for share, _, _ in parts)
    for share, kind, text in parts:
        wide = width * share / total
        drawn.append(
            f'<rect class="{kind}" x="{x:g}" y="{y}" width="{wide:g}" '
            f'height="{height}"/>'
            + label(x + wide / 2, y + height / 2 + 4, text, "small")
        )
        x += wide
    return "".join(drawn)


def chain() -> str:
    """Draw the way from files to a model, with questions below."""
    steps = [
        ("sources", "a", ["JSONL, Parquet,", "WARC, HTML,", "text, code"]),
        ("prepare", "b", ["clean, langid,", "filter, dedup,", "quality, leaks"]),
        ("tokenise", "b", ["a BPE,", "or your own", "tokenizer.json"]),
        ("mix", "b", ["exact shares,", "packed rows,", "one order"]),
        ("pre-train", "c", ["FSDP, TP, CP,", "resumes to", "the same bits"]),
        ("fine-tune", "c", ["SFT, LoRA,", "DPO, rewards,", "GRPO"]),
        ("evaluate", "d", ["and export:", "safetensors that", "others load"]),
    ]
    parts, wide = [], 110
    for at, (name, kind, lines) in enumerate(steps):
        x = 14 + at * 124
        parts.append(
            box(x, 62, wide, 96, name, *[line for line in lines if line], kind=kind)
        )
        if at:
            parts.append(arrow((x - 14, 110), (x - 1, 110)))
    parts += [
        label(
            WIDTH / 2,
            34,
            "one YAML manifest, one command: gristmill run mine.yaml",
            "head",
        ),
        box(
            14,
            196,
            854,
            44,
            "store",
            "every stage's output under the hash of what went into it: reused, "
            "resumed, checked",
        ),
    ]
    parts += [arrow((69 + at * 124, 159), (69 + at * 124, 195)) for at in range(7)]
    questions = [
        "why was it dropped?",
        "what would 60 words keep?",
        "what did step 1,200 read?",
        "how do two runs differ?",
    ]
    commands = ["explain", "whatif", "trace", "compare"]
    for at, (question, command) in enumerate(zip(questions, commands, strict=True)):
        x = 14 + at * 218
        parts.append(box(x, 278, 200, 54, command, question))
        parts.append(arrow((x + 100, 241), (x + 100, 277)))
    return picture(
        "Sources are prepared, tokenised, mixed, trained on; every output is kept "
        "and can be asked.",
        350,
        *parts,
    )


def store() -> str:
    """Draw the inputs of a fingerprint, and the effect of a changed key."""
    parts = [
        label(
            WIDTH / 2,
            32,
            "A threshold of filter is changed: what is before it is reused, what "
            "follows is rebuilt",
            "head",
        )
    ]
    stages = [
        ("ingest", "sources, files"),
        ("langid", "keep: [en]"),
        ("filter", "min_words: 50"),
        ("dedup", "minhash"),
        ("mix", "weights"),
        ("pretrain", "model, steps"),
    ]
    for at, (name, key) in enumerate(stages):
        x, is_rebuilt = 20 + at * 144, at >= 2
        parts.append(box(x, 60, 122, 62, name, key, kind="d" if is_rebuilt else "b"))
        parts.append(
            label(
                x + 61, 144, "another hash" if is_rebuilt else "the same hash", "small"
            )
        )
        if at:
            parts.append(arrow((x - 22, 91), (x - 1, 91)))
    parts += [
        box(
            20,
            176,
            330,
            66,
            "fingerprint",
            "hash of: name and version of the stage,",
            "its own keys, its inputs' fingerprints",
            kind="a",
        ),
        arrow((350, 209), (396, 209)),
        box(397, 166, 463, 150, "", kind="box"),
        label(412, 190, "STORE/filter/mine--1f3353ce6a407c76/", "mono", START),
    ]
    files = [
        ("lease/", "who is making it, with a number that only rises"),
        ("work/", "shards that are done, checkpoints"),
        ("data/", "the output"),
        ("manifest.json", "every file with its checksum"),
        ("_SUCCESS", "written last: only then it counts"),
    ]
    for at, (name, content) in enumerate(files):
        parts.append(label(430, 214 + 22 * at, name, "mono", START))
        parts.append(label(546, 214 + 22 * at, content, "small", START))
    parts += [
        label(185, 270, "not in it: workers, ranks, engine, log level,", "small"),
        label(185, 288, "the time, the machine: they change no result", "small"),
    ]
    return picture(
        "A fingerprint names an output; a changed key gives new names to "
        "it and what follows.",
        334,
        *parts,
    )


def annotations() -> str:
    """Draw a document shard and the tables of two steps, row by row."""
    parts = [
        label(20, 32, "documents (never change)", "head", START),
        label(400, 32, "filter", "head"),
        label(720, 32, "clean", "head"),
    ]
    heads = [(20, "id   text"), (270, "keep  reason      words"), (590, "keep  edits")]
    rows = [
        ("3f.. The mill ran all d...", "yes   -           412", "yes   -"),
        ("8a.. Too short.", "no    min_words     2", "null: not judged"),
        (
            "c1.. Write to ann@mill...",
            "yes   -           388",
            "yes   bytes 9-21: <EMAIL>",
        ),
        ("e9.. The river, the ri...", "yes   -            97", "yes   -"),
    ]
    for x, text in heads:
        parts.append(label(x + 10, 62, text, "mono", START))
    for at, columns in enumerate(rows):
        y = 74 + at * 34
        for (x, wide, kind), text in zip(
            [(20, 220, "a"), (270, 290, "b"), (590, 270, "c")], columns, strict=True
        ):
            kind = "d" if "no " in columns[1] and x > 20 else kind
            parts.append(
                f'<rect class="{kind}" x="{x}" y="{y}" width="{wide}" '
                'height="28" rx="4"/>'
            )
            parts.append(label(x + 10, y + 18, text, "mono", START))
        for x in (240, 560):
            parts.append(arrow((x, y + 14), (x + 29, y + 14), kind="dashed"))
    parts.append(
        label(
            WIDTH / 2,
            240,
            "the same rows in the same order: ids are compared on every read",
            "small",
        )
    )
    return picture(
        "Steps write tables beside the documents: verdict, reason, "
        "values, edits, row by row.",
        258,
        *parts,
    )


def conservation() -> str:
    """Draw the conservation of documents, with the figures of docs/how-to/README.md."""
    parts = [
        label(
            WIDTH / 2,
            30,
            "read = kept + dropped by a named rule + quarantined, at every stage",
            "head",
        )
    ]
    steps = [
        ("ingest", [(258, "b", "kept 258")]),
        ("filter", [(242, "b", "kept 242"), (16, "d", "16")]),
        ("dedup", [(222, "b", "kept 222"), (20, "d", "20")]),
    ]
    wide = 400
    for at, (name, shares) in enumerate(steps):
        y, read = 54 + at * 54, sum(share for share, _, _ in shares)
        parts += [
            label(30, y + 24, name, "head", START),
            label(100, y + 24, f"read {read}", "small", START),
        ]
        parts.append(cells(170, y, wide * read // 258, 36, shares))
        if at:
            reasons = ["min_words 8, max_duplicate_line_ratio 8", "near_duplicate 20"][
                at - 1
            ]
            parts.append(label(590, y + 23, reasons, "small", START))
    parts.append(
        label(
            WIDTH / 2,
            232,
            "258 = 222 + 16 + 20 + 0 quarantined; a stage whose "
            "counts do not balance fails",
            "small",
        )
    )
    return picture(
        "The funnel of a run: what one step keeps, the next one reads.", 250, *parts
    )


TEXT = (
    "The mill\n# The mill\n- flour, 3 lb\n\nThe river runs to the mill, and the "
    "mill runs ...\nThe mill"
)


def dialects() -> str:
    """Draw the values of a text in each dialect of Gopher's rules."""
    parts = [
        label(30, 32, "One text", "head", START),
        label(410, 32, "what five projects count in it", "head", START),
    ]
    for at, line in enumerate(TEXT.split("\n")):
        parts.append(label(30, 62 + at * 22, line, "mono", START))
    shown = [
        "words",
        "mean_word_length",
        "duplicate_line_ratio",
        "top_2gram_char_ratio",
    ]
    for at, name in enumerate(["words", "mean word", "copied lines", "top 2-gram"]):
        parts.append(label(572 + at * 88, 62, name, "small"))
    for row, dialect in enumerate(DIALECTS):
        y = 72 + row * 34
        parts.append(box(410, y, 104, 28, dialect, kind="c"))
        values = statistics(pa.array([TEXT]), GopherRules(dialect=dialect))
        for at, name in enumerate(shown):
            value = float(values[name][0])
            parts.append(
                label(
                    572 + at * 88,
                    y + 19,
                    "-" if np.isnan(value) else f"{value:.3g}",
                    "mono",
                )
            )
    parts.append(label(30, 228, "so one threshold draws", "small", START))
    parts.append(label(30, 246, "five different lines", "small", START))
    return picture(
        "One text measured by five dialects of Gopher's rules: every column differs.",
        264,
        *parts,
    )


def order() -> str:
    """Draw quotas of rows, and their order."""
    total = 20
    quotas = [
        row[0]
        for row in round_table(
            [[share * total] for share in (Fraction(7, 10), Fraction(3, 10))]
        )
    ]
    read = Order(quotas, seed=7).rows(np.arange(total))
    of_web = {
        row: source == 0
        for row, source in enumerate(
            sources_of_rows([quotas], np.arange(total)).tolist()
        )
    }
    parts = [
        label(
            30,
            32,
            f"Rows of the packed set: {quotas[0]} of web, {quotas[1]} of books",
            "head",
            START,
        ),
        row_cells(
            30,
            46,
            [(int(row), "b" if of_web[int(row)] else "c") for row in range(total)],
        ),
        label(
            30,
            122,
            "The order of reading, computed from (seed, position): nothing is stored",
            "head",
            START,
        ),
        row_cells(
            30, 136, [(int(row), "b" if of_web[int(row)] else "c") for row in read]
        ),
    ]
    bound = 0.0
    for at in range(1, total + 1):
        web = sum(of_web[int(row)] for row in read[:at])
        bound = max(bound, abs(web - quotas[0] * at / total))
    for at in (4, 10, 20):
        web = sum(of_web[int(row)] for row in read[:at])
        x = 30 + at * 41
        parts += [
            f'<line class="arrow" x1="{x}" y1="132" x2="{x}" y2="196" '
            'style="marker-end:none"/>',
            label(x - 4, 212, f"{web} of {at} are web", "small", "end"),
        ]
    parts.append(
        label(
            30,
            244,
            f"Every prefix has the mixture: web is off by {bound:.2g} rows at the "
            "most (bound 0.5)",
            "small",
            START,
        )
    )
    return picture(
        "Rows of two sources, and their keyed order, in which every "
        "prefix keeps the mixture.",
        262,
        *parts,
    )


def row_cells(x: int, y: int, rows: list[tuple[int, str]]) -> str:
    """Return numbered cells side by side."""
    return "".join(
        f'<rect class="{kind}" x="{x + at * 41}" y="{y}" width="38" height="38" '
        'rx="4"/>' + label(x + at * 41 + 19, y + 24, str(row), "small")
        for at, (row, kind) in enumerate(rows)
    )


LENGTHS = [10, 5, 12, 3, 6, 9, 2]
ROW = 16


def packing() -> str:
    """Draw the same documents in rows of 16 tokens by both packings."""
    kinds = ["a", "b", "c", "d", "box", "a", "b"]
    documents = [[number] * size for number, size in enumerate(LENGTHS)]
    stream, best = (
        [
            (row, owner, int(np.sum(of_row == owner)))
            for row, of_row in enumerate(packed.documents)
            for owner in dict.fromkeys(of_row.tolist())
        ]
        for packed in (pack(documents, ROW, "stream"), pack(documents, ROW))
    )
    parts = []
    for x, title, pieces in (
        (30, "stream: back to back", stream),
        (460, "best_fit: whole where it can be", best),
    ):
        parts.append(label(x, 32, title, "head", START))
        places: dict[int, int] = {}
        for row, owner, size in pieces:
            at = places.get(row, 0)
            places[row] = at + size
            kind, text = (
                ("ground", "pad")
                if owner < 0
                else (kinds[owner], f"{'ABCDEFG'[owner]} {size}")
            )
            parts.append(
                f'<rect class="{kind}" x="{x + at * 24}" y="{48 + row * 40}" '
                f'width="{size * 24}" height="32" '
                f'stroke="var(--line)"/>'
                + label(x + (at + size / 2) * 24, 68 + row * 40, text, "small")
            )
    owners = [owner for _, owner, _ in stream if owner >= 0]
    num_cut = sum(owners.count(owner) > 1 for owner in set(owners))
    pads = sum(size for _, owner, size in best if owner < 0)
    bottom = 64 + 40 * max(row + 1 for row, _, _ in stream + best)
    parts += [
        label(
            30,
            bottom,
            f"{num_cut} of {len(LENGTHS)} documents are cut; only the "
            "last row is padded",
            "small",
            START,
        ),
        label(
            460,
            bottom,
            f"none is cut; padding, {pads} here, is never trained on",
            "small",
            START,
        ),
    ]
    return picture(
        "Seven documents in rows of 16 tokens, packed as a stream and by best fit.",
        bottom + 18,
        *parts,
    )


def resume() -> str:
    """Draw the batches of four processes, a kill, and the same batches on two."""
    read = Order([14, 6], seed=7).rows(np.arange(12)).reshape(3, 4)
    parts = [
        label(
            30,
            32,
            "Batch b is rows order(4b) to order(4b + 3), whoever reads them",
            "head",
            START,
        )
    ]
    for step, rows in enumerate(read.tolist()):
        x = 110 + step * 255
        parts.append(label(x + 105, 62, f"step {step + 1}", "head"))
        is_resumed = step == 2
        for rank in range(4):
            kind = "c" if is_resumed and rank < 2 else "b"
            parts.append(
                f'<rect class="{kind}" x="{x + rank * 54}" y="74" width="48" '
                'height="40" rx="4"/>'
                + label(x + rank * 54 + 24, 99, str(rows[rank]), "mono")
            )
        parts.append(
            label(
                x + 105,
                136,
                "2 processes, two rows each"
                if is_resumed
                else "4 processes, a row each",
                "small",
            )
        )
    parts += [
        box(
            250,
            160,
            240,
            52,
            "checkpoint",
            "weights, moments, one integer: 2",
            kind="a",
        ),
        box(550, 160, 140, 52, "SIGKILL", "step 3 had begun", kind="d"),
        arrow((550, 186), (491, 186)),
        arrow((370, 212), (370, 226), (725, 226), (725, 144), kind="dashed"),
        label(
            WIDTH / 2,
            252,
            "With as many processes the losses are the same bits; with others the "
            "same rows, summed in another order",
            "small",
        ),
    ]
    return picture(
        "Batches follow from the step alone: a training resumes on two processes "
        "where four were.",
        270,
        *parts,
    )


def tracing() -> str:
    """Draw the way from a step to its documents, and back."""
    chain_of = [
        ("step 1,200", ["of pretrain"], "c"),
        ("rows", ["order(seed, step)", "computed"], "c"),
        ("pieces", ["row, start, length,", "document's id"], "b"),
        ("document", ["text, edits, verdicts,", "cluster"], "b"),
        ("source", ["file, record,", "URL"], "a"),
    ]
    parts = [label(WIDTH / 2, 34, "gristmill trace --step 1200", "head")]
    for at, (name, lines, kind) in enumerate(chain_of):
        x = 24 + at * 172
        parts.append(box(x, 60, 142, 76, name, *lines, kind=kind))
        if at:
            parts += [
                arrow((x - 30, 86), (x - 1, 86)),
                arrow((x - 1, 112), (x - 30, 112)),
            ]
    stored = [
        "metrics.jsonl",
        "nothing is stored",
        "train-00000.docs.parquet",
        "part-00000.parquet",
        "ingest",
    ]
    parts += [
        label(95 + at * 172, 160, name, "mono" if "." in name else "small")
        for at, name in enumerate(stored)
    ]
    parts.append(
        label(
            WIDTH / 2,
            194,
            "gristmill trace --document ID: the way back, also for steps to come",
            "head",
        )
    )
    return picture(
        "A step leads to rows, pieces, documents and sources, and a "
        "document back to steps.",
        216,
        *parts,
    )


def loop() -> str:
    """Draw a step of a training."""
    steps = [
        ("rows", ["order(seed, step)", "read ahead"], "b"),
        ("loss", ["micro-batches;", "sum over all ranks"], "c"),
        ("gradients", ["/ tokens of the step,", "clipped"], "c"),
        ("spike?", ["6 sigma, NaN, Inf"], "a"),
        ("update", ["optimizer, schedule,", "averages"], "c"),
    ]
    parts = []
    for at, (name, lines, kind) in enumerate(steps):
        x = 24 + at * 172
        parts.append(box(x, 30, 142, 76, name, *lines, kind=kind))
        if at:
            parts.append(arrow((x - 30, 68), (x - 1, 68)))
    parts += [
        arrow((611, 106), (611, 150)),
        arrow((611, 209), (611, 231)),
        box(
            520,
            151,
            182,
            58,
            "skipped, bit-exactly",
            "its documents are listed",
            kind="d",
        ),
        box(520, 232, 182, 58, "validation", "per source, bits per byte", kind="a"),
        box(270, 232, 182, 58, "checkpoint", "written while it goes on", kind="a"),
        arrow((783, 106), (783, 261), (703, 261)),
        arrow((519, 261), (453, 261)),
        arrow((269, 261), (95, 261), (95, 107)),
        label(180, 252, "the next step", "small"),
    ]
    return picture(
        "One step: rows, loss, gradients, a look for spikes, the update.", 312, *parts
    )


def prefect() -> str:
    """Draw the division of work between the store and Prefect."""
    parts = [
        box(30, 40, 250, 170, "", kind="b"),
        label(155, 66, "the store", "head"),
        box(600, 40, 250, 170, "", kind="c"),
        label(725, 66, "Prefect", "head"),
        box(
            345, 60, 190, 56, "gristmill run", "from a shell, or from Prefect", kind="a"
        ),
    ]
    for x, lines in (
        (
            46,
            [
                "what is committed, what is reused",
                "leases: who makes it",
                "logs, checkpoints, run.json",
                "deleted: the work is lost",
            ],
        ),
        (
            616,
            [
                "forms, schedules, cancelling",
                "a task for each stage, its log",
                "tables and curves as artifacts",
                "deleted: no work is lost",
            ],
        ),
    ):
        parts += [
            label(x, 96 + 28 * at, line, "small", START)
            for at, line in enumerate(lines)
        ]
    parts += [
        arrow((345, 80), (281, 80)),
        arrow((281, 100), (344, 100)),
        label(312, 134, "decides", "small"),
        arrow((535, 88), (599, 88), kind="dashed"),
        label(567, 134, "tells", "small"),
        label(440, 176, "a server that is away stops nothing", "small"),
    ]
    return picture(
        "A run decides by the store alone, and tells Prefect what happens.", 232, *parts
    )


def engines() -> str:
    """Draw a job as Beam describes it, and its execution by each engine."""
    parts = [
        label(
            WIDTH / 2,
            30,
            "A job is described once: tasks, and a chain of steps",
            "head",
        )
    ]
    for at, (head, lines, kind) in enumerate(
        [
            ("tasks", ["names of shards,", "no documents"], "a"),
            ("read", ["a shard,", "from the store"], "b"),
            ("compute", ["kernels on whole", "Arrow batches"], "b"),
            ("write", ["a shard and", "its record"], "b"),
        ]
    ):
        x = 30 + at * 214
        parts.append(box(x, 48, 178, 72, head, *lines, kind=kind))
        if at:
            parts.append(arrow((x - 36, 84), (x - 1, 84)))
    parts.append(label(WIDTH / 2, 152, "and executed where engine.runner says", "head"))
    rows = [
        ("local", "Beam's own runner", "threads, processes", "a"),
        ("engine.nodes", "local, on each host;", "tasks are claimed", "a"),
        ("ray, dask, spark", "their own tasks", "call the same chain", "c"),
        ("flink, dataflow", "Beam's runners,", "on Beam's workers", "d"),
    ]
    for at, (head, first, second, kind) in enumerate(rows):
        x = 30 + at * 214
        parts.append(box(x, 172, 178, 72, head, first, second, kind=kind))
        parts.append(arrow((x + 89, 245), (x + 89, 271)))
    parts.append(
        box(
            30,
            272,
            820,
            44,
            "store",
            "the same files, byte for byte, from each of them",
        )
    )
    return picture(
        "A job's tasks and chain of steps, executed by one of several engines.",
        334,
        *parts,
    )


PICTURES = {
    "chain": chain,
    "store": store,
    "annotations": annotations,
    "conservation": conservation,
    "dialects": dialects,
    "order": order,
    "packing": packing,
    "resume": resume,
    "tracing": tracing,
    "training-loop": loop,
    "prefect": prefect,
    "engines": engines,
}


def main(folder: Path) -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw())


def drawn() -> Iterator[tuple[str, str]]:
    """Return the name and the text of each picture."""
    yield from ((f"{name}.svg", draw()) for name, draw in PICTURES.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
