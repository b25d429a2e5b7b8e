"""A flame graph of the chain: py-spy samples the command and all that it starts, and what is seldom is left out.

py-spy draws every frame, which for a run of minutes are megabytes. Here its samples are folded again: without
processes, line numbers, the interpreter's own start and threads that wait; with one frame for what calls itself within
a package of others; and without branches of fewer than LEAST_SHARE of all samples.
"""

from __future__ import annotations

import html
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from zlib import crc32

from benchmarks.chain.our_chain import Chain
from benchmarks.measuring import Row, row
from gristmill.core.files import atomic_write

SAMPLES_PER_SECOND = 50
LEAST_SHARE = 0.003
WIDTH, FRAME_HEIGHT, MARGIN, CHARACTER_WIDTH = 1200, 17, 30, 6.6
"""Pixels."""
STYLE = (
    ".page{fill:#fff}.title{fill:#222}"
    "@media(prefers-color-scheme:dark){.page{fill:#1c1e21}.title{fill:#ddd}g{filter:brightness(.85)}}"
)
"""What is behind the frames, for whoever reads in the dark too; the frames are light either way, with dark names."""
HIDDEN = (
    "process ",
    "<module> (<string>",
    "_run_module",
    "_run_code",
    "_bootstrap",
    "run (threading",
    "main (multiprocessing",
)
"""Names of processes, and frames of the interpreter's own start, which say nothing."""
WAITING = ("Condition.wait (", "Thread.run (threading", "EpollSelector.select (", "_CompilerLock.acquire (")
"""Where a thread waits, although the system says for a moment that it runs; a thread's target may be no function of
Python."""


@dataclass
class Frame:
    """A function with those that it called."""

    name: str
    samples: int = 0
    inner: dict[str, Frame] = field(default_factory=dict)


def draw_flame(chain: Chain, path: Path) -> Row:
    """Run the chain under py-spy and draw where its processor time goes; a row that says so."""
    program = Path(sys.executable).with_name("py-spy")
    found = str(program) if program.exists() else shutil.which("py-spy")
    if found is None:
        return row("chain_flame", None, None, "frames", "py-spy is not installed: pip install py-spy")
    folded = chain.folder / "samples"
    chain.run(
        "--no-ui",
        command=(
            found,
            "record",
            "--subprocesses",
            "--format",
            "raw",
            "--rate",
            str(SAMPLES_PER_SECOND),
            "--output",
            str(folded),
            "--",
            sys.executable,
        ),
    )
    root = fold(read_samples(folded.read_text(encoding="utf-8", errors="replace")))
    with atomic_write(path) as sink:
        drawn = list(draw(root))
        sink.write("\n".join(page(root, drawn)).encode())
    return row("chain_flame", len(drawn), None, "frames", f"{root.samples} samples: [{path.name}]({path.name})")


def read_samples(text: str) -> dict[tuple[str, ...], int]:
    """Stacks with how often each was met: lines of `frame;frame;... number`."""
    found: dict[tuple[str, ...], int] = {}
    for line in text.splitlines():
        stack, _, number = line.rpartition(" ")
        frames = tuple(name for name, _ in groupby(filter(None, map(name_of, stack.split(";")))))
        if stack.rpartition(";")[2].startswith(WAITING):
            continue
        if number.isdigit() and frames:
            found[frames] = found.get(frames, 0) + int(number)
    return found


def name_of(frame: str) -> str | None:
    """What a frame is called in the picture: function and file, or the package of a file that lies in one; or None."""
    parts = re.fullmatch(r"(.*) \((.*?)(:\d+)?\)", frame)
    if parts is None or frame.startswith(HIDDEN):
        return None
    function, file = parts[1], parts[2]
    if file.startswith("<frozen importlib"):
        return "import"
    return file.split("/")[0] or Path(file).name if "/" in file else f"{function} ({file})"


def fold(samples: Mapping[tuple[str, ...], int]) -> Frame:
    """The tree of all stacks."""
    root = Frame("all")
    for stack, number in samples.items():
        at = root
        at.samples += number
        for name in stack:
            at = at.inner.setdefault(name, Frame(name))
            at.samples += number
    return root


def draw(root: Frame) -> Iterator[tuple[float, int, float, Frame]]:
    """The frames that are drawn: left, level, width (in shares of all samples), and each."""
    waiting = [(0.0, 0, root)]
    while waiting:
        left, level, frame = waiting.pop()
        yield left, level, frame.samples / root.samples, frame
        for inner in sorted(frame.inner.values(), key=lambda one: one.name):
            share = inner.samples / root.samples
            if share >= LEAST_SHARE:
                waiting.append((left, level + 1, inner))
                left += share


def page(root: Frame, drawn: list[tuple[float, int, float, Frame]]) -> Iterator[str]:
    """An SVG with a title for each frame that is drawn, for whoever points at it."""
    height = (max(level for _, level, _, _ in drawn) + 1) * FRAME_HEIGHT + 2 * MARGIN
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" '
        f'font-size="11"><style>{STYLE}</style><rect class="page" width="{WIDTH}" height="{height}"/>'
        f'<text class="title" x="{MARGIN}" y="18">gristmill run, by processor time: {root.samples} samples; '
        f"branches below {LEAST_SHARE:.1%} are left out</text>"
    )
    for left, level, share, frame in drawn:
        x, width = MARGIN + left * (WIDTH - 2 * MARGIN), share * (WIDTH - 2 * MARGIN)
        y, name = height - MARGIN - (level + 1) * FRAME_HEIGHT, html.escape(frame.name)
        shown = html.escape(frame.name[: int(width / CHARACTER_WIDTH)]) if width > 5 * CHARACTER_WIDTH else ""
        yield (
            f'<g><title>{name}: {share:.1%}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{FRAME_HEIGHT - 1}" fill="hsl({crc32(frame.name.encode()) % 55},75%,65%)"/>'
            + (f'<text x="{x + 2:.1f}" y="{y + 12}">{shown}</text>' if shown else "")
            + "</g>"
        )
    yield "</svg>"
