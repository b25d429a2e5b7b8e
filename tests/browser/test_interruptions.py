"""Runs that are cancelled in the browser, lose their runner, or their server for a while: nothing is left behind, the
page says what happened, and Retry goes on where the training was.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.files import read_json
from tests.servers import wait_for

CANCEL_SECONDS = 20.0
FROZEN_SECONDS = float(os.environ.get("GRISTMILL_TEST_FROZEN_SECONDS", "5"))
"""How long the server stands still; a minute takes a minute."""
OVERRIDES = [
    "pretrain.steps=1000000",
    "pretrain.validate_every=1000000",
    "engine.checkpoint_every=1000000",
    "engine.ranks=2",
]
"""A training that is not over before it is cancelled, and that saves no checkpoint unless it is told to stop."""


class Training:
    """The one training of these tests, as its folder and its processes show it."""

    def __init__(self, site: Any, run: str) -> None:
        self.site, self.id = site, run

    @property
    def folder(self) -> Path | None:
        """The stage's folder: the one whose training never ends."""
        return next(
            (
                path.parent
                for path in self.site.store.glob("pretrain/*/stage.json")
                if read_json(path)["config"]["steps"] == 1_000_000
            ),
            None,
        )

    def steps(self) -> list[str]:
        """Every step's line, whole ones only."""
        if self.folder is None or not (file := self.folder / "work" / "metrics.jsonl").exists():
            return []
        lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        return [line for line in lines if '"loss"' in line]

    def checkpoint(self) -> int:
        """The step of the newest whole checkpoint; 0 if there is none."""
        assert self.folder is not None
        return max(
            (
                int(path.parent.name.removeprefix("step-"))
                for path in self.folder.glob("work/checkpoints/step-*/complete.json")
            ),
            default=0,
        )

    def processes(self) -> set[int]:
        """torchrun and its ranks, which have sessions of their own."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self.folder is not None and str(self.folder) in path.read_text().split("\0"):
                    found.add(int(path.parent.name))
            except OSError:  # it has ended meanwhile
                continue
        return found

    def log_lines(self) -> list[str]:
        """The newest lines that the run's page shows."""
        found = self.site.call("/logs/filter", {"logs": {"flow_run_id": {"any_": [self.id]}}, "sort": "TIMESTAMP_DESC"})
        return [one["message"] for one in found]

    def trains(self, beyond: int) -> list[str]:
        """Wait until so many steps are passed."""
        return wait_for(lambda: len(lines := self.steps()) > beyond and lines, f"step {beyond}")

    def retry_in(self, page: Any) -> None:
        """Press Retry on the run's page, and confirm."""
        page.get_by_role("button", name="Retry", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name=re.compile("Retry|Confirm")).click()


@pytest.fixture(scope="module")
def training(site: Any, finished: Any) -> Iterator[Training]:
    """Started by the API after the run of everything, whose stages it has in common; stopped at the end of these tests."""
    run = site.call(
        f"/deployments/{site.deployment('gristmill')}/create_flow_run",
        {"parameters": {"manifest": str(site.manifest), "until": "pretrain", "overrides": OVERRIDES}},
    )
    yield Training(site, run["id"])
    site.call(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
    site.ended(run["id"])


def test_cancel_in_the_browser_ends_all_ranks_behind_a_checkpoint_and_retry_goes_on(
    site: Any, page: Any, training: Training
) -> None:
    page.goto(f"{site.address}/runs/flow-run/{training.id}")
    before = training.trains(beyond=20)
    assert len(training.processes()) == 3, "torchrun and two ranks"
    assert training.checkpoint() == 0
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    wait_for(lambda: not training.processes(), "the end of all ranks", CANCEL_SECONDS)
    stopped = training.checkpoint()
    assert stopped >= len(before)
    assert site.ended(training.id)["state_name"] == "Cancelled"
    page.get_by_text("Cancelled", exact=True).first.wait_for()
    wait_for(lambda: site.task_states(training.id)["pretrain"] == "Cancelled", "the cancelled task's state")
    made = training.steps()[:stopped]
    said = "\n".join(training.log_lines())
    assert "Finished in state Cancelled(" in said
    for noise in ("Traceback", "SignalException", "Crash detected"):
        assert noise not in said

    training.retry_in(page)
    after = training.trains(beyond=stopped + 20)
    # Made anew, these lines would hold other times.
    assert after[:stopped] == made
    assert [f'"step": {number},' in line for number, line in enumerate(after, start=1)] == [True] * len(after)


def test_a_server_that_stands_still_holds_nothing_up_and_hears_of_the_run_again(site: Any, training: Training) -> None:
    seen = len(training.trains(beyond=20))
    server = site.children()["server"]
    os.kill(server, signal.SIGSTOP)
    try:
        began, end = time.monotonic(), 0
        while time.monotonic() - began < FROZEN_SECONDS:
            end = len(training.trains(beyond=max(seen, end)))
    finally:
        os.kill(server, signal.SIGCONT)
    assert end > seen + 20

    def reported() -> bool:
        found = site.artifacts(training.id).get("pretrain-progress", {"description": "0 of"})["description"]
        return int(re.findall(r"([\d,]+) of", found)[0].replace(",", "")) > end

    wait_for(reported, "news of the training")
    assert site.run(training.id)["state_name"] == "Running"


def test_a_run_whose_runner_was_killed_is_shown_as_crashed_and_retry_goes_on(
    site: Any, page: Any, training: Training
) -> None:
    before = training.trains(beyond=20)
    runner = site.children()["deployments"]
    os.kill(runner, signal.SIGKILL)
    assert site.ended(training.id)["state_name"] == "Crashed"
    wait_for(lambda: not training.processes(), "the end of all ranks", CANCEL_SECONDS)
    stopped = training.checkpoint()
    assert stopped >= len(before)
    made = training.steps()[:stopped]
    page.goto(f"{site.address}/runs/flow-run/{training.id}")
    page.get_by_text("Crashed", exact=True).first.wait_for()

    wait_for(lambda: site.children().get("deployments", runner) != runner, "another runner")
    training.retry_in(page)
    assert training.trains(beyond=stopped + 20)[:stopped] == made
