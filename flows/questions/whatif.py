"""`gristmill whatif`: documents that other thresholds would keep, computed from stored
measurements.

Exact for the stages that saw a document. A document that only the new thresholds keep
was never seen by later stages; it is counted as `unseen`, since they might drop it.
Duplicates are not searched again, nor the best share by a score (`keep_top`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import (
    Inputs,
    annotation_stages,
    read_documents,
    read_table,
    shard_names,
)
from gristmill.dataprep.whatif_thresholds import (
    NotReplayableError,
    Rule,
    Tally,
    Verdicts,
    judge_shard,
    nearest,
    short_name,
)
from gristmill.flows.authoring.manifest_text import flow_text
from gristmill.flows.pages.page_elements import (
    Heading,
    Listing,
    Note,
    Parts,
    Table,
    table,
)
from gristmill.flows.pages.terminal_pages import Answer, print_parts
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.threshold_samples import (
    CutSample,
    NearPlace,
    near_places,
    read_samples,
    stored_rules,
)
from gristmill.flows.questions.what_changed import keyed_manifest
from gristmill.flows.running.session import Session
from gristmill.mixtures.base import flat_items
from gristmill.mixtures.loader import short_key
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.yaml_text import join_first

Rules = Mapping[str, list[Rule]]
"""Stage -> its rules."""
NEIGHBOUR = 0.1
"""Relative distance of the neighbours of a threshold; at least 1 for integers."""
MOST_IDLE = 60
"""Number of idle thresholds listed; rules by language create hundreds."""
Counts = dict[str, np.ndarray]
"""Source -> documents, bytes, tokens, and bytes of texts that were not tokenised."""


@dataclass(frozen=True)
class Size:
    """Amount of text: documents, bytes, and tokens (None if unknown)."""

    documents: int
    bytes: int
    tokens: int | None


@dataclass(frozen=True)
class RuleTallies:
    """Documents that fail a rule, now and with the changed thresholds."""

    now: Tally = field(default_factory=Tally)
    then: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class ChangedCut:
    """A changed threshold.

    Attributes:
        rule: label of its rule.
        key: its setting.
        statistic: the measured column that it bounds.
        now: value of the setting; None if the rule is new.
        then: changed value.
        failing: documents nearest to the changed threshold that it drops.
        passing: documents nearest to it that pass it and fail no other rule.
    """

    rule: str
    key: str
    statistic: str
    now: Any
    then: Any
    failing: list[CutSample]
    passing: list[CutSample]


@dataclass(frozen=True)
class WhatIf(Answer):
    """Documents that other thresholds would keep.

    Attributes:
        now: source -> size kept now.
        then: source -> size that would be kept.
        unseen: source -> size that would be kept but was not seen by later stages,
            which may drop it.
        rules: label of a rule -> documents that fail it.
        cuts: changed thresholds.
        tokens_known: True if tokens are counted.
    """

    now: dict[str, Size]
    then: dict[str, Size]
    unseen: dict[str, Size]
    rules: dict[str, RuleTallies]
    cuts: list[ChangedCut]
    tokens_known: bool

    def parts(self) -> list[Parts]:
        """Return the comparison as parts of a page."""
        unseen = sum(size.documents for size in self.unseen.values())
        warning = (
            f"and {unseen:,} documents that later stages have not seen: they may drop "
            "some of them"
        )
        return [
            self._kept(),
            Note(warning, "warning") if unseen else None,
            self._failing(),
            [_cut_parts(cut) for cut in self.cuts],
        ]

    def _kept(self) -> Table:
        """Amounts kept now and with the changed thresholds, in all and by source."""
        counts: dict[str, list[int]] = {}
        for unit in ("documents", "bytes", "tokens")[: 3 if self.tokens_known else 2]:
            counts[unit] = [
                sum(getattr(size, unit) for size in sizes.values())
                for sizes in (self.now, self.then)
            ]
        if len(self.now) > 1:
            nothing = Size(0, 0, 0)
            for source in sorted({*self.now, *self.then}):
                counts[f"  {source}"] = [
                    sizes.get(source, nothing).documents
                    for sizes in (self.now, self.then)
                ]
        rows = [
            [name, now, then, f"{then - now:+,} ({(then - now) / max(now, 1):+.2%})"]
            for name, (now, then) in counts.items()
        ]
        return table({"kept": "", "now": ",", "then": ",", "change": ">"}, rows)

    def _failing(self) -> list[Parts]:
        """Rules of changed stages, with the documents that fail each, and no other."""
        changed_stages = {cut.rule.partition("/")[0] for cut in self.cuts}
        rows = []
        for name, tallies in sorted(
            self.rules.items(), key=lambda item: (-item[1].then.failing, item[0])
        ):
            old, new = tallies.now, tallies.then
            is_changed = name.partition("/")[0] in changed_stages
            if old != new or (is_changed and new.failing):
                counts = (old.failing, new.failing, old.only, new.only)
                rows.append([short_name(name), *(f"{count:,}" for count in counts)])
        header = ("rule", "fail", "then", "only it", "then")
        return [Heading("Failing"), Table(header, rows, range(1, 5))] if rows else []


def _cut_parts(cut: ChangedCut) -> list[Parts]:
    """A changed threshold and the documents next to it as parts of a page."""
    samples = {
        "would be dropped, nearest to the cut first": cut.failing,
        "would pass, nearest to the cut first": cut.passing,
    }
    return [
        Heading(f"{cut.key} {flow_text(cut.now)} -> {flow_text(cut.then)}"),
        [
            Listing(title, [sample.entry() for sample in documents])
            for title, documents in samples.items()
        ],
    ]


@dataclass(frozen=True)
class Neighbour:
    """A threshold beside the present one, and the number of documents failing it."""

    bound: float
    failing: int


@dataclass(frozen=True)
class Threshold:
    """Effect of a threshold.

    Attributes:
        rule: label of the rule.
        key: key of the setting.
        bound: value of the threshold.
        seen: number of documents that the stage judged.
        failing: number of them that fail the rule.
        only: number of them that fail no other rule of the stage.
        looser, stricter: the neighbouring thresholds; None for a bound that is not a
            number, or 0.
    """

    rule: str
    key: str
    bound: Any
    seen: int
    failing: int
    only: int
    looser: Neighbour | None
    stricter: Neighbour | None


@dataclass(frozen=True)
class Comparison:
    """Committed outputs, and every stage's rules before and after."""

    inputs: Inputs
    before: Rules
    after: Rules

    @property
    def old_bounds(self) -> dict[str, Any]:
        """Setting -> its value before."""
        rules = itertools.chain.from_iterable(self.before.values())
        return {rule.key: rule.bound for rule in rules}

    @property
    def changed(self) -> list[Rule]:
        """Rules whose bounds differ."""
        old = self.old_bounds
        rules = itertools.chain.from_iterable(self.after.values())
        return [
            rule for rule in rules if rule.key not in old or old[rule.key] != rule.bound
        ]


@dataclass
class _Totals:
    now: Counts = field(default_factory=dict)
    then: Counts = field(default_factory=dict)
    unseen: Counts = field(default_factory=dict)
    rules: dict[str, RuleTallies] = field(default_factory=dict)
    nearest: list[NearPlace] = field(default_factory=list)


def compare(before: Session, after: Session) -> Comparison:
    """Pair up the rules of two openings of a manifest.

    Raises:
        NotReplayableError: nothing is committed yet, nothing differs, or a key other
            than a threshold differs.
    """
    old, new = map(_settings, (before, after))
    differing = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    for key in sorted(differing):
        if key.startswith(("sft.prepare.", "dpo.prepare.")):
            raise NotReplayableError(
                f"{key} concerns examples, but whatif replays documents only; run it: "
                f"{after.command('run')}"
            )
    inputs = _measured_inputs(before)
    old_rules, new_rules = (
        stored_rules(session, inputs) for session in (before, after)
    )
    for rules in (*old_rules.values(), *new_rules.values()):
        differing -= {rule.key for rule in rules}
    if differing:
        raise NotReplayableError(
            f"{min(differing)} changes a measurement, or a stage after preparation, "
            f"which stored values cannot replay; run it: {after.command('run')}"
        )
    comparison = Comparison(inputs, old_rules, new_rules)
    if not comparison.changed:
        raise NotReplayableError(
            "nothing differs; name a threshold, e.g. --set "
            "filter.gopher_quality.min_words=40"
        )
    return comparison


def _measured_inputs(session: Session) -> dict[str, Path]:
    """Return the committed outputs of ingest and of every preparing stage.

    Raises:
        NotReplayableError: one of them is missing, or there are no such stages.
    """
    if not session.manifest.steps:
        raise NotReplayableError(
            f"{session.manifest_file} has no `prepare:` section, so it has no thresholds"
        )
    inputs = committed_inputs(session)
    stages = [INGEST, *session.manifest.steps]
    for name in stages:
        if name not in inputs:
            raise NotReplayableError(
                f"{name} is not committed, so nothing is measured yet; run: "
                f"{session.command('run', '--until', stages[-1])}"
            )
    return {name: inputs[name] for name in stages}


def thresholds(session: Session) -> list[Threshold]:
    """Count the documents that every threshold drops, and that its neighbours would
    drop, of those its stage saw; in stage order.

    Raises:
        NotReplayableError: nothing is committed yet.
    """
    inputs = _measured_inputs(session)
    thresholds = []
    for stage, rules in stored_rules(session, inputs).items():
        counts = np.zeros((len(rules), 5), np.int64)
        for shard in shard_names(inputs[INGEST]):
            verdicts, _ = judge_shard(inputs, shard, stage, rules, rules)
            for count, rule in zip(counts, rules, strict=True):
                count += _counts(verdicts, rule)
        for rule, (seen, failing, only, *beside) in zip(
            rules, counts.tolist(), strict=True
        ):
            neighbours = map(Neighbour, _neighbours(rule), beside)
            looser, stricter = [*neighbours, None, None][:2]
            key, sizes = short_key(rule.key), (seen, failing, only)
            thresholds.append(
                Threshold(rule.label, key, rule.bound, *sizes, looser, stricter)
            )
    return thresholds


def _counts(verdicts: Verdicts, rule: Rule) -> np.ndarray:
    """Return the documents seen, failing and failing this rule alone, and those that
    fail its neighbours; shape (5,), int64.
    """
    tally, failed = verdicts.tallies[rule.label], verdicts.failed
    # Documents dropped for a reason other than a threshold stay dropped.
    judged = verdicts.keep | np.any(list(failed.values()), axis=0)
    judged &= ~failed[rule.of_step(rule.unless)] if rule.unless else True
    beside = [0, 0]
    for place, bound in enumerate(_neighbours(rule)):
        values = verdicts.columns[rule.statistic]
        fails = values > bound if rule.side == "max" else values < bound
        beside[place] = int((fails & judged).sum())
    return np.array([len(verdicts.rows), tally.failing, tally.only, *beside])


def _neighbours(rule: Rule) -> tuple[float, ...]:
    """Return the next looser and the next stricter bound of a rule, if it has any."""
    if not isinstance(rule.bound, int | float) or not rule.bound:
        return ()
    size = NEIGHBOUR * abs(rule.bound)
    step = max(round(size), 1) if isinstance(rule.bound, int) else float(f"{size:.1g}")
    bounds = round(rule.bound - step, 10), round(rule.bound + step, 10)
    return bounds if rule.side == "min" else bounds[::-1]


def _settings(session: Session) -> dict[str, Any]:
    """Return the settings that shape outputs; `prepare.filter.rules.x` is called
    `filter.rules.x`, as in keys of rules.
    """
    manifest = session.manifest
    content = keyed_manifest(manifest.model_dump(mode="json", exclude={"engine"}))
    settings = {
        key.removeprefix("prepare."): value for key, value in flat_items(content)
    }
    return {**settings, "prepare": list(manifest.steps)}


def replay(comparison: Comparison, samples: int, tokens: Path | None) -> WhatIf:
    """Judge every document again.

    Args:
        comparison: rules before and after.
        samples: number of documents shown on each side of every changed threshold.
        tokens: the committed output of `tokenize`, for exact numbers of tokens; None
            leaves them out.
    """
    totals = _Totals()
    changed = {rule.label: rule for rule in comparison.changed}
    for shard in shard_names(comparison.inputs[INGEST]):
        _replay_shard(comparison, shard, changed, samples, tokens, totals)
    tokens_per_byte = {
        source: num_tokens / max(num_bytes, 1)
        for source, (_, num_bytes, num_tokens, _) in totals.now.items()
    }

    def size(source: str, amounts: np.ndarray) -> Size:
        num_documents, num_bytes, num_tokens, untokenised = amounts.tolist()
        # Texts that were not tokenised have the tokens per byte of their source.
        estimate = round(untokenised * tokens_per_byte.get(source, 0.0))
        known = None if tokens is None else num_tokens + estimate
        return Size(num_documents, num_bytes, known)

    now, then, unseen = (
        {source: size(source, amounts) for source, amounts in counts.items()}
        for counts in (totals.now, totals.then, totals.unseen)
    )
    samples_by_rule = read_samples(comparison.inputs, totals.nearest, samples)
    old_bounds = comparison.old_bounds
    cuts = [
        ChangedCut(
            label,
            rule.key,
            rule.statistic,
            old_bounds.get(rule.key),
            rule.bound,
            **vars(samples_by_rule[label]),
        )
        for label, rule in changed.items()
    ]
    return WhatIf(now, then, unseen, totals.rules, cuts, tokens is not None)


def _replay_shard(
    comparison: Comparison,
    shard: str,
    changed: Mapping[str, Rule],
    samples: int,
    tokens: Path | None,
    totals: _Totals,
) -> None:
    inputs = comparison.inputs
    documents = read_documents(inputs, shard, ["source", "text"])
    sources = documents["source"].cast(pa.string()).to_numpy()
    rows = np.arange(len(sources))
    now = then = np.ones(len(sources), bool)
    unseen = np.zeros(len(sources), bool)
    replayed: list[Verdicts] = []
    for stage in annotation_stages(inputs):
        old, new = judge_shard(
            inputs, shard, stage, comparison.before[stage], comparison.after[stage]
        )
        saw = np.isin(rows, old.rows)
        unseen |= then & ~saw
        now = now & np.isin(rows, old.rows[old.keep])
        then = then & (np.isin(rows, new.rows[new.keep]) | ~saw)
        for name in {*old.tallies, *new.tallies}:
            tallies = totals.rules.setdefault(name, RuleTallies())
            for total, verdicts in ((tallies.now, old), (tallies.then, new)):
                tally = verdicts.tallies.get(name, Tally())
                total.failing += tally.failing
                total.only += tally.only
        replayed.append(new)
    for name, rule in changed.items():
        for verdicts in replayed:
            if name in verdicts.failed:
                nearest_rows = nearest(verdicts, rule, samples, then[verdicts.rows])
                totals.nearest += near_places(name, shard, nearest_rows)
    amounts = np.zeros((len(sources), 4), np.int64)
    amounts[:, 0] = 1
    amounts[:, 1] = amounts[:, 3] = pc.binary_length(documents["text"]).to_numpy()
    if tokens is not None:
        from gristmill.tokenize.encoding.encode import docs_name

        encoded = read_table(tokens / docs_name(shard), ["row", "tokens"])
        encoded_rows = encoded["row"].to_numpy()
        amounts[encoded_rows, 2] = encoded["tokens"].to_numpy()
        amounts[encoded_rows, 3] = 0
    for counts, mask in (
        (totals.now, now),
        (totals.then, then & ~unseen),
        (totals.unseen, then & unseen),
    ):
        for source in dict.fromkeys(sources[mask].tolist()):
            amount = amounts[mask & (sources == source)].sum(axis=0)
            counts[source] = counts.get(source, 0) + amount


def print_thresholds(thresholds: Sequence[Threshold], command: str) -> None:
    """Print the documents that every threshold drops, most first, and those that its
    neighbours would drop.
    """
    rows, idle = [], []
    for threshold in sorted(thresholds, key=lambda threshold: -threshold.failing):
        stricter = threshold.stricter
        if not threshold.failing and not (stricter and stricter.failing):
            idle.append(threshold.key)
            continue
        beside = [
            neighbour and f"{neighbour.bound:g}: {neighbour.failing:,}"
            for neighbour in (threshold.looser, stricter)
        ]
        setting = f"{threshold.key}={flow_text(threshold.bound)}"
        rows.append([setting, threshold.failing, threshold.only, *beside])
    columns = {"threshold": "", "fail": ",", "only it": ","}
    more = (
        f"{len(idle)} more drop nothing, even with a bound that is a tenth "
        f"stricter: {join_first(idle, MOST_IDLE)}"
    )
    print_parts(
        table({**columns, "looser": ">", "stricter": ">"}, rows),
        more if idle else None,
        "Counts of the documents that the stage saw; a document may fail several. "
        f"To see what another threshold keeps in the end: `{command}`",
    )
