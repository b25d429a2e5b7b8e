from __future__ import annotations

import json
import math
from pathlib import Path

from gristmill.core.stage_context import Context
from gristmill.train.loop.bad_steps import origins_of
from gristmill.train.loop.spike_report import examine, forget_after, write_spike_report

STEP = {"step": 120, "loss": 9.5, "grad_norm": 3.0, "mean": 2.0, "deviation": 0.5}


def documents(losses: list[float]) -> list[dict[str, object]]:
    return [
        {"id": f"{number:02x}", "source": "web", "loss": loss}
        for number, loss in enumerate(losses)
    ]


def test_documents_are_ordered_by_loss_and_outliers_are_attributed() -> None:
    """Nine losses of 1 and one of 11: the mean is 2, the deviation sqrt(10), so
    attribution begins at 8.3.
    """
    report = examine(STEP, documents([1.0] * 4 + [11.0] + [1.0] * 5))
    assert [document["id"] for document in report["documents"]][:3] == [
        "04",
        "00",
        "01",
    ]
    assert report["suspects"] == ["04"]
    assert report["mean"] == 2.0


def test_losses_of_nan_are_attributed() -> None:
    report = examine(STEP, documents([1.0, math.nan, 50.0, math.inf]))
    assert report["suspects"] == ["01", "03"]
    assert [document["loss"] for document in report["documents"]] == [
        None,
        None,
        50.0,
        1.0,
    ]


def test_largest_of_similar_losses_is_attributed() -> None:
    assert examine(STEP, documents([1.0, 1.1, 1.0]))["suspects"] == ["01"]
    assert examine(STEP, [])["suspects"] == []


def test_reports_have_one_exclusion_list(tmp_path: Path) -> None:
    write_spike_report(tmp_path, examine(STEP, documents([1.0, 1.0, 9.0])))
    write_spike_report(
        tmp_path, examine({**STEP, "step": 300, "loss": None}, documents([8.0]))
    )
    assert (tmp_path / "exclude.txt").read_text() == "00\n02\n"
    assert json.loads((tmp_path / "step-120.json").read_text())["suspects"] == ["02"]
    forget_after(tmp_path, 200)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "exclude.txt",
        "step-120.json",
    ]
    assert (tmp_path / "exclude.txt").read_text() == "02\n"


def test_document_is_listed_with_origin_scores_and_text(tmp_path: Path) -> None:
    origin = {"url": "https://site.example/a", "quality": {"gopher": 0.25}}
    written = [{**document, "text": "0 0 0"} for document in documents([1.0, 9.0])]
    write_spike_report(tmp_path, examine(STEP, written, {"01": origin}))
    report = json.loads((tmp_path / "step-120.json").read_text())
    assert report["documents"] == [{**written[1], **origin}, written[0]]


def test_unreadable_scores_are_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    context = Context(tmp_path, emit=lambda event: warnings.append(event["message"]))

    def read_scores(ids: object) -> dict[str, dict[str, object]]:
        raise OSError(f"{ids}: the store is away")

    read = documents([1.0, 2.0])
    assert origins_of(read, read_scores, context) == {}
    (warning,) = warnings
    assert "['00', '01']: the store is away" in warning
    origins = origins_of(read, lambda ids: {"01": {"language": "en"}}, context)
    judged = examine(STEP, read, origins)["documents"]
    assert judged == [{**read[1], "language": "en"}, read[0]]
