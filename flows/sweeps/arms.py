"""Arms of an ablation: the manifest with parts left out, other settings, or other
documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.flows.sweeps.grid import SweepError
from gristmill.flows.sweeps.proxies import as_settings
from gristmill.mixtures.base import RawSection
from gristmill.mixtures.loader import open_manifest
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.ablation import REFERENCE, Ablation, Arm
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.yaml_text import unknown_name

SHUFFLE = "gristmill.dataprep.user_code.shuffled_words:shuffle_words"
"""Function of the control whose words are shuffled."""


@dataclass(frozen=True)
class Variant:
    """An arm, or a control of one.

    Attributes:
        name: of the arm.
        overrides: settings that replace the manifest's.
        prepare: steps, as written.
        conditions: source -> its condition on documents, or an empty one.
        repeats: source -> its expression of repeats, or None.
        drop: source -> share of its documents that remain after a random drop.
        copies: reads of each repeated document.
        repeated_share: share of the documents that are repeated, the first by draw.
        shuffled: the words of each paragraph are shuffled.
        shift: added to every seed.
    """

    name: str
    overrides: tuple[str, ...]
    prepare: Sequence[Any]
    conditions: Mapping[str, str]
    repeats: Mapping[str, str | None]
    drop: Mapping[str, float] = field(default_factory=dict)
    copies: int = 1
    repeated_share: float = 0.0
    shuffled: bool = False
    shift: int = 0

    def settings(
        self, against: str, excluded_below: float, pool: Mapping[str, float]
    ) -> list[str]:
        """Settings of its documents.

        Args:
            against: file of the held-out documents.
            excluded_below: documents with a smaller draw are held out.
            pool: source -> share of the remaining documents that may be used.
        """
        steps = [
            *self.prepare,
            {
                "decontaminate": {
                    "against": [{"path": against, "text_fields": ["text"]}]
                },
                "name": "without_held_out",
            },
        ]
        if self.shuffled:
            steps.append({"edit": {"use": SHUFFLE}, "name": "shuffled_words"})
        settings: dict[str, object] = {"prepare": steps}
        for source, condition in self.conditions.items():
            share = pool.get(source, 1.0) * self.drop.get(source, 1.0)
            end = excluded_below + (1 - excluded_below) * share
            parts = [condition, f"draw >= {excluded_below:.6f}"]
            if share < 1:
                parts.append(f"draw < {end:.6f}")
            key = f"sources.{source}"
            settings[f"{key}.where"] = " AND ".join(filter(None, parts))
            settings[f"{key}.max_epochs"] = MOST_EPOCHS
            if self.copies > 1:
                last = excluded_below + (end - excluded_below) * self.repeated_share
                times = f"if(draw < {last:.6f}, {self.copies}, 1)"
                own = self.repeats[source]
                settings[f"{key}.epochs"] = f"({own}) * {times}" if own else times
        return [*self.overrides, *as_settings(settings)]


MOST_EPOCHS = 1000
"""Limit on passes over a source: strict arms repeat their documents, and the report
shows how often.
"""


def read_arms(
    settings: Ablation, manifest_file: str, overrides: Sequence[str]
) -> list[Variant]:
    """Return the manifest itself and all arms.

    Raises:
        SweepError: an arm leaves out a part that the manifest does not have, or there is
            no arm.
        gristmill.mixtures.loader.ManifestError: a setting of an arm is invalid.
    """
    manifest, written = open_manifest(manifest_file, list(overrides))
    arms = dict(settings.arms)
    if settings.each_rule:
        arms |= arms_of_rules(manifest)
    if not arms:
        raise SweepError(
            "an ablation needs at least one arm; name some in the file of --arms, or "
            "compare the rules of the filters with --each-rule"
        )
    variants = []
    for name, arm in {REFERENCE: None, **arms}.items():
        changes = () if arm is None else _overrides_of(name, arm, manifest, written.raw)
        changed, changed_as_written = open_manifest(
            manifest_file, [*overrides, *changes]
        )
        extra = arm.where if arm is not None else None
        sources = changed.sources.items()
        variants.append(
            Variant(
                name,
                changes,
                changed_as_written.raw.get("prepare") or (),
                {source: all_of(section.where, extra) for source, section in sources},
                {source: section.epochs for source, section in sources},
            )
        )
    return variants


def all_of(*conditions: str | None) -> str:
    """Return one condition for several; empty if there are none."""
    return " AND ".join(f"({condition})" for condition in conditions if condition)


def rule_sets_of(manifest: Manifest) -> list[str]:
    """Return the rule sets of all filters, as `filter.gopher_quality`."""
    return [
        f"{name}.{rule_set}"
        for name, step in manifest.steps.items()
        if isinstance(step.config, Filter)
        for rule_set in step.config.rules.sets
    ]


def arms_of_rules(manifest: Manifest) -> dict[str, Arm]:
    """Return an arm without any rule set, and for each rule set one without it and one
    with it alone; of two rule sets, the second alone is the arm without the first.

    Raises:
        SweepError: the manifest has no filter.
    """
    rule_sets = rule_sets_of(manifest)
    if not rule_sets:
        raise SweepError("--each-rule: the manifest has no step `filter`")
    arms = {"no-rules": Arm(without=tuple(rule_sets))}
    if len(rule_sets) > 1:
        short_names = [rule_set.partition(".")[2] for rule_set in rule_sets]
        for rule_set, short_name in zip(rule_sets, short_names, strict=True):
            is_unique = short_names.count(short_name) == 1
            name = short_name if is_unique else rule_set
            arms[f"no-{name}"] = Arm(without=(rule_set,))
            if len(rule_sets) > 2:
                others = tuple(other for other in rule_sets if other != rule_set)
                arms[f"only-{name}"] = Arm(without=others)
    return arms


def _overrides_of(
    name: str, arm: Arm, manifest: Manifest, raw: RawSection
) -> tuple[str, ...]:
    """Return the settings of an arm that replace the manifest's."""
    weights = None if manifest.mix is None else manifest.mix.weights
    weight = "sources.{}.weight" if weights is None else "mix.weights.{}"
    known = [*manifest.steps, *rule_sets_of(manifest), *manifest.sources]
    settings = dict(arm.set)
    for part in arm.without:
        if part not in known:
            raise SweepError(
                f"arms.{name}.without: no such part: "
                f"{unknown_name(part, known, 'the manifest has')}"
            )
        if part in manifest.sources:
            settings[weight.format(part)] = 0
        elif part not in manifest.steps:
            settings[part] = None
    if not manifest.steps.keys().isdisjoint(arm.without):
        steps = zip(raw["prepare"], manifest.steps, strict=True)
        kept = [entry for entry, step in steps if step not in arm.without]
        settings = {"prepare": kept} | settings
    return tuple(as_settings(settings))
