"""Runs that are cancelled in the browser, lose their runner, or their server for a while:
no process is left, the page shows the reason, and Retry continues the training.
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
"""Seconds for which the server is frozen."""
OVERRIDES = [
    "pretrain.steps=1000000",
    "pretrain.validate_every=1000000",
    "engine.checkpoint_every=1000000",
    "engine.ranks=2",
]
"""An endless training that saves a checkpoint only when it is stopped."""


class Training:
    """The training of these tests, as seen in its folder and processes."""

    def __init__(self, site: Any, run: str) -> None:
        self.site, self.id = site, run

    @property
    def folder(self) -> Path | None:
        """Folder of the stage whose training never ends."""
        return next(
            (
                path.parent
                for path in self.site.store.glob("pretrain/*/stage.json")
                if read_json(path)["config"]["steps"] == 1_000_000
            ),
            None,
        )

    def steps(self) -> list[str]:
        """Return the complete metrics line of every step."""
        if (
            self.folder is None
            or not (file := self.folder / "work" / "metrics.jsonl").exists()
        ):
            return []
        lines = [
            line
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("}\n")
        ]
        return [line for line in lines if '"loss"' in line]

    def checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint; 0 if there is no
        checkpoint.
        """
        assert self.folder is not None
        return max(
            (
                int(path.parent.name.removeprefix("step-"))
                for path in self.folder.glob("work/checkpoints/step-*/complete.json")
            ),
            default=0,
        )

    def processes(self) -> set[int]:
        """Return the ids of torchrun and its ranks, which have sessions of their
        own.
        """
        process_ids = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self.folder is not None and str(
                    self.folder
                ) in path.read_text().split("\0"):
                    process_ids.add(int(path.parent.name))
            except OSError:  # it has ended meanwhile
                continue
        return process_ids

    def log_lines(self) -> list[str]:
        """Return the newest log lines on the run's page."""
        log_records = self.site.call(
            "/logs/filter",
            {"logs": {"flow_run_id": {"any_": [self.id]}}, "sort": "TIMESTAMP_DESC"},
        )
        return [record["message"] for record in log_records]

    def trains(self, beyond: int) -> list[str]:
        """Wait until training has passed a step."""
        return wait_for(
            lambda: len(lines := self.steps()) > beyond and lines, f"step {beyond}"
        )

    def retry_in(self, page: Any) -> None:
        """Press Retry on the run's page and confirm."""
        page.get_by_role("button", name="Retry", exact=True).click()
        page.get_by_role("dialog").get_by_role(
            "button", name=re.compile("Retry|Confirm")
        ).click()


@pytest.fixture(scope="module")
def training(site: Any, finished: Any) -> Iterator[Training]:
    """A training started by the API after the complete run, whose stages it shares;
    stopped at the end of these tests.
    """
    run = site.call(
        f"/deployments/{site.deployment('gristmill')}/create_flow_run",
        {
            "parameters": {
                "manifest": str(site.manifest),
                "until": "pretrain",
                "overrides": OVERRIDES,
            }
        },
    )
    yield Training(site, run["id"])
    site.call(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
    site.ended(run["id"])


def test_cancel_in_the_browser_ends_all_ranks_behind_a_checkpoint_and_retry_goes_on(
    site: Any, page: Any, training: Training
) -> None:
    page.goto(f"{site.address}/runs/flow-run/{training.id}")
    steps_before = training.trains(beyond=20)
    assert len(training.processes()) == 3, "torchrun and two ranks"
    assert training.checkpoint() == 0
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    wait_for(lambda: not training.processes(), "the end of all ranks", CANCEL_SECONDS)
    checkpoint_step = training.checkpoint()
    assert checkpoint_step >= len(steps_before)
    assert site.ended(training.id)["state_name"] == "Cancelled"
    page.get_by_text("Cancelled", exact=True).first.wait_for()
    wait_for(
        lambda: site.task_states(training.id)["pretrain"] == "Cancelled",
        "the cancelled task's state",
    )
    kept_steps = training.steps()[:checkpoint_step]
    log_text = "\n".join(training.log_lines())
    assert "Finished in state Cancelled(" in log_text
    for noise in ("Traceback", "SignalException", "Crash detected"):
        assert noise not in log_text

    training.retry_in(page)
    steps_after = training.trains(beyond=checkpoint_step + 20)
    # If these steps were repeated, their lines would hold other times.
    assert steps_after[:checkpoint_step] == kept_steps
    assert [
        f'"step": {number},' in line for number, line in enumerate(steps_after, start=1)
    ] == [True] * len(steps_after)


def test_a_server_that_stands_still_holds_nothing_up_and_hears_of_the_run_again(
    site: Any, training: Training
) -> None:
    steps_before = len(training.trains(beyond=20))
    server = site.children()["server"]
    os.kill(server, signal.SIGSTOP)
    try:
        start_time, last_step = time.monotonic(), 0
        while time.monotonic() - start_time < FROZEN_SECONDS:
            last_step = len(training.trains(beyond=max(steps_before, last_step)))
    finally:
        os.kill(server, signal.SIGCONT)
    assert last_step > steps_before + 20

    def reported() -> bool:
        description = site.artifacts(training.id).get(
            "pretrain-progress", {"description": "0/"}
        )["description"]
        return (
            int(re.findall(r"([\d,]+)/", description)[0].replace(",", "")) > last_step
        )

    wait_for(reported, "news of the training")
    assert site.run(training.id)["state_name"] == "Running"


def test_a_run_whose_runner_was_killed_is_shown_as_crashed_and_retry_goes_on(
    site: Any, page: Any, training: Training
) -> None:
    steps_before = training.trains(beyond=20)
    os.kill(site.children()["deployments"], signal.SIGKILL)
    assert site.wait() != 0
    site.start()
    assert site.ended(training.id)["state_name"] == "Crashed"
    wait_for(lambda: not training.processes(), "the end of all ranks", CANCEL_SECONDS)
    checkpoint_step = training.checkpoint()
    assert checkpoint_step >= len(steps_before)
    kept_steps = training.steps()[:checkpoint_step]
    page.goto(f"{site.address}/runs/flow-run/{training.id}")
    page.get_by_text("Crashed", exact=True).first.wait_for()

    training.retry_in(page)
    assert training.trains(beyond=checkpoint_step + 20)[:checkpoint_step] == kept_steps
