"""Summarise the pages of the benchmarks: docs/performance.md (`make reference`).

It has each page's date and machine, and every row whose ratio is below one: slower, or
found less often, than the peer or the bound. Pages older than the last commit of the
code that they measure (`benchmarks.areas.MEASURES`) are named on stderr.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from benchmarks.areas import MEASURES  # noqa: E402

AREAS = {
    "floors": "A short form of most areas, held against floors before a change lands",
    "chain": "Raw JSON lines to packed shards, beside whole chains of others",
    "dataprep": "Rules, MinHash, language, extraction, jobs: each beside a named peer",
    "tokenize": "Encoding, mixing, packing, export",
    "stream": "Rows into a training, beside a memory map and MosaicML Streaming",
    "train": "Steps, loop, parallel forms, beside transformers and plain matrix "
    "products",
    "objectives": "A step of each objective, beside the same in transformers",
    "optimizers": "The loss that each optimizer reaches beside AdamW on equal "
    "tokens, over three seeds",
    "defaults": "Bits per byte of the training that `gristmill new` proposes, beside a "
    "tuned script after equal process time",
    "posttrain": "Fine-tuning, preferences, rollouts, beside TRL and transformers",
    "models": "Judges, generated documents, examples, clusters, beside plain programs",
    "quality": "How often duplicates, languages, leaks, personal data are found, and "
    "how often wrongly",
    "dialects": "Verdicts of each dialect of Gopher's rules, beside those of its "
    "project's own code",
    "engines": "The chain on Ray, Dask, Spark and Flink, beside the local runner",
    "bounds": "Memory and disk of 30 million documents, beside limits",
    "requests": "What an object store is asked, beside what the planner says",
    "requests_parts": "Requests for a gigabyte by store and size of a part, beside "
    "the number of parts",
    "chaos": "What happens when processes, disks, files, clocks and servers fail",
}
MORE_IS_WORSE = {"chaos", "requests", "requests_parts", "optimizers"}
"""Areas whose ratios are ours over the peer's times, counts or losses, or shares of
equal bytes.
"""
TITLE = """\
# Performance

Every figure here was printed by `gristmill bench AREA`, which measures us and a named peer, or a bound, in the same
run. The ratio is ours over the peer's where more is better, so that below 1 means slower. Written by `make reference`
from the pages of the single areas.

| area | what | measured |
| --- | --- | --- |
"""


def page() -> str:
    """Return the whole page."""
    rows, slower = [], []
    pages = sorted(
        path.stem.removeprefix("bench-") for path in (ROOT / "docs").glob("bench-*.md")
    )
    for area in [*AREAS, *(area for area in pages if area not in AREAS)]:
        text = (ROOT / "docs" / f"bench-{area}.md").read_text()
        written = re.search(r"^Written[^:]*: (.*?)\.?$", text, re.MULTILINE)
        rows.append(
            f"| [{area}](bench-{area}.md) | {AREAS.get(area, '')} | "
            f"{written[1] if written else ''} |"
        )
        slower += [] if area in MORE_IS_WORSE else below_one(area, text)
    return (
        TITLE + "\n".join(rows) + "\n\n## Slower than the peer or the bound\n\n"
        "| area | row | ours | beside | unit | ratio | note |\n| --- | --- | ---: | "
        "---: | --- | ---: | --- |\n" + "\n".join(slower) + "\n"
    )


def below_one(area: str, text: str) -> list[str]:
    """Return the rows of a page's tables whose ratio is below one, unless less is
    better.
    """
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 6 or not re.fullmatch(r"\d+(\.\d+)?", cells[4]):
            continue
        less_is_better = "less is better" in cells[-1] or cells[3] in (
            "bytes",
            "GB",
            "per MB",
        )
        if float(cells[4]) < 1 and not less_is_better:
            rows.append(f"| {area} | " + " | ".join([*cells[:5], cells[-1]]) + " |")
    return rows


def written_at(text: str) -> str:
    """Return the time of a page's measurement, `2026-11-24 18:00`; the empty string if
    it has none.
    """
    match = re.search(r"(\d{4}-\d\d-\d\d \d\d:\d\d)", text)
    return match[1] if match else ""


def changed_at(paths: tuple[str, ...]) -> str:
    """Return the time of the last commit of folders or files, in the form of
    `written_at`.
    """
    command = ["git", "log", "-1", "--format=%cd", "--date=unix", "--", *paths]
    seconds = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return f"{datetime.fromtimestamp(int(seconds)):%Y-%m-%d %H:%M}"


def stale_pages() -> list[str]:
    """Return a sentence for each page that is older than the code that it measures."""
    sentences = []
    for area, paths in MEASURES.items():
        page_path = f"docs/bench-{area}.md"
        written, changed = written_at((ROOT / page_path).read_text()), changed_at(paths)
        if written < changed:
            sentences.append(
                f"{page_path}: measured {written or 'at no known date'}, "
                f"{', '.join(paths)} changed {changed}; "
                f"run `gristmill bench {area} --markdown {page_path}`"
            )
    return sentences


if __name__ == "__main__":
    print(page(), end="")
    for sentence in stale_pages():
        print(sentence, file=sys.stderr)
