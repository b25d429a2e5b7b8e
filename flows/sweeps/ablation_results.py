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
    DUPLICATED,
    OTHER_SEEDS,
    SHUFFLED,
    AblationPlan,
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
from gristmill.flows.sweeps.proxies import TrainedGroup
from gristmill.mixtures.schema.ablation import REFERENCE, Ablation, Decide


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
        seeds_needed: seeds that would find a difference of this size beside those of
            all other arms; None if more than 1,000.
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
        detectable: smallest difference that these seeds find with a power of 0.8, in
            any one of all arms.
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
        return can_tell(self.controls)

    def by_size(self, arm: ComparedArm) -> tuple[str, str]:
        """Names of the smaller and the larger set of an arm and the manifest."""
        if arm.tokens_kept < self.tokens_kept:
            return arm.arm, REFERENCE
        return REFERENCE, arm.arm


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
    trials = [_compare(each, target, settings.decide) for each in trained]
    by_size = {
        size: [trial for trial in trials if trial.trial.size == size]
        for size in settings.sizes
    }
    deciding = by_size.pop(settings.sizes[-1])
    groups = [
        group
        for each in trained
        for group in (*each.arms, *each.random_drops.values(), *each.controls)
    ]
    return AblationResults(
        rule_of(settings),
        earlier_rule,
        plan.seeds,
        target,
        trials,
        {arm.name: _joint_decision(arm.name, deciding) for arm in plan.variants[1:]},
        all(trial.can_tell for trial in deciding),
        {size: _agreement(compared, deciding) for size, compared in by_size.items()},
        {group.name: group.error for group in groups if group.error is not None},
    )


def compare(
    group: TrainedGroup, other: TrainedGroup, target: Weights, rule: Decide
) -> Difference:
    """Return the difference between two arms in the mean over the target."""
    values, others = values_of(group, target), values_of(other, target)
    return difference(values, others, rule.confidence)


def values_of(group: TrainedGroup, target: Weights) -> list[float]:
    """Return the mean over the target of each proxy of an arm."""
    return [proxy.mean(target) for proxy in group.proxies]


def _compare(trained: TrainedTrial, target: Weights, rule: Decide) -> ComparedTrial:
    reference, *arms = trained.arms
    arms = [arm for arm in arms if arm.error is None]
    controls = _compare_controls(trained, target, rule)
    unseen = [
        control.difference.high
        for control in controls
        if not (control.holds or control.is_required)
    ]
    smallest = max([rule.smallest_difference, *unseen])
    differences = [compare(arm, reference, target, rule) for arm in arms]
    # Holm's strictest step, which the arm with the smallest p value has to pass.
    strictest = 1 - (1 - rule.confidence) / max(1, len(arms))
    adjusted = holm([change.p for change in differences])
    compared = []
    for arm, change, p in zip(arms, differences, adjusted, strict=True):
        decision = decide(change.mean, p, rule.confidence, smallest)
        drop = trained.random_drops.get(arm.name)
        smaller = arm if arm.num_tokens < reference.num_tokens else reference
        compared.append(
            ComparedArm(
                arm.name,
                arm.num_tokens,
                arm.epochs,
                values_of(arm, target),
                {
                    name: compare(arm, reference, {name: 1.0}, rule).mean
                    for name in target
                },
                change,
                p,
                decision if can_tell(controls) else "cannot tell",
                compare(smaller, drop, target, rule) if drop and drop.proxies else None,
                seeds_to_find(change.mean, change.spread, strictest),
            )
        )
    spreads = [change.spread for change in differences or [controls[0].difference]]
    return ComparedTrial(
        trained.trial,
        trained.tokens,
        values_of(reference, target),
        reference.num_tokens,
        reference.epochs,
        compared,
        controls,
        smallest,
        detectable(len(reference.proxies), float(np.median(spreads)), strictest),
    )


def can_tell(controls: Sequence[Control]) -> bool:
    """True if the required controls were trained, and hold."""
    trained = {control.name for control in controls}
    return {OTHER_SEEDS, SHUFFLED} <= trained and all(
        control.holds for control in controls if control.is_required
    )


def _compare_controls(
    trained: TrainedTrial, target: Weights, rule: Decide
) -> list[Control]:
    """Compare the controls that could be trained with the reference."""
    controls = []
    for control in trained.controls:
        if control.error is not None:
            continue
        is_same = control.name == OTHER_SEEDS
        smallest = rule.smallest_difference if is_same else 0.0
        change = compare(control, trained.arms[0], target, rule)
        decision = decide(change.mean, change.p, rule.confidence, smallest)
        expected: Decision = "cannot tell" if is_same else "worse"
        controls.append(
            Control(
                control.name,
                expected,
                change,
                decision == expected,
                control.name != DUPLICATED or decision == "better",
                seeds_to_find(change.mean, change.spread, rule.confidence),
            )
        )
    return controls


def _joint_decision(arm: str, deciding: Sequence[ComparedTrial]) -> Decision:
    """Return the decision that all trials agree on."""
    decisions: set[Decision] = {
        next((each.decision for each in trial.arms if each.arm == arm), "cannot tell")
        for trial in deciding
    }
    return decisions.pop() if len(decisions) == 1 else "cannot tell"


def _agreement(
    trials: Sequence[ComparedTrial], deciding: Sequence[ComparedTrial]
) -> float:
    """Share of pairs of arms that both sizes rank alike, over all pools and rates."""
    alike: list[bool] = []
    for trial, other in zip(trials, deciding, strict=True):
        means = {arm.arm: arm.difference.mean for arm in trial.arms}
        # The reference differs by nothing from itself.
        pairs = [(0.0, 0.0)]
        pairs += [
            (means[arm.arm], arm.difference.mean)
            for arm in other.arms
            if arm.arm in means
        ]
        alike += [
            (first[0] < second[0]) == (first[1] < second[1])
            for first, second in itertools.combinations(pairs, 2)
        ]
    return float(np.mean(alike))
