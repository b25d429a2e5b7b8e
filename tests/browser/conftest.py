"""One server with its deployments and one complete run, shared by all tests of
pages.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.servers import (
    DEADLINE_SECONDS,
    call_prefect,
    free_ports,
    kept_password,
    prefect_home,
    wait_for,
)

MANIFEST = """\
name: tiny
sources:
  notes: {path: "notes/*.txt", max_epochs: 100}
prepare:
  - filter: {rules: [{gopher_quality: {min_words: 20}}]}
tokenizer: {vocab_size: 300}
mix: {tokens: 4096, sequence_length: 32, validation: 0.2}
pretrain:
  model: {layers: 1, width: 16, heads: 1}
  steps: 16
  global_batch_size: 4
  micro_batch_size: 4
  log_every: 1
  validate_every: 16
"""
WORDS = "the of and to in that have with be a river mountain window garden letter machine teacher evening".split()


class Site:
    """A running `gristmill up`, in a folder with a manifest.

    Args:
        folder: of the manifest, the store and Prefect's home.
        database: an empty one of Prefect.
    """

    def __init__(self, folder: Path, database: Path) -> None:
        self._port = free_ports()
        self.address = f"http://127.0.0.1:{self._port}"
        self.manifest = write_project(folder)
        self.store = folder / "store"
        self.home = Path(prefect_home(folder / "prefect", database))
        self.start()

    def start(self) -> None:
        """Start it, and wait until its deployments are there."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "PREFECT_API_URL"
        }
        command = [sys.executable, "-m", "gristmill.flows.cli.main", "up"]
        self._up = subprocess.Popen(
            [*command, "--port", str(self._port), "--limit", "2"],
            env={
                **environment,
                "PREFECT_HOME": str(self.home),
                "GRISTMILL_STORE": str(self.store),
            },
            cwd=self.manifest.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for(lambda: len(self.call("/deployments/filter", {})) == 4, "serving")

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._up.pid

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        return self._up.wait(timeout=DEADLINE_SECONDS)

    def close(self) -> None:
        """End it."""
        self._up.send_signal(signal.SIGTERM)
        self.wait()

    @property
    def password(self) -> str:
        """The password that its page requests."""
        return kept_password(self.home)

    def children(self) -> dict[str, int]:
        """Return the ids of the child processes of `up`: the `server` and the runner of
        the `deployments`.
        """
        process_ids = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                command = (path / "cmdline").read_text().split("\0")
            except OSError:  # the process has ended meanwhile
                continue
            if parent == self.pid:
                process_ids["server" if "prefect" in command else "deployments"] = int(
                    path.name
                )
        return process_ids

    def call(self, path: str, body: Any = None) -> Any:
        """Call the server's API with its password."""
        return call_prefect(f"{self.address}/api", path, body, password=self.password)

    def signed_in(self, browser: Any, **options: Any) -> Any:
        """Return a browser context that is signed in, as after typing the password into
        the page.
        """
        context = browser.new_context(
            viewport={"width": 1400, "height": 1400}, **options
        )
        context.set_default_timeout(60_000)
        encoded = base64.b64encode(self.password.encode()).decode()
        context.add_init_script(
            f"location.origin === {self.address!r} && "
            f"localStorage.setItem('prefect-password', {encoded!r})"
        )
        return context

    def deployment(self, flow: str, manifest: str = "any-manifest") -> str:
        """Return the id of a flow's deployment, by default the one for any manifest."""
        name = {
            "gristmill": "",
            "gristmill-stage": "stage-of-",
        }[flow] + manifest
        return str(self.call(f"/deployments/name/{flow}/{name}")["id"])

    def run(self, run: str) -> Any:
        """Return a flow run."""
        return self.call(f"/flow_runs/{run}")

    def ended(self, run: str) -> Any:
        """Wait for the end of a flow run and return it."""
        return wait_for(
            lambda: (
                (flow_run := self.run(run))["state_type"]
                in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
                and flow_run
            ),
            "the run's end",
        )

    def task_states(self, run: str) -> dict[str, str]:
        """Return the state of every stage in a run's last attempt, by stage name."""
        task_runs = self.call(
            "/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}}
        )
        return {
            task_run["name"]: task_run["state_name"]
            for task_run in sorted(
                task_runs, key=lambda task_run: task_run["flow_run_run_count"]
            )
        }

    def artifacts(self, run: str) -> dict[str, Any]:
        """Return a run's newest artifacts by key."""
        newest_first = self.call(
            "/artifacts/filter",
            {"artifacts": {"flow_run_id": {"any_": [run]}}, "sort": "CREATED_DESC"},
        )
        return {
            artifact["key"]: artifact
            for artifact in reversed(newest_first)
            if artifact["key"]
        }


def write_project(folder: Path) -> Path:
    """Write notes of one to thirty lines; the first one is too short for the filter."""
    (folder / "notes").mkdir(parents=True)
    for note in range(30):
        lines = [
            " ".join(
                WORDS[(note * 7 + line * 3 + word) % len(WORDS)] for word in range(12)
            )
            + "."
            for line in range(note + 1)
        ]
        (folder / "notes" / f"{note:02d}.txt").write_text("\n".join(lines))
    manifest = folder / "tiny.yaml"
    manifest.write_text(MANIFEST)
    return manifest


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of the system's browser; skips if it or Playwright is missing."""
    pytest.importorskip("playwright.sync_api")
    executable = next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
        ),
        None,
    )
    if executable is None:
        pytest.skip("there is no Chromium on this machine")
    return executable


OPEN = pytest.StashKey[ExitStack]()
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def open_here(request: pytest.FixtureRequest) -> Iterator[ExitStack]:
    """Resources that stay open while the tests of this folder run, so that other tests
    need not share the machine with them.
    """
    with ExitStack() as stack:
        request.session.stash[OPEN] = stack
        yield stack


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close the browser and end the server after the last test of this folder."""
    if OPEN in item.session.stash and (
        nextitem is None or not nextitem.path.is_relative_to(HERE)
    ):
        item.session.stash[OPEN].close()


@pytest.fixture(scope="session")
def site(
    chromium: str,
    open_here: ExitStack,
    prefect_database: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Site:
    return open_here.enter_context(
        closing(Site(tmp_path_factory.mktemp("site"), prefect_database))
    )


@pytest.fixture(scope="session")
def browser(chromium: str, open_here: ExitStack) -> Any:
    """The headless browser."""
    from playwright.sync_api import sync_playwright

    playwright = open_here.enter_context(sync_playwright())
    return open_here.enter_context(
        closing(
            playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        )
    )


@pytest.fixture
def page(site: Site, browser: Any) -> Iterator[Any]:
    with closing(site.signed_in(browser)) as context:
        yield context.new_page()


@pytest.fixture(scope="session")
def finished(site: Site, browser: Any) -> Any:
    """The first run, of all stages, started by the form; returns the flow run at its
    end.
    """
    context = site.signed_in(browser)
    page = context.new_page()
    page.goto(
        f"{site.address}/deployments/deployment/{site.deployment('gristmill')}/run"
    )
    page.locator("textarea").first.fill(str(site.manifest))
    page.get_by_role("button", name="Submit").click()
    (run,) = wait_for(lambda: site.call("/flow_runs/filter", {}), "the form's run")
    context.close()
    return site.ended(run["id"])
