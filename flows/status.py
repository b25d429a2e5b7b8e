"""What is done, what is not, and why: tables that are read from the store alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.dataprep.files import read_json, sha256_file
from gristmill.flows.lease import running_owner
from gristmill.flows.session import Session
from gristmill.flows.store import StageFolder, Store

STYLES = {"committed": "green", "unfinished": "yellow", "running": "cyan", "missing": "dim", "corrupt": "red"}
ACTIONS = {"committed": "reuse", "unfinished": "go on", "running": "wait for", "missing": "make", "corrupt": "mend"}


def stage_states(session: Session) -> list[dict[str, Any]]:
    """One row per stage: state (committed, unfinished, running, missing, corrupt), fingerprint, folder, details."""
    rows = []
    for stage, node in session.plan.items():
        folder = session.folder(stage)
        state: str = folder.state()
        owner = running_owner(folder.path / "lease") if state == "unfinished" else None
        row: dict[str, Any] = {"stage": stage, "state": "running" if owner else state,
                               "fingerprint": node.fingerprint[:16], "folder": str(folder.path)}
        if state == "committed":
            manifest = folder.manifest()
            row["seconds"] = manifest["seconds"]
            row["bytes"] = sum(entry["bytes"] for entry in manifest["files"].values())
        elif owner:
            row["owner"] = f"process {owner['pid']} on {owner['host']}"
        elif state == "unfinished":
            row["details"] = _unfinished(folder)
        elif state == "corrupt":
            row["details"] = next(folder.damage(), "")
        rows.append(row)
    return rows


def _unfinished(folder: StageFolder) -> str:
    error = folder.work / "error.json"
    if error.exists():
        return f"failed: {read_json(error)['message'].splitlines()[0]}"
    files = sum(1 for file in folder.data.rglob("*") if file.is_file()) if folder.data.exists() else 0
    return f"interrupted with {files} files written"


def print_status(session: Session, rows: list[dict[str, Any]]) -> None:
    """Print the stages' states as a table that fits the terminal."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "state", "fingerprint"):
        table.add_column(column, no_wrap=True)
    table.add_column("seconds", justify="right", min_width=7)
    table.add_column("MB", justify="right", min_width=6)
    if any("details" in row or "owner" in row for row in rows):
        table.add_column("", overflow="fold")
    for row in rows:
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        size = f"{row['bytes'] / 1e6:.1f}" if "bytes" in row else ""
        cells = [row["stage"], Text(row["state"], style=STYLES[row["state"]]), row["fingerprint"][:8], seconds, size,
                 row.get("details") or row.get("owner", "")]
        table.add_row(*cells[: len(table.columns)])
    console.print(table)
    console.print(Text(f"store: {session.store.root}", style="dim"), soft_wrap=True)


def explain_plan(session: Session) -> list[dict[str, Any]]:
    """One row per stage: what a run would do with it, and which keys differ from the nearest output in the store."""
    rows = []
    for row in stage_states(session):
        action = ACTIONS[row["state"]]
        reason = ""
        if row["state"] == "missing":
            reason = _why_missing(session.store, session, row["stage"])
        elif row["state"] in ("unfinished", "corrupt", "running"):
            reason = row.get("details") or row.get("owner", "")
        rows.append({**row, "action": action, "reason": reason})
    return rows


def _why_missing(store: Store, session: Session, stage: str) -> str:
    """Compare with the newest committed output of the same stage: which recipe keys or inputs are others."""
    node = session.plan[stage]
    previous = [folder for name, folder in store.outputs() if name == stage and folder.state() == "committed"]
    if not previous:
        return "never made"
    nearest = max((folder.manifest() for folder in previous), key=lambda manifest: manifest["started"])
    changes = list(_differences(nearest["recipe"], json.loads(json.dumps(node.recipe))))
    if nearest["version"] != node.stage.version:
        changes.append(f"stage version {nearest['version']} -> {node.stage.version}")
    others = [name for name, value in node.inputs.items() if nearest["input_fingerprints"].get(name) != value]
    if changes:
        return "changed: " + "; ".join(changes[:4]) + (" ..." if len(changes) > 4 else "")
    return f"{others[0]} before it changes" if others else "what comes before it changes"


def _differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            here = f"{at}.{key}" if at else str(key)
            if key not in old or key not in new:
                yield f"{here} {'added' if key in new else 'removed'}"
            else:
                yield from _differences(old[key], new[key], here)
    elif old != new:
        short = [json.dumps(value) for value in (old, new)]
        yield f"{at} {short[0]} -> {short[1]}" if max(map(len, short)) < 60 else f"{at}"


def print_plan(rows: list[dict[str, Any]]) -> None:
    """Print what a run would do."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "action", "fingerprint"):
        table.add_column(column, no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in rows:
        action = Text(row["action"], style=STYLES[row["state"]])
        table.add_row(row["stage"], action, row["fingerprint"][:8], row["reason"])
    Console(highlight=False).print(table)


def print_runs(records: list[dict[str, Any]]) -> None:
    """Print the runs of a store, newest last."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", no_wrap=True, min_width=24)
    table.add_column("state", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("made / reused", justify="right")
    for record in records:
        made = [stage for stage in record["stages"].values() if stage.get("how") in ("Completed", "Resumed")]
        reused = [stage for stage in record["stages"].values() if stage.get("how") == "Cached"]
        seconds = record.get("finished", time.time()) - record["started"]
        table.add_row(record["run"], record["state"], f"{seconds:.0f}", f"{len(made)} / {len(reused)}")
    Console(highlight=False).print(table)


def find_damage(session: Session) -> dict[str, list[str]]:
    """Stage -> a sentence per committed file that is absent or has another checksum."""
    found = {}
    for stage in session.plan:
        folder = session.folder(stage)
        if folder.state() in ("committed", "corrupt"):
            sentences = list(folder.damage(deep=True))
            if sentences:
                found[stage] = sentences
    return found


def repair_damage(session: Session, damage: Mapping[str, list[str]]) -> None:
    """Withdraw damaged commits and remove the damaged files, so that the next run makes them again."""
    for stage in damage:
        folder = session.folder(stage)
        try:
            files = folder.manifest()["files"]
        except (OSError, ValueError, RuntimeError):
            files = {}
        for name, entry in files.items():
            file = folder.data / name
            if file.exists() and sha256_file(file) != entry["sha256"]:
                file.unlink()
        number = len(list(folder.path.glob("_CORRUPT.*")))
        (folder.path / "_SUCCESS").rename(folder.path / f"_CORRUPT.{number}")
