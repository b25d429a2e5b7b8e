"""Flame graph of the chain: py-spy samples the command and its descendants, and rare
branches are left out.

py-spy draws every frame, megabytes for a run of minutes. Here its samples are folded
again: without processes, line numbers, the interpreter's own start and waiting threads;
with one frame for calls within a package of others; and without branches of fewer than
LEAST_SHARE of all samples.
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
from gristmill.core.files import write_text

SAMPLES_PER_SECOND = 50
LEAST_SHARE = 0.003
WIDTH, FRAME_HEIGHT, MARGIN, CHARACTER_WIDTH = 1200, 17, 30, 6.6
"""Pixels."""
STYLE = (
    ".page{fill:#fff}.title{fill:#222}"
    "@media(prefers-color-scheme:dark){.page{fill:#1c1e21}.title{fill:#ddd}g{filter:brightness(.85)}}"
)
"""Background of the frames, for light and dark colour schemes; the frames are light in
both, with dark names.
"""
HIDDEN = (
    "process ",
    "<module> (<string>",
    "_run_module",
    "_run_code",
    "_bootstrap",
    "run (threading",
    "main (multiprocessing",
)
"""Names of processes, and frames of the interpreter's own start."""
WAITING = (
    "Condition.wait (",
    "Thread.run (threading",
    "EpollSelector.select (",
    "_CompilerLock.acquire (",
)
"""Frames of waiting threads, which the system reports as running for a moment; a
thread's target may not be a Python function.
"""


@dataclass
class Frame:
    """A function with its callees."""

    name: str
    samples: int = 0
    inner: dict[str, Frame] = field(default_factory=dict)


def draw_flame(chain: Chain, path: Path) -> Row:
    """Run the chain under py-spy and draw its processor time; returns a row that links
    the picture.
    """
    local = Path(sys.executable).with_name("py-spy")
    program = str(local) if local.exists() else shutil.which("py-spy")
    if program is None:
        return row(
            "chain_flame",
            None,
            None,
            "frames",
            "py-spy is not installed: pip install py-spy",
        )
    folded = chain.folder / "samples"
    options = [
        "--subprocesses",
        "--format",
        "raw",
        "--rate",
        str(SAMPLES_PER_SECOND),
        "--output",
        str(folded),
    ]
    chain.run("--no-ui", command=(program, "record", *options, "--", sys.executable))
    root = fold(read_samples(folded.read_text(encoding="utf-8", errors="replace")))
    drawn = list(draw(root))
    write_text(path, "\n".join(page(root, drawn)))
    return row(
        "chain_flame",
        len(drawn),
        None,
        "frames",
        f"{root.samples} samples: [{path.name}]({path.name})",
    )


def read_samples(text: str) -> dict[tuple[str, ...], int]:
    """Parse lines of `frame;frame;... number`; returns stacks with their numbers of
    samples.
    """
    samples: dict[tuple[str, ...], int] = {}
    for line in text.splitlines():
        stack, _, number = line.rpartition(" ")
        frames = tuple(
            name for name, _ in groupby(filter(None, map(name_of, stack.split(";"))))
        )
        if stack.rpartition(";")[2].startswith(WAITING):
            continue
        if number.isdigit() and frames:
            samples[frames] = samples.get(frames, 0) + int(number)
    return samples


def name_of(frame: str) -> str | None:
    """Return a frame's name in the picture: function and file, or the package of its
    file; None if it is hidden.
    """
    parts = re.fullmatch(r"(.*) \((.*?)(:\d+)?\)", frame)
    if parts is None or frame.startswith(HIDDEN):
        return None
    function, file = parts[1], parts[2]
    if file.startswith("<frozen importlib"):
        return "import"
    if "/" in file:
        return file.split("/")[0] or Path(file).name
    return f"{function} ({file})"


def fold(samples: Mapping[tuple[str, ...], int]) -> Frame:
    """Return the tree of all stacks."""
    root = Frame("all")
    for stack, number in samples.items():
        frame = root
        frame.samples += number
        for name in stack:
            frame = frame.inner.setdefault(name, Frame(name))
            frame.samples += number
    return root


def draw(root: Frame) -> Iterator[tuple[float, int, float, Frame]]:
    """Return the offset, level and width (in shares of all samples) of each drawn
    frame, and the frame.
    """
    pending = [(0.0, 0, root)]
    while pending:
        offset, level, frame = pending.pop()
        yield offset, level, frame.samples / root.samples, frame
        for callee in sorted(frame.inner.values(), key=lambda inner: inner.name):
            share = callee.samples / root.samples
            if share >= LEAST_SHARE:
                pending.append((offset, level + 1, callee))
                offset += share


def page(root: Frame, drawn: list[tuple[float, int, float, Frame]]) -> Iterator[str]:
    """Return the lines of an SVG with a title for each frame, shown under the
    pointer.
    """
    height = (max(level for _, level, _, _ in drawn) + 1) * FRAME_HEIGHT + 2 * MARGIN
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="monospace" '
        f'font-size="11"><style>{STYLE}</style><rect class="page" width="{WIDTH}" '
        f'height="{height}"/>'
        f'<text class="title" x="{MARGIN}" y="18">gristmill run, by processor time: '
        f"{root.samples} samples; "
        f"branches below {LEAST_SHARE:.1%} are left out</text>"
    )
    for offset, level, share, frame in drawn:
        x, width = MARGIN + offset * (WIDTH - 2 * MARGIN), share * (WIDTH - 2 * MARGIN)
        y, name = height - MARGIN - (level + 1) * FRAME_HEIGHT, html.escape(frame.name)
        label = (
            html.escape(frame.name[: int(width / CHARACTER_WIDTH)])
            if width > 5 * CHARACTER_WIDTH
            else ""
        )
        yield (
            f'<g><title>{name}: {share:.1%}</title><rect x="{x:.1f}" y="{y}" '
            f'width="{width:.1f}" '
            f'height="{FRAME_HEIGHT - 1}" '
            f'fill="hsl({crc32(frame.name.encode()) % 55},75%,65%)"/>'
            + (f'<text x="{x + 2:.1f}" y="{y + 12}">{label}</text>' if label else "")
            + "</g>"
        )
    yield "</svg>"
