"""Photograph the pages of a run for docs/gallery.md, light and dark:
`.ci/screenshots.py FOLDER`.

The commands of docs/how-to/README.md must have run in FOLDER. The system's Chromium
shows its report, the browser of its data and Prefect's own pages; pictures have few
colours so that they are small.
"""

from __future__ import annotations

import base64
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests know how to wait for a server

from PIL import Image  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402

from tests.servers import call_prefect, free_ports, kept_password, wait_for  # noqa: E402

OUT = ROOT / "docs" / "pictures"
COLOURS = 64
SETTLED_MILLISECONDS = 10_000
"""Time until the charts of Prefect's pages no longer move, which nothing signals."""


@contextmanager
def serving(
    folder: Path, *arguments: str, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a command of gristmill that serves pages until the context ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "gristmill", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **variables},
    ) as server:
        try:
            yield server
        finally:
            server.send_signal(signal.SIGINT)


def take(page: Any, name: str) -> None:
    """Write a picture of a page."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS)
    picture.save(OUT / f"{name}.png", optimize=True)


def pages_of(browser: Any, height: int, script: str = "") -> Iterator[tuple[str, Any]]:
    """Return a page in each colour scheme, in which a script runs first."""
    for scheme in ("light", "dark"):
        context = browser.new_context(
            viewport={"width": 1100, "height": height}, color_scheme=scheme
        )
        context.set_default_timeout(60_000)
        if script:
            context.add_init_script(script.replace("SCHEME", scheme))
        yield scheme, context.new_page()
        context.close()


def photograph_report(folder: Path, browser: Any) -> None:
    """Photograph the first screen of the report."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "gristmill",
            "report",
            "mill.yaml",
            "--out",
            "report.html",
        ],
        cwd=folder,
        check=True,
    )
    for scheme, page in pages_of(browser, 720):
        page.goto((folder / "report.html").as_uri())
        take(page, f"report-{scheme}")


def photograph_data(folder: Path, browser: Any) -> None:
    """Photograph the list of dropped documents in the browser of data."""
    with serving(folder, "browse", "mill.yaml", "--port", "0") as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        for scheme, page in pages_of(browser, 720):
            page.goto(address)  # its token signs the browser in
            page.goto(urljoin(address, "/documents?outcome=dropped"))
            take(page, f"browse-{scheme}")


def photograph_prefect(folder: Path, browser: Any) -> None:
    """Photograph the page of a run in Prefect's own interface."""
    port = free_ports()
    address = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory() as home,
        tempfile.TemporaryDirectory() as store,
        serving(folder, "up", "mill.yaml", "--port", str(port), PREFECT_HOME=home),
    ):
        wait_for(lambda: kept_password(home), "the password")
        password = kept_password(home)

        def call(path: str, body: Any = None) -> Any:
            return call_prefect(f"{address}/api", path, body, password=password)

        wait_for(lambda: call("/deployments/filter", {}), "serving", 600)
        subprocess.run(
            [sys.executable, "-m", "gristmill", "run", "mill.yaml", "--store", store],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            env={
                **os.environ,
                "PREFECT_HOME": home,
                "PREFECT_API_URL": f"{address}/api",
                "PREFECT_API_AUTH_STRING": password,
            },
        )
        (run,) = wait_for(lambda: call("/flow_runs/filter", {}), "the run")
        encoded = base64.b64encode(password.encode()).decode()
        script = (
            "localStorage.setItem('prefect-password', "
            f"{encoded!r});localStorage.setItem('color-scheme', '\"SCHEME\"')"
        )
        for scheme, page in pages_of(browser, 575, script):
            page.goto(f"{address}/runs/flow-run/{run['id']}")
            page.get_by_text("Task Runs").first.wait_for()
            page.wait_for_timeout(SETTLED_MILLISECONDS)
            take(page, f"prefect-{scheme}")


def main(folder: Path, *kinds: str) -> None:
    """Write all pictures, or those of some of `report`, `data` and `prefect`."""
    photographers = {
        "report": photograph_report,
        "data": photograph_data,
        "prefect": photograph_prefect,
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        for kind in kinds or photographers:
            photographers[kind](folder, browser)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
