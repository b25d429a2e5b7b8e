"""Analysis of an ablation: paired differences, decisions, and what the controls say of
the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.core.files import find_json, json_digest, write_json
from gristmill.core.store import Store
from gristmill.flows.sweeps.ablation import (
    ABLATIONS,
    AblationPlan,
    TrainedArm,
    TrainedTrial,
    Trial,
)
from gristmill.flows.sweeps.grid import Weights, normalised
from gristmill.flows.sweeps.paired_differences import (
    Decision,
    Difference,
    decide,
    detectable,
    difference,
    holm,
    seeds_to_find,
)
from gristmill.mixtures.schema.ablation import Ablation, Decide


@dataclass(frozen=True)
class ComparedArm:
    """An arm in a trial.

    Attributes:
        arm: name.
        tokens_kept: tokens of one pass over its documents.
        epochs: most passes over the documents of a source.
        bits_per_byte: of each seed, mean over the target.
        by_source: held-out source -> mean difference from the reference.
        difference: from the reference.
        p: p value, adjusted for the number of arms.
        decision: by the rule, at this size and rate; "cannot tell" if a required
            control does not hold.
        random_drop: difference of the smaller of both sets from a random part of the
            larger one; None if both have the same size.
        seeds_needed: seeds that would find a difference of this size; None if more than
            1,000.
    """

    arm: str
    tokens_kept: int
    epochs: float
    bits_per_byte: list[float]
    by_source: dict[str, float]
    difference: Difference
    p: float
    decision: Decision
    random_drop: Difference | None
    seeds_needed: int | None


@dataclass(frozen=True)
class Control:
    """A control of a trial.

    Attributes:
        name: of the control.
        expected: decision that an instrument that works comes to.
        difference: from the reference.
        holds: True if the difference is as expected.
        is_required: True if nothing can be decided unless it holds. Any other control
            that does not hold was too small a harm for the budget: only differences
            beyond its interval can be decided.
        seeds_needed: seeds that would find a difference of this size.
    """

    name: str
    expected: Decision
    difference: Difference
    holds: bool
    is_required: bool
    seeds_needed: int | None


@dataclass(frozen=True)
class ComparedTrial:
    """All comparisons of a trial.

    Attributes:
        trial: pool, size and learning rate.
        tokens: of each training.
        reference: bits per byte of the manifest itself, by seed.
        tokens_kept, epochs: of the manifest itself, as of an arm.
        arms: compared with the reference.
        controls: checks of the instrument.
        smallest: smallest difference that can be decided: that of the rule, or the
            largest one that a control which does not hold may have.
        detectable: smallest difference that these seeds find with a power of 0.8.
    """

    trial: Trial
    tokens: int
    reference: list[float]
    tokens_kept: int
    epochs: float
    arms: list[ComparedArm]
    controls: list[Control]
    smallest: float
    detectable: float

    @property
    def can_tell(self) -> bool:
        """True if the required controls hold."""
        return all(control.holds for control in self.controls if control.is_required)


@dataclass(frozen=True)
class AblationResults:
    """Results of an ablation.

    Attributes:
        rule: the rule that decided.
        earlier_rule: the rule of the first run of these arms, if it was another one.
        seeds: seeds of every arm.
        target: held-out source -> its share in the measured mean.
        trials: all comparisons.
        decisions: arm -> decision at the largest size: that of every pool and rate if
            the required controls hold, else "cannot tell".
        can_tell: True if the required controls of the deciding trials hold.
        agreement: smaller size -> share of pairs of arms that it ranks as the largest
            one does.
        failed: arm -> reason why it could not be trained.
    """

    rule: dict[str, Any]
    earlier_rule: dict[str, Any] | None
    seeds: tuple[int, ...]
    target: Weights
    trials: list[ComparedTrial]
    decisions: dict[str, Decision]
    can_tell: bool
    agreement: dict[str, float]
    failed: dict[str, str]


def rule_of(settings: Ablation) -> dict[str, Any]:
    """Return the budget and the rule of an ablation as JSON."""
    return settings.model_dump(mode="json", exclude={"arms", "each_rule", "pretrain"})


def fix_rule(plan: AblationPlan, store: Store) -> dict[str, Any] | None:
    """Store the rule before the first training.

    Returns:
        the rule of an earlier run of the same arms, if it is another one.
    """
    arms = [(variant.name, variant.overrides) for variant in plan.variants]
    digest = json_digest([plan.manifest_file, list(plan.overrides), arms])
    path = store.root / ABLATIONS / f"rule-{digest[:16]}.json"
    rule = rule_of(plan.settings)
    earlier: dict[str, Any] | None = find_json(path)
    if earlier is None:
        write_json(path, rule)
    return None if earlier in (None, rule) else earlier


def analyse_ablation(
    plan: AblationPlan,
    trained: Sequence[TrainedTrial],
    earlier_rule: dict[str, Any] | None = None,
) -> AblationResults:
    """Compare all arms with the reference, and decide by the rule."""
    settings = plan.settings
    sources = trained[0].arms[0].proxies[0].bits_per_byte
    target = normalised(settings.decide.target or dict.fromkeys(sources, 1.0))
    trials = [_compare(outcome, target, settings.decide) for outcome in trained]
    deciding = [entry for entry in trials if entry.trial.size == settings.sizes[-1]]
    arms = [variant.name for variant in plan.variants[1:]]
    failed = {
        arm.arm: arm.error
        for outcome in trained
        for arm in outcome.every_arm
        if arm.error is not None
    }
    return AblationResults(
        rule_of(settings),
        earlier_rule,
        plan.seeds,
        target,
        trials,
        {arm: _joint_decision(arm, deciding) for arm in arms},
        all(entry.can_tell for entry in deciding),
        {
            size: _agreement(
                [entry for entry in trials if entry.trial.size == size], deciding
            )
            for size in settings.sizes[:-1]
        },
        failed,
    )


def values_of(arm: TrainedArm, target: Weights) -> list[float]:
    """Return the mean bits per byte (and errors of tasks) over the target, by seed."""
    return [
        sum(
            share * {**proxy.bits_per_byte, **proxy.tasks}[name]
            for name, share in target.items()
            if share
        )
        for proxy in arm.proxies
    ]


def _compare(outcome: TrainedTrial, target: Weights, rule: Decide) -> ComparedTrial:
    reference, *arms = outcome.arms
    trained = [arm for arm in arms if arm.error is None]
    values = values_of(reference, target)
    controls = _compare_controls(outcome, target, rule)
    unseen = [
        control.difference.high
        for control in controls
        if not (control.holds or control.is_required)
    ]
    smallest = max([rule.smallest_difference, *unseen])
    can_tell = all(control.holds for control in controls if control.is_required)

    def compared_with(arm: TrainedArm, other: TrainedArm) -> Difference:
        others = values_of(other, target)
        return difference(values_of(arm, target), others, rule.confidence)

    differences = [compared_with(arm, reference) for arm in trained]
    adjusted = holm([entry.p for entry in differences])
    compared = []
    for arm, change, p in zip(trained, differences, adjusted, strict=True):
        drop = outcome.random_drops.get(arm.arm)
        from_drop = None
        if drop is not None and drop.error is None:
            is_smaller = sum(arm.tokens_kept.values()) < sum(
                reference.tokens_kept.values()
            )
            from_drop = compared_with(arm if is_smaller else reference, drop)
        compared.append(
            ComparedArm(
                arm.arm,
                sum(arm.tokens_kept.values()),
                max(arm.epochs.values()),
                values_of(arm, target),
                {
                    name: float(
                        np.mean(values_of(arm, {name: 1.0}))
                        - np.mean(values_of(reference, {name: 1.0}))
                    )
                    for name in target
                },
                change,
                p,
                decide(change.mean, p, rule.confidence, smallest)
                if can_tell
                else "cannot tell",
                from_drop,
                seeds_to_find(change.mean, change.spread, rule.confidence),
            )
        )
    spreads = [entry.spread for entry in differences] or [controls[0].difference.spread]
    return ComparedTrial(
        outcome.trial,
        outcome.tokens,
        values,
        sum(reference.tokens_kept.values()),
        max(reference.epochs.values()),
        compared,
        controls,
        smallest,
        detectable(len(values), float(np.median(spreads)), rule.confidence),
    )


def _compare_controls(
    outcome: TrainedTrial, target: Weights, rule: Decide
) -> list[Control]:
    """Compare the controls that could be trained with the reference."""
    values = values_of(outcome.arms[0], target)
    controls = []
    for control in (outcome.same, outcome.shuffled, outcome.duplicated):
        if control.error is not None:
            continue
        is_same = control is outcome.same
        smallest = rule.smallest_difference if is_same else 0.0
        change = difference(values_of(control, target), values, rule.confidence)
        decision = decide(change.mean, change.p, rule.confidence, smallest)
        expected: Decision = "cannot tell" if is_same else "worse"
        controls.append(
            Control(
                control.arm,
                expected,
                change,
                decision == expected,
                control is not outcome.duplicated or decision == "better",
                seeds_to_find(change.mean, change.spread, rule.confidence),
            )
        )
    return controls


def _joint_decision(arm: str, deciding: Sequence[ComparedTrial]) -> Decision:
    """Return the decision that all trials agree on."""
    decisions: set[Decision] = set()
    for trial in deciding:
        decided = {entry.arm: entry.decision for entry in trial.arms}
        decisions.add(decided.get(arm, "cannot tell"))
    return decisions.pop() if len(decisions) == 1 else "cannot tell"


def _agreement(
    trials: Sequence[ComparedTrial], deciding: Sequence[ComparedTrial]
) -> float:
    """Share of pairs of arms that both sizes rank alike, over all pools and rates."""
    alike = []
    for trial, other in zip(trials, deciding, strict=True):
        means, other_means = _means(trial), _means(other)
        names = [name for name in means if name in other_means]
        alike += [
            (means[one] < means[two]) == (other_means[one] < other_means[two])
            for one, two in itertools.combinations(names, 2)
        ]
    return float(np.mean(alike))


def _means(trial: ComparedTrial) -> dict[str, float]:
    """Mean difference of the reference and all arms."""
    return {"": 0.0} | {entry.arm: entry.difference.mean for entry in trial.arms}
