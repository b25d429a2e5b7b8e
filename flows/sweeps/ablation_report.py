"""Report of an ablation: tables for the terminal, a page with a forest plot, and
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from gristmill.core.files import write_text
from gristmill.flows.pages.page_elements import (
    Figure,
    Heading,
    Mark,
    Note,
    Page,
    Part,
    Span,
    Table,
    Tone,
    section_of,
    table,
)
from gristmill.flows.pages.page_html import html_file
from gristmill.flows.pages.pictures import intervals
from gristmill.flows.pages.terminal_pages import print_parts, print_sections
from gristmill.flows.planning.quantities import quantity
from gristmill.flows.sweeps.ablation import OTHER_SEEDS
from gristmill.flows.sweeps.ablation_results import (
    AblationResults,
    ComparedTrial,
    Control,
)
from gristmill.flows.sweeps.paired_differences import MOST_SEEDS, Decision, Difference
from gristmill.flows.sweeps.sweep_report import write_beside
from gristmill.mixtures.schema.ablation import REFERENCE

UNIT = "bits per byte"
MARKS: dict[Decision, Mark] = {"better": "good", "worse": "bad", "cannot tell": ""}
ARM_COLUMNS = {"arm": "", "kept": ">", "epochs": ".2f", "difference": ">"}
ARM_COLUMNS |= {"seeds": ">", "decision": ""}
CONTROL_COLUMNS = {"control": "", "difference": ">", "expected": "", "holds": ""}
DROP_COLUMNS = {"set": "", "beside a random part of": "", "difference": ">"}


def write_ablation(manifest_file: str, results: AblationResults) -> list[Path]:
    """Write `NAME-ablation.json` and `.html` beside the manifest, and return their
    paths.
    """
    json_file = write_beside(manifest_file, "ablation", asdict(results))
    page_file = json_file.with_suffix(".html")
    page = page_of_ablation(Path(manifest_file).stem, results)
    write_text(page_file, html_file(page))
    return [json_file, page_file]


def print_ablation(results: AblationResults) -> None:
    """Print an ablation as text."""
    for trial in results.trials:
        print_sections(section_of(heading(trial), trial_parts(trial)))
    failed = [
        Note(f"{arm}: {error}", "warning") for arm, error in results.failed.items()
    ]
    tone: Tone = "plain" if results.can_tell else "warning"
    verdict = [Note(sentence, tone) for sentence in describe_verdict(results)]
    print_parts(failed, describe_rule(results), verdict)


def heading(trial: ComparedTrial) -> str:
    """Return the heading of a trial."""
    return f"{trial.trial.title}: {trial.tokens:,} tokens"


def trial_parts(trial: ComparedTrial) -> list[Part]:
    """Return the tables of a trial."""
    return [
        arms_table(trial),
        Heading("Controls"),
        controls_table(trial),
        Heading("Sets of equal size"),
        drops_table(trial),
    ]


def arms_table(trial: ComparedTrial) -> Table:
    """Return the manifest itself, then the arms from best to worst."""
    mean = sum(trial.reference) / len(trial.reference)
    kept = quantity(trial.tokens_kept)
    absolute = f"{mean:.4f} {UNIT}"
    rows: list[list[object]] = [[REFERENCE, kept, trial.epochs, absolute, "", ""]]
    for arm in sorted(trial.arms, key=lambda arm: arm.difference.mean):
        agreeing = round(arm.difference.agreement * arm.difference.seeds)
        rows.append(
            [
                arm.arm,
                quantity(arm.tokens_kept),
                arm.epochs,
                shown(arm.difference),
                f"{agreeing} of {arm.difference.seeds}",
                Span(arm.decision, MARKS[arm.decision]),
            ]
        )
    return table(ARM_COLUMNS, rows)


def controls_table(trial: ComparedTrial) -> Table:
    """Return the controls of a trial."""
    rows = [
        [
            control.name,
            shown(control.difference),
            "no difference" if control.expected == "cannot tell" else control.expected,
            "yes" if control.holds else "no",
        ]
        for control in trial.controls
    ]
    return table(CONTROL_COLUMNS, rows)


def drops_table(trial: ComparedTrial) -> Table:
    """Return the comparisons of sets of equal size."""
    rows = []
    for arm in trial.arms:
        if arm.random_drop is not None:
            rows.append([*trial.by_size(arm), shown(arm.random_drop)])
    return table(DROP_COLUMNS, rows)


def shown(change: Difference) -> str:
    """Format a difference with half the width of its interval."""
    return f"{change.mean:+.4f} ± {change.high - change.mean:.4f}"


def describe_rule(results: AblationResults) -> Iterator[str]:
    """Yield the rule, and that of the first run if it was another one."""
    rule = results.rule["decide"]
    yield (
        "rule: an arm is better or worse if it differs from the manifest by at least "
        f"{rule['smallest_difference']:g} {UNIT} with {rule['confidence']:.0%} "
        "confidence over all arms (intervals are those of each arm alone), at "
        f"{results.rule['sizes'][-1]} and at every learning rate and pool"
    )
    earlier = results.earlier_rule
    if earlier is not None:
        before = {**earlier, **earlier["decide"]}
        changed = [
            f"{key} {json.dumps(before.get(key))} instead of {json.dumps(value)}"
            for key, value in {**results.rule, **rule}.items()
            if before.get(key) != value and key != "decide"
        ]
        yield f"this rule is not that of the first run, which had {', '.join(changed)}"
    for size, share in results.agreement.items():
        yield f"{size} ranks {share:.0%} of pairs as the largest size does"


def describe_verdict(results: AblationResults) -> Iterator[str]:
    """Yield what the controls say of the budget, and the decisions."""
    size = results.rule["sizes"][-1]
    deciding = [trial for trial in results.trials if trial.trial.size == size]
    for trial in deciding:
        for control in trial.controls:
            if control.holds or not (control.is_required or trial.can_tell):
                continue
            limit = f" differences below {trial.smallest:.4f}"
            yield (
                f"{trial.trial.title}: this budget cannot tell"
                f"{'' if control.is_required else limit}: {describe_failure(control)}"
            )
    smallest = max(trial.detectable for trial in deciding)
    yield (
        f"{len(results.seeds)} seeds find differences from {smallest:.4f} {UNIT} on, "
        "four times out of five"
    )
    for decision in ("better", "worse", "cannot tell"):
        arms = [arm for arm, made in results.decisions.items() if made == decision]
        if decision == "cannot tell":
            arms = [arm + describe_seeds(arm, deciding) for arm in arms]
        if arms:
            yield f"{decision}: {', '.join(arms)}"


def describe_seeds(arm: str, deciding: Sequence[ComparedTrial]) -> str:
    """Describe the seeds that would decide on an arm, or nothing if they could not."""
    seeds = [
        entry.seeds_needed
        for trial in deciding
        for entry in trial.arms
        if entry.arm == arm and abs(entry.difference.mean) >= trial.smallest
    ]
    numbers = [number for number in seeds if number is not None]
    return f" ({max(numbers)} seeds could)" if len(numbers) == len(deciding) else ""


def describe_failure(control: Control) -> str:
    """Describe a control that does not hold, and the budget that could."""
    change = control.difference
    if control.expected == "cannot tell":
        return f"{control.name}: a difference of {shown(change)}"
    text = f"{control.name}: not worse, {shown(change)}"
    if change.mean <= 0 or control.seeds_needed is None:
        return f"{text}; more than {MOST_SEEDS} seeds, or larger proxies, could"
    return f"{text}; {control.seeds_needed} seeds could"


def page_of_ablation(name: str, results: AblationResults) -> Page:
    """Return the page of an ablation."""
    sections = []
    for trial in results.trials:
        by_mean = sorted(trial.arms, key=lambda arm: arm.difference.mean)
        changes = [(entry.arm, entry.difference) for entry in by_mean]
        # The harms of the other controls would leave no room for the arms.
        changes += [
            (control.name, control.difference)
            for control in trial.controls
            if control.name == OTHER_SEEDS
        ]
        rows = [(name, each.mean, each.low, each.high) for name, each in changes]
        confidence = results.rule["decide"]["confidence"]
        caption = (
            f"Difference in {UNIT} from the manifest, with {confidence:.0%} intervals "
            "over seeds; arms to the left of the line are better"
        )
        figure = Figure(intervals(rows, f"difference in {UNIT}"), caption)
        parts = [figure, *trial_parts(trial)]
        sections.append(section_of(heading(trial), parts))
    notes = [Note(sentence) for sentence in describe_verdict(results)]
    notes += [Note(sentence) for sentence in describe_rule(results)]
    return Page(f"Ablation of {name}", list(filter(None, sections)), parts=notes)
