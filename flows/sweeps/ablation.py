"""Ablations: small models trained on variants of a manifest's documents, measured on
the same held-out text.

Every proxy is an ordinary run up to `pretrain`, so that stages which variants share run
once, and an interrupted ablation resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from gristmill.core.files import write_json_lines
from gristmill.dataprep.row_groups import documents_of
from gristmill.flows.running.events import RunNotice, Subscriber
from gristmill.flows.running.run import StageFailedError
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.running.stage_server import StageServer, proxy_server
from gristmill.flows.stages.registry import MIX, TOKENIZER
from gristmill.flows.sweeps.arms import Variant, read_arms
from gristmill.flows.sweeps.grid import (
    SweepError,
    check_names,
    read_settings,
    settings_from,
)
from gristmill.flows.sweeps.proxies import (
    ProxyManifest,
    Request,
    TrainedGroup,
    as_settings,
    check_held_out,
    only_needed,
    packed_manifest,
    run_in_sequence,
    showing_progress,
    sources_read,
    train_proxies,
)
from gristmill.mixtures.loader import anchor
from gristmill.mixtures.scaling.size_rules import take_dial
from gristmill.mixtures.schema.ablation import Ablation, Pool, quick
from gristmill.mixtures.schema.mix import ROW_LENGTH
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.yaml_text import problems_of
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
OTHER_SEEDS, SHUFFLED, DUPLICATED = "other seeds", "shuffled words", "half duplicated"
"""Names of the controls."""
REPEATED_SHARE, COPIES = 0.1, 9
"""In the control with duplicates this share of the documents is read so many times:
half of what it reads are copies. Few documents that are read often harm (Hernandez et
al. 2022), all of them read twice do not (Muennighoff et al. 2023).
"""
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

    @property
    def title(self) -> str:
        """The settings in words."""
        pool = self.pool.replace("_", " ")
        return f"{self.size}, {self.rate} learning rate, {pool}"


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
class TrainedTrial:
    """All trainings of a trial.

    Attributes:
        trial: its settings.
        tokens: of each training.
        arms: the manifest itself and the arms, in order.
        controls: the manifest itself with other seeds, with shuffled words, and with
            few documents read often.
        random_drops: arm -> a random part of the larger of both sets, as large as the
            smaller.
    """

    trial: Trial
    tokens: int
    arms: tuple[TrainedGroup, ...]
    controls: tuple[TrainedGroup, ...]
    random_drops: Mapping[str, TrainedGroup]


@dataclass(frozen=True)
class AblationPlan(ProxyManifest):
    """A planned ablation of a manifest with the user's settings.

    Attributes:
        settings: arms, budget and rule.
        variants: the manifest itself and the arms.
        seeds: seeds of every arm.
        sequence_length: tokens per row.
    """

    settings: Ablation
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
    given = settings.held_out
    domains = given if isinstance(given, dict) else manifest.sources
    tasks = [task["name"] for task in settings.pretrain.get("tasks", ())]
    check_names("decide.target", settings.decide.target, [*domains, *tasks])
    length = ROW_LENGTH if manifest.mix is None else manifest.mix.sequence_length
    plan = AblationPlan(
        manifest_file,
        tuple(overrides),
        store,
        settings,
        tuple(read_arms(settings, manifest_file, overrides)),
        tuple(range(manifest.seed, manifest.seed + settings.seeds)),
        length,
    )
    for variant in plan.variants:
        where = as_settings(
            {
                f"sources.{name}.where": condition
                for name, condition in variant.conditions.items()
                if condition
            }
        )
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
    with (
        showing_progress(output) as emit,
        proxy_server(session.plan, session.manifest.engine) as server,
    ):
        run = AblationRun(plan, emit, server)
        section = session.manifest.tokenizer
        if section is None or section.path is None:
            tokenizing = only_needed(session, TOKENIZER)
            run.run_stages(tokenizing)
            path = tokenizing.folder(TOKENIZER).data / "tokenizer.json"
            run.tokenizer = as_settings({"tokenizer": {"path": str(path)}})
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
    """

    plan: AblationPlan
    emit: Subscriber
    server: StageServer | None = None
    tokenizer: Sequence[str] = ()
    held_out: HeldOut = field(init=False)

    def run_stages(self, session: Session) -> None:
        """Run the stages of a session."""
        run_in_sequence(session, self.emit, server=self.server)

    def train_trial(self, trial: Trial) -> TrainedTrial:
        """Train all arms and controls of a trial."""
        reference, *arms = self.plan.variants
        pool = self._pool_of(trial)
        self.emit(RunNotice(trial.title))
        (first,) = self.train_arms(trial, [(reference, pool)])
        if first.error is not None:
            raise StageFailedError(first.error)
        # The set has no more documents than it reads with their copies, but some.
        num_reads = 1 + REPEATED_SHARE * (COPIES - 1)
        fewer = {
            source: pool.get(source, 1.0)
            * share_read(entry["epochs"] / num_reads, entry["available_tokens"])
            for source, entry in first.sources.items()
        }
        shifted = replace(reference, name=OTHER_SEEDS, shift=len(self.plan.seeds))
        duplicated = replace(
            reference, name=DUPLICATED, copies=COPIES, repeated_share=REPEATED_SHARE
        )
        controls = self.train_arms(
            trial,
            [
                (shifted, pool),
                (replace(reference, name=SHUFFLED, shuffled=True), pool),
                (duplicated, fewer),
            ],
        )
        trained = self.train_arms(trial, [(arm, pool) for arm in arms])
        drops = {
            arm.name: drop
            for arm, group in zip(arms, trained, strict=True)
            if (
                drop := random_drop(
                    reference, arm, first.tokens_kept, group.tokens_kept
                )
            )
        }
        dropped = self.train_arms(trial, [(drop, pool) for drop in drops.values()])
        return TrainedTrial(
            trial,
            self.plan.tokens_of(trial),
            (first, *trained),
            tuple(controls),
            dict(zip(drops, dropped, strict=True)),
        )

    def _pool_of(self, trial: Trial) -> dict[str, float]:
        """Share of each source's documents that may be used, such that the arm that
        keeps most reads each of them once.
        """
        if trial.pool == "equal_tokens":
            return {}
        pool: dict[str, float] = {}
        for variant in self.plan.variants:
            overrides = self.overrides(trial, variant, {}, self.plan.seeds[0])
            mixing = self.plan.open(overrides, MIX)
            try:
                self.run_stages(mixing)
            except StageFailedError:
                continue  # the arm's training reports it
            for source, entry in sources_read(packed_manifest(mixing)).items():
                share = share_read(entry["epochs"], entry["available_tokens"])
                pool[source] = min(pool.get(source, 1.0), share)
        return pool

    def overrides(
        self, trial: Trial, variant: Variant, pool: Mapping[str, float], seed: int
    ) -> list[str]:
        """Settings of a training."""
        held_out = self.held_out
        mix = {
            "tokens": self.plan.tokens_of(trial),
            "sequence_length": self.plan.sequence_length,
            "seed": seed + variant.shift,
            "validation": 0,
            "phases": [],
        }
        settings = {f"mix.{key}": value for key, value in mix.items()} | {
            "merge": None,
            "pretrain": {
                **self.plan.proxy_section(trial),
                "seed": seed + variant.shift,
                "validation_set": str(held_out.packed),
            },
        }
        return [
            *variant.settings(str(held_out.documents), held_out.excluded_below, pool),
            *self.tokenizer,
            *as_settings(settings),
        ]

    def train_arms(
        self, trial: Trial, variants: Sequence[tuple[Variant, Mapping[str, float]]]
    ) -> list[TrainedGroup]:
        """Train arms or controls, each from a pool of documents, with every seed."""
        requests = [
            Request(
                variant.name, seed, tuple(self.overrides(trial, variant, pool, seed))
            )
            for variant, pool in variants
            for seed in self.plan.seeds
        ]
        return train_proxies(
            self.plan, requests, self.emit, "validation_average", server=self.server
        )


def share_read(epochs: float, tokens: int) -> float:
    """Share of a source's documents that have the tokens of less than an epoch, but are
    several documents.
    """
    return min(1.0, max(epochs, LEAST_TOKENS / max(1, tokens)))


def random_drop(
    reference: Variant,
    arm: Variant,
    kept: Mapping[str, int],
    kept_by_arm: Mapping[str, int],
) -> Variant | None:
    """Return the larger of two sets without a random part, so that both have the same
    size; None if no source of both differs in size.
    """
    pairs = ((reference, kept), (arm, kept_by_arm))
    (_, goal), (larger, sizes) = sorted(pairs, key=lambda pair: sum(pair[1].values()))
    drop = {
        source: min(1.0, goal[source] / size)
        for source, size in sizes.items()
        if source in goal
    }
    is_smaller = sum(goal.values()) < (1 - SAME_SIZE) * sum(sizes.values())
    if not is_smaller or min(drop.values(), default=1.0) >= 1 - SAME_SIZE:
        return None
    return replace(larger, name=f"random drop for {arm.name}", drop=drop)


def set_aside(run: AblationRun) -> HeldOut:
    """Pack the held-out documents, and write down their texts.

    Raises:
        SweepError: a source has no held-out rows.
    """
    plan = run.plan
    given = plan.settings.held_out
    settings: dict[str, object] = {
        "prepare": [],
        "pretrain": {"steps": 1},
        "merge": None,
        "mix": {
            "tokens": plan.sequence_length,
            "sequence_length": plan.sequence_length,
            "validation": given if isinstance(given, float) else GIVEN_SHARE,
            # The rows for training are never read, and may be of any source.
            "on_shortfall": "redistribute",
        },
    }
    if isinstance(given, dict):
        settings["sources"] = {
            name: {"path": str(path)} for name, path in given.items()
        }
    session = plan.open([*run.tokenizer, *as_settings(settings)], MIX)
    run.run_stages(session)
    packed = PackedSet(session.folder(MIX).data)
    held_out = packed.manifest["validation"]
    target = plan.settings.decide.target or dict.fromkeys(held_out, 1.0)
    check_held_out(
        held_out,
        {name: target.get(name, 0.0) for name in held_out},
        "raise held_out, or leave it out of decide.target",
    )
    return HeldOut(
        packed.folder,
        _write_documents(session, packed),
        given if isinstance(given, float) else 0.0,
    )


def _write_documents(session: Session, packed: PackedSet) -> Path:
    """Write the texts of the held-out documents as a table with the column `text`."""
    ids: list[bytes] = []
    for source in packed.manifest["validation"]:
        ids += packed.validation_pieces(source)["id"].to_pylist()
    inputs = {INGEST: session.folder(INGEST).data}
    documents = documents_of(inputs, ids, ["text"]).values()
    rows = [{"text": document["text"]} for document in documents]
    folder = session.store.root / ABLATIONS
    path = folder / f"held-out-{session.plan[MIX].identity[:16]}.jsonl"
    if not path.exists():
        write_json_lines(path, rows)
    return path
