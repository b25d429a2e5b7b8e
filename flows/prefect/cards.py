"""Markdown cards about stages for the Prefect UI."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.dataprep.conservation import top_reasons
from gristmill.flows.pages.markdown import markdown_page
from gristmill.flows.pages.page_elements import Figure, Part, page_of, table
from gristmill.flows.pages.pictures import curves
from gristmill.flows.report.facts import training
from gristmill.flows.report.stage_summaries import Counts, read_as
from gristmill.flows.report.training import points_of, reward_points
from gristmill.flows.running.events import Outcome


def stage_card(outcome: Outcome) -> str:
    """Card of a finished stage: counts and reasons, or losses, and the folder of its
    output.
    """
    manifest = outcome.folder.manifest()
    parts: list[Part] = []
    counted = manifest["summary"].get("counts")
    if counted and "kept" in counted:
        counts = read_as(Counts, counted)
        reasons = top_reasons(counts.dropped, counts.quarantined, 20)
        rows = [
            ("read", counts.read),
            ("kept", counts.kept),
            *((f"dropped: {rule}", number) for rule, number in reasons),
        ]
        parts.append(table({"": "", "documents": ","}, rows))
    record = training(outcome.folder)
    parts += loss_parts(points_of(record, {"loss": "loss"}).get("loss", []))
    if rewards := reward_points(record):
        parts.append(Figure(curves(rewards, "step", "reward"), "reward by step"))
    page = page_of(
        f"{outcome.stage}: {outcome.how}",
        f"Made in {manifest['seconds']:.1f} s, fingerprint "
        f"`{outcome.fingerprint[:16]}`. {outcome.note}",
        parts,
        f"Output: `{outcome.folder.path}`",
    )
    return markdown_page(page, has_pictures=True)


def loss_parts(losses: Sequence[tuple[float, float]]) -> list[Part]:
    """Loss of a training as a picture, and as a short table with its first and last
    value.
    """
    if not losses:
        return []
    every = max(1, (len(losses) - 1) // 10)
    rows = dict([*losses[::every], losses[-1]])
    return [
        Figure(curves({"training": losses}, "step", "loss"), "loss by step"),
        table({"step": "g", "loss": ".4f"}, rows.items()),
    ]


def live_card(
    stage: str, description: str, losses: Sequence[tuple[float, float]]
) -> str:
    """Card of a running training: its progress and its loss so far."""
    page = page_of(f"{stage}: running", description, loss_parts(losses))
    return markdown_page(page, has_pictures=True)
