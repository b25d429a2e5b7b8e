"""Photograph a run's report for docs/gallery.md, light and dark: `.ci/screenshots.py FOLDER`.

FOLDER is one in which the commands of docs/how-to/README.md have run. The browser is the system's Chromium; pictures
have few colours so that they are small.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COLOURS = 64


def main(folder: Path) -> None:
    """Write both."""
    subprocess.run([sys.executable, "-m", "gristmill", "report", "mill.yaml", "--out", "report.html"], cwd=folder,
                   check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1100, "height": 720}, color_scheme=scheme)
            page.goto((folder / "report.html").as_uri())
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS)
            picture.save(OUT / f"report-{scheme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
