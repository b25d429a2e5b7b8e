"""The report's sections about a run's models: held-out text, tasks, calibration,
memory, leaks, samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.flows.pages.page_elements import (
    Figure,
    Heading,
    Note,
    Part,
    Section,
    Span,
    Table,
    Text,
    section_of,
)
from gristmill.flows.pages.pictures import reliability
from gristmill.flows.report.report_facts import Facts
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.manifest import CONTINUING

SAMPLES = 3
BOOTSTRAP_NOTE = "In brackets: 95 % bootstrap intervals over documents."


def held_out(facts: Facts, name: str = "evaluate") -> Section | None:
    """Measurements on held-out text and pairs."""
    next_tokens = [
        [
            row["model"],
            row["source"],
            f"{row['bits_per_byte']:.4f}{interval(row.get('bits_per_byte_interval'), 4)}",
            f"{row['perplexity']:.2f}{interval(row.get('perplexity_interval'), 2)}",
            f"{row['token_accuracy']:.2%}",
            f"{row['documents']:,}" if "documents" in row else "",
        ]
        for row in evaluation_rows(facts)
    ]
    masked = [
        [
            row["model"],
            row["source"],
            f"{row['pseudo_perplexity']:.2f}{interval(row['pseudo_perplexity_interval'], 2)}",
            f"{row['masked_accuracy']:.2%}{interval(row['masked_accuracy_interval'], 4)}",
            f"{row['documents']:,}",
        ]
        for row in masked_rows(facts)
    ]
    spans = [
        [
            row["model"],
            row["source"],
            f"{row['span_loss']:.4f}",
            f"{row['span_accuracy']:.2%}{interval(row['span_accuracy_interval'], 4)}",
            f"{row['documents']:,}",
        ]
        for row in span_rows(facts)
    ]
    accuracies = [
        f"{model}: {measured['reward_accuracy']:.1%}{interval(measured.get('reward_accuracy_interval'), 3)}"
        for model, measured in evaluated_models(facts)
        if measured.get("reward_accuracy") is not None
    ]
    header = [
        "model",
        "source",
        "bits per byte",
        "perplexity",
        "token accuracy",
        "documents",
    ]
    return section_of(
        "Held-out text",
        Table(header, next_tokens, {2, 3, 4, 5}),
        Table(
            ["model", "source", "pseudo-perplexity", "masked accuracy", "documents"],
            masked,
            {2, 3, 4},
        ),
        Table(
            ["model", "source", "loss of hidden spans", "accuracy", "documents"],
            spans,
            {2, 3, 4},
        ),
        Note(BOOTSTRAP_NOTE),
        Note(f"Reward accuracy on held-out pairs: {', '.join(accuracies)}")
        if accuracies
        else None,
    )


def merged(facts: Facts, name: str) -> Section | None:
    """Held-out measurements of merged checkpoints, of each of them, and of the end of
    the training.
    """
    rows = []
    for model in facts.get("merged", {"models": ()})["models"]:
        share = "" if model["share"] is None else f"{model['share']:.1%}"
        for source, values in model["sources"].items():
            rows.append([model["model"], share, source, *_held_out_values(values)])
    return section_of(
        "Merged checkpoints",
        Table(
            ["model", "share", "source", "bits per byte", "perplexity"], rows, {1, 3, 4}
        ),
        Note(f"{BOOTSTRAP_NOTE} Of an encoder the perplexity is of masked tokens."),
    )


def _held_out_values(values: Mapping[str, Any]) -> list[str]:
    key = "perplexity" if "perplexity" in values else "pseudo_perplexity"
    perplexity = f"{values[key]:.2f}{interval(values.get(f'{key}_interval'), 2)}"
    if "bits_per_byte" not in values:
        return ["", perplexity]
    return [
        f"{values['bits_per_byte']:.4f}{interval(values.get('bits_per_byte_interval'), 4)}",
        perplexity,
    ]


def tasks(facts: Facts, name: str = "evaluate") -> Section | None:
    """Every task's metrics for every model, differences between models, and reliability
    plots.
    """
    rows, plots = [], []
    for model, measured in evaluated_models(facts):
        for task, summary in measured.get("tasks", {}).items():
            for metric, value in metric_values(summary):
                rows.append(
                    [task, model, metric, value_with_interval(value), summary["items"]]
                )
            calibration = summary.get("calibration")
            if calibration:
                caption = (
                    f"{task}, {model}: accuracy against confidence; expected "
                    f"calibration error {calibration['ece_equal_width']:.3f} (bins of "
                    f"equal width), {calibration['ece_equal_mass']:.3f} (of equal mass)"
                )
                plots.append(Figure(reliability(calibration["reliability"]), caption))
    if not rows:
        return None
    changes = [
        [
            change["task"],
            change["metric"],
            f"{change['from']} to {change['to']}",
            f"{change['value']:+.4f}{interval(change, 4)}",
            "yes" if change["significant"] else "within noise",
        ]
        for change in facts["evaluation"].get("differences", ())
    ]
    return section_of(
        "Tasks",
        Table(["task", "model", "metric", "value", "items"], rows, {3, 4}),
        Heading("From model to model, on the same items") if changes else None,
        Table(["task", "metric", "models", "difference", "certain"], changes, {3}),
        plots,
    )


def suites(facts: Facts, name: str = "evaluate") -> Section | None:
    """Every suite: the centred scores of this run's models and of published ones, and
    each task.
    """
    models = evaluated_models(facts)
    parts: list[Part] = []
    for suite in dict.fromkeys(
        suite for _, measured in models for suite in measured.get("suites", {})
    ):
        results = [
            (model, measured["suites"][suite])
            for model, measured in models
            if suite in measured.get("suites", {})
        ]
        parts += _suite(suite, results)
    note = Note(
        "0 is chance, 1 is every item right; in brackets: 95 % bootstrap "
        "intervals over items."
    )
    return section_of("Suites", parts, note)


def _suite(suite: str, results: list[tuple[str, Mapping[str, Any]]]) -> list[Part]:
    """A suite: `results` are (model, measurements of the suite)."""
    first = results[0][1]
    limit = (
        ""
        if first["limit"] is None
        else f", at most {first['limit']:,} items of each task"
    )
    scores = [
        [model, value_with_interval(result["score"]), "this run"]
        for model, result in results
    ]
    scores += [
        [row["model"], f"{row['score']:.4f}", row["source"]]
        for row in first["references"]
    ]
    rows = []
    for model, result in results:
        for task, measured in result["tasks"].items():
            accuracy, centred = (
                value_with_interval(measured["accuracy"]),
                value_with_interval(measured["centred"]),
            )
            chance, items = f"{measured['baseline']:.3f}", f"{measured['items']:,}"
            rows.append(
                [task, measured["shots"], model, accuracy, chance, centred, items]
            )
    return [
        Heading(f"{suite}: {first['title']}{limit}"),
        Table(["model", "centred score", "source"], scores, {1}),
        Table(
            ["task", "shots", "model", "accuracy", "chance", "centred", "items"],
            rows,
            {1, 3, 4, 5, 6},
        ),
    ]


def memorisation(facts: Facts, name: str = "evaluate") -> Section | None:
    """Documents that a model continues word for word, by copies in the training set."""
    rows = [
        [
            model,
            copies,
            group["documents"],
            f"{group['memorised']['value']:.1%}{interval(group['memorised'], 3)}",
            f"{group['mean_right_tokens']:.1f}",
        ]
        for model, measured in evaluated_models(facts)
        for copies, group in measured.get("memorisation", {}).items()
    ]
    header = [
        "model",
        "in the training set",
        "documents",
        "continued exactly",
        "right tokens, mean",
    ]
    return section_of("Memorisation", Table(header, rows, {2, 3, 4}))


def leaks(facts: Facts, name: str = "evaluate") -> Section | None:
    """Items of the tasks that the training set holds, and the metrics with and without
    them.
    """
    rows = []
    for model, by_task in facts.get("evaluation", {}).get("contamination", {}).items():
        for task, leak in by_task.items():
            metrics = {
                name: value
                for name, value in leak.items()
                if isinstance(value, Mapping)
            }
            for metric, sides in metrics.items() or [("", {})]:
                values = [
                    f"{sides[side]['value']:.4f}" if side in sides else "-"
                    for side in ("contaminated", "clean")
                ]
                rows.append(
                    [
                        task,
                        model,
                        f"{leak['contaminated']} of {leak['items']}",
                        metric,
                        *values,
                    ]
                )
    return section_of(
        "Contamination of tasks",
        Table(
            ["task", "model", "items found", "metric", "on these", "on the others"],
            rows,
            {2, 4, 5},
        ),
    )


def samples(facts: Facts, name: str = "evaluate") -> Section | None:
    """Generated texts: the pre-trained model continues a prompt, a tuned one answers
    it.
    """
    parts: list[Part] = []
    for model, measured in evaluated_models(facts):
        is_continuing = model in CONTINUING
        parts.append(
            Heading(
                f"{model}: {'continues a text' if is_continuing else 'answers a prompt'}"
            )
        )
        for sample in measured["samples"]:
            completion = (
                sample["completion"] if is_continuing else f"\n{sample['completion']}"
            )
            parts.append(Text([Span(sample["prompt"], "strong"), Span(completion)]))
    return section_of("Samples", parts)


def evaluated_models(facts: Facts) -> list[tuple[str, Any]]:
    """(name, measurements) of every model, in the order of their training."""
    models = facts.get("evaluation", {}).get("models", {})
    return [(name, models[name]) for name in STAGES if name in models]


def evaluation_rows(facts: Facts) -> list[dict[str, Any]]:
    """Rows of next-token models by source: bits per byte, perplexity, token
    accuracy.
    """
    return [row for row in _source_rows(facts) if "perplexity" in row]


def masked_rows(facts: Facts) -> list[dict[str, Any]]:
    """Rows of masked-token models by source: pseudo-perplexity, masked accuracy."""
    return [row for row in _source_rows(facts) if "pseudo_perplexity" in row]


def span_rows(facts: Facts) -> list[dict[str, Any]]:
    """Rows of models of hidden spans by source: loss and accuracy of the spans."""
    return [row for row in _source_rows(facts) if "span_loss" in row]


def _source_rows(facts: Facts) -> list[dict[str, Any]]:
    return [
        {"model": model, "source": source, **values}
        for model, measured in evaluated_models(facts)
        for source, values in measured["sources"].items()
    ]


def some_samples(facts: Facts) -> list[dict[str, str]]:
    """A few generated texts (model, prompt, completion): one of every model, then
    more.
    """
    models = [
        (name, measured["samples"])
        for name, measured in evaluated_models(facts)
        if measured["samples"]
    ]
    chosen = [
        {"model": name, **texts[0 if name in CONTINUING else -1]}
        for name, texts in models
    ]
    others = [{"model": name, **sample} for name, texts in models for sample in texts]
    others = [sample for sample in others if sample not in chosen]
    return [*chosen, *others][: max(SAMPLES, len(chosen))]


def metric_values(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, value with its interval) of the metrics of a task's summary."""
    return [
        (name, value)
        for name, value in summary.items()
        if isinstance(value, Mapping) and value.get("value") is not None
    ]


def value_with_interval(value: Mapping[str, Any]) -> str:
    """A value with its interval."""
    return f"{value['value']:.4f}{interval(value, 4)}"


def interval(bounds: Mapping[str, Any] | None, digits: int) -> str:
    """An interval as ` [low, high]`; empty if there is none."""
    return (
        ""
        if not bounds or "low" not in bounds
        else f" [{bounds['low']:.{digits}f}, {bounds['high']:.{digits}f}]"
    )
