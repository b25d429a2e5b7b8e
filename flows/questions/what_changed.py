"""Reasons for running a stage: differences between its recipe and the nearest output in
the store.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from gristmill.core.files import as_path, find_json, read_json
from gristmill.core.secrets import mask_secrets
from gristmill.core.stage_context import input_fingerprints
from gristmill.core.store import OutputManifest
from gristmill.flows.pages.page_elements import Note, Span, table
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.planning.derived_settings import (
    DerivedSettings,
    derived_keys,
    in_a_sentence,
)
from gristmill.flows.questions.status import STATE_MARKS, StageState, stage_states
from gristmill.flows.running.session import Session
from gristmill.flows.stages.plan import Node
from gristmill.flows.stages.registry import PRETRAIN
from gristmill.mixtures.manifest import Manifest, context_warnings
from gristmill.mixtures.schema.prepare import name_steps, written_steps
from gristmill.mixtures.schema.pretrain import HOW_KEYS
from gristmill.mixtures.user_code import code_in, is_code, name_code
from gristmill.mixtures.yaml_text import join_first

CONTINUABLE = (
    "steps",
    "schedule.",
    "optimizer.learning_rate",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "optimizer.clip_norm",
    "optimizer.cautious_decay",
    "spikes.sigma",
    "z_loss",
    "early_stopping",
    "callbacks",
    "tasks",
    "beta",
    "continue_from",
    *HOW_KEYS,
)
"""Training keys that may change mid-training: rows read and checkpoint contents do not
depend on them.
"""
MOST_CHANGES = 4
LONGEST_VALUE = 60


ACTIONS = {
    "committed": "reuse",
    "unfinished": "resume",
    "running": "wait for",
    "missing": "make",
    "corrupt": "repair",
}


@dataclass(frozen=True)
class UsableCheckpoint:
    """A checkpoint of another training that a training could continue from: its step
    and folder.
    """

    step: int
    checkpoint: str


@dataclass(frozen=True, kw_only=True)
class PlannedStage(StageState):
    """Planned action for a stage.

    Attributes:
        action: `reuse`, `make`, `resume`, `wait for` or `repair`.
        reason: reason of the action; empty if the output is reused unchanged.
        cut_off_after: the earlier stage after which this one is not run, if that stage
            reproduces the bytes of its nearest output.
        continue_from: a checkpoint that the training could continue from.
        warning: warning before the run; empty if there is none.
        code: functions of the user's that the stage runs.
        derived: settings of a pre-training derived from its size or depth.
    """

    action: str
    reason: str
    cut_off_after: str | None = None
    continue_from: UsableCheckpoint | None = None
    warning: str = ""
    code: list[str] = field(default_factory=list)
    derived: DerivedSettings | None = None


def explain_plan(
    session: Session, force: frozenset[str] = frozenset()
) -> list[PlannedStage]:
    """Return the action of a run for each stage, and its reason; nothing is written.

    Args:
        session: the opened manifest.
        force: stages to rebuild even if they are committed.
    """
    warnings = context_warnings(session.manifest, trained_context(session.manifest))
    # Stage -> position of the last one up to it that is made for a reason of its own.
    last_made: dict[str, int] = {}
    planned = []
    for position, row in enumerate(stage_states(session)):
        stage, action, node = row.stage, ACTIONS[row.state], session.plan[row.stage]
        last_made[stage] = max((last_made[name] for name in node.inputs), default=-1)
        reason = row.details or row.owner or ""
        cut_off_after = continue_from = None
        if row.state == "missing":
            changes = nearest_differences(session, node)
            reason = why_missing(changes)
            # Earlier stages may reproduce their bytes, and then this one is not run.
            sentences = (
                itertools.chain(*changes.values()) if changes else ["never made"]
            )
            if last_made[stage] >= 0 and set(sentences) <= node.inputs.keys():
                cut_off_after = list(session.plan)[last_made[stage]]
                reason += f"; reused if {cut_off_after} gives the same bytes"
            continue_from = continuable(session, stage)
        elif row.state == "committed" and stage in force:
            action, reason = "make", "forced"
        elif row.state == "committed":
            reason = made_otherwise(session, stage)
        if action != "reuse" and cut_off_after is None:
            last_made[stage] = position
        functions = code_in(node.config)
        planned.append(
            PlannedStage(
                **vars(row),
                action=action,
                reason=reason,
                cut_off_after=cut_off_after,
                continue_from=continue_from,
                warning="" if action == "reuse" else warnings.get(stage, ""),
                code=list(dict.fromkeys(function.describe() for function in functions)),
                derived=derived_keys(session.manifest) if stage == PRETRAIN else None,
            )
        )
    return planned


def print_plan(planned: Sequence[PlannedStage]) -> None:
    """Print the action for every stage, and the number of stages that would run."""
    marks = {action: STATE_MARKS[state] for state, action in ACTIONS.items()}
    rows = [
        (
            row.stage,
            Span(row.action, marks[row.action]),
            row.fingerprint[:8],
            row.reason,
        )
        for row in planned
    ]
    notes: list[Note] = []
    for row in planned:
        if row.derived is not None:
            notes.append(Note(in_a_sentence(row.derived), "plain"))
        if row.warning:
            notes.append(Note(row.warning, "warning"))
        if row.continue_from is not None:
            setting = f"{row.stage}.continue_from={row.continue_from.checkpoint}"
            sentence = (
                f"{row.stage} would start at step 1, but could continue from step "
                f"{row.continue_from.step} of another training: `--set {setting}`"
            )
            notes.append(Note(sentence, "warning"))
        notes += [
            Note(f"{row.stage} runs code of your own: {code}") for code in row.code
        ]
    num_to_run = sum(row.action != "reuse" for row in planned)
    num_cut_offs = sum(row.cut_off_after is not None for row in planned)
    summary = f"{num_to_run} of {len(planned)} stages would run"
    if not num_to_run:
        summary = "nothing would run: all stages are committed"
    elif num_cut_offs:
        summary += (
            f", {num_cut_offs} of them only if the stages before them give other bytes"
        )
    columns = dict.fromkeys(("stage", "action", "fingerprint", "why"), "")
    print_parts(table(columns, rows), notes, summary)


def trained_context(manifest: Manifest) -> int:
    """Return the longest context that the initial model will have been trained on, in
    tokens.
    """
    length = 0 if manifest.mix is None else manifest.mix.sequence_length
    model_path = None
    if manifest.model is not None:
        model_path = manifest.model.path
    elif manifest.pretrain is not None:
        model_path = manifest.pretrain.model.init_from
    if model_path is None:
        return length
    config = read_json(as_path(model_path) / "config.json")
    own_length = config.get("sequence_length", 0)
    return max(length, config.get("max_position_embeddings", own_length))


def nearest_differences(session: Session, node: Node) -> dict[str, list[str]] | None:
    """Return the differences of a stage from its nearest committed output; None without
    one.

    The nearest output has the fewest differences; ties go to the same manifest name,
    then to the newest. Outputs of another manifest that differ in more than a few
    places are ignored.
    """
    candidates = []
    for folder in session.store.outputs_of(node.name):
        if folder.state() == "committed":
            manifest = folder.manifest()
            changes = differences(manifest, node)
            distance = sum(map(len, changes.values()))
            is_foreign = not folder.path.name.startswith(f"{session.manifest.name}--")
            if not is_foreign or distance <= MOST_CHANGES:
                rank = distance, is_foreign, -manifest["started"]
                candidates.append((rank, changes))
    return min(candidates, key=itemgetter(0), default=(None, None))[1]


def why_missing(changes: Mapping[str, Sequence[str]] | None) -> str:
    """Describe differences by kind: `config changed: steps 400 -> 40`."""
    if changes is None:
        return "never made"
    parts = [
        f"{kind} changed: {join_first(sentences, MOST_CHANGES)}"
        for kind, sentences in changes.items()
        if sentences
    ]
    return "; ".join(parts) or "what comes before it changes"


def continuable(session: Session, stage: str) -> UsableCheckpoint | None:
    """Find the latest checkpoint of another training that this one could continue from;
    None if no checkpoint is usable, or the manifest names one.

    That training read the same rows, with the same model and kind of optimizer; the
    stage itself checks this again.
    """
    node, usable = session.plan[stage], []
    if node.stage.training is None or node.config.get("continue_from") is not None:
        return None
    recipe = _stored_recipe(node)
    for folder in session.store.outputs_of(stage):
        metadata = find_json(folder.path / "stage.json", {})
        if (
            metadata.get("version") == node.stage.version
            and _stored_inputs(metadata) == dict(node.inputs)
            and all(
                key.startswith(CONTINUABLE)
                for key, _, _ in changed_keys(metadata["recipe"], recipe)
            )
        ):
            for marker in (folder.work / "checkpoints").glob("step-*/complete.json"):
                step = int(marker.parent.name.removeprefix("step-"))
                if step < recipe["steps"]:
                    usable.append((step, str(marker.parent)))
    return UsableCheckpoint(*max(usable)) if usable else None


def _stored_recipe(node: Node) -> Any:
    """Return a stage's recipe as an output records it."""
    return json.loads(json.dumps(mask_secrets(dict(node.recipe))))


def _stored_inputs(record: Mapping[str, Any]) -> dict[str, str]:
    return input_fingerprints(record.get("input_fingerprints", ()))


def made_otherwise(session: Session, stage: str) -> str:
    """Describe settings or the version of an output that differ from the plan: `made
    with micro_batch_size 16`.
    """
    config = session.plan[stage].config
    settings = session.folder(stage).manifest().get("how", {})
    changes = [
        f"{key} {json.dumps(value)}"
        for key, value in settings.items()
        if config.get(key) != value
    ]
    version = session.plan[stage].kept_version
    if version is not None:
        changes.append(f"version {version} of the stage and kept")
    return f"made with {', '.join(changes)}" if changes else ""


def differences(manifest: OutputManifest, node: Node) -> dict[str, list[str]]:
    """Return the differences of a committed output from a node of the plan, as
    sentences by kind: config, files, code, input.
    """
    before = _stored_inputs(manifest)
    config, files, code = list[str](), list[str](), list[str]()
    inputs = [stage for stage in node.inputs if before.get(stage) != node.inputs[stage]]
    for key, old, new in changed_keys(manifest["recipe"], _stored_recipe(node)):
        section, _, last = key.rpartition(".")
        if changed_code := _changed_code(old, new):
            code += changed_code
        elif last == "listing":
            old_files, new_files = (
                {file["path"]: (file["size"], file["stamp"]) for file in side}
                if isinstance(side, list)
                else {}
                for side in (old, new)
            )
            common = old_files.keys() & new_files.keys()
            counts = {
                "new": len(new_files) - len(common),
                "gone": len(old_files) - len(common),
                "changed": sum(old_files[path] != new_files[path] for path in common),
            }
            changes = [f"{count} {kind}" for kind, count in counts.items() if count]
            listing = ", ".join(changes) or "in another order"
            files.append(f"{section} ({listing})")
        else:
            config.append(describe_change(key, old, new))
    if manifest["version"] != node.stage.version:
        code.append(f"stage version {manifest['version']} -> {node.stage.version}")
    inputs += [f"{stage} removed" for stage in before if stage not in node.inputs]
    if len(node.edits) > 1 and manifest.get("edits") != list(node.edits):
        inputs.append(f"edits are applied in the order {', '.join(node.edits)}")
    return {"config": config, "files": files, "code": code, "input": inputs}


def _changed_code(old: Any, new: Any) -> list[str]:
    """Return `the code of ./steps.py:keep` for each function that changed, if nothing
    else differs.
    """
    changes: list[str] = []
    if _without_code(old) != _without_code(new):
        return changes
    for before, after in zip(code_in(old), code_in(new), strict=False):
        name = after.written_again
        if before.written_again != name:
            changes.append(f"{before.written_again} -> {name}")
        elif before.distribution != after.distribution:
            changes.append(f"{name}, {before.distribution} -> {after.distribution}")
        elif before.files != after.files:
            changes.append(f"the code of {name}")
    return changes


def _without_code(value: Any) -> Any:
    if is_code(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_code(inner) for key, inner in value.items()}
    return list(map(_without_code, value)) if isinstance(value, list) else value


ABSENT = object()
"""Value of a key that one side does not have."""


def changed_keys(
    old: Any, new: Any, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, old value, new value) where two nested mappings differ; ABSENT
    for a missing key.
    """
    if all(isinstance(side, Mapping) and not is_code(side) for side in (old, new)):
        for key in sorted({*old, *new}):
            yield from changed_keys(
                old.get(key, ABSENT),
                new.get(key, ABSENT),
                f"{prefix}.{key}" if prefix else str(key),
            )
    elif old != new:
        yield prefix, old, new


def keyed(value: Any) -> Any:
    """Convert lists to mappings so that entries are compared key by key; preparing
    steps are keyed by name.
    """
    if isinstance(value, Mapping):
        return {str(key): keyed(inner) for key, inner in value.items()}
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(entry, Mapping) for entry in value)
    ):
        return value
    steps = written_steps(value)
    merged = {name: inner for entry in value for name, inner in entry.items()}
    if all(stage for stage, _ in steps):
        entries = [entry[stage] for (stage, _), entry in zip(steps, value, strict=True)]
        merged = dict(zip(name_steps(steps), entries, strict=True))
    elif len(merged) < len(value) or any(len(entry) > 1 for entry in value):
        merged = dict(enumerate(value))
    return keyed(merged)


def keyed_manifest(manifest: Mapping[str, object]) -> Any:
    """Return a manifest as JSON with its lists keyed by name."""
    return keyed(name_code(deepcopy(dict(manifest))))


def describe_change(key: str, old: Any, new: Any) -> str:
    """Format a change as `steps 400 -> 40`; long values are left out."""
    before, after = (
        "" if value is ABSENT else json.dumps(value, ensure_ascii=False)
        for value in (old, new)
    )
    is_long = max(len(before), len(after)) >= LONGEST_VALUE
    if before and after:
        return key if is_long else f"{key} {before} -> {after}"
    text = f"{key} {'removed' if before else 'added'}"
    if is_long or isinstance(old if before else new, Mapping | list):
        return text
    return f"{text}: {before or after}"
