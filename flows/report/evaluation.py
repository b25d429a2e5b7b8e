"""What the report says of a run's models: held-out text, tasks, calibration, memory, leaks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from gristmill.flows.facts import Facts
from gristmill.flows.report.html import figure, table
from gristmill.flows.report.summary import evaluated_models, evaluation_rows


def evaluation_sections(facts: Facts) -> list[str]:
    """All parts, empty where nothing was measured."""
    return [held_out(facts), tasks(facts), memorisation(facts), leaks(facts)]


def held_out(facts: Facts) -> str:
    """Measurements on held-out text and pairs."""
    rows = [[row["model"], row["source"], f"{row['bits_per_byte']:.4f}{_range(row.get('bits_per_byte_interval'), 4)}",
             f"{row['perplexity']:.2f}{_range(row.get('perplexity_interval'), 2)}", f"{row['token_accuracy']:.2%}",
             f"{row.get('documents', ''):,}" if "documents" in row else ""] for row in evaluation_rows(facts)]
    if not rows:
        return ""
    accuracy = [f"{model}: {measured['reward_accuracy']:.1%}{_range(measured.get('reward_accuracy_interval'), 3)}"
                for model, measured in evaluated_models(facts)
                if measured.get("reward_accuracy") is not None]
    note = f'<p class="note">Reward accuracy on held-out pairs: {escape(", ".join(accuracy))}</p>' if accuracy else ""
    return ("<h2>Held-out text</h2>" + table(
        ["model", "source", "bits per byte", "perplexity", "token accuracy", "documents"], rows, {2, 3, 4, 5})
        + '<p class="note">In brackets: 95 % bootstrap intervals over documents.</p>' + note)


def tasks(facts: Facts) -> str:
    """Every task's metrics for every model, what changed between models, and reliability plots."""
    from gristmill.flows.report.pictures import reliability

    rows, plots = [], []
    for model, measured in evaluated_models(facts):
        for task, summary in measured.get("tasks", {}).items():
            rows += [[task, model, name, shown(value), summary["items"]] for name, value in metric_values(summary)]
            if "calibration" in summary:
                found = summary["calibration"]
                plots.append(figure(reliability(found["reliability"]), (
                    f"{task}, {model}: accuracy against confidence; expected calibration error "
                    f"{found['ece_equal_width']:.3f} (bins of equal width), {found['ece_equal_mass']:.3f} (of equal "
                    "mass)")))
    if not rows:
        return ""
    changes = [[one["task"], one["metric"], f"{one['from']} to {one['to']}", f"{one['value']:+.4f}{_range(one, 4)}",
                "yes" if one["significant"] else "within noise"]
               for one in facts["evaluation"].get("differences", ())]
    return ("<h2>Tasks</h2>" + table(["task", "model", "metric", "value", "items"], rows, {3, 4})
            + (("<h3>From model to model, on the same items</h3>" + table(
                ["task", "metric", "models", "difference", "certain"], changes, {3})) if changes else "")
            + "".join(plots))


def memorisation(facts: Facts) -> str:
    """What is continued word for word, by copies in the training set."""
    rows = [[model, group, found["documents"], f"{found['memorised']['value']:.1%}{_range(found['memorised'], 3)}",
             f"{found['mean_right_tokens']:.1f}"]
            for model, measured in evaluated_models(facts)
            for group, found in measured.get("memorisation", {}).items()]
    return "" if not rows else "<h2>Known by heart</h2>" + table(
        ["model", "in the training set", "documents", "continued exactly", "right tokens, mean"], rows, {2, 3, 4})


def leaks(facts: Facts) -> str:
    """Items of the tasks that stand in the training set, and the metrics with and without them."""
    found = facts.get("evaluation", {}).get("contamination", {})
    rows = []
    for model, by_task in found.items():
        for task, one in by_task.items():
            sides = {name: value for name, value in one.items() if isinstance(value, Mapping)}
            for name, value in sides.items() or [("", {})]:
                rows.append([task, model, f"{one['contaminated']} of {one['items']}", name,
                             *(f"{value[side]['value']:.4f}" if side in value else "-" for side in (
                                 "contaminated", "clean"))])
    return "" if not rows else "<h2>Tasks in the training set</h2>" + table(
        ["task", "model", "items found", "metric", "on these", "on the others"], rows, {2, 4, 5})


def metric_values(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The metrics of a task's summary: name and what belongs to it."""
    return [(name, value) for name, value in summary.items()
            if isinstance(value, Mapping) and value.get("value") is not None]


def shown(value: Mapping[str, Any]) -> str:
    """A value with its interval."""
    return f"{value['value']:.4f}{_range(value, 4)}"


def _range(found: Mapping[str, Any] | None, digits: int) -> str:
    return "" if not found or "low" not in found else f" [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"
