"""Run commands in a terminal and record it as docs/pictures/terminal.svg: `make
pictures`.

It prepares the documents of the demo in an empty store, then asks why one of them was
dropped and what another threshold would keep, on the documents of this machine's
Python.
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
"""Control sequence that erases the line above."""
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
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "GRISTMILL_STORE": f"{folder}/store",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        show(console, "gristmill run mixtures/demo.yaml --until quality")
        query = (
            "SELECT id FROM documents WHERE reason LIKE 'gopher_quality/%' ORDER "
            "BY id LIMIT 1"
        )
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
        show(
            console,
            "gristmill whatif mixtures/demo.yaml --set "
            "filter.gopher_quality.min_words=60",
            lines=20,
        )
    (ROOT / "docs" / "pictures" / "terminal.svg").write_text(
        console.export_svg(title="gristmill", code_format=FORMAT, unique_id="terminal")
    )


def show(console: Console, command: str, lines: int = 1000) -> None:
    """Add a command and the first lines of its output, without overwritten text."""
    console.print(f"[bold green]$[/] [bold]{command}[/]")
    output = in_terminal(command).replace("\r\n", "\n").rstrip().split("\n")
    kept: list[str] = []
    for line in output:
        for _ in range(line.count(ERASED)):
            kept.pop()
        kept.append(re.sub(r".*(\r|\x1b\[2K)", "", line))
    text = "\n".join(kept[:lines]).replace(
        os.environ["GRISTMILL_STORE"], "gristmill-store"
    )
    console.print(Text.from_ansi(text))
    console.print()


def in_terminal(command: str) -> str:
    """Run a command in a terminal, and return its output."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command, shell=True, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    output = bytearray()
    while True:
        try:
            output += os.read(controller, 65536)
        except OSError:  # Linux reports the closed end so
            break
    if process.wait() != 0:
        raise SystemExit(f"{command}: {output.decode()}")
    return output.decode()


if __name__ == "__main__":
    main()
