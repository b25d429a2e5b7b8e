"""The report's sections about a run's models: held-out text, tasks, calibration, memory, leaks, samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.flows.report.page_elements import Figure, Heading, Note, Part, Section, Table, Text
from gristmill.flows.report.pictures import reliability
from gristmill.flows.report.report_facts import Facts
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.manifest import CONTINUING

SAMPLES = 3


def held_out(facts: Facts, name: str = "evaluate") -> Section | None:
    """Measurements on held-out text and pairs."""
    rows = [
        [
            row["model"],
            row["source"],
            f"{row['bits_per_byte']:.4f}{_range(row.get('bits_per_byte_interval'), 4)}",
            f"{row['perplexity']:.2f}{_range(row.get('perplexity_interval'), 2)}",
            f"{row['token_accuracy']:.2%}",
            f"{row.get('documents', ''):,}" if "documents" in row else "",
        ]
        for row in evaluation_rows(facts)
    ]
    masked = [
        [
            row["model"],
            row["source"],
            f"{row['pseudo_perplexity']:.2f}{_range(row['pseudo_perplexity_interval'], 2)}",
            f"{row['masked_accuracy']:.2%}{_range(row['masked_accuracy_interval'], 4)}",
            f"{row['documents']:,}",
        ]
        for row in masked_rows(facts)
    ]
    spans = [
        [
            row["model"],
            row["source"],
            f"{row['span_loss']:.4f}",
            f"{row['span_accuracy']:.2%}{_range(row['span_accuracy_interval'], 4)}",
            f"{row['documents']:,}",
        ]
        for row in span_rows(facts)
    ]
    if not rows and not masked and not spans:
        return None
    parts: list[Part] = [
        *(
            [
                Table(
                    ["model", "source", "bits per byte", "perplexity", "token accuracy", "documents"],
                    rows,
                    {2, 3, 4, 5},
                )
            ]
            if rows
            else []
        ),
        *(
            [Table(["model", "source", "pseudo-perplexity", "masked accuracy", "documents"], masked, {2, 3, 4})]
            if masked
            else []
        ),
        *(
            [Table(["model", "source", "loss of hidden spans", "accuracy", "documents"], spans, {2, 3, 4})]
            if spans
            else []
        ),
        Note("In brackets: 95 % bootstrap intervals over documents."),
    ]
    accuracy = [
        f"{model}: {measured['reward_accuracy']:.1%}{_range(measured.get('reward_accuracy_interval'), 3)}"
        for model, measured in evaluated_models(facts)
        if measured.get("reward_accuracy") is not None
    ]
    if accuracy:
        parts.append(Note(f"Reward accuracy on held-out pairs: {', '.join(accuracy)}"))
    return Section("Held-out text", parts)


def merged(facts: Facts, name: str) -> Section | None:
    """Held-out measurements of merged checkpoints beside each of them and the end of the training."""
    found = facts.get("merged")
    rows = [
        [one["model"], "" if one["share"] is None else f"{one['share']:.1%}", source, *_held_out_values(values)]
        for one in (found or {"models": ()})["models"]
        for source, values in one["sources"].items()
    ]
    if not rows:
        return None
    return Section(
        "Merged checkpoints",
        [
            Table(["model", "share", "source", "bits per byte", "perplexity"], rows, {1, 3, 4}),
            Note(
                "In brackets: 95 % bootstrap intervals over documents. Of an encoder the perplexity is of masked "
                "tokens."
            ),
        ],
    )


def _held_out_values(values: Mapping[str, Any]) -> list[str]:
    kind = "perplexity" if "perplexity" in values else "pseudo_perplexity"
    bits = (
        f"{values['bits_per_byte']:.4f}{_range(values.get('bits_per_byte_interval'), 4)}"
        if "bits_per_byte" in values
        else ""
    )
    return [bits, f"{values[kind]:.2f}{_range(values.get(f'{kind}_interval'), 2)}"]


def tasks(facts: Facts, name: str = "evaluate") -> Section | None:
    """Every task's metrics for every model, what changed between models, and reliability plots."""
    rows, plots = [], []
    for model, measured in evaluated_models(facts):
        for task, summary in measured.get("tasks", {}).items():
            rows += [[task, model, name, shown(value), summary["items"]] for name, value in metric_values(summary)]
            if "calibration" in summary:
                found = summary["calibration"]
                plots.append(
                    Figure(
                        reliability(found["reliability"]),
                        (
                            f"{task}, {model}: accuracy against confidence; expected calibration error "
                            f"{found['ece_equal_width']:.3f} (bins of equal width), {found['ece_equal_mass']:.3f} (of equal "
                            "mass)"
                        ),
                    )
                )
    if not rows:
        return None
    changes = [
        [
            one["task"],
            one["metric"],
            f"{one['from']} to {one['to']}",
            f"{one['value']:+.4f}{_range(one, 4)}",
            "yes" if one["significant"] else "within noise",
        ]
        for one in facts["evaluation"].get("differences", ())
    ]
    return Section(
        "Tasks",
        [
            Table(["task", "model", "metric", "value", "items"], rows, {3, 4}),
            *([Heading("From model to model, on the same items")] if changes else []),
            Table(["task", "metric", "models", "difference", "certain"], changes, {3}),
            *plots,
        ],
    )


def suites(facts: Facts, name: str = "evaluate") -> Section | None:
    """Every suite: the centred scores of this run's models beside published ones, and each task."""
    parts: list[Part] = []
    measured = [(model, found.get("suites", {})) for model, found in evaluated_models(facts)]
    for suite in dict.fromkeys(suite for _, found in measured for suite in found):
        ours = [(model, found[suite]) for model, found in measured if suite in found]
        first = ours[0][1]
        scores = [[model, shown(one["score"]), "this run"] for model, one in ours]
        scores += [[one["model"], f"{one['score']:.4f}", one["source"]] for one in first["references"]]
        asked = "" if first["limit"] is None else f", at most {first['limit']:,} items of each task"
        parts += [
            Heading(f"{suite}: {first['title']}{asked}"),
            Table(["model", "centred score", "source"], scores, {1}),
            Table(
                ["task", "shots", "model", "accuracy", "chance", "centred", "items"],
                [
                    [
                        task,
                        one["shots"],
                        model,
                        shown(one["accuracy"]),
                        f"{one['baseline']:.3f}",
                        shown(one["centred"]),
                        f"{one['items']:,}",
                    ]
                    for model, found in ours
                    for task, one in found["tasks"].items()
                ],
                {1, 3, 4, 5, 6},
            ),
        ]
    return (
        Section(
            "Suites",
            [*parts, Note("0 is chance, 1 is every item right; in brackets: 95 % bootstrap intervals over items.")],
        )
        if parts
        else None
    )


def memorisation(facts: Facts, name: str = "evaluate") -> Section | None:
    """What is continued word for word, by copies in the training set."""
    rows = [
        [
            model,
            group,
            found["documents"],
            f"{found['memorised']['value']:.1%}{_range(found['memorised'], 3)}",
            f"{found['mean_right_tokens']:.1f}",
        ]
        for model, measured in evaluated_models(facts)
        for group, found in measured.get("memorisation", {}).items()
    ]
    return (
        Section(
            "Memorisation",
            [
                Table(
                    ["model", "in the training set", "documents", "continued exactly", "right tokens, mean"],
                    rows,
                    {2, 3, 4},
                )
            ],
        )
        if rows
        else None
    )


def leaks(facts: Facts, name: str = "evaluate") -> Section | None:
    """Items of the tasks that stand in the training set, and the metrics with and without them."""
    found = facts.get("evaluation", {}).get("contamination", {})
    rows = []
    for model, by_task in found.items():
        for task, one in by_task.items():
            sides = {name: value for name, value in one.items() if isinstance(value, Mapping)}
            for name, value in sides.items() or [("", {})]:
                rows.append(
                    [
                        task,
                        model,
                        f"{one['contaminated']} of {one['items']}",
                        name,
                        *(
                            f"{value[side]['value']:.4f}" if side in value else "-"
                            for side in ("contaminated", "clean")
                        ),
                    ]
                )
    return (
        Section(
            "Contamination of tasks",
            [
                Table(
                    ["task", "model", "items found", "metric", "on these", "on the others"],
                    rows,
                    {2, 4, 5},
                )
            ],
        )
        if rows
        else None
    )


def samples(facts: Facts, name: str = "evaluate") -> Section | None:
    """Generated texts: the pre-trained model continues a prompt, a tuned one answers it."""
    parts: list[Part] = []
    for model, measured in evaluated_models(facts):
        does, between = ("continues a text", "") if model in CONTINUING else ("answers a prompt", "\n")
        if measured["samples"]:
            parts.append(Heading(f"{model}: {does}"))
        parts += [
            Text([(sample["prompt"], "strong"), (between + sample["completion"], "")]) for sample in measured["samples"]
        ]
    return Section("Samples", parts) if parts else None


def evaluated_models(facts: Facts) -> list[tuple[str, Any]]:
    """(name, measurements) of every model, in the order of their training."""
    models = facts.get("evaluation", {}).get("models", {})
    return [(name, models[name]) for name in STAGES if name in models]


def evaluation_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per model that predicts next tokens, and source: bits per byte, perplexity, token accuracy."""
    return [row for row in _source_rows(facts) if "perplexity" in row]


def masked_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per model that fills in masked tokens, and source: pseudo-perplexity, masked accuracy."""
    return [row for row in _source_rows(facts) if "pseudo_perplexity" in row]


def span_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per model that fills in hidden spans, and source: their loss and accuracy."""
    return [row for row in _source_rows(facts) if "span_loss" in row]


def _source_rows(facts: Facts) -> list[dict[str, Any]]:
    return [
        {"model": model, "source": source, **values}
        for model, measured in evaluated_models(facts)
        for source, values in measured["sources"].items()
    ]


def some_samples(facts: Facts) -> list[dict[str, str]]:
    """A few generated texts (model, prompt, completion): one of every model, then more."""
    models = [(name, measured["samples"]) for name, measured in evaluated_models(facts) if measured["samples"]]
    chosen = [{"model": name, **made[0 if name in CONTINUING else -1]} for name, made in models]
    more = [{"model": name, **sample} for name, made in models for sample in made]
    return [*chosen, *(sample for sample in more if sample not in chosen)][: max(SAMPLES, len(chosen))]


def metric_values(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The metrics of a task's summary: name and what belongs to it."""
    return [
        (name, value)
        for name, value in summary.items()
        if isinstance(value, Mapping) and value.get("value") is not None
    ]


def shown(value: Mapping[str, Any]) -> str:
    """A value with its interval."""
    return f"{value['value']:.4f}{_range(value, 4)}"


def _range(found: Mapping[str, Any] | None, digits: int) -> str:
    return "" if not found or "low" not in found else f" [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"
