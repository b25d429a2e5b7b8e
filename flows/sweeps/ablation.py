"""Ablations: small models trained on variants of a manifest's documents, measured on
the same held-out text.

Every proxy is an ordinary run up to `pretrain`, so that stages which variants share run
once, and an interrupted ablation resumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from gristmill.core.files import write_text
from gristmill.dataprep.documents import read_documents, shard_names
from gristmill.flows.running.events import RunNotice, Subscriber
from gristmill.flows.running.run import StageFailedError
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.running.stage_server import StageServer, stage_server
from gristmill.flows.stages.registry import MIX, PRETRAIN, TOKENIZE, TOKENIZER
from gristmill.flows.sweeps.arms import Variant, read_arms
from gristmill.flows.sweeps.grid import SweepError, read_settings, settings_from
from gristmill.flows.sweeps.proxies import (
    Proxy,
    in_one_line,
    measured,
    only_needed,
    packed_manifest,
    run_in_sequence,
    showing_progress,
)
from gristmill.mixtures.loader import anchor
from gristmill.mixtures.scaling.size_rules import take_dial
from gristmill.mixtures.schema.ablation import Ablation, Pool, quick
from gristmill.mixtures.schema.mix import ROW_LENGTH
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.yaml_text import problems_of, unknown_name
from gristmill.tokenize.packed import PackedSet

ABLATIONS = "ablations"
"""Folder of a store with the held-out documents and the first rule of each ablation."""
GIVEN_SHARE = 0.9
"""Share of given held-out documents that are measured: a packed set needs some for
training.
"""
AVERAGED_SHARE = 0.2
"""Share of the steps at the end whose weights are averaged: averages of the last
checkpoints are less noisy ("Signal and noise": Heineman et al. 2025).
"""
SHUFFLED = "shuffled words"
"""Name of a control."""
COPIES = 2
"""Reads of each duplicated document in the control with duplicates."""
LEAST_TOKENS = 20_000
"""Tokens of a source from which on a random part of it has several documents."""
SAME_SIZE = 0.02
"""Relative difference in size up to which an arm has no random drop as a control."""


@dataclass(frozen=True)
class Trial:
    """Settings that trainings of one comparison share: pool, size and learning rate."""

    pool: Pool
    size: str
    rate: str


@dataclass(frozen=True)
class HeldOut:
    """Held-out text.

    Attributes:
        packed: folder of the packed set whose held-out rows are measured.
        documents: file with the text of these documents.
        excluded_below: documents of the manifest with a smaller draw are not trained on.
    """

    packed: Path
    documents: Path
    excluded_below: float


@dataclass(frozen=True)
class TrainedArm:
    """Trainings of an arm, or of a control, in one trial.

    Attributes:
        arm: name.
        tokens_kept: tokens of one pass over its documents, by source.
        epochs: source -> passes over its documents.
        proxies: trainings, one per seed.
        error: reason why its documents cannot be mixed or trained on.
    """

    arm: str
    tokens_kept: Mapping[str, int]
    epochs: Mapping[str, float]
    proxies: tuple[Proxy, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class TrainedTrial:
    """All trainings of a trial.

    Attributes:
        trial: its settings.
        tokens: of each training.
        arms: the manifest itself and the arms, in order.
        same: the manifest itself with other seeds.
        shuffled: with shuffled words.
        duplicated: with half of the documents read twice.
        random_drops: arm -> a random part of the larger of both sets, as large as the
            smaller.
    """

    trial: Trial
    tokens: int
    arms: tuple[TrainedArm, ...]
    same: TrainedArm
    shuffled: TrainedArm
    duplicated: TrainedArm
    random_drops: Mapping[str, TrainedArm]

    @property
    def every_arm(self) -> list[TrainedArm]:
        """All arms and controls."""
        controls = (self.same, self.shuffled, self.duplicated)
        return [*self.arms, *self.random_drops.values(), *controls]


@dataclass(frozen=True)
class AblationPlan:
    """A planned ablation.

    Attributes:
        settings: arms, budget and rule.
        manifest_file: the manifest.
        overrides: the user's settings.
        store: folder or URL of the outputs, as the user wrote it.
        variants: the manifest itself and the arms.
        seeds: seeds of every arm.
        sequence_length: tokens per row.
    """

    settings: Ablation
    manifest_file: str
    overrides: tuple[str, ...]
    store: str | None
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    sequence_length: int

    @property
    def trials(self) -> list[Trial]:
        """Comparisons, the deciding size last."""
        return [
            Trial(pool, size, rate)
            for pool in self.settings.pools
            for size in self.settings.sizes
            for rate in self.settings.rates
        ]

    @property
    def num_trainings(self) -> int:
        """Largest number of trainings: some arms have no random drop."""
        arms = 2 * len(self.variants) - 1 + 3
        return len(self.trials) * arms * len(self.seeds)

    def open(self, overrides: Sequence[str], until: str) -> Session:
        """Open a session up to a stage, without stages that it does not need."""
        session = open_session(
            self.manifest_file,
            [*self.overrides, *overrides],
            self.store,
            until=until,
            exactly=True,
        )
        return only_needed(session, until)

    def proxy_section(self, trial: Trial) -> dict[str, Any]:
        """Section `pretrain` of a trial, without seed and held-out set."""
        dialled = take_dial(
            {
                **self.settings.pretrain,
                "size": trial.size,
                "tokens_per_parameter": self.settings.tokens_per_parameter,
            },
            self.sequence_length,
        )
        try:
            tuned = Pretrain.model_validate(dialled).optimizer.learning_rate
        except ValidationError as error:
            raise SweepError(f"pretrain: {problems_of(error)}") from error
        section = {
            key: value
            for key, value in dialled.items()
            if key not in ("size", "tokens_per_parameter")
        }
        # The weight decay stays: it was derived from the rate before the factor.
        rate = tuned * self.settings.rates[trial.rate]
        return {
            **section,
            "optimizer": {**section.get("optimizer", {}), "learning_rate": rate},
            "validate_every": section["steps"],
            "average": {"kind": "swa", "start_fraction": 1 - AVERAGED_SHARE},
        }

    def tokens_of(self, trial: Trial) -> int:
        """Tokens that a training of a trial reads."""
        section = self.proxy_section(trial)
        rows: int = section["steps"] * section["global_batch_size"]
        return rows * self.sequence_length

    def proxy_settings(
        self, trial: Trial, seed: int, held_out: HeldOut, tokenizer: Sequence[str]
    ) -> list[str]:
        """Settings of a training besides those of its documents."""
        section = {
            **self.proxy_section(trial),
            "seed": seed,
            "validation_set": str(held_out.packed),
        }
        return [
            *tokenizer,
            f"mix.tokens={self.tokens_of(trial)}",
            f"mix.sequence_length={self.sequence_length}",
            f"mix.seed={seed}",
            "mix.validation=0",
            "mix.phases=[]",
            "merge=null",
            f"pretrain={in_one_line(section)}",
        ]


def plan_ablation(
    settings: Ablation,
    manifest_file: str,
    overrides: Sequence[str],
    store: str | None,
) -> AblationPlan:
    """Plan an ablation, and check all arms before any stage runs.

    Args:
        settings: arms, budget and rule.
        manifest_file: the manifest.
        overrides: settings that replace the manifest's, in all arms.
        store: folder or URL of the outputs.

    Raises:
        SweepError: an arm, or a source of the target, does not exist.
        gristmill.mixtures.loader.ManifestError: the manifest or an arm is invalid.
    """
    manifest = open_session(manifest_file, list(overrides), store).manifest
    domains = (
        list(settings.held_out)
        if isinstance(settings.held_out, dict)
        else list(manifest.sources)
    )
    names = [*domains, *(task["name"] for task in settings.pretrain.get("tasks", ()))]
    unknown = [name for name in settings.decide.target if name not in names]
    if unknown:
        raise SweepError(
            "decide.target: no such held-out source or task: "
            f"{unknown_name(unknown[0], names)}"
        )
    length = ROW_LENGTH if manifest.mix is None else manifest.mix.sequence_length
    plan = AblationPlan(
        settings,
        manifest_file,
        tuple(overrides),
        store,
        tuple(read_arms(settings, manifest_file, overrides)),
        tuple(range(manifest.seed, manifest.seed + settings.seeds)),
        length,
    )
    for variant in plan.variants:
        where = [
            f"sources.{name}.where={in_one_line(condition)}"
            for name, condition in variant.conditions.items()
            if condition
        ]
        tokens = f"mix.tokens={plan.tokens_of(plan.trials[0])}"
        plan.open([*variant.overrides, *where, tokens], MIX)
    return plan


def read_ablation(
    arms: Path | Mapping[str, Any] | None, each_rule: bool, is_quick: bool
) -> Ablation:
    """Read the settings of an ablation, or take the defaults without a file.

    Args:
        arms: the file, or its content.
        each_rule: compare the rule sets of the filters.
        is_quick: replace the budget by the smallest one.

    Raises:
        SweepError: the file cannot be read, or has other keys.
    """
    if isinstance(arms, Path):
        settings, folder = read_settings(arms, Ablation), arms.resolve().parent
    else:
        settings, folder = settings_from("arms", arms or {}, Ablation), Path.cwd()
    settings = anchor(settings, folder)
    if each_rule:
        settings = settings.model_copy(update={"each_rule": True})
    return quick(settings) if is_quick else settings


def run_ablation(plan: AblationPlan, output: TextIO) -> list[TrainedTrial]:
    """Train every proxy that is not trained yet.

    Args:
        plan: the planned ablation.
        output: stream of the progress display.

    Raises:
        StageFailedError: a stage that all arms share failed.
        KeyboardInterrupt: the user pressed Ctrl+C or SIGTERM arrived; the same call
            resumes the ablation.
        SweepError: a source has no held-out text.
    """
    with prepared_run(plan, output) as run:
        return [run.train_trial(trial) for trial in plan.trials]


@contextmanager
def prepared_run(plan: AblationPlan, output: TextIO) -> Iterator[AblationRun]:
    """Make the shared tokenizer, set text aside, and show the progress of the block."""
    tokens = f"mix.tokens={plan.tokens_of(plan.trials[0])}"
    session = plan.open([tokens], MIX)
    engine = session.manifest.engine
    with (
        showing_progress(output) as emit,
        stage_server(session.plan, session.plan, engine) as server,
    ):
        run = AblationRun(plan, emit, server)
        section = session.manifest.tokenizer
        if section is None or section.path is None:
            run.run_stages(only_needed(session, TOKENIZER))
            path = session.folder(TOKENIZER).data / "tokenizer.json"
            run.tokenizer = (f"tokenizer={in_one_line({'path': str(path)})}",)
        run.held_out = set_aside(run)
        yield run


@dataclass
class AblationRun:
    """An ablation with its tokenizer and held-out text.

    Attributes:
        plan: the ablation.
        emit: receives progress.
        server: starts stages.
        tokenizer: settings of the tokenizer that all arms share.
        held_out: text that is measured.
        trained: number of trainings so far.
    """

    plan: AblationPlan
    emit: Subscriber
    server: StageServer | None = None
    tokenizer: tuple[str, ...] = ()
    held_out: HeldOut = field(init=False)
    trained: int = 0

    def run_stages(self, session: Session, after: str | None = None) -> None:
        """Run the stages of a session that follow `after`."""
        run_in_sequence(session, self.emit, after, server=self.server)

    def train_trial(self, trial: Trial) -> TrainedTrial:
        """Train all arms and controls of a trial."""
        reference, *arms = self.plan.variants
        pool = self._pool_of(trial)
        trained = [self._train(trial, arm, pool) for arm in (reference, *arms)]
        if trained[0].error is not None:
            raise StageFailedError(trained[0].error)
        kept = trained[0].tokens_kept
        tokens = self.plan.tokens_of(trial)
        random_drops = {}
        for arm, outcome in zip(arms, trained[1:], strict=True):
            drop = random_drop(reference, arm, kept, outcome.tokens_kept)
            if drop is not None:
                random_drops[arm.name] = self._train(trial, drop, pool)
        # The set has no more documents than it reads with their copies, but some.
        fewer = {
            source: pool.get(source, 1.0)
            * min(
                1.0,
                max(
                    epochs * 2 / (1 + COPIES),
                    LEAST_TOKENS / max(1, kept[source]),
                ),
            )
            for source, epochs in trained[0].epochs.items()
        }
        controls = (
            (replace(reference, name="other seeds", shift=len(self.plan.seeds)), pool),
            (replace(reference, name=SHUFFLED, shuffled=True), pool),
            (replace(reference, name="half duplicated", copies=COPIES), fewer),
        )
        same, shuffled, duplicated = (
            self._train(trial, control, part) for control, part in controls
        )
        return TrainedTrial(
            trial, tokens, tuple(trained), same, shuffled, duplicated, random_drops
        )

    def _pool_of(self, trial: Trial) -> dict[str, float]:
        """Share of each source's documents that may be used, such that the arm that
        keeps most reads each of them once.
        """
        if trial.pool == "equal_tokens":
            return {}
        pool: dict[str, float] = {}
        for variant in self.plan.variants:
            session = self.open(trial, variant, {}, self.plan.seeds[0])
            mixing = only_needed(session, MIX)
            try:
                self.run_stages(mixing)
            except StageFailedError:
                continue  # the arm's training reports it
            for source, entry in packed_manifest(mixing)["realised"].items():
                pool[source] = min(pool.get(source, 1.0), entry["epochs"] or 1.0)
        return pool

    def open(
        self,
        trial: Trial,
        variant: Variant,
        pool: Mapping[str, float],
        seed: int,
        further: Sequence[str] = (),
    ) -> Session:
        """Open the session of a training, with further settings."""
        held_out = self.held_out
        settings = [
            *variant.settings(str(held_out.documents), held_out.excluded_below, pool),
            *self.plan.proxy_settings(
                trial, seed + variant.shift, held_out, self.tokenizer
            ),
        ]
        return self.plan.open([*settings, *further], PRETRAIN)

    def _train(
        self, trial: Trial, variant: Variant, pool: Mapping[str, float]
    ) -> TrainedArm:
        """Train an arm with every seed."""
        outcome = TrainedArm(variant.name, {}, {})
        for seed in self.plan.seeds:
            self.trained += 1
            self.emit(
                RunNotice(
                    f"training {self.trained} of at most {self.plan.num_trainings}: "
                    f"{variant.name}, seed {seed}, {trial.size}, {trial.rate} rate"
                )
            )
            session = self.open(trial, variant, pool, seed)
            try:
                self.run_stages(session, TOKENIZE if outcome.proxies else None)
            except StageFailedError as error:
                return replace(outcome, error=str(error))
            realised = packed_manifest(session)["realised"]
            if not outcome.proxies:
                outcome = replace(
                    outcome,
                    tokens_kept={
                        source: entry["available_tokens"]
                        for source, entry in realised.items()
                    },
                    epochs={
                        source: entry["epochs"] for source, entry in realised.items()
                    },
                )
            proxy = measured(session, seed, "validation_average")
            outcome = replace(outcome, proxies=(*outcome.proxies, proxy))
        return outcome


def random_drop(
    reference: Variant,
    arm: Variant,
    kept: Mapping[str, int],
    kept_by_arm: Mapping[str, int],
) -> Variant | None:
    """Return the larger of two sets without a random part, so that both have the same
    size; None if their sizes are equal.
    """
    total, total_of_arm = sum(kept.values()), sum(kept_by_arm.values())
    if not total_of_arm or abs(total_of_arm / total - 1) <= SAME_SIZE:
        return None
    larger, sizes, goal = reference, kept, kept_by_arm
    if total_of_arm > total:
        larger, sizes, goal = arm, kept_by_arm, kept
    drop = {
        source: min(1.0, goal.get(source, 0) / size)
        for source, size in sizes.items()
        if size and goal.get(source)
    }
    return replace(larger, name=f"random drop for {arm.name}", drop=drop)


def set_aside(run: AblationRun) -> HeldOut:
    """Pack the held-out documents, and write down their texts.

    Raises:
        SweepError: a source has no held-out rows.
    """
    plan = run.plan
    given = plan.settings.held_out
    is_share = isinstance(given, float)
    settings = [
        *run.tokenizer,
        "prepare=[]",
        "pretrain={steps: 1}",
        "merge=null",
        f"mix={in_one_line(_held_out_mix(plan))}",
    ]
    if isinstance(given, dict):
        sources = {name: {"path": str(path)} for name, path in given.items()}
        settings.append(f"sources={in_one_line(sources)}")
    session = plan.open(settings, MIX)
    run.run_stages(session)
    packed = PackedSet(session.folder(MIX).data)
    rows = {
        source: entry["rows"] for source, entry in packed.manifest["validation"].items()
    }
    missing = [
        name
        for name in plan.settings.decide.target or rows
        if name in rows and not rows[name]
    ]
    if missing:
        raise SweepError(
            f"no held-out text of {', '.join(missing)}; raise held_out, or leave it out "
            "of decide.target"
        )
    return HeldOut(
        packed.folder,
        _write_documents(session, packed),
        given if is_share else 0.0,  # type: ignore[arg-type]
    )


def _held_out_mix(plan: AblationPlan) -> dict[str, Any]:
    given = plan.settings.held_out
    return {
        "tokens": plan.sequence_length,
        "sequence_length": plan.sequence_length,
        "validation": given if isinstance(given, float) else GIVEN_SHARE,
        # The rows for training are never read, and may be of any source.
        "on_shortfall": "redistribute",
    }


def _write_documents(session: Session, packed: PackedSet) -> Path:
    """Write the texts of the held-out documents as a table with the column `text`."""
    ids = pa.chunked_array(
        [
            packed.validation_pieces(source)["id"].combine_chunks()
            for source in packed.manifest["validation"]
        ]
    ).unique()
    inputs = {INGEST: session.folder(INGEST).data}
    texts = []
    for shard in shard_names(inputs[INGEST]):
        table = read_documents(inputs, shard, ["id", "text"])
        texts += table.filter(pc.is_in(table["id"], ids))["text"].to_pylist()
    folder = session.store.root / ABLATIONS
    path = folder / f"held-out-{session.plan[MIX].identity[:16]}.jsonl"
    if not path.exists():
        write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
