"""The report's sections about a run's models: held-out text, tasks, leaks,
samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gristmill.flows.pages.page_elements import (
    Heading,
    MaybeSection,
    Measure,
    Part,
    Span,
    Table,
    Text,
    section_of,
    table,
)
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.stage_summaries import (
    Interval,
    ModelMeasures,
    Sample,
    SourceMeasures,
    SuiteResult,
    read_as,
)
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.manifest import CONTINUING

SAMPLES = 3
LARGE = 1000.0
"""From here on metrics are written in four digits."""
BOOTSTRAP_NOTE = "In brackets: 95 % bootstrap intervals over documents."
MODEL = {"model": "", "source": ""}


class HeldOutRow(SourceMeasures):
    """Measures of a model on held-out text of a source."""

    model: str
    source: str


def held_out(facts: Facts, name: str = "evaluate") -> MaybeSection:
    """Measurements on held-out text."""
    return section_of("Held-out text", held_out_tables(facts), BOOTSTRAP_NOTE)


def held_out_tables(facts: Facts) -> list[Table]:
    """Measures of models of next tokens, and of hidden ones; those that no model has
    are empty.
    """
    next_tokens, hidden = [], []
    for row in held_out_rows(facts):
        place = row.model, row.source
        if row.perplexity is not None:
            measures = row.bits_per_byte, row.perplexity, row.token_accuracy
            next_tokens.append([*place, *measures, row.documents])
        if row.hidden_loss is not None:
            hidden.append([*place, row.hidden_loss, row.hidden_accuracy, row.documents])
    texts = {"bits per byte": ".4f", "perplexity": ".2f", "token accuracy": ".2%"}
    losses = {"loss of hidden tokens": ".4f", "accuracy": ".2%"}
    return [
        table({**MODEL, **columns, "documents": ","}, rows)
        for columns, rows in ((texts, next_tokens), (losses, hidden))
    ]


def tasks(facts: Facts, name: str = "evaluate") -> MaybeSection:
    """Every task's metrics for every model, and differences between models."""
    metrics = task_table(evaluated_models(facts))
    if not metrics.rows:
        return None
    changes = [
        [
            change.task,
            change.metric,
            f"{change.from_} to {change.to}",
            change,
            "yes" if change.significant else "within noise",
        ]
        for change in facts.evaluation.differences
    ]
    differences = {"models": "", "difference": "+.4f", "certain": ""}
    return section_of(
        "Tasks",
        metrics,
        Heading("From model to model, on the same items") if changes else None,
        table({"task": "", "metric": "", **differences}, changes),
    )


def task_table(models: Sequence[tuple[str, ModelMeasures]]) -> Table:
    """Every metric of every task for some models by name."""
    rows = [
        [task, model, metric, metric_text(read_as(Interval, value)), summary["items"]]
        for model, measured in models
        for task, summary in measured.tasks.items()
        for metric, value in summary.items()
        if isinstance(value, Mapping) and value.get("value") is not None
    ]
    names = {"task": "", "model": "", "metric": ""}
    return table({**names, "value": ">", "items": "d"}, rows)


def metric_text(value: Measure) -> str:
    """A metric in four decimals, or in four digits if it is large, such as the
    perplexity of an untrained model.
    """
    largest = max(value.value, value.high or 0.0)
    return f"{value:.4f}" if largest < LARGE else f"{value:.4g}"


def suites(facts: Facts, name: str = "evaluate") -> MaybeSection:
    """Every suite: the centred scores of this run's models and of published ones, and
    each task.
    """
    note = (
        "0 is chance, 1 is every item right; in brackets: 95 % bootstrap intervals "
        "over items."
    )
    return section_of("Suites", suite_parts(evaluated_models(facts)), note)


def suite_parts(models: Sequence[tuple[str, ModelMeasures]]) -> list[Heading | Table]:
    """For each suite a heading, the scores of some models and of published ones, and a
    table of its tasks.
    """
    results: dict[str, dict[str, SuiteResult]] = {}
    for model, measured in models:
        for suite, result in measured.suites.items():
            results.setdefault(suite, {})[model] = result
    parts: list[Heading | Table] = []
    columns = {"accuracy": ".4f", "chance": ".3f", "centred": ".4f", "items": ","}
    for suite, by_model in results.items():
        scores, rows = [], []
        for model, result in by_model.items():
            scores.append([model, result.score, "this run"])
            rows += [
                [
                    task,
                    measures.shots,
                    model,
                    measures.accuracy,
                    measures.baseline,
                    measures.centred,
                    measures.items,
                ]
                for task, measures in result.tasks.items()
            ]
        scores += [[row.model, row.score, row.source] for row in result.references]
        most = f", at most {result.limit or 0:,} items of each task"
        limit = "" if result.limit is None else most
        parts += [
            Heading(f"{suite}: {result.title}{limit}"),
            table({"model": "", "centred score": ".4f", "source": ""}, scores),
            table({"task": "", "shots": "d", "model": "", **columns}, rows),
        ]
    return parts


def leaks(facts: Facts, name: str = "evaluate") -> MaybeSection:
    """Items of the tasks that the training set holds, and the metrics with and without
    them.
    """
    rows = []
    for model, by_task in facts.evaluation.contamination.items():
        for task, leak in by_task.items():
            items = f"{leak['contaminated']} of {leak['items']}"
            metrics = read_as(dict[str, dict[str, Measure]], leak["metrics"])
            for metric, sides in metrics.items() or [("", {})]:
                values = map(sides.get, ("contaminated", "clean"))
                rows.append([task, model, items, metric, *values])
    columns = {
        "items found": ">",
        "metric": "",
        "on these": ".4f",
        "on the others": ".4f",
    }
    return section_of(
        "Contamination of tasks", table({"task": "", "model": "", **columns}, rows)
    )


def canaries(facts: Facts, name: str = "evaluate") -> MaybeSection:
    """Memorised secrets of every model by their number of copies."""
    rows = [
        [
            model,
            group.copies,
            group.read,
            group.exposure,
            group.extracted,
            group.loss,
            group.secrets,
        ]
        for model, measured in evaluated_models(facts)
        for group in measured.canaries
    ]
    columns = {
        "model": "",
        "copies": "d",
        "copies read": ".1f",
        "exposure": ".2f",
        "extracted": ".1%",
        "nats": ".2f",
        "secrets": "d",
    }
    meanings = {"copies": "documents into which each secret was inserted"}
    return section_of("Canaries", table(columns, rows, meanings))


def samples(facts: Facts, name: str = "evaluate") -> MaybeSection:
    """Generated texts: the pre-trained model continues a prompt, a tuned one answers
    it.
    """
    parts: list[Part] = []
    for model, measured in evaluated_models(facts):
        is_continuing = model in CONTINUING
        kind = "continues a text" if is_continuing else "answers a prompt"
        parts.append(Heading(f"{model}: {kind}"))
        break_ = "" if is_continuing else "\n"
        parts += [
            Text([Span(text.prompt, "strong"), Span(f"{break_}{text.completion}")])
            for text in measured.samples
        ]
    return section_of("Samples", parts)


def evaluated_models(facts: Facts) -> list[tuple[str, ModelMeasures]]:
    """(name, measurements) of every model, in the order of their training."""
    models = facts.evaluation.models
    return [(name, models[name]) for name in STAGES if name in models]


def held_out_rows(facts: Facts) -> list[HeldOutRow]:
    """Rows of all models by source."""
    return [
        HeldOutRow(**dict(measures), model=model, source=source)
        for model, measured in evaluated_models(facts)
        for source, measures in measured.sources.items()
    ]


def some_samples(facts: Facts) -> list[tuple[str, Sample]]:
    """A few generated texts with the names of their models: one of every model, then
    more.
    """
    chosen, extra = [], []
    for name, measured in evaluated_models(facts):
        texts = [(name, sample) for sample in measured.samples]
        if texts:
            chosen.append(texts[0 if name in CONTINUING else -1])
            extra += [text for text in texts if text != chosen[-1]]
    return [*chosen, *extra][: max(SAMPLES, len(chosen))]
