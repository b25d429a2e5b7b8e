"""Change the mixture in the middle of a training: write a manifest that keeps the first
steps and mixes the others with the new weights.

The new packed set begins with the rows that the first N steps read (`mix.continues`),
and the new training with their last checkpoint (`pretrain.continue_from`); steps after
that checkpoint are trained again, on the same rows. The original training is not
modified and may still be running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gristmill.flows.authoring.manifest_text import set_keys
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.takedown import (
    find_documents,
    keep_checkpoint,
    none_there,
    write_once,
)
from gristmill.flows.questions.training_reads import KeptOrder, Reading, reading_of
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.mixtures.loader import full_key, parse_manifest
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.recipes.named_recipes import manifest_file
from gristmill.mixtures.schema.mix import Continues
from gristmill.tokenize.mixing.continue_mixture import digest_of_sums
from gristmill.train.loop.batch_plan import plan_of

SETTLED = ("sequence_length", "packing", "fim", "validation", "seed")
"""Mixture keys that decide the contents of rows; they cannot change mid-training."""
SETTLED_OF_SOURCES = ("where", "epochs")
FOLDER = "continued"
"""Folder of the store for checkpoints that trainings continue from; no training deletes
them.
"""


class ContinuedError(ValueError):
    """A training cannot be continued with another mixture from this step on."""


@dataclass(frozen=True)
class Continuation:
    """A training that keeps the first steps of another.

    Attributes:
        manifest: its file.
        from_step: number of steps kept.
        rows: number of rows that they read.
        checkpoint: step of the checkpoint that it continues from; None if it starts at
            step 0.
        shares: source -> share of the rows.
        excluded: ids of the documents that later steps leave out.
        list: file with these ids.
        not_found: names of documents that do not exist.
    """

    manifest: str
    from_step: int
    rows: int
    checkpoint: int | None
    shares: dict[str, float]
    excluded: Sequence[str]
    list: str | None
    not_found: Sequence[str]

    def show(self, command: str) -> None:
        """Print the rows kept, the first step of the training, and the command that
        runs it.
        """
        console = plain_console()
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.shares.items())
        console.print(
            f"steps 1 to {self.from_step} read {self.rows:,} rows, which are "
            f"kept: {shares}"
        )
        if self.checkpoint is None:
            start = (
                "these steps have no checkpoint left: training starts at step 0, on "
                "the same rows"
            )
        else:
            start = f"training continues from the checkpoint of step {self.checkpoint}"
            repeated = self.from_step - self.checkpoint
            if repeated:
                plural = "s" * (repeated != 1)
                start += f": {repeated} step{plural} more on the same rows"
        console.print(start)
        if self.excluded:
            console.print(
                f"{len(self.excluded)} documents are no longer read: {self.list}"
            )
        for name in self.not_found:
            console.print(f"not found: {name}", style="yellow")
        console.print(f"wrote {self.manifest}; run it: {command}")


def continue_with(
    session: Session, step: int, settings: Sequence[str], excluded: Sequence[str]
) -> Continuation:
    """Write a manifest whose training repeats the first steps of this one and then
    reads the changed mixture.

    Args:
        session: the opened manifest; its mixture must be packed.
        step: number of steps to keep.
        settings: changes as `key.path=value`.
        excluded: ids, locators and URLs of documents to leave out from then on.

    Raises:
        TraceError: this manifest does not train, or its mixture is not packed.
        ContinuedError: these steps cannot be kept, or the changes affect what they
            read.
        gristmill.flows.questions.takedown.TakedownError: none of the documents exists,
            or an output file exists with other content.
        gristmill.mixtures.loader.ManifestError: the new manifest is invalid.
    """
    reading, mix = reading_of(session), session.manifest.mix
    packed = reading.packed
    assert packed is not None
    rows = _rows_of_steps(reading, step)
    file = Path(session.manifest_file)
    target = file.with_name(f"{file.stem}-from-{step}.yaml")
    list_file = file.with_name(f"{file.stem}-from-{step}.ids")
    assert mix is not None
    continues = Continues(
        rows=packed.order(reading.section.key_seed).places_before(len(rows)),
        sources=tuple(packed.sources),
        phases=tuple(map(tuple, packed.phases)),
        seed=reading.section.key_seed,
        fingerprint=packed.fingerprint,
        digest=digest_of_sums(packed.sums()[rows]),
        withheld=tuple(packed.withheld.tolist()),
        continues=mix.continues,
    )
    section = continues.model_dump(mode="json", exclude_defaults=True)
    ids: list[str] = []
    not_found: list[str] = []
    changes: dict[tuple[str, ...], Any] = {}
    if excluded:
        documents, not_found = find_documents(committed_inputs(session), excluded)
        if not documents:
            raise none_there(excluded)
        ids = sorted(id_.hex() for id_ in documents)
        section["exclude"] = list_file.name
        holding = np.unique(packed.rows_of_documents(list(documents))["row"].to_numpy())
        num_emptied = int((~np.isin(holding, rows)).sum())
        changes[MIX, "tokens"] = mix.tokens + num_emptied * mix.sequence_length
    for setting in settings:
        key, _, value = setting.partition("=")
        changes[tuple(full_key(key).split("."))] = yaml.safe_load(value)
    checkpoint = max(
        (saved for saved in reading.checkpoints() if saved <= step), default=None
    )
    changes[MIX, "continues"] = section
    changes[PRETRAIN, "continue_from"] = None
    if checkpoint is not None:
        changes[PRETRAIN, "continue_from"] = str(
            keep_checkpoint(session, checkpoint, FOLDER)
        )
    text = set_keys(manifest_file(file).read_text(encoding="utf-8"), changes)
    if ids:
        write_once(list_file, "\n".join([*ids, ""]))
    changed = parse_manifest(text, str(target))
    _check_settled(session.manifest, changed, reading, step)
    write_once(target, text)
    sources = packed.sources
    counts = np.bincount(packed.source_of(rows), minlength=len(sources)).tolist()
    return Continuation(
        str(target),
        step,
        len(rows),
        checkpoint,
        {
            name: count / len(rows)
            for name, count in zip(sources, counts, strict=True)
            if count
        },
        ids,
        str(list_file) if ids else None,
        not_found,
    )


def _rows_of_steps(reading: Reading, step: int) -> np.ndarray:
    """Return the rows (int64) that the first steps read, in order."""
    assert not isinstance(reading.order, KeptOrder)
    plan = reading.plan
    if not 1 <= step <= reading.section.steps:
        raise ContinuedError(
            f"--from-step {step}: {reading.stage} has {reading.section.steps} steps; "
            f"give 1 to {reading.section.steps}"
        )
    if plan.end(step) > reading.order.total:
        last = next(
            earlier
            for earlier in range(step, 0, -1)
            if plan.end(earlier) <= reading.order.total
        )
        raise ContinuedError(
            f"--from-step {step}: its training had read all {reading.order.total} rows "
            f"of the set before and read them again; give {last} at most, or mix more "
            "tokens from the start"
        )
    return reading.order.rows(np.arange(plan.end(step)))


def _check_settled(
    before: Manifest, after: Manifest, reading: Reading, step: int
) -> None:
    """Raise ContinuedError if a changed key affects what the first steps read."""
    assert before.mix is not None
    assert reading.packed is not None
    if after.mix is None or after.pretrain is None:
        raise ContinuedError(
            f"the changed manifest has no `{MIX}:` or no "
            f"`{PRETRAIN}:`, so there is nothing to train"
        )
    changed_keys = [
        f"{MIX}.{key}"
        for key in SETTLED
        if getattr(before.mix, key) != getattr(after.mix, key)
    ]
    for name, old in before.sources.items():
        if name not in after.sources:
            continue
        new = after.sources[name]
        changed_keys += [
            f"sources.{name}.{key}"
            for key in SETTLED_OF_SOURCES
            if getattr(old, key) != getattr(new, key)
        ]
    seed = after.seed if after.pretrain.seed is None else after.pretrain.seed
    if before.seed != after.seed or reading.section.key_seed != seed:
        changed_keys.append(f"seed of {MIX} or {PRETRAIN}")
    plan = plan_of(after.pretrain, reading.packed.sequence_length)
    if any(
        plan.positions(earlier) != reading.plan.positions(earlier)
        for earlier in range(step)
    ):  # type: ignore[union-attr]
        changed_keys.append(f"{PRETRAIN}.global_batch_size or its batch_ramp")
    if changed_keys:
        raise ContinuedError(
            f"{', '.join(changed_keys)}: decides what the first {step} steps read "
            "and cannot change; leave "
            "it as it was (batch sizes may change after them: batch_ramp)"
        )
