"""Reasons for running a stage: differences between its recipe and the nearest output in
the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.text import Text

from gristmill.core.files import as_path, read_json
from gristmill.core.secrets import mask_secrets
from gristmill.core.stage_context import input_fingerprints
from gristmill.core.store import IDENTITY, OutputManifest
from gristmill.flows.pages.terminal_tables import plain_table
from gristmill.flows.planning.derived_settings import (
    DerivedSettings,
    derived_keys,
    in_a_sentence,
)
from gristmill.flows.questions.status import STYLES, StageState, stage_states
from gristmill.flows.running.output_identities import settle_node
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.plan import Node, settle_plan
from gristmill.flows.stages.registry import PRETRAIN
from gristmill.mixtures.manifest import Manifest, context_warnings
from gristmill.mixtures.training import HOW_KEYS
from gristmill.mixtures.user_code import code_in, is_code

CONTINUABLE = (
    "steps",
    "schedule.",
    "optimizer.learning_rate",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "optimizer.hessian_every",
    "optimizer.gamma",
    "optimizer.clip",
    "optimizer.cautious_decay",
    "optimizer.beta3",
    "optimizer.alpha",
    "optimizer.rise_steps",
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
    cut_offs = possible_cut_offs(session)
    planned = []
    for row in stage_states(session):
        stage, action = row.stage, ACTIONS[row.state]
        reason = row.details or row.owner or ""
        cut_off_after = continue_from = None
        if row.state == "missing":
            reason = why_missing(session, stage)
            cut_off_after = cut_offs.get(stage)
            if cut_off_after is not None:
                reason = f"{reason}; may be cut off after {cut_off_after}"
            continue_from = continuable(session, stage)
        elif row.state == "committed" and stage in force:
            action, reason = "make", "forced"
        elif row.state == "committed":
            reason = made_otherwise(session, stage)
        functions = code_in(session.plan[stage].config)
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
    table = plain_table(
        ("stage", False), ("action", False), ("fingerprint", False), ("why", False)
    )
    for row in planned:
        action = Text(row.action, style=STYLES[row.state])
        table.add_row(row.stage, action, row.fingerprint[:8], row.reason)
    console = plain_console()
    console.print(table)
    for row in planned:
        if row.derived is not None:
            console.print(in_a_sentence(row.derived), soft_wrap=True)
        if row.warning:
            console.print(row.warning, style="yellow", soft_wrap=True)
        if row.continue_from is not None:
            console.print(
                f"{row.stage} would start at step 1, but could continue from "
                f"step {row.continue_from.step} of another training: --set "
                f"{row.stage}.continue_from={row.continue_from.checkpoint}",
                style="yellow",
                soft_wrap=True,
            )
        for code in row.code:
            console.print(
                f"{row.stage} runs code of your own: {code}",
                style="dim",
                soft_wrap=True,
            )
    num_to_run = sum(row.action != "reuse" for row in planned)
    num_cut_offs = sum(row.cut_off_after is not None for row in planned)
    summary = f"{num_to_run} of {len(planned)} stages would run"
    if not num_to_run:
        summary = "nothing would run: all stages are committed"
    elif num_cut_offs:
        summary += (
            f"; {num_cut_offs} of them are reused if the stages before them "
            "give the same bytes"
        )
    console.print(summary, style="dim")


def trained_context(manifest: Manifest) -> int:
    """Return the longest context that the initial model will have been trained on, in
    tokens.
    """
    length = 0 if manifest.mix is None else manifest.mix.sequence_length
    model_path: str | None = None
    if manifest.model is not None:
        model_path = manifest.model.path
    elif manifest.pretrain is not None:
        model_path = manifest.pretrain.model.init_from
    if model_path is None:
        return length
    config = read_json(as_path(model_path) / "config.json")
    return max(
        length, config.get("max_position_embeddings", config.get("sequence_length", 0))
    )


def why_missing(session: Session, stage: str) -> str:
    """Describe the differences from the nearest committed output of a stage: `config
    changed: steps 400 -> 40`.

    The nearest output has the fewest differences; ties go to the same manifest name,
    then to the newest. Outputs of another manifest that differ in more than a few
    places are ignored.
    """
    nearest = nearest_output(session, session.plan[stage])
    if nearest is None:
        return "never made"
    parts = []
    for kind, sentences in differences(nearest, session.plan[stage]).items():
        if sentences:
            shown = ", ".join(sentences[:MOST_CHANGES])
            num_hidden = len(sentences) - MOST_CHANGES
            more = f" and {num_hidden} more" if num_hidden > 0 else ""
            parts.append(f"{kind} changed: {shown}{more}")
    return "; ".join(parts) or "what comes before it changes"


def nearest_output(session: Session, node: Node) -> OutputManifest | None:
    """Return the manifest of the committed output that `why_missing` compares a stage
    with.
    """
    candidates = []
    for folder in session.store.outputs_of(node.name):
        if folder.state() != "committed":
            continue
        manifest = folder.manifest()
        distance = sum(map(len, differences(manifest, node).values()))
        is_foreign = not folder.path.name.startswith(f"{session.manifest.name}--")
        if not is_foreign or distance <= MOST_CHANGES:
            candidates.append(((distance, is_foreign, -manifest["started"]), manifest))
    return (
        min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None
    )


def possible_cut_offs(session: Session) -> dict[str, str]:
    """Return stages that need not run again if earlier stages reproduce the bytes of
    their nearest outputs.

    Returns:
        stage -> the last earlier stage that must be rebuilt.
    """
    rebuilt: set[str] = set()

    def settle(node: Node) -> Node:
        settled = settle_node(node, session.store, session.manifest.name)
        if (
            session.store.folder(
                node.name, session.manifest.name, settled.fingerprint
            ).state()
            == "committed"
        ):
            return settled
        rebuilt.add(node.name)
        nearest = nearest_output(session, node)
        return (
            node
            if nearest is None
            else replace(node, alias=nearest.get(IDENTITY, nearest["fingerprint"]))
        )

    before: dict[str, set[str]] = {}
    for name, node in settle_plan(session.plan, settle).items():
        before[name] = set().union(
            *(before[each] | ({each} & rebuilt) for each in node.inputs)
        )
    return {
        name: next(each for each in reversed(session.plan) if each in stages)
        for name, stages in before.items()
        if stages and name not in rebuilt
    }


def continuable(session: Session, stage: str) -> UsableCheckpoint | None:
    """Find the latest checkpoint of another training that this one could continue from;
    None if no checkpoint is usable, or the manifest names one.

    That training read the same rows, with the same model and kind of optimizer; the
    stage itself checks this again.
    """
    node, checkpoints = session.plan[stage], []
    if node.stage.training is None or node.config.get("continue_from") is not None:
        return None
    recipe = json.loads(json.dumps(mask_secrets(dict(node.recipe))))
    for name, folder in session.store.outputs():
        description = folder.path / "stage.json"
        if name != stage or not description.exists():
            continue
        metadata = read_json(description)
        if (
            metadata["version"] != node.stage.version
            or input_fingerprints(metadata.get("input_fingerprints", ()))
            != dict(node.inputs)
            or not all(
                key.startswith(CONTINUABLE)
                for key, _, _ in changed_keys(metadata["recipe"], recipe)
            )
        ):
            continue
        markers = (folder.work / "checkpoints").glob("step-*/complete.json")
        checkpoints += [
            (int(path.parent.name.removeprefix("step-")), str(path.parent))
            for path in markers
        ]
    usable = [entry for entry in checkpoints if entry[0] < recipe["steps"]]
    return UsableCheckpoint(*max(usable)) if usable else None


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
    recipe = json.loads(json.dumps(mask_secrets(dict(node.recipe))))
    changes: dict[str, list[str]] = {"config": [], "files": [], "code": [], "input": []}
    for key, old, new in changed_keys(manifest["recipe"], recipe):
        if code := list(_changed_code(old, new)):
            changes["code"].extend(code)
        elif key.rpartition(".")[2] == "listing":
            changes["files"].append(
                f"{key.rpartition('.')[0]} ({_changed_files(old, new)})"
            )
        else:
            changes["config"].append(describe_change(key, old, new))
    if manifest["version"] != node.stage.version:
        changes["code"].append(
            f"stage version {manifest['version']} -> {node.stage.version}"
        )
    before = input_fingerprints(manifest.get("input_fingerprints", ()))
    changes["input"] = [
        stage
        for stage, fingerprint in node.inputs.items()
        if before.get(stage) != fingerprint
    ]
    changes["input"] += [
        f"{stage} removed" for stage in before if stage not in node.inputs
    ]
    if len(node.edits) > 1 and manifest.get("edits") != list(node.edits):
        changes["input"].append(
            f"edits are applied in the order {', '.join(node.edits)}"
        )
    return changes


def _changed_code(old: Any, new: Any) -> Iterator[str]:
    """Yield `the code of ./steps.py:keep` for each function that changed, if nothing
    else differs.
    """
    pairs = list(zip(code_in(old), code_in(new), strict=False))
    if _without_code(old) != _without_code(new):
        return
    for before, after in pairs:
        if before.reference != after.reference or bool(before.files) != bool(
            after.files
        ):
            yield f"{before.written_again} -> {after.written_again}"
        elif before.files != after.files:
            yield f"the code of {after.written_again}"
        elif before.distribution != after.distribution:
            yield (
                f"{after.written_again}, {before.distribution} -> {after.distribution}"
            )


def _without_code(value: Any) -> Any:
    if is_code(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_code(inner) for key, inner in value.items()}
    return (
        [_without_code(inner) for inner in value] if isinstance(value, list) else value
    )


ABSENT = object()
"""Value of a key that one side does not have."""


def changed_keys(
    old: Any, new: Any, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, old value, new value) where two nested mappings differ; ABSENT
    for a missing key.
    """
    if (
        not isinstance(old, Mapping)
        or not isinstance(new, Mapping)
        or is_code(old)
        or is_code(new)
    ):
        if old != new:
            yield prefix, old, new
        return
    for key in sorted({*old, *new}):
        yield from changed_keys(
            old.get(key, ABSENT),
            new.get(key, ABSENT),
            f"{prefix}.{key}" if prefix else str(key),
        )


def describe_change(key: str, old: Any, new: Any) -> str:
    """Format a change as `steps 400 -> 40`; long values are left out."""
    if old is not ABSENT and new is not ABSENT:
        before = json.dumps(old, ensure_ascii=False)
        after = json.dumps(new, ensure_ascii=False)
        return (
            f"{key} {before} -> {after}"
            if max(len(before), len(after)) < LONGEST_VALUE
            else key
        )
    value = new if old is ABSENT else old
    text = f"{key} {'added' if old is ABSENT else 'removed'}"
    value_text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping | list) or len(value_text) >= LONGEST_VALUE:
        return text
    return f"{text}: {value_text}"


def _changed_files(old: Any, new: Any) -> str:
    """Summarize the difference of two listings: `2 new, 1 gone, 3 changed`."""
    before, after = (
        {file["path"]: (file["size"], file["stamp"]) for file in files}
        if isinstance(files, list)
        else {}
        for files in (old, new)
    )
    counts = {
        "new": len(after.keys() - before.keys()),
        "gone": len(before.keys() - after.keys()),
        "changed": sum(
            before[path] != after[path] for path in before.keys() & after.keys()
        ),
    }
    return (
        ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        or "in another order"
    )
