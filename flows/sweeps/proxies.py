"""Proxies of sweeps and ablations: ordinary runs up to `pretrain` of variants of one
manifest, which differ in their mixture or documents and in their seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, cast

import yaml

from gristmill.core.files import read_json, read_json_lines
from gristmill.core.lease import running_owner
from gristmill.flows.running.events import RunNotice, Subscriber, to_all
from gristmill.flows.running.launch import interruptible
from gristmill.flows.running.run import StageFailedError
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.running.stage_server import StageServer, proxy_server
from gristmill.flows.running.terminal import (
    LastingStream,
    TerminalObserver,
    plain_console,
)
from gristmill.flows.stages.plan import Plan
from gristmill.flows.stages.registry import MIX, PRETRAIN, TOKENIZE
from gristmill.flows.sweeps.grid import (
    SweepError,
    Weights,
    mixtures_of,
    normalised,
    read_grid,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed_files import MANIFEST, ShardEntry
from gristmill.train.loop.batch_plan import plan_of

SHARED_UNTIL = TOKENIZE
"""Last stage that all mixtures share."""
METRICS = "metrics.jsonl"
"""Metrics file of a training."""
PROXY_MODEL = {"layers": 2, "width": 128, "heads": 4}
"""Small enough for a CPU: a proxy ranks mixtures, whatever its own quality."""


@dataclass(frozen=True)
class Proxy:
    """Measurements of one training of a mixture.

    Attributes:
        seed: seed of initialisation and order.
        fingerprint: of the training's output.
        bits_per_byte: source -> bits per byte of its held-out text.
        tasks: task -> error.
    """

    seed: int
    fingerprint: str
    bits_per_byte: Mapping[str, float]
    tasks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProxyManifest:
    """A manifest whose variants are trained as proxies.

    Attributes:
        manifest_file: the manifest.
        overrides: settings of all proxies.
        store: folder or URL of the outputs, as the user wrote it.
    """

    manifest_file: str
    overrides: tuple[str, ...]
    store: str | None

    def open(self, overrides: Sequence[str] = (), until: str = PRETRAIN) -> Session:
        """Open a session up to a stage, without stages that it does not need."""
        session = open_session(
            self.manifest_file,
            [*self.overrides, *overrides],
            self.store,
            until=until,
            exactly=True,
        )
        return only_needed(session, until)


@dataclass(frozen=True)
class Request:
    """A proxy to train.

    Attributes:
        group: its mixture or arm.
        seed: of the proxies of a group, which differ in it.
        overrides: settings of this proxy.
    """

    group: str
    seed: int
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class TrainedGroup:
    """Trained proxies of a mixture or arm.

    Attributes:
        proxies: one per seed, in the order of the requests.
        packed: packed.json of the first one.
        error: reason why the documents cannot be mixed or trained on.
    """

    proxies: tuple[Proxy, ...] = ()
    packed: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class MixtureOutcome:
    """A mixture that was tried.

    Attributes:
        mixture: its number.
        weights: share of each source.
        proxies: its trainings, one per seed.
        validation: source -> checksum of its held-out rows.
        supply: source -> tokens that may be read of it.
        error: reason why the mixture cannot be made or trained.
    """

    mixture: int
    weights: Weights
    proxies: tuple[Proxy, ...] = ()
    validation: Mapping[str, str] = field(default_factory=dict)
    supply: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Sweep(ProxyManifest):
    """Mixtures of a sweep, and the settings that its proxies share: the user's, and the
    size and budget of the proxy.

    Attributes:
        mixtures: shares of every source, each summing to 1.
        seeds: seeds of initialisation and order; every mixture is trained with each of
            them.
        manifest_weights: the manifest's weight of each source.
        target: source -> share of its bits per byte in the objective, or task -> share
            of its error; the shares sum to 1, and the objective is minimized.
        tokens: size of the manifest's own set, to which the suggested mixture and the
            repetition limits apply.
    """

    mixtures: tuple[Weights, ...]
    seeds: tuple[int, ...]
    manifest_weights: Weights
    target: Weights
    tokens: int = 0

    def request(self, number: int, seed: int) -> Request:
        """Return the request of one mixture and seed."""
        weights = in_one_line(self.mixtures[number])
        overrides = (f"mix.weights={weights}", f"pretrain.seed={seed}")
        return Request(f"mixture {number}", seed, overrides)


def plan_sweep(
    manifest_file: str,
    grid_file: Path | None,
    steps: int,
    num_seeds: int,
    model: Mapping[str, object],
    overrides: Sequence[str],
    store: str | None,
    target: Weights | None = None,
) -> Sweep:
    """Plan a sweep, and check it before any stage runs.

    Args:
        manifest_file: the manifest; its `pretrain` section has every other setting of a
            proxy.
        grid_file: the mixtures, see `grid.Grid`; without it nothing is trained.
        steps: training steps of every proxy. A proxy reads every token of its set once,
            in exactly the shares of its mixture.
        num_seeds: proxies per mixture; they differ in initialisation and order, which
            shows the spread between runs.
        model: keys of `pretrain.model` that differ from `PROXY_MODEL`.
        overrides: settings that replace the manifest's.
        store: folder or URL of the outputs.
        target: share of each source, or task of `pretrain.tasks`, in the objective; the
            manifest's weights if absent.

    Raises:
        SweepError: the manifest does not pre-train or mixes in phases, or the grid is
            invalid.
        gristmill.mixtures.loader.ManifestError: the manifest is invalid.
    """
    session = open_session(manifest_file, list(overrides), store)
    manifest = session.manifest
    if manifest.mix is None or manifest.pretrain is None:
        raise SweepError(
            f"{manifest_file} has no `mix:` and `pretrain:` sections; a "
            "sweep trains a model on mixtures"
        )
    manifest_weights = own_weights(manifest)
    tasks = [task.name for task in manifest.pretrain.tasks]
    for name, share in (target or {}).items():
        if name in manifest_weights and name in tasks:
            raise SweepError(
                f"--target: {name} is both a source and a task; rename the task"
            )
        if name not in manifest_weights and name not in tasks:
            raise SweepError(
                f"--target: no such source: {name} (sources: "
                f"{', '.join(manifest_weights)}; tasks of "
                f"pretrain.tasks: {', '.join(tasks) or 'none'})"
            )
        if share < 0:
            raise SweepError(
                f"--target: the share of {name} is below 0; shares are 0 or more"
            )
    target_weights = target or manifest_weights
    tasks = [task for task in tasks if task in target_weights]
    target_shares = normalised(
        {name: target_weights.get(name, 0.0) for name in (*manifest_weights, *tasks)}
    )
    proxy_overrides = [
        f"pretrain.steps={steps}",
        f"pretrain.validate_every={steps}",
        f"pretrain.model={in_one_line({**PROXY_MODEL, **model})}",
    ]
    # Read from the proxy's manifest, since batch ramps depend on the number of steps.
    proxy_manifest = open_session(
        manifest_file, [*overrides, *proxy_overrides], store
    ).manifest
    assert isinstance(proxy_manifest.pretrain, Pretrain)
    tokens = tokens_read(proxy_manifest.pretrain, manifest.mix.sequence_length)
    first_seed = (
        manifest.seed if manifest.pretrain.seed is None else manifest.pretrain.seed
    )
    return Sweep(
        manifest_file,
        (*overrides, *proxy_overrides, f"mix.tokens={tokens}"),
        store,
        tuple(mixtures_of(read_grid(grid_file), manifest_weights) if grid_file else ()),
        tuple(range(first_seed, first_seed + num_seeds)),
        manifest_weights,
        target_shares,
        manifest.mix.tokens,
    )


def _needed_of(plan: Plan, stage: str) -> set[str]:
    """Return a stage and all stages upstream of it."""
    return {stage}.union(*(_needed_of(plan, name) for name in plan[stage].inputs))


def only_needed(session: Session, stage: str = PRETRAIN) -> Session:
    """Restrict a session to a stage and all stages upstream of it."""
    needed = _needed_of(session.plan, stage)
    plan = {name: node for name, node in session.plan.items() if name in needed}
    return replace(session, plan=plan)


def tokens_read(section: Pretrain, sequence_length: int) -> int:
    """Return the tokens that a training reads."""
    rows = plan_of(section, sequence_length).positions(section.steps)[0]
    return rows * sequence_length


def own_weights(manifest: Manifest) -> Weights:
    """Return the manifest's weight of each source.

    Raises:
        SweepError: the weights are not fixed.
    """
    assert manifest.mix is not None
    if manifest.mix.phases:
        raise SweepError(
            "mix.phases gives several mixtures, but a sweep compares "
            "single mixtures; remove mix.phases"
        )
    if manifest.mix.weights is None:
        return {name: source.weight for name, source in manifest.sources.items()}
    if "alpha" in manifest.mix.weights:
        raise SweepError(
            "mix.weights: {alpha: ...} depends on the sizes of the "
            "sources; write the weights out"
        )
    return {name: manifest.mix.weights.get(name, 0.0) for name in manifest.sources}


def in_one_line(value: object) -> str:
    """Return YAML for a setting."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1 << 30)
    return text.strip()


@contextmanager
def showing_progress(output: TextIO) -> Iterator[Subscriber]:
    """Show the runs in the block on a stream; Ctrl+C or SIGTERM ends them so that they
    can resume.
    """
    observer = TerminalObserver(plain_console(cast(TextIO, LastingStream(output))))
    try:
        with interruptible():
            yield observer
    finally:
        observer.stop_bars()


def train_mixtures(sweep: Sweep, output: TextIO) -> list[MixtureOutcome]:
    """Train every proxy that is not trained yet, and return the outcomes of all
    mixtures.

    Args:
        sweep: the planned sweep.
        output: stream of the progress display.

    Raises:
        StageFailedError: a stage that all mixtures share failed.
        LeaseLostError: another run took over a stage while this one was paused.
        KeyboardInterrupt: the user pressed Ctrl+C or SIGTERM arrived; the same command
            resumes the sweep.
        SweepError: a source of the target has no held-out text; nothing was trained.
    """
    numbers = range(len(sweep.mixtures))
    requests = [
        sweep.request(number, seed) for number in numbers for seed in sweep.seeds
    ]
    shares = {name: sweep.target[name] for name in sweep.manifest_weights}
    shared = sweep.open((), SHARED_UNTIL)
    with (
        showing_progress(output) as emit,
        proxy_server(shared.plan, shared.manifest.engine) as server,
    ):
        run_in_sequence(shared, emit, server=server)
        groups = train_proxies(sweep, requests, emit, target=shares, server=server)
    outcomes = []
    for number, group in enumerate(groups.values()):
        outcome = MixtureOutcome(
            number, sweep.mixtures[number], group.proxies, error=group.error
        )
        if group.packed:
            held_out = group.packed["validation"].items()
            outcome = replace(
                outcome,
                validation={name: entry["sha256"] for name, entry in held_out},
                supply=supply_of(group.packed),
            )
        outcomes.append(outcome)
    return outcomes


def train_proxies(
    manifest: ProxyManifest,
    requests: Sequence[Request],
    emit: Subscriber,
    weights: str = "validation",
    target: Weights | None = None,
    server: StageServer | None = None,
) -> dict[str, TrainedGroup]:
    """Train every proxy that is not trained yet. One that another run makes is left to
    it while others are free, so that runs on several hosts share the work.

    Args:
        manifest: the manifest of all proxies.
        requests: the proxies, in order.
        emit: receives progress.
        weights: measured weights, see `measured`.
        target: shares of sources that must have held-out text.
        server: starts stages.

    Returns:
        the trained proxies by group. A group that its sources cannot fill is an
        outcome: its other proxies are not trained.
    """
    groups = {request.group: TrainedGroup() for request in requests}
    proxies: dict[Request, Proxy] = {}
    waiting = list(requests)
    while waiting:
        request, session = _next_free(manifest, waiting)
        waiting.remove(request)
        place = f"{len(requests) - len(waiting)} of {len(requests)}"
        emit(RunNotice(f"training {place}: {request.group}, seed {request.seed}"))
        try:
            run_in_sequence(session, emit, target, server)
        except StageFailedError as error:
            groups[request.group] = TrainedGroup(error=str(error))
            waiting = [other for other in waiting if other.group != request.group]
            continue
        proxies[request] = measured(session, request.seed, weights)
        if not groups[request.group].packed:
            groups[request.group] = TrainedGroup(packed=packed_manifest(session))
    for request in requests:
        group = groups[request.group]
        if group.error is None:
            groups[request.group] = replace(
                group, proxies=(*group.proxies, proxies[request])
            )
    return groups


def _next_free(
    manifest: ProxyManifest, waiting: Sequence[Request]
) -> tuple[Request, Session]:
    """Return the first proxy that no other run makes now, else the first one."""
    first: tuple[Request, Session] | None = None
    for request in waiting:
        session = manifest.open(request.overrides)
        if not _is_made_elsewhere(session):
            return request, session
        first = first or (request, session)
    assert first is not None
    return first


def _is_made_elsewhere(session: Session) -> bool:
    """True if another run makes the mixture or the training now."""
    return any(
        running_owner(session.folder(stage).path / "lease") is not None
        for stage in (MIX, PRETRAIN)
    )


def measured(session: Session, seed: int, weights: str = "validation") -> Proxy:
    """Return the measurements of a committed training.

    Args:
        session: the run up to the training.
        seed: its seed.
        weights: measured weights: the last ones (`validation`), or their running mean
            (`validation_average`).
    """
    folder = session.folder(PRETRAIN)
    validation = folder.manifest()["summary"].get(weights, {})
    return Proxy(
        seed,
        session.plan[PRETRAIN].fingerprint,
        {
            name: values["bits_per_byte"]
            for name, values in validation.items()
            if "bits_per_byte" in values
        },
        task_errors(folder.data / METRICS),
    )


def supply_of(packed: Mapping[str, Any]) -> dict[str, float]:
    """Return the tokens that a mixture may read of each of its sources: one epoch,
    times `max_epochs`.
    """
    requested = packed["requested"]
    return {
        name: realised["available_tokens"] * requested[name]["max_epochs"]
        for name, realised in packed["realised"].items()
        if name in requested
    }


def task_errors(metrics: Path) -> dict[str, float]:
    """Return the error of each task at the end of a training, by the continuous metric
    of its kind: the Brier score of choices, nats of a cloze's answer, bits per byte of
    texts; the share of wrong answers where a task has no other. Accuracies of small
    models are all near chance.
    """
    last_tasks: dict[str, dict[str, float]] = {}
    for line in read_json_lines(metrics):
        last_tasks = line.get("tasks", last_tasks)
    errors = {}
    for task, values in last_tasks.items():
        match values:
            case {"brier_score": error} | {"bits_per_byte": error}:
                errors[task] = error
            case {"perplexity": perplexity}:
                errors[task] = math.log(perplexity)
            case {"acc": accuracy}:
                errors[task] = 1.0 - accuracy
    return errors


def packed_manifest(session: Session) -> dict[str, Any]:
    """Return the packed.json of a committed mixture."""
    content: dict[str, Any] = read_json(session.folder(MIX).data / MANIFEST)
    return content


def check_held_out(held_out: Mapping[str, ShardEntry], target: Weights) -> None:
    """Raise SweepError if a mixture holds out no rows of a source of the target."""
    measured = {name for name, entry in held_out.items() if entry["rows"]}
    missing = [name for name in target if target[name] and name not in measured]
    if missing:
        raise SweepError(
            f"no held-out text of {', '.join(missing)}; raise mix.validation, or "
            "remove these sources from --target"
        )


def run_in_sequence(
    session: Session,
    emit: Subscriber,
    target: Weights | None = None,
    server: StageServer | None = None,
) -> None:
    """Run a session's stages that are not committed, with a run record, so that gc
    keeps their outputs.

    A mixture is checked before the training: it must hold out text of every source of
    the target. Stages are forked from `server` if given.
    """
    record = session.start_record()
    runner = session.runner(to_all(record.note, emit), server)
    with record.until_end():
        for stage in session.plan:
            if stage == PRETRAIN and target is not None:
                check_held_out(packed_manifest(session)["validation"], target)
            if session.committed(stage) is None:
                runner.run_stage(stage)
