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
from gristmill.flows.running.run import Runner, StageFailedError
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
    Grid,
    SweepError,
    Weights,
    check_names,
    mixtures_of,
    normalised,
    read_settings,
)
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.mix import Mix
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

    @property
    def values(self) -> dict[str, float]:
        """Bits per byte of sources and errors of tasks."""
        return {**self.bits_per_byte, **self.tasks}

    def mean(self, target: Weights) -> float:
        """Return the mean of the values with shares that sum to 1."""
        return sum(share * self.values[name] for name, share in target.items() if share)


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
        name: of the mixture or arm.
        proxies: one per seed, in the order of the requests.
        packed: packed.json of the first one; empty if it is not known.
        error: reason why the documents cannot be mixed or trained on.
    """

    name: str
    proxies: tuple[Proxy, ...] = ()
    packed: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def sources(self) -> dict[str, Any]:
        """Entries in packed.json of the sources that it reads."""
        return sources_read(self.packed)

    @property
    def tokens_kept(self) -> dict[str, int]:
        """Source that it reads -> tokens of one pass over its documents."""
        return {name: each["available_tokens"] for name, each in self.sources.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens of one pass over all its documents."""
        return sum(self.tokens_kept.values())

    @property
    def epochs(self) -> float:
        """Most passes over the documents of a source."""
        return max(each["epochs"] for each in self.sources.values())


@dataclass(frozen=True)
class TriedMixture:
    """A mixture of a sweep: its number, the share of each source, and its proxies."""

    mixture: int
    weights: Weights
    trained: TrainedGroup


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
        settings = {"mix.weights": self.mixtures[number], "pretrain.seed": seed}
        return Request(f"mixture {number}", seed, tuple(as_settings(settings)))


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
    mix, pretrain = sections_of(session)
    manifest_weights = own_weights(session.manifest, mix)
    tasks = [task.name for task in pretrain.tasks]
    target = target or manifest_weights
    check_names("--target", target, [*manifest_weights, *tasks])
    for name, share in target.items():
        if name in manifest_weights and name in tasks:
            raise SweepError(
                f"--target: {name} is both a source and a task; rename the task"
            )
        if share < 0:
            raise SweepError(
                f"--target: the share of {name} is below 0; shares are 0 or more"
            )
    measured_names = [*manifest_weights, *(task for task in tasks if task in target)]
    target_shares = normalised({name: target.get(name, 0.0) for name in measured_names})
    proxy_settings = {
        "pretrain.steps": steps,
        "pretrain.validate_every": steps,
        "pretrain.model": {**PROXY_MODEL, **model},
    }
    proxy_overrides = (*overrides, *as_settings(proxy_settings))
    # Read from the proxy's manifest, since batch ramps depend on the number of steps.
    proxy = open_session(manifest_file, list(proxy_overrides), store)
    tokens = tokens_read(sections_of(proxy)[1], mix.sequence_length)
    first_seed = session.manifest.seed if pretrain.seed is None else pretrain.seed
    return Sweep(
        manifest_file,
        (*proxy_overrides, f"mix.tokens={tokens}"),
        store,
        tuple(
            mixtures_of(read_settings(grid_file, Grid), manifest_weights)
            if grid_file
            else ()
        ),
        tuple(range(first_seed, first_seed + num_seeds)),
        manifest_weights,
        target_shares,
        mix.tokens,
    )


def only_needed(session: Session, stage: str = PRETRAIN) -> Session:
    """Restrict a session to a stage and all stages upstream of it."""
    plan: Plan = {}
    needed = {stage}
    for name, node in reversed(session.plan.items()):
        if name in needed:
            plan = {name: node, **plan}
            needed |= node.inputs.keys()
    return replace(session, plan=plan)


def tokens_read(section: Pretrain, sequence_length: int) -> int:
    """Return the tokens that a training reads."""
    rows = plan_of(section, sequence_length).positions(section.steps)[0]
    return rows * sequence_length


def sections_of(session: Session) -> tuple[Mix, Pretrain]:
    """Return the sections `mix` and `pretrain`.

    Raises:
        SweepError: the manifest does not have both.
    """
    manifest = session.manifest
    if manifest.mix is None or manifest.pretrain is None:
        raise SweepError(
            f"{session.manifest_file} has no `mix:` and `pretrain:` sections; add "
            "them, since proxies are pre-trained as they say"
        )
    return manifest.mix, manifest.pretrain


def own_weights(manifest: Manifest, mix: Mix) -> Weights:
    """Return the manifest's weight of each source.

    Raises:
        SweepError: the weights are not fixed.
    """
    if mix.phases:
        raise SweepError(
            "mix.phases gives several mixtures, but a sweep compares "
            "single mixtures; remove mix.phases"
        )
    if mix.weights is None:
        return {name: source.weight for name, source in manifest.sources.items()}
    if "alpha" in mix.weights:
        raise SweepError(
            "mix.weights: {alpha: ...} depends on the sizes of the "
            "sources; write the weights out"
        )
    return {name: mix.weights.get(name, 0.0) for name in manifest.sources}


def as_settings(values: Mapping[str, object]) -> list[str]:
    """Return settings as on a command line: `KEY=YAML`."""
    return [
        f"{key}={yaml.safe_dump(value, default_flow_style=True, width=1 << 30).strip()}"
        for key, value in values.items()
    ]


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


def train_mixtures(sweep: Sweep, output: TextIO) -> list[TriedMixture]:
    """Train every proxy that is not trained yet, and return all mixtures.

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
    return [
        TriedMixture(number, sweep.mixtures[number], group)
        for number, group in enumerate(groups)
    ]


def train_proxies(
    manifest: ProxyManifest,
    requests: Sequence[Request],
    emit: Subscriber,
    weights: str = "validation",
    target: Weights | None = None,
    server: StageServer | None = None,
) -> list[TrainedGroup]:
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
        the groups in order. Of one that its sources cannot fill the other proxies are
        not trained.
    """
    proxies: dict[Request, Proxy] = {}
    packed: dict[str, Mapping[str, Any]] = {}
    errors: dict[str, str] = {}
    waiting = list(requests)
    while waiting:
        request, session = _next_free(manifest, waiting)
        group = request.group
        waiting.remove(request)
        place = f"{len(requests) - len(waiting)} of {len(requests)}"
        emit(RunNotice(f"training {place}: {group}, seed {request.seed}"))
        try:
            run_in_sequence(session, emit, target, server)
        except StageFailedError as error:
            errors[group] = str(error)
            waiting = [other for other in waiting if other.group != group]
            continue
        proxies[request] = measured(session, request.seed, weights)
        packed.setdefault(group, packed_manifest(session))
    groups = []
    for name in dict.fromkeys(request.group for request in requests):
        if name in errors:
            groups.append(TrainedGroup(name, error=errors[name]))
            continue
        of_group = [proxies[request] for request in requests if request.group == name]
        groups.append(TrainedGroup(name, tuple(of_group), packed[name]))
    return groups


def _next_free(
    manifest: ProxyManifest, waiting: Sequence[Request]
) -> tuple[Request, Session]:
    """Return the first proxy that no other run makes now, else the first one."""
    opened = ((request, manifest.open(request.overrides)) for request in waiting)
    free = (pair for pair in opened if not _is_made_elsewhere(pair[1]))
    return next(free, None) or (waiting[0], manifest.open(waiting[0].overrides))


def _is_made_elsewhere(session: Session) -> bool:
    """True if another run makes the documents, the mixture or the training now."""
    return any(
        running_owner(session.folder(stage).path / "lease") is not None
        for stage in session.plan
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


def sources_read(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries in a packed.json of sources of which tokens are read."""
    realised = packed.get("realised", {}).items()
    return {name: entry for name, entry in realised if entry["tokens"]}


def check_held_out(
    held_out: Mapping[str, ShardEntry],
    target: Weights,
    remedy: str = "raise mix.validation, or remove these sources from --target",
) -> None:
    """Raise SweepError if a mixture holds out no rows of a source of the target."""
    measured = {name for name, entry in held_out.items() if entry["rows"]}
    missing = [name for name in target if target[name] and name not in measured]
    if missing:
        raise SweepError(f"no held-out text of {', '.join(missing)}; {remedy}")


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
    runner = Runner(session, to_all(record.note, emit), server)
    with record.until_end():
        for stage in session.plan:
            if stage == PRETRAIN and target is not None:
                check_held_out(packed_manifest(session)["validation"], target)
            if session.committed(stage) is None:
                runner.run_stage(stage)
