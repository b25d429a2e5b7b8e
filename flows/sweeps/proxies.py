"""The proxies of a sweep: for every mixture and seed an ordinary run of `mix` and `pretrain`, alike in all else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from gristmill.core.files import read_json
from gristmill.core.stage_context import read_inputs
from gristmill.core.store import StageFolder
from gristmill.flows.running.observers import Observers
from gristmill.flows.running.run import Observer, StageFailedError
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.stages.plan import Plan
from gristmill.flows.stages.registry import MIX, PRETRAIN, TOKENIZE
from gristmill.flows.sweeps.grid import SweepError, Weights, mixtures_of, normalised, read_grid
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import MANIFEST
from gristmill.train.loop.batch_plan import plan_of

SHARED_UNTIL = TOKENIZE
"""The last stage that is the same for all mixtures."""
MIXTURE = MIX
"""The stage that differs; what it holds out is looked at before anything is trained."""
METRICS = "metrics.jsonl"
"""The record of a training."""
PROXY_MODEL = {"layers": 2, "width": 128, "heads": 4}
"""Small enough for a CPU; what it measures is which mixture is better, not how good a model gets."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep tries, and everything that its proxies have in common.

    Attributes:
        manifest_file: the manifest.
        overrides: of all proxies: those that the user gave, and the proxy's size and budget.
        store: where the outputs are, as the user said it.
        mixtures: shares of every source, each summing to 1.
        seeds: of initialisation and order; every mixture is trained with each of them.
        own: the manifest's own weights.
        target: source -> how much its bits per byte count in the mean that is to be small, or task -> how much its
            error does; shares that sum to 1.
        tokens: of the manifest's own set, which the suggested mixture is for; repetition limits are of that.
    """

    manifest_file: str
    overrides: tuple[str, ...]
    store: str | None
    mixtures: tuple[Weights, ...]
    seeds: tuple[int, ...]
    own: Weights
    target: Weights
    tokens: int = 0

    def shared(self) -> Session:
        """The stages that all proxies share."""
        return open_session(self.manifest_file, list(self.overrides), self.store, until=SHARED_UNTIL)

    def proxy(self, number: int, seed: int) -> Session:
        """The run of one mixture with one seed: what its pre-training needs, and no data of later trainings."""
        overrides = [*self.overrides, *weight_overrides(self.mixtures[number]), f"pretrain.seed={seed}"]
        session = open_session(self.manifest_file, overrides, self.store, until=PRETRAIN, exactly=True)
        needed = needed_of(session.plan, PRETRAIN)
        return replace(session, plan={name: node for name, node in session.plan.items() if name in needed})


def plan_sweep(
    manifest_file: str,
    grid_file: Path,
    steps: int,
    num_seeds: int,
    model: Mapping[str, Any],
    overrides: Sequence[str],
    store: str | None,
    target: Mapping[str, float] | None = None,
) -> Sweep:
    """Read what is asked for, and check it before any work.

    Args:
        manifest_file: the manifest; its `pretrain` section gives everything that is not said here.
        grid_file: the mixtures, see `grid.Grid`.
        steps: of every proxy. It reads as many tokens as these take, each once, in exactly the shares that are tried:
            the sources' `min_tokens` and `max_tokens`, which are of the whole set, do not bind it.
        num_seeds: proxies per mixture; they differ in initialisation and order, which shows the spread between runs.
        model: keys of `pretrain.model` that differ from `PROXY_MODEL`.
        overrides: settings that replace the manifest's.
        store: where the outputs are.
        target: how much each source, or task of `pretrain.tasks`, counts in the mean; the manifest's weights if absent.

    Raises:
        SweepError: the manifest does not pre-train or mixes in stages, or the grid is wrong.
        gristmill.mixtures.load.ManifestError: the manifest is wrong.
    """
    session = open_session(manifest_file, list(overrides), store)
    manifest = session.manifest
    if manifest.mix is None or manifest.pretrain is None:
        raise SweepError(f"{manifest_file} has no `mix:` and `pretrain:` sections; a sweep trains a model on mixtures")
    own = own_weights(manifest)
    tasks = [task.name for task in manifest.pretrain.tasks]
    if both := sorted(own.keys() & set(tasks) & (target or {}).keys()):
        raise SweepError(f"--target: {both[0]} is a source and a task; give the task another name")
    unknown = sorted((target or {}).keys() - own.keys() - set(tasks))
    if unknown:
        raise SweepError(
            f"--target: no such source: {', '.join(unknown)} (sources: {', '.join(own)}; tasks of "
            f"pretrain.tasks: {', '.join(tasks) or 'none'})"
        )
    negative = sorted(name for name, share in (target or {}).items() if share < 0)
    if negative:
        raise SweepError(f"--target: the share of {negative[0]} is below 0; shares are 0 or more")
    counts = normalised(
        {name: (target or own).get(name, 0.0) for name in (*own, *(task for task in tasks if task in (target or {})))}
    )
    proxy = [
        f"pretrain.steps={steps}",
        f"pretrain.validate_every={steps}",
        f"pretrain.model={yaml.safe_dump({**PROXY_MODEL, **model}, default_flow_style=True).strip()}",
    ]
    # Asked of the changed manifest, since ramps of the batch depend on the steps.
    changed = open_session(manifest_file, [*overrides, *proxy], store).manifest
    assert isinstance(changed.pretrain, Pretrain)
    length = manifest.mix.sequence_length
    tokens = plan_of(changed.pretrain, length).positions(steps)[0] * length
    first_seed = manifest.seed if manifest.pretrain.seed is None else manifest.pretrain.seed
    return Sweep(
        manifest_file,
        (*overrides, *proxy, f"mix.tokens={tokens}", *without_limits(manifest)),
        store,
        tuple(mixtures_of(read_grid(grid_file), own)),
        tuple(first_seed + number for number in range(num_seeds)),
        own,
        counts,
        manifest.mix.tokens,
    )


def needed_of(plan: Plan, stage: str) -> set[str]:
    """A stage and all those that it is made from."""
    return {stage}.union(*(needed_of(plan, name) for name in plan[stage].inputs))


def own_weights(manifest: Manifest) -> Weights:
    """The manifest's weight of each source.

    Raises:
        SweepError: its weights are not fixed ones.
    """
    assert manifest.mix is not None
    if manifest.mix.phases:
        raise SweepError("mix.phases gives several mixtures, and a sweep compares one with another: leave it out")
    if manifest.mix.weights is None:
        return {name: source.weight for name, source in manifest.sources.items()}
    if "alpha" in manifest.mix.weights:
        raise SweepError("mix.weights: {alpha: ...} depends on the sizes of the sources; write the weights out")
    return {name: manifest.mix.weights.get(name, 0.0) for name in manifest.sources}


def weight_overrides(weights: Mapping[str, float]) -> list[str]:
    """The settings that make a manifest mix by these weights."""
    return [f"mix.weights={yaml.safe_dump(dict(weights), default_flow_style=True, width=1 << 30).strip()}"]


def without_limits(manifest: Manifest) -> list[str]:
    """The settings that free sources of limits in tokens, which are meant for the whole set and not for a proxy's."""
    return [
        f"sources.{name}.{key}=null"
        for name, source in manifest.sources.items()
        for key in ("min_tokens", "max_tokens")
        if getattr(source, key) is not None
    ]


def run_shared(sweep: Sweep, observer: Observer) -> None:
    """Bring the stages that all proxies share to their committed output.

    Raises:
        StageFailedError: one of them could not be finished.
    """
    run_recorded(sweep.shared(), observer)


def run_mixture(sweep: Sweep, number: int, observer: Observer) -> dict[str, Any]:
    """Train the proxies of one mixture; what is committed already is reused, also under another fingerprint, where it
    was trained on the same rows in the same way.

    Returns:
        `weights`; per seed `seed`, `fingerprint`, `bits_per_byte` (source -> value) and `tasks` (task -> error) in
        `proxies`; `validation`, the checksum of each source's held-out rows; `supply`, the tokens that may be read of
        each source that was mixed; or `error`, where the mixture cannot be made or trained.

    Raises:
        SweepError: a source that counts has no held-out text; nothing was trained.
    """
    found: dict[str, Any] = {"mixture": number, "weights": sweep.mixtures[number], "proxies": []}
    for seed in sweep.seeds:
        session = sweep.proxy(number, seed)
        mixed = replace(session, plan={name: node for name, node in session.plan.items() if name != PRETRAIN})
        try:
            run_recorded(mixed, observer, SHARED_UNTIL, {name: sweep.target[name] for name in sweep.own})
            folder = trained_alike(session)
            if folder is None:
                run_recorded(session, observer, MIXTURE)
                folder = session.folder(PRETRAIN)
        except StageFailedError as error:
            # A mixture that its sources cannot fill is a result: the others continue, and the report names it.
            return {**found, "error": str(error)}
        found["validation"] = {name: entry["sha256"] for name, entry in held_out_by(session).items()}
        found["supply"] = supply_of(session)
        measured = folder.manifest()["summary"].get("validation", {})
        bits = {name: values["bits_per_byte"] for name, values in measured.items() if "bits_per_byte" in values}
        found["proxies"].append(
            {
                "seed": seed,
                "fingerprint": read_json(folder.path / "stage.json")["fingerprint"],
                "bits_per_byte": bits,
                "tasks": task_errors(folder.data / METRICS),
            }
        )
    return found


def trained_alike(session: Session) -> StageFolder | None:
    """A committed training with the same recipe on a set with the same rows, whatever its mixture was called; None
    where there is none."""
    wanted, node = _rows_of(session.folder(MIXTURE).data), session.plan[PRETRAIN]
    trained = session.folder(PRETRAIN).path.parent
    for path in sorted(trained.iterdir()) if trained.exists() else ():
        folder = StageFolder(path)
        if folder.state() != "committed":
            continue
        told = read_json(folder.path / "stage.json")
        if (told["recipe"], told["version"]) == (node.recipe, node.stage.version):
            read = read_inputs(told)
            if _rows_of(read[MIXTURE]) == wanted:
                return folder
    return None


def _rows_of(folder: Path) -> tuple[str, ...] | None:
    """What a training reads of a packed set, by checksums: its rows, and those held out; None where it is gone."""
    if not (folder / MANIFEST).exists():
        return None
    with closing(PackedSet(folder)) as packed:
        return packed.fingerprint, *sorted(
            f"{name} {one['sha256']}" for name, one in packed.manifest["validation"].items()
        )


def supply_of(session: Session) -> dict[str, float]:
    """Tokens that a mixture may read of each source that it mixes: one pass, times `max_epochs`."""
    packed = read_json(session.folder(MIXTURE).data / MANIFEST)
    return {
        name: one["available_tokens"] * packed["requested"][name]["max_epochs"]
        for name, one in packed["realised"].items()
        if name in packed["requested"]
    }


def task_errors(metrics: Path) -> dict[str, float]:
    """Task -> what is to be small at the end of a training, by what its kind measures without steps: the Brier score of
    choices, nats of a cloze's answer, bits per byte of texts. Accuracies of small models are all near chance."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    last: dict[str, dict[str, float]] = next((line["tasks"] for line in reversed(lines) if "tasks" in line), {})
    return {
        task: -found["logp"] if "logp" in found else found["brier"] if "brier" in found else found["bits_per_byte"]
        for task, found in last.items()
    }


def held_out_by(session: Session) -> Mapping[str, Mapping[str, Any]]:
    """The rows that a committed mixture holds out, by source."""
    held_out: dict[str, dict[str, Any]] = read_json(session.folder(MIXTURE).data / MANIFEST)["validation"]
    return held_out


def check_held_out(held_out: Mapping[str, Mapping[str, Any]], target: Mapping[str, float]) -> None:
    """Raise SweepError where the rows held out of a mixture, by source, have none of a source that counts."""
    missing = [name for name, share in target.items() if share and not held_out.get(name, {}).get("rows")]
    if missing:
        raise SweepError(
            f"no held-out text of {', '.join(missing)}; raise mix.validation, or leave these sources out of --target"
        )


def run_recorded(
    session: Session, observer: Observer, after: str | None = None, target: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Run a session's stages, those behind `after` where it is given, with a record, so that gc keeps them.

    A mixture is looked at as soon as it is made: it must hold out text of every source of the target.
    """
    record = session.start_record()
    runner = session.runner(Observers(record, observer))
    names = list(session.plan)
    with record.until_end():
        for stage in names[names.index(after) + 1 if after in names else 0 :]:
            runner.run_stage(stage)
            if stage == MIXTURE:
                check_held_out(held_out_by(session), target)
