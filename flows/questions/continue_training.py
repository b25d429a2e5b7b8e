"""Changing the mixture of a training on the way: a manifest whose first steps read what was read, and then something
else.

The new manifest's set begins with the rows that the first N steps read (`mix.continues`), and its training with the
last checkpoint of these (`pretrain.continue_from`): the steps between the two are trained again, on the same rows.
Nothing of the training that is continued is changed, so that it may still run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.text import Text

from gristmill.flows.authoring.manifest_text import set_keys
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.takedown import find_documents, keep_checkpoint, none_there, write_once
from gristmill.flows.questions.training_reads import KeptOrder, Reading, reading_of
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.mixtures.load import full_key, parse_manifest
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.recipes.named_recipes import manifest_file
from gristmill.tokenize.mixing.continue_mixture import digest_of_sums
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.batch_plan import plan_of

SETTLED = ("sequence_length", "packing", "document_starts", "fim", "validation", "seed")
"""Keys of the mixture that decide what rows hold: they cannot change on the way."""
SETTLED_OF_SOURCES = ("where", "epochs")
FOLDER = "continued"
"""Of the store: the checkpoints that trainings continue from, which no training deletes."""


class ContinuedError(ValueError):
    """A training cannot be continued with another mixture from this step on."""


def continue_with(session: Session, step: int, settings: Sequence[str], excluded: Sequence[str]) -> dict[str, Any]:
    """Write a manifest whose training reads what this one's first steps did, and the changed mixture behind them.

    Args:
        session: the opened manifest; its mixture must be packed.
        step: how many steps are as they were.
        settings: `key.path=value`, what is changed.
        excluded: ids, locators and addresses of documents that are read no more.

    Returns:
        `manifest`, `from_step`, `rows` (that are kept), `shares` (of each source in them), `checkpoint` (its step; None
        where training begins at step 0), `excluded` (ids), `list` of these, and `not_found`.

    Raises:
        TraceError: nothing is trained by this manifest, or its mixture is not packed.
        ContinuedError: these steps cannot be kept, or what is changed would change what they read.
        gristmill.flows.questions.takedown.TakedownError: none of the documents is there, or a file of that name has
            other content.
        gristmill.mixtures.load.ManifestError: the new manifest is wrong.
    """
    reading = reading_of(session)
    assert reading.packed is not None
    rows = _rows_of_steps(reading, step)
    file = Path(session.manifest_file)
    target, listed = (file.with_name(f"{file.stem}-from-{step}.{end}") for end in ("yaml", "ids"))
    section = _continues(session, reading.packed, rows, reading.section.key_seed)
    ids, not_found = _documents(session, excluded)
    changes: dict[tuple[str, ...], Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        changes[tuple(full_key(key).split("."))] = yaml.safe_load(value)
    if ids:
        section["exclude"] = listed.name
        tokens = _tokens_without(session, reading, rows, ids)
        changes = {(MIX, "tokens"): tokens, **changes}
    checkpoint = max((one for one in reading.checkpoints() if one <= step), default=None)
    changes[MIX, "continues"] = section
    kept = None if checkpoint is None else keep_checkpoint(session, checkpoint, FOLDER)
    changes[PRETRAIN, "continue_from"] = None if kept is None else str(kept)
    text = set_keys(manifest_file(file).read_text(encoding="utf-8"), changes)
    if ids:
        write_once(listed, "".join(f"{one}\n" for one in ids))
    changed = parse_manifest(text, str(target))
    _check_settled(session.manifest, changed, reading, step)
    write_once(target, text)
    counts = np.bincount(reading.packed.source_of(rows), minlength=len(reading.packed.sources))
    return {
        "manifest": str(target),
        "from_step": step,
        "rows": len(rows),
        "checkpoint": checkpoint,
        "shares": {
            name: count / len(rows)
            for name, count in zip(reading.packed.sources, counts.tolist(), strict=True)
            if count
        },
        "excluded": ids,
        "list": str(listed) if ids else None,
        "not_found": not_found,
    }


def _rows_of_steps(reading: Reading, step: int) -> np.ndarray:
    """The rows (int64) that the first steps read, in that order."""
    assert not isinstance(reading.order, KeptOrder)
    plan = reading.plan
    if not 1 <= step <= reading.section.steps:
        raise ContinuedError(
            f"--from-step {step}: {reading.stage} has {reading.section.steps} steps; give 1 to {reading.section.steps}"
        )
    if any(first < step for first, _ in getattr(plan, "jumps", ())):
        first = min(first for first, _ in plan.jumps)  # type: ignore[union-attr]
        raise ContinuedError(
            f"--from-step {step}: the training rolled back to step {first} before it, and passed over "
            f"rows; give {first} at the most"
        )
    if plan.end(step) > reading.order.total:
        last = next(one for one in range(step, 0, -1) if plan.end(one) <= reading.order.total)
        raise ContinuedError(
            f"--from-step {step}: its training had read all {reading.order.total} rows of the set "
            f"before, and read them again; give {last} at the most, or mix more tokens from the start"
        )
    return reading.order.rows(np.arange(plan.end(step)))


def _continues(session: Session, packed: PackedSet, rows: np.ndarray, seed: int) -> dict[str, Any]:
    assert session.manifest.mix is not None
    before = session.manifest.mix.continues
    earlier = {} if before is None else {"continues": before.model_dump(mode="json", exclude_defaults=True)}
    return {
        "rows": packed.order(seed).places_before(len(rows)),
        "sources": list(packed.sources),
        "phases": [list(phase) for phase in packed.phases],
        "seed": seed,
        "fingerprint": packed.fingerprint,
        "digest": digest_of_sums(packed.sums()[rows]),
        **({"withheld": packed.withheld.tolist()} if len(packed.withheld) else {}),
        **earlier,
    }


def _documents(session: Session, excluded: Sequence[str]) -> tuple[list[str], list[str]]:
    if not excluded:
        return [], []
    found, not_found = find_documents(committed_inputs(session, session.plan), excluded)
    if not found:
        raise none_there(excluded)
    return sorted(one.hex() for one in found), not_found


def _tokens_without(session: Session, reading: Reading, rows: np.ndarray, ids: Sequence[str]) -> int:
    """Tokens of the set, with as many rows more as hold one of these documents and were not read."""
    assert session.manifest.mix is not None
    assert reading.packed is not None
    holding = np.unique(reading.packed.rows_of_documents([bytes.fromhex(one) for one in ids])["row"].to_numpy())
    emptied = int((~np.isin(holding, rows)).sum())
    return session.manifest.mix.tokens + emptied * session.manifest.mix.sequence_length


def _check_settled(before: Manifest, after: Manifest, reading: Reading, step: int) -> None:
    """See that nothing is changed that decides what the first steps read.

    Raises:
        ContinuedError: names what is.
    """
    assert before.mix is not None
    assert reading.packed is not None
    if after.mix is None or after.pretrain is None:
        raise ContinuedError(f"the changed manifest has no `{MIX}:` or no `{PRETRAIN}:`, so there is nothing to train")
    moved = [f"{MIX}.{key}" for key in SETTLED if getattr(before.mix, key) != getattr(after.mix, key)]
    moved += [
        f"sources.{name}.{key}"
        for name, source in before.sources.items()
        if name in after.sources
        for key in SETTLED_OF_SOURCES
        if getattr(source, key) != getattr(after.sources[name], key)
    ]
    if (before.seed, reading.section.key_seed) != (
        after.seed,
        after.pretrain.seed if after.pretrain.seed is not None else after.seed,
    ):
        moved.append(f"seed of {MIX} or {PRETRAIN}")
    plan = plan_of(after.pretrain, reading.packed.sequence_length)
    if any(plan.positions(one) != reading.plan.positions(one) for one in range(step)):  # type: ignore[union-attr]
        moved.append(f"{PRETRAIN}.global_batch_size or its batch_ramp")
    if moved:
        raise ContinuedError(
            f"{', '.join(moved)}: decides what the first {step} steps read, which is settled; leave "
            "it as it was (batch sizes may change behind them: batch_ramp)"
        )


def print_continued(found: Mapping[str, Any], command: str) -> None:
    """Print what is kept, where training begins, and how to run it."""
    console = plain_console()
    shares = ", ".join(f"{name} {share:.1%}" for name, share in found["shares"].items())
    console.print(Text(f"steps 1 to {found['from_step']} read {found['rows']:,} rows, which are kept: {shares}"))
    begins = found["checkpoint"]
    if begins is None:
        console.print(Text("no checkpoint of these steps is left: training begins at step 0, on the same rows"))
    else:
        again = found["from_step"] - begins
        console.print(
            Text(
                f"training continues from the checkpoint of step {begins}"
                + (f": {again} step{'s' * (again != 1)} more on the same rows" if again else "")
            )
        )
    if found["excluded"]:
        console.print(Text(f"{len(found['excluded'])} documents are read no more: {found['list']}"))
    for name in found["not_found"]:
        console.print(Text(f"not found: {name}", style="yellow"))
    console.print(Text(f"wrote {found['manifest']}; run it: {command}"))
