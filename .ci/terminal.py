"""Run commands in a terminal and keep what it showed as docs/pictures/terminal.svg: `make pictures`.

It prepares the documents of the demo in an empty store, then asks why one of them went and what another threshold
would keep: of the documents that this machine's Python has.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
COLUMNS = 84
ERASED = "\x1b[1A\x1b[2K"
"""The line above is taken back."""
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">
<title>A run of the demo, and two questions about it, in a terminal</title>
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, "Liberation Mono", "DejaVu Sans Mono", monospace;
  line-height: {line_height}px }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
"""


def main() -> None:
    """Write the picture."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"GRISTMILL_STORE": f"{folder}/store", "PATH": f"{BIN}:{os.environ['PATH']}"}
        show(console, "gristmill run mixtures/demo.yaml --until quality")
        query = "SELECT id FROM documents WHERE reason LIKE 'gopher_quality/%' ORDER BY id LIMIT 1"
        printed = subprocess.run(
            ["gristmill", "query", "mixtures/demo.yaml", query, "--csv"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        show(
            console,
            f"gristmill explain mixtures/demo.yaml {printed.split()[-1][:16]}",
        )
        show(console, "gristmill whatif mixtures/demo.yaml --set filter.gopher_quality.min_words=60", lines=20)
    (ROOT / "docs" / "pictures" / "terminal.svg").write_text(
        console.export_svg(title="gristmill", code_format=FORMAT, unique_id="terminal")
    )


def show(console: Console, command: str, lines: int = 1000) -> None:
    """Add a command and the first lines of what it prints; of a line that is written over, what stays."""
    console.print(f"[bold green]$[/] [bold]{command}[/]")
    printed = in_terminal(command).replace("\r\n", "\n").rstrip().split("\n")
    kept: list[str] = []
    for line in printed:
        for _ in range(line.count(ERASED)):
            kept.pop()
        kept.append(re.sub(r".*(\r|\x1b\[2K)", "", line))
    text = "\n".join(kept[:lines]).replace(os.environ["GRISTMILL_STORE"], "gristmill-store")
    console.print(Text.from_ansi(text))
    console.print()


def in_terminal(command: str) -> str:
    """What a command prints to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(command, shell=True, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    read = bytearray()
    while True:
        try:
            read += os.read(ours, 65536)
        except OSError:  # the other end is closed: so Linux says that all is read
            break
    if process.wait() != 0:
        raise SystemExit(f"{command}: {read.decode()}")
    return read.decode()


if __name__ == "__main__":
    main()
