from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from gristmill.core.files import write_json
from gristmill.flows.questions.training_reads import settled_plan
from gristmill.train.loop.batch_plan import RowPlan


def test_settled_plan_follows_rollbacks_of_running_and_committed_trainings(
    tmp_path: Path,
) -> None:
    """The training rolled back from step 6 to step 4: positions 8 to 11 no longer
    belong to any step.
    """
    folder, plan = (
        SimpleNamespace(data=tmp_path / "data", work=tmp_path / "work"),
        RowPlan(((0, 0, 2),)),
    )
    assert settled_plan(folder, plan) == plan  # type: ignore[arg-type]
    for place in (folder.work, folder.data):
        place.mkdir()
        write_json(
            place / "rollbacks.json",
            [{"to_step": 4, "from_step": 6, "first_bad_step": 5, "positions": 4}],
        )
        row_plan = settled_plan(folder, plan)  # type: ignore[arg-type]
        assert row_plan.steps_of(np.array([6, 7, 8, 11, 12])).tolist() == [
            3,
            3,
            -1,
            -1,
            4,
        ]
        if place == folder.work:
            (place / "rollbacks.json").unlink()
