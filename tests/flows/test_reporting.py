"""Progress of a running stage on Prefect's page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.store import StageFolder
from gristmill.flows.prefect import prefect_progress
from gristmill.flows.prefect.prefect_progress import PrefectObserver
from gristmill.flows.running.events import StageProgress, StageStarted


@pytest.mark.slow
def test_live_curve_of_a_resumed_training_includes_earlier_attempts(
    toy_runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards: list[str] = []
    monkeypatch.setattr(
        prefect_progress,
        "publish_card",
        lambda key, markdown, description: cards.append(markdown),
    )
    monkeypatch.setattr(PrefectObserver, "_send", lambda self, stage, action: action())
    monkeypatch.setattr(PrefectObserver, "_send_progress", lambda self, *of: None)
    monkeypatch.setattr(PrefectObserver, "_show_line", lambda self, *of: None)
    monkeypatch.setattr(prefect_progress, "CARD_SECONDS", 0.0)
    folder = StageFolder(tmp_path)
    folder.work.mkdir()
    lines = [{"step": step, "loss": 9.0 - step} for step in (1, 2, 3)] + [
        {"step": 3, "validation_loss": 6.5}
    ]
    # The last line is incomplete.
    (folder.work / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo'
    )
    node = toy_runner(first={"n": 1}).session.plan["first"]
    for resuming, first in ((True, "| 1 | 8.0000 |"), (False, "| 4 | 5.0000 |")):
        observer = PrefectObserver()
        observer(StageStarted(node, folder, resuming))
        for step in (4, 5, 6):
            observer(StageProgress(node, step, 9, "steps", loss=9.0 - step))
        rows = [line for line in cards[-1].splitlines() if line.endswith("000 |")]
        assert (rows[0], rows[-1]) == (first, "| 6 | 3.0000 |")
        observer.close()
