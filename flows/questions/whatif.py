"""`gristmill whatif`: documents that other thresholds would keep, computed from stored
measurements.

Exact for the stages that saw a document. A document that only the new thresholds keep
was never seen by later stages; it is counted as `unseen`, since they might drop it.
Duplicates are not searched again. The best share by a score (`keep_top`) is recomputed
among the documents that earlier stages keep and whose score is known.
"""

from __future__ import annotations

import itertools
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

from gristmill.dataprep.documents import (
    annotation_stages,
    column_names,
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
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.threshold_samples import (
    Found,
    merge_nearest,
    show,
    stored_rules,
)
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.registry import prepare_step
from gristmill.flows.stages.stage import imported
from gristmill.mixtures.load import short_key
from gristmill.mixtures.sources import INGEST
from gristmill.mixtures.user_code import name_code

NEIGHBOUR = 0.1
"""Relative distance of the neighbours of a threshold; at least 1 for integers."""
MOST_IDLE = 60
"""Number of idle thresholds listed; rules by language create hundreds."""
Sizes = dict[str, dict[str, float]]
"""Source -> documents, bytes, tokens."""


@dataclass(frozen=True)
class Comparison:
    """Committed outputs, and every stage's rules before and after."""

    inputs: Mapping[str, Path]
    before: Mapping[str, list[Rule]]
    after: Mapping[str, list[Rule]]

    @property
    def changed(self) -> list[Rule]:
        """Rules whose bounds differ."""
        old = {rule.key: rule.bound for rules in self.before.values() for rule in rules}
        rules = itertools.chain.from_iterable(self.after.values())
        return [
            rule for rule in rules if rule.key not in old or old[rule.key] != rule.bound
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
        NotReplayableError: nothing is committed yet, nothing differs, or a key other
            than a threshold differs.
    """
    differing = _differing_keys(before, after)
    example_keys = sorted(
        key for key in differing if key.split(".")[1:2] == ["prepare"]
    )
    if example_keys:
        section = example_keys[0].partition(".")[0]
        prepared = next(
            name
            for name, node in after.plan.items()
            if node.stage.output == "examples" and node.recipe["kind"] == section
        )
        raise NotReplayableError(
            f"{example_keys[0]} concerns examples, but whatif replays documents only; "
            f"run it: {after.command('run', '--until', prepared)}, then see the "
            "outcome of every example with gristmill report or gristmill explain"
        )
    inputs = _measured_inputs(before)
    old_rules = _replayable(before, inputs, None)
    new_rules = _replayable(after, inputs, old_rules)
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
    """Count the documents that every threshold drops, and that its neighbours would
    drop, of those its stage saw.

    Returns:
        per rule, in stage order: `rule`, `key`, `bound`, `seen` (documents), `failing`,
        `only` (documents that fail no other rule of the stage), `looser` and `stricter`
        (`bound`, `failing`; or None).

    Raises:
        NotReplayableError: nothing is committed yet.
    """
    inputs = _measured_inputs(session)
    counts: dict[str, dict[str, Any]] = {}
    for stage, rules in stored_rules(session, inputs).items():
        for shard in shard_names(inputs[INGEST]):
            verdicts, _ = judge_shard(inputs, shard, stage, rules, rules)
            for rule in rules:
                _count_failures(
                    counts.setdefault(rule.label, _zero_counts(rule)), rule, verdicts
                )
    return list(counts.values())


def _zero_counts(rule: Rule) -> dict[str, Any]:
    """Return the zero counts of a rule, with its neighbours."""
    sides: dict[str, Any] = {"looser": None, "stricter": None}
    if isinstance(rule.bound, int | float) and rule.bound:
        size = NEIGHBOUR * abs(rule.bound)
        step = (
            max(round(size), 1) if isinstance(rule.bound, int) else float(f"{size:.1g}")
        )
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


def _count_failures(entry: dict[str, Any], rule: Rule, verdicts: Verdicts) -> None:
    tally, failed = verdicts.tallies[rule.label], verdicts.failed
    entry["seen"] += len(verdicts.rows)
    entry["failing"] += tally.failing
    entry["only"] += tally.only
    # Documents dropped for a reason other than a threshold stay dropped.
    judged = verdicts.keep | np.any(list(failed.values()), axis=0)
    judged &= ~failed[rule.of_step(rule.unless)] if rule.unless else True
    for side in ("looser", "stricter"):
        if entry[side] is not None:
            values, bound = verdicts.columns[rule.statistic], entry[side]["bound"]
            fails = values > bound if rule.side == "max" else values < bound
            entry[side]["failing"] += int((fails & judged).sum())


def _replayable(
    session: Session, inputs: Mapping[str, Path], ran: Mapping[str, list[Rule]] | None
) -> dict[str, list[Rule]]:
    """Return the replayable rules of every preparing stage; rankings are recomputed
    from earlier stages' rules.

    Args:
        ran: rules that the stages ran with; None means those of this session.
    """
    rules = stored_rules(session, inputs)
    shards = shard_names(inputs[INGEST])
    for stage, step in session.manifest.steps.items() if shards else ():
        ranking_path = prepare_step(step.stage).ranking
        if ranking_path is None:
            continue
        seed = session.plan[stage].config.get("seed", 0)
        columns = column_names(inputs[stage] / shards[0])
        ranking = imported(ranking_path)(
            inputs, stage, step.config, seed, ran or rules, rules, columns
        )
        rules[stage] += [] if ranking is None else [ranking]
    return rules


def _differing_keys(before: Session, after: Session) -> set[str]:
    """Return the differing keys as rules name them: `prepare[0].filter.rules.x` is
    `filter.rules.x`.
    """
    old, new = (
        dict(
            _flatten(
                name_code(session.manifest.model_dump(mode="json", exclude={"engine"}))
            )
        )
        for session in (before, after)
    )
    steps = list(after.manifest.steps)
    keys = set()
    for path in old.keys() | new.keys():
        if old.get(path) == new.get(path):
            continue
        if path[0] == "prepare" and len(path) > 2 and path[1] < len(steps):
            path = (steps[path[1]], *path[3:])
        keys.add(".".join(map(str, path)))
    return keys


def _flatten(
    value: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for index, inner in enumerate(value):
            yield from _flatten(inner, (*path, index))
    else:
        yield path, value


def replay(comparison: Comparison, samples: int, tokens: Path | None) -> dict[str, Any]:
    """Judge every document again.

    Args:
        comparison: rules before and after.
        samples: number of documents shown on each side of every changed threshold;
            passing ones fail no other rule.
        tokens: the committed output of `tokenize`, for exact numbers of tokens; None
            leaves them out.

    Returns:
        `now`, `then` and `unseen`: source -> documents, bytes, tokens; `rules`: per
        rule its tallies before and after; `cuts`: per changed rule its bounds and the
        documents on both sides.
    """
    totals = _Totals()
    changed = {rule.label: rule for rule in comparison.changed}
    for shard in shard_names(comparison.inputs[INGEST]):
        _replay_shard(comparison, shard, changed, samples, tokens, totals)
    # Texts that were not tokenised are estimated by the tokens per byte of their
    # source.
    per_byte = {}
    if tokens is not None:
        for source, size in totals.now.items():
            size.pop("estimated_bytes", None)
            per_byte[source] = size["tokens"] / max(size["bytes"], 1)
    for sizes in (totals.then, totals.unseen):
        for source, size in sizes.items():
            size["tokens"] += size.pop("estimated_bytes", 0.0) * per_byte.get(
                source, 0.0
            )
    shown = show(comparison.inputs, totals.samples)
    old_bounds = {
        rule.key: rule.bound for rules in comparison.before.values() for rule in rules
    }
    cuts = [
        {
            "rule": rule.label,
            "key": rule.key,
            "statistic": rule.statistic,
            "now": old_bounds.get(rule.key),
            "then": rule.bound,
            **shown.get(rule.label, {}),
        }
        for rule in changed.values()
    ]
    return {
        "now": totals.now,
        "then": totals.then,
        "unseen": totals.unseen,
        "rules": {
            name: {side: vars(tally) for side, tally in sides.items()}
            for name, sides in totals.rules.items()
        },
        "cuts": cuts,
        "tokens_known": tokens is not None,
    }


def _replay_shard(
    comparison: Comparison,
    shard: str,
    changed: Mapping[str, Rule],
    samples: int,
    tokens: Path | None,
    totals: _Totals,
) -> None:
    documents = read_documents(comparison.inputs, shard, ["source", "text"])
    sources = np.array(documents["source"].cast(pa.string()).to_pylist(), object)
    sizes = (
        pc.binary_length(documents["text"])
        .to_numpy(zero_copy_only=False)
        .astype(np.int64)
    )
    now = then = np.ones(len(sources), bool)
    unseen = np.zeros(len(sources), bool)
    replayed: list[Verdicts] = []
    for stage in annotation_stages(comparison.inputs):
        old, new = judge_shard(
            comparison.inputs,
            shard,
            stage,
            comparison.before[stage],
            comparison.after[stage],
        )
        saw = np.zeros(len(sources), bool)
        saw[old.rows] = True
        unseen |= then & ~saw
        now, then = _narrow(now, old), _narrow(then, new) | (then & ~saw)
        for name in {*old.tallies, *new.tallies}:
            sides = totals.rules.setdefault(name, {"now": Tally(), "then": Tally()})
            for side, verdicts in (("now", old), ("then", new)):
                tally = verdicts.tallies.get(name, Tally())
                sides[side] = Tally(
                    sides[side].failing + tally.failing, sides[side].only + tally.only
                )
        replayed.append(new)
    for name, rule in changed.items():
        for verdicts in replayed:
            if name in verdicts.failed:
                sides_of_cut = totals.samples.setdefault(
                    name, {"failing": [], "passing": []}
                )
                nearest_rows = nearest(verdicts, rule, samples, then[verdicts.rows])
                merge_nearest(sides_of_cut, shard, nearest_rows, samples)
    lengths = None if tokens is None else _tokens(tokens, shard, len(sources))
    for part, mask in (
        (totals.now, now),
        (totals.then, then & ~unseen),
        (totals.unseen, then & unseen),
    ):
        _add_sizes(part, sources, sizes, lengths, mask)


def _narrow(kept: np.ndarray, verdicts: Verdicts) -> np.ndarray:
    passed = np.zeros(len(kept), bool)
    passed[verdicts.rows[verdicts.keep]] = True
    return kept & passed


def _tokens(tokens: Path, shard: str, rows: int) -> np.ndarray:
    """Return the tokens of a shard's documents, -1 for those that were not
    tokenised.
    """
    from gristmill.tokenize.encoding.encode import docs_name

    table = read_table(tokens / docs_name(shard), ["row", "tokens"])
    lengths = np.full(rows, -1, np.int64)
    lengths[table["row"].to_numpy()] = table["tokens"].to_numpy()
    return lengths


def _add_sizes(
    totals: Sizes,
    sources: np.ndarray,
    sizes: np.ndarray,
    lengths: np.ndarray | None,
    mask: np.ndarray,
) -> None:
    for source in np.unique(sources[mask].astype(str)):
        of_source = mask & (sources == source)
        total = totals.setdefault(
            source, {"documents": 0, "bytes": 0, "tokens": 0, "estimated_bytes": 0}
        )
        total["documents"] += int(of_source.sum())
        total["bytes"] += int(sizes[of_source].sum())
        if lengths is not None:
            tokenised = of_source & (lengths >= 0)
            total["tokens"] += int(lengths[tokenised].sum())
            total["estimated_bytes"] += int(sizes[of_source & ~tokenised].sum())


LEAST_EXCERPT = 12
"""Minimum number of characters of an excerpt worth printing."""


def print_replay(result: Mapping[str, Any]) -> None:
    """Print the comparison."""
    console = plain_console()
    _print_sizes(console, result)
    _print_rules(console, result)
    for cut in result["cuts"]:
        console.print()
        bounds = f"{_bound_text(cut['now'])} -> {_bound_text(cut['then'])}"
        console.print(Text.assemble((cut["key"], "bold"), f"  {bounds}"))
        for side, title, color in (
            ("failing", "would be dropped, nearest to the cut first", "red"),
            ("passing", "would pass, nearest to the cut first", "green"),
        ):
            if cut.get(side):
                console.print(Text(title, style=color))
            for sample in cut.get(side, []):
                _print_sample(console, sample)


def print_thresholds(counts: Sequence[Mapping[str, Any]], command: str) -> None:
    """Print the documents that every threshold drops, most first, and those that its
    neighbours would drop.
    """
    console = plain_console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("threshold", overflow="fold")
    for name in ("fail", "only it", "looser", "stricter"):
        table.add_column(name, justify="right", no_wrap=True)
    idle = []
    for entry in sorted(counts, key=lambda entry: -entry["failing"]):
        if not entry["failing"] and not (entry["stricter"] or {}).get("failing"):
            idle.append(entry["key"])
            continue
        neighbours = [entry["looser"], entry["stricter"]]
        table.add_row(
            f"{entry['key']}={_bound_text(entry['bound'])}",
            f"{entry['failing']:,}",
            f"{entry['only']:,}",
            *(
                "" if side is None else f"{side['bound']:g}: {side['failing']:,}"
                for side in neighbours
            ),
        )
    console.print(table)
    if idle:
        more = f", and {len(idle) - MOST_IDLE} others" if len(idle) > MOST_IDLE else ""
        console.print(
            Text(
                f"{len(idle)} more drop nothing, even with a bound that is a tenth "
                f"stricter: {', '.join(idle[:MOST_IDLE])}{more}",
                style="dim",
            )
        )
    console.print(
        Text(
            "Counts of the documents that the stage saw; a document may fail several. "
            f"To see what another threshold keeps in the end: {command}",
            style="dim",
        ),
        soft_wrap=True,
    )


def _print_sample(console: Console, sample: Mapping[str, Any]) -> None:
    """Print the measured value, the whole locator, which `explain` takes, and as much
    text as fits the line.
    """
    line = Text.assemble(
        (f"{sample['value']:>9.4g}  ", "bold"),
        (f"{sample['source']} {sample['locator']}", "dim"),
    )
    room = console.width - len(line) - 2
    if room >= LEAST_EXCERPT:
        excerpt = Text(f"  {sample['excerpt']}")
        excerpt.truncate(room + 2, overflow="ellipsis")
        line.append_text(excerpt)
    console.print(line, soft_wrap=True)


def _print_sizes(console: Console, result: Mapping[str, Any]) -> None:
    before, after = result["now"], result["then"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("kept", no_wrap=True)
    for name in ("now", "then", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    units = ["documents", "bytes"]
    if result["tokens_known"]:
        units.append("tokens")
    for unit in units:
        now = sum(size[unit] for size in before.values())
        then = sum(size[unit] for size in after.values())
        change = f"{then - now:+,.0f} ({(then - now) / max(now, 1):+.2%})"
        table.add_row(unit, f"{now:,.0f}", f"{then:,.0f}", change)
    if len(before) > 1:
        for source in sorted({*before, *after}):
            now = before[source]["documents"] if source in before else 0
            then = after[source]["documents"] if source in after else 0
            table.add_row(f"  {source}", f"{now:,}", f"{then:,}", f"{then - now:+,}")
    console.print(table)
    unseen = sum(size["documents"] for size in result["unseen"].values())
    if unseen:
        console.print(
            Text(
                f"and {unseen:,} documents that later stages have not seen: they may "
                "drop some of them",
                style="yellow",
            )
        )


def _print_rules(console: Console, result: Mapping[str, Any]) -> None:
    """Print the rules of changed stages: number of documents that fail each, and that
    fail no other.
    """
    changed_stages = {cut["rule"].partition("/")[0] for cut in result["cuts"]}
    rows = []
    for name, sides in result["rules"].items():
        now, then = sides["now"], sides["then"]
        if now != then or (
            name.partition("/")[0] in changed_stages and then["failing"]
        ):
            counts = (now["failing"], then["failing"], now["only"], then["only"])
            rows.append((-then["failing"], name, counts))
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rule", overflow="fold")
    for name in ("fail", "then", "only it", "then"):
        table.add_column(name, justify="right", no_wrap=True)
    for _, name, counts in sorted(rows):
        table.add_row(short_name(name), *(f"{count:,}" for count in counts))
    console.print()
    console.print(table)


def _bound_text(bound: Any) -> str:
    if bound is None:
        return "none"
    if isinstance(bound, Mapping):
        return ", ".join(f"{name} {value:g}" for name, value in bound.items())
    if isinstance(bound, list | tuple):
        return ", ".join(bound)
    return f"{bound:g}"
