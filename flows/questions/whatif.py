"""`gristmill whatif`: what other thresholds would keep, from the stored measurements alone.

Exact for the stages that saw a document. A document that only the new thresholds let through was never seen by the
stages behind: it is counted as `unseen`, since they might drop it. Duplicates are not searched again. The best share
by a score (`keep_top`) is found again among the documents that the stages before it leave and whose score is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.dataprep.documents import annotation_stages, column_names, read_documents, read_table, shard_names
from gristmill.dataprep.whatif_thresholds import (
    NotReplayableError,
    Rule,
    Tally,
    Verdicts,
    judge_shard,
    nearest,
    short_name,
)
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.threshold_samples import Found, merge_nearest, show, stored_rules
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.stage import imported
from gristmill.mixtures.load import short_key
from gristmill.mixtures.sources import INGEST
from gristmill.mixtures.user_code import name_code

NEIGHBOUR = 0.1
"""How far the neighbours of a threshold lie from it, as a share of it; one of a whole number at least."""
MOST_IDLE = 60
"""Thresholds that drop nothing, of which so many are named: rules by language make them by the hundred."""
Sizes = dict[str, dict[str, float]]
"""Source -> documents, bytes, tokens."""


@dataclass(frozen=True)
class Comparison:
    """What is compared: the committed outputs, and every stage's rules before and after."""

    inputs: Mapping[str, Path]
    before: Mapping[str, list[Rule]]
    after: Mapping[str, list[Rule]]

    @property
    def changed(self) -> list[Rule]:
        """The rules whose bounds differ."""
        old = {rule.key: rule.bound for rules in self.before.values() for rule in rules}
        return [
            rule
            for rules in self.after.values()
            for rule in rules
            if rule.key not in old or old[rule.key] != rule.bound
        ]


@dataclass
class _Totals:
    now: Sizes = field(default_factory=dict)
    then: Sizes = field(default_factory=dict)
    unseen: Sizes = field(default_factory=dict)
    rules: dict[str, dict[str, Tally]] = field(default_factory=dict)
    samples: dict[str, dict[str, list[Found]]] = field(default_factory=dict)


def compare(before: Session, after: Session) -> Comparison:
    """Pair up the rules of two openings of a manifest.

    Raises:
        NotReplayableError: nothing is committed yet, nothing differs, or something differs that is not a threshold.
    """
    differing = _differing_keys(before, after)
    if examples := sorted(key for key in differing if key.split(".")[1:2] == ["prepare"]):
        prepared = next(
            name
            for name, node in after.plan.items()
            if node.stage.of_examples and node.recipe["kind"] == examples[0].partition(".")[0]
        )
        raise NotReplayableError(
            f"{examples[0]} is about examples, of which there are few: whatif looks at documents alone; run it: "
            f"{after.command('run', '--until', prepared)}, and gristmill report or "
            "gristmill explain with an example's place says what became of which"
        )
    inputs = _measured(before)
    old_rules = _replayable(before, inputs, None)
    new_rules = _replayable(after, inputs, old_rules)
    others = sorted(differing - _keys(old_rules) - _keys(new_rules))
    if others:
        raise NotReplayableError(
            f"{others[0]} changes what is measured, or what comes after preparation: stored values cannot answer for "
            f"it; run it: {after.command('run')}"
        )
    comparison = Comparison(inputs, old_rules, new_rules)
    if not comparison.changed:
        raise NotReplayableError("nothing differs; name a threshold, e.g. --set filter.gopher_quality.min_words=40")
    return comparison


def _measured(session: Session) -> dict[str, Path]:
    """The committed outputs of ingest and of every preparing stage.

    Raises:
        NotReplayableError: one of them is missing.
    """
    inputs = committed_inputs(session, session.plan)
    stages = [INGEST, *session.manifest.steps]
    missing = [name for name in stages if name not in inputs]
    if missing:
        raise NotReplayableError(
            f"{missing[0]} is not committed, so nothing is measured yet; run: "
            f"{session.command('run', '--until', stages[-1])}"
        )
    return {name: inputs[name] for name in stages}


def thresholds(session: Session) -> list[dict[str, Any]]:
    """What every threshold drops of the documents that its stage saw, and what its neighbours would.

    Returns:
        per rule, in the order of the stages: `rule`, `key`, `bound`, `seen` (documents), `failing`, `only` (those
        that fail no other rule of the stage), `looser` and `stricter` (`bound`, `failing`; None without any).

    Raises:
        NotReplayableError: nothing is committed yet.
    """
    inputs = _measured(session)
    found: dict[str, dict[str, Any]] = {}
    for stage, rules in stored_rules(session, inputs).items():
        for shard in shard_names(inputs[INGEST]):
            verdicts, _ = judge_shard(inputs, shard, stage, rules, rules)
            for rule in rules:
                _add(found.setdefault(rule.label, _threshold(rule)), rule, verdicts)
    return list(found.values())


def _threshold(rule: Rule) -> dict[str, Any]:
    """A rule that no document has been held against, with its neighbours."""
    sides: dict[str, Any] = {"looser": None, "stricter": None}
    if isinstance(rule.bound, int | float) and rule.bound:
        size = NEIGHBOUR * abs(rule.bound)
        step = max(round(size), 1) if isinstance(rule.bound, int) else float(f"{size:.1g}")
        sign = 1 if rule.side == "max" else -1
        sides = {
            name: {"bound": round(rule.bound + direction * step, 10), "failing": 0}
            for name, direction in (("looser", sign), ("stricter", -sign))
        }
    return {
        "rule": rule.label,
        "key": short_key(rule.key),
        "bound": rule.bound,
        "seen": 0,
        "failing": 0,
        "only": 0,
        **sides,
    }


def _add(one: dict[str, Any], rule: Rule, verdicts: Verdicts) -> None:
    tally, failed = verdicts.tallies[rule.label], verdicts.failed
    one["seen"] += len(verdicts.rows)
    one["failing"] += tally.failing
    one["only"] += tally.only
    # What is dropped for a reason that is not a threshold stays so.
    judged = verdicts.keep | np.any(list(failed.values()), axis=0)
    judged &= ~failed[rule.of_step(rule.unless)] if rule.unless else True
    for side in ("looser", "stricter"):
        if one[side] is not None:
            values, bound = verdicts.columns[rule.statistic], one[side]["bound"]
            fails = values > bound if rule.side == "max" else values < bound
            one[side]["failing"] += int((fails & judged).sum())


def _replayable(
    session: Session, inputs: Mapping[str, Path], ran: Mapping[str, list[Rule]] | None
) -> dict[str, list[Rule]]:
    """The replayable rules of every preparing stage; a ranking is found from what the stages before it leave.

    Args:
        ran: the rules that the stages ran with; None: the very ones of this session.
    """
    rules = stored_rules(session, inputs)
    shards = shard_names(inputs[INGEST])
    for stage, step in session.manifest.steps.items() if shards else ():
        if (find := session.plan[stage].stage.ranking) is None:
            continue
        seed = session.plan[stage].config.get("seed", 0)
        columns = column_names(inputs[stage] / shards[0])
        ranking = imported(find)(inputs, stage, step.config, seed, ran or rules, rules, columns)
        rules[stage] += [] if ranking is None else [ranking]
    return rules


def _keys(rules: Mapping[str, list[Rule]]) -> set[str]:
    return {rule.key for group in rules.values() for rule in group}


def _differing_keys(before: Session, after: Session) -> set[str]:
    old, new = (
        dict(_flat(name_code(session.manifest.model_dump(mode="json", exclude={"engine"}))))
        for session in (before, after)
    )
    names = list(after.manifest.steps)
    return {_key(place, names) for place in old.keys() | new.keys() if old.get(place) != new.get(place)}


def _flat(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, (*at, key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for index, inner in enumerate(value):
            yield from _flat(inner, (*at, index))
    else:
        yield at, value


def _key(place: tuple[Any, ...], steps: Sequence[str]) -> str:
    """A place in the manifest as rules name it: `prepare[0].filter.rules.x` is `filter.rules.x`."""
    if place[0] == "prepare" and len(place) > 2 and place[1] < len(steps):
        place = (steps[place[1]], *place[3:])
    return ".".join(map(str, place))


def replay(comparison: Comparison, samples: int, tokens: Path | None) -> dict[str, Any]:
    """Judge every document again.

    Args:
        comparison: what to compare.
        samples: documents shown on each side of every changed cut; only documents that no other rule drops are
            shown as passing.
        tokens: the committed output of `tokenize`, for exact numbers of tokens; else none are given.

    Returns:
        `now`, `then` and `unseen`: source -> documents, bytes, tokens; `rules`: per rule its tallies before and
        after; `cuts`: per changed rule its bounds and the documents on both sides.
    """
    totals = _Totals()
    changed = {rule.label: rule for rule in comparison.changed}
    for shard in shard_names(comparison.inputs[INGEST]):
        _replay_shard(comparison, shard, changed, samples, tokens, totals)
    per_byte = _tokens_per_byte(totals.now) if tokens is not None else {}
    for sizes in (totals.then, totals.unseen):
        for source, size in sizes.items():
            size["tokens"] += size.pop("estimated_bytes", 0.0) * per_byte.get(source, 0.0)
    shown = show(comparison.inputs, totals.samples)
    return {
        "now": totals.now,
        "then": totals.then,
        "unseen": totals.unseen,
        "rules": {name: {side: vars(tally) for side, tally in sides.items()} for name, sides in totals.rules.items()},
        "cuts": [_describe_cut(comparison, rule, shown.get(rule.label, {})) for rule in changed.values()],
        "tokens_known": tokens is not None,
    }


def _replay_shard(
    comparison: Comparison, shard: str, changed: Mapping[str, Rule], samples: int, tokens: Path | None, totals: _Totals
) -> None:
    documents = read_documents(comparison.inputs, shard, ["source", "text"])
    sources = np.array(documents["source"].cast(pa.string()).to_pylist(), object)
    sizes = pc.binary_length(documents["text"]).to_numpy(zero_copy_only=False).astype(np.int64)
    now = then = np.ones(len(sources), bool)
    unseen = np.zeros(len(sources), bool)
    replayed: list[Verdicts] = []
    for stage in annotation_stages(comparison.inputs):
        old, new = judge_shard(comparison.inputs, shard, stage, comparison.before[stage], comparison.after[stage])
        saw = np.zeros(len(sources), bool)
        saw[old.rows] = True
        unseen |= then & ~saw
        now, then = _narrow(now, old), _narrow(then, new) | (then & ~saw)
        for name in {*old.tallies, *new.tallies}:
            sides = totals.rules.setdefault(name, {"now": Tally(), "then": Tally()})
            for side, verdicts in (("now", old), ("then", new)):
                tally = verdicts.tallies.get(name, Tally())
                sides[side] = Tally(sides[side].failing + tally.failing, sides[side].only + tally.only)
        replayed.append(new)
    for name, rule in changed.items():
        for verdicts in replayed:
            if name in verdicts.failed:
                sides_of_cut = totals.samples.setdefault(name, {"failing": [], "passing": []})
                nearest_rows = nearest(verdicts, rule, samples, then[verdicts.rows])
                merge_nearest(sides_of_cut, shard, nearest_rows, samples)
    lengths = None if tokens is None else _tokens(tokens, shard, len(sources))
    for part, mask in ((totals.now, now), (totals.then, then & ~unseen), (totals.unseen, then & unseen)):
        _add_sizes(part, sources, sizes, lengths, mask)


def _narrow(kept: np.ndarray, verdicts: Verdicts) -> np.ndarray:
    passed = np.zeros(len(kept), bool)
    passed[verdicts.rows[verdicts.keep]] = True
    return kept & passed


def _tokens(tokens: Path, shard: str, rows: int) -> np.ndarray:
    """Tokens of a shard's documents, -1 for those that were not tokenised."""
    from gristmill.tokenize.encoding.encode import docs_name

    table = read_table(tokens / docs_name(shard), ["row", "tokens"])
    lengths = np.full(rows, -1, np.int64)
    lengths[table["row"].to_numpy()] = table["tokens"].to_numpy()
    return lengths


def _add_sizes(
    part: Sizes, sources: np.ndarray, sizes: np.ndarray, lengths: np.ndarray | None, mask: np.ndarray
) -> None:
    for source in np.unique(sources[mask].astype(str)):
        here = mask & (sources == source)
        total = part.setdefault(source, {"documents": 0, "bytes": 0, "tokens": 0, "estimated_bytes": 0})
        total["documents"] += int(here.sum())
        total["bytes"] += int(sizes[here].sum())
        if lengths is not None:
            known = here & (lengths >= 0)
            total["tokens"] += int(lengths[known].sum())
            total["estimated_bytes"] += int(sizes[here & ~known].sum())


def _tokens_per_byte(now: Sizes) -> dict[str, float]:
    for size in now.values():
        size.pop("estimated_bytes", None)
    return {source: size["tokens"] / max(size["bytes"], 1) for source, size in now.items()}


def _describe_cut(comparison: Comparison, rule: Rule, shown: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    old = {other.key: other.bound for rules in comparison.before.values() for other in rules}
    return {
        "rule": rule.label,
        "key": rule.key,
        "statistic": rule.statistic,
        "now": old.get(rule.key),
        "then": rule.bound,
        **shown,
    }


LEAST_EXCERPT = 12
"""Characters; a shorter piece of a document's text says nothing."""


def print_replay(found: Mapping[str, Any]) -> None:
    """Print the comparison for people."""
    console = plain_console()
    _print_sizes(console, found)
    _print_rules(console, found)
    for cut in found["cuts"]:
        console.print()
        console.print(Text.assemble((cut["key"], "bold"), f"  {_shown(cut['now'])} -> {_shown(cut['then'])}"))
        for side, title in (
            ("failing", "would be dropped, nearest to the cut first"),
            ("passing", "would pass, nearest to the cut first"),
        ):
            if cut.get(side):
                console.print(Text(title, style="red" if side == "failing" else "green"))
            for sample in cut.get(side, []):
                _print_sample(console, sample)


def print_thresholds(found: Sequence[Mapping[str, Any]], command: str) -> None:
    """Print what every threshold drops, those that drop most first, and what its neighbours would drop."""
    console = plain_console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("threshold", overflow="fold")
    for name in ("fail", "only it", "looser", "stricter"):
        table.add_column(name, justify="right", no_wrap=True)
    touching = [one for one in found if one["failing"] or (one["stricter"] or {}).get("failing")]
    for one in sorted(touching, key=lambda one: -one["failing"]):
        sides = (
            "" if one[side] is None else f"{one[side]['bound']:g}: {one[side]['failing']:,}"
            for side in ("looser", "stricter")
        )
        table.add_row(f"{one['key']}={_shown(one['bound'])}", f"{one['failing']:,}", f"{one['only']:,}", *sides)
    console.print(table)
    idle = [one["key"] for one in found if one not in touching]
    if idle:
        others = f", and {len(idle) - MOST_IDLE} others" if len(idle) > MOST_IDLE else ""
        console.print(
            Text(
                f"{len(idle)} more drop nothing, nor would they with a bound that is a tenth stricter: "
                f"{', '.join(idle[:MOST_IDLE])}{others}",
                style="dim",
            )
        )
    console.print(
        Text(
            "Documents of those that the stage saw; a document may fail several. What another threshold "
            f"keeps in the end: {command}",
            style="dim",
        ),
        soft_wrap=True,
    )


def _print_sample(console: Console, sample: Mapping[str, Any]) -> None:
    """What was measured, the locator whole, since `explain` takes it, and as much text as the line has room for."""
    line = Text.assemble((f"{sample['value']:>9.4g}  ", "bold"), (f"{sample['source']} {sample['locator']}", "dim"))
    room = console.width - len(line) - 2
    if room >= LEAST_EXCERPT:
        excerpt = Text(f"  {sample['excerpt']}")
        excerpt.truncate(room + 2, overflow="ellipsis")
        line.append_text(excerpt)
    console.print(line, soft_wrap=True)


def _print_sizes(console: Console, found: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("kept", no_wrap=True)
    for name in ("now", "then", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    units = ["documents", "bytes", *(["tokens"] if found["tokens_known"] else [])]
    for unit in units:
        now, then = (sum(size[unit] for size in found[side].values()) for side in ("now", "then"))
        change = f"{then - now:+,.0f} ({(then - now) / max(now, 1):+.2%})"
        table.add_row(unit, f"{now:,.0f}", f"{then:,.0f}", change)
    for source in sorted({*found["now"], *found["then"]}) if len(found["now"]) > 1 else ():
        now, then = (found[side].get(source, {"documents": 0})["documents"] for side in ("now", "then"))
        table.add_row(f"  {source}", f"{now:,}", f"{then:,}", f"{then - now:+,}")
    console.print(table)
    unseen = sum(size["documents"] for size in found["unseen"].values())
    if unseen:
        console.print(
            Text(
                f"and {unseen:,} documents that the stages behind have not seen: they may drop some of them",
                style="yellow",
            )
        )


def _print_rules(console: Console, found: Mapping[str, Any]) -> None:
    """The rules of the stages in which something changed: how many documents fail each, and how many no other."""
    rules = found["rules"]
    touched = {cut["rule"].partition("/")[0] for cut in found["cuts"]}
    shown = [
        name
        for name, sides in rules.items()
        if sides["now"] != sides["then"] or (name.partition("/")[0] in touched and sides["then"]["failing"])
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rule", overflow="fold")
    for name in ("fail", "then", "only it", "then"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in sorted(shown, key=lambda name: (-rules[name]["then"]["failing"], name)):
        counts = (rules[name][side][what] for what in ("failing", "only") for side in ("now", "then"))
        table.add_row(short_name(name), *(f"{count:,}" for count in counts))
    if shown:
        console.print()
        console.print(table)


def _shown(bound: Any) -> str:
    if isinstance(bound, Mapping):
        return ", ".join(f"{name} {value:g}" for name, value in bound.items())
    return "none" if bound is None else ", ".join(bound) if isinstance(bound, list | tuple) else f"{bound:g}"
