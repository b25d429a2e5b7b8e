"""One server with its deployments, and one run of everything, shared by all tests that look at pages."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers import DEADLINE_SECONDS, call_prefect, free_ports, kept_password, prefect_home, wait_for

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


@dataclass(frozen=True)
class Site:
    """A running `gristmill up`."""

    address: str
    manifest: Path
    store: Path
    pid: int
    home: Path

    @property
    def password(self) -> str:
        """What its page asks for."""
        return kept_password(self.home)

    def children(self) -> dict[str, int]:
        """What `up` has started: the process of the `server`, and of the runner of the `deployments`."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                command = (path / "cmdline").read_text().split("\0")
            except OSError:  # it has ended meanwhile
                continue
            if parent == self.pid:
                found["server" if "prefect" in command else "deployments"] = int(path.name)
        return found

    def call(self, path: str, body: Any = None) -> Any:
        """Ask the server's API, with its password."""
        return call_prefect(f"{self.address}/api", path, body, password=self.password)

    def signed_in(self, browser: Any, **options: Any) -> Any:
        """A browser's context that knows the password, as one does after it was typed into the page."""
        context = browser.new_context(viewport={"width": 1400, "height": 1400}, **options)
        context.set_default_timeout(60_000)
        encoded = base64.b64encode(self.password.encode()).decode()
        context.add_init_script(
            f"location.origin === {self.address!r} && localStorage.setItem('prefect-password', {encoded!r})"
        )
        return context

    def deployment(self, flow: str, manifest: str = "any-manifest") -> str:
        """The id of a flow's deployment, for any manifest unless one is named."""
        name = {"gristmill": "", "gristmill-stage": "stage-of-", "gristmill-sweep": "sweep-of-"}[flow] + manifest
        return str(self.call(f"/deployments/name/{flow}/{name}")["id"])

    def run(self, run: str) -> Any:
        """A flow run."""
        return self.call(f"/flow_runs/{run}")

    def ended(self, run: str) -> Any:
        """A flow run, once it has ended."""
        return wait_for(
            lambda: (now := self.run(run))["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") and now,
            "the run's end",
        )

    def task_states(self, run: str) -> dict[str, str]:
        """The state of every stage in the last attempt of a run, by the stage's name."""
        found = self.call("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return {one["name"]: one["state_name"] for one in sorted(found, key=lambda one: one["flow_run_run_count"])}

    def artifacts(self, run: str) -> dict[str, Any]:
        """The newest artifact of every key of a run."""
        found = self.call("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}, "sort": "CREATED_DESC"})
        return {one["key"]: one for one in reversed(found) if one["key"]}


def write_project(folder: Path) -> Path:
    """Notes of one to thirty lines, so that the first one is too short for the filter."""
    (folder / "notes").mkdir(parents=True)
    for note in range(30):
        lines = [
            " ".join(WORDS[(note * 7 + line * 3 + word) % len(WORDS)] for word in range(12)) + "."
            for line in range(note + 1)
        ]
        (folder / "notes" / f"{note:02d}.txt").write_text("\n".join(lines))
    manifest = folder / "tiny.yaml"
    manifest.write_text(MANIFEST)
    return manifest


@pytest.fixture(scope="session")
def chromium() -> str:
    """The system's browser; everything here is skipped where it, or Playwright, is missing."""
    pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine")
    return found


OPEN = pytest.StashKey[ExitStack]()
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def open_here(request: pytest.FixtureRequest) -> Iterator[ExitStack]:
    """What is open while the tests of this folder run: the others shall not have to share the machine with it."""
    with ExitStack() as stack:
        request.session.stash[OPEN] = stack
        yield stack


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close the browser and end the server when the last test of this folder is over."""
    if OPEN in item.session.stash and (nextitem is None or not nextitem.path.is_relative_to(HERE)):
        item.session.stash[OPEN].close()


@pytest.fixture(scope="session")
def site(chromium: str, open_here: ExitStack, prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return open_here.enter_context(running_site(tmp_path_factory.mktemp("site"), prefect_database))


@contextmanager
def running_site(folder: Path, database: Path) -> Iterator[Site]:
    manifest = write_project(folder)
    port = free_ports()
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    up = subprocess.Popen(
        [sys.executable, "-m", "gristmill.flows.cli.main", "up", "--port", str(port), "--limit", "2"],
        env={
            **environment,
            "PREFECT_HOME": prefect_home(folder / "prefect", database),
            "GRISTMILL_STORE": str(folder / "store"),
        },
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    found = Site(f"http://127.0.0.1:{port}", manifest, folder / "store", up.pid, folder / "prefect")
    try:
        wait_for(lambda: len(found.call("/deployments/filter", {})) == 5, "serving")
        yield found
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(timeout=DEADLINE_SECONDS)


@pytest.fixture(scope="session")
def browser(chromium: str, open_here: ExitStack) -> Any:
    """The browser, without a window."""
    from playwright.sync_api import sync_playwright

    playwright = open_here.enter_context(sync_playwright())
    return open_here.enter_context(closing(playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])))


@pytest.fixture
def page(site: Site, browser: Any) -> Iterator[Any]:
    with closing(site.signed_in(browser)) as context:
        yield context.new_page()


@pytest.fixture(scope="session")
def finished(site: Site, browser: Any) -> Any:
    """The first run of all, of everything, started by filling the form in; the flow run at its end."""
    context = site.signed_in(browser)
    page = context.new_page()
    page.goto(f"{site.address}/deployments/deployment/{site.deployment('gristmill')}/run")
    page.locator("textarea").first.fill(str(site.manifest))
    page.get_by_role("button", name="Submit").click()
    (run,) = wait_for(lambda: site.call("/flow_runs/filter", {}), "the form's run")
    context.close()
    return site.ended(run["id"])
