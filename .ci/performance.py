"""Gather what the pages of the benchmarks say: docs/performance.md (`make reference`).

Each page's date and machine, and every row whose ratio is below one: what is slower, or found less often, than the peer
or the bound beside it.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AREAS = {
    "chain": "Raw JSON lines to packed shards, beside whole chains of others",
    "dataprep": "Rules, MinHash, language, extraction, jobs: each beside a named peer",
    "tokenize": "Encoding, mixing, packing, export",
    "stream": "Rows into a training, beside a memory map and MosaicML Streaming",
    "train": "Steps, loop, parallel forms, beside transformers and plain matrix products",
    "objectives": "A step of each objective, beside the same in transformers",
    "optimizers": "The loss that each optimizer reaches beside AdamW on equal tokens, over three seeds",
    "posttrain": "Fine-tuning, preferences, rollouts, beside TRL and transformers",
    "models": "Judges, generated documents, examples, clusters, a red team, beside plain programs",
    "quality": "How often duplicates, languages, leaks, personal data are found, and how often wrongly",
    "engines": "The same work on Dask, Spark and Flink, with a worker killed",
    "bounds": "Memory and disk of 30 million documents, beside limits",
    "requests": "What an object store is asked, beside what the planner says",
    "chaos": "What happens when processes, disks, files, clocks and servers fail",
}
MORE_IS_WORSE = {"chaos", "engines", "requests", "optimizers"}
"""Areas whose ratios are not of that kind: ours over the peer's times, counts, losses, or whether bytes are equal."""
TITLE = """\
# Performance

Every figure here was printed by `gristmill bench AREA`, which measures us and a named peer, or a bound, in the same
run. The ratio is ours over the peer's where more is better, so that below 1 means slower. Written by `make reference`
from the pages of the single areas.

| area | what | measured |
| --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    rows, slower = [], []
    found = sorted(path.stem.removeprefix("bench-") for path in (ROOT / "docs").glob("bench-*.md"))
    for area in [*AREAS, *(area for area in found if area not in AREAS)]:
        text = (ROOT / "docs" / f"bench-{area}.md").read_text()
        written = re.search(r"^Written[^:]*: (.*?)\.?$", text, re.MULTILINE)
        rows.append(f"| [{area}](bench-{area}.md) | {AREAS.get(area, '')} | {written[1] if written else ''} |")
        slower += [] if area in MORE_IS_WORSE else below_one(area, text)
    return (
        TITLE + "\n".join(rows) + "\n\n## Slower than the peer or the bound\n\n"
        "| area | row | ours | beside | unit | ratio | note |\n| --- | --- | ---: | ---: | --- | ---: | --- |\n"
        + "\n".join(slower)
        + "\n"
    )


def below_one(area: str, text: str) -> list[str]:
    """The rows of a page's tables whose ratio is below one, unless less is better."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if (
            len(cells) == 6
            and re.fullmatch(r"\d+(\.\d+)?", cells[4])
            and float(cells[4]) < 1
            and ("less is better" not in cells[5] and cells[3] not in ("bytes", "GB", "per MB"))
        ):
            found.append(f"| {area} | " + " | ".join(cells) + " |")
    return found


if __name__ == "__main__":
    print(page(), end="")
