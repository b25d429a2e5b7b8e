"""What other thresholds would keep, as people read it: no wider than a terminal of 60 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.flows.terminal import plain_console

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
        for side, title in (("failing", "would be dropped, nearest to the cut first"),
                            ("passing", "would pass, nearest to the cut first")):
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
        sides = ("" if one[side] is None else f"{one[side]['bound']:g}: {one[side]['failing']:,}"
                 for side in ("looser", "stricter"))
        table.add_row(f"{one['key']}={_shown(one['bound'])}", f"{one['failing']:,}", f"{one['only']:,}", *sides)
    console.print(table)
    idle = [one["key"] for one in found if one not in touching]
    if idle:
        console.print(Text(f"{len(idle)} more drop nothing, nor would they with a bound that is a tenth stricter: "
                           f"{', '.join(idle)}", style="dim"))
    console.print(Text("Documents of those that the stage saw; a document may fail several. What another threshold "
                       f"keeps in the end: {command}", style="dim"), soft_wrap=True)


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
        console.print(Text(f"and {unseen:,} documents that the stages behind have not seen: they may drop some of them",
                           style="yellow"))


def _print_rules(console: Console, found: Mapping[str, Any]) -> None:
    """The rules of the stages in which something changed: how many documents fail each, and how many no other."""
    rules = found["rules"]
    touched = {cut["rule"].partition("/")[0] for cut in found["cuts"]}
    shown = [name for name, sides in rules.items() if sides["now"] != sides["then"]
             or (name.partition("/")[0] in touched and sides["then"]["failing"])]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rule", overflow="fold")
    for name in ("fail", "then", "only it", "then"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in sorted(shown, key=lambda name: (-rules[name]["then"]["failing"], name)):
        counts = (rules[name][side][what] for what in ("failing", "only") for side in ("now", "then"))
        table.add_row(name.rpartition("/")[2], *(f"{count:,}" for count in counts))
    if shown:
        console.print()
        console.print(table)


def _shown(bound: Any) -> str:
    if isinstance(bound, Mapping):
        return ", ".join(f"{name} {value:g}" for name, value in bound.items())
    return "none" if bound is None else ", ".join(bound) if isinstance(bound, list | tuple) else f"{bound:g}"
