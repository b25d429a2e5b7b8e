"""Facts about a run, read from its committed outputs, for the terminal, the UI and the
report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from gristmill.core.files import read_json
from gristmill.core.secrets import mask_text
from gristmill.core.store import StageFolder
from gristmill.flows.pages.page_elements import ByName
from gristmill.flows.questions.find_documents import (
    committed_folders,
    committed_inputs,
)
from gristmill.flows.questions.losses import LossReport, report_losses
from gristmill.flows.questions.spike_documents import spike_reports, with_origins
from gristmill.flows.questions.threshold_samples import Cut, describe_cuts
from gristmill.flows.report.stage_summaries import (
    Evaluation,
    Kind,
    MetricsLine,
    Packed,
    Record,
    StageCounts,
    StepSummary,
    Summary,
    Tokenized,
    TrainingSummary,
    read_as,
)
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, TOKENIZE
from gristmill.flows.stages.stage import Stage
from gristmill.mixtures.schema.sources import INGEST
from gristmill.tokenize.importing.token_sources import corpora


@dataclass(frozen=True)
class Cost:
    """Processor time and memory of a stage."""

    cpu_seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class StageFacts:
    """A committed stage.

    Attributes:
        stage: name in the plan.
        seconds, bytes, cost: of its work and its files.
        versions: library -> version.
    """

    stage: str
    seconds: float
    bytes: int
    cost: Cost | None = None
    versions: ByName[str] = field(default_factory=dict)


@dataclass(frozen=True)
class SpikeReport:
    """A skipped step (train/loop/spike_report.py); `suspects` are ids of documents."""

    step: int
    loss: float | None
    suspects: Sequence[str]
    documents: Sequence[ByName[object]]
    mean: float | None = None


@dataclass
class Facts:
    """Facts about a run; topics whose stage is not committed are empty.

    Attributes:
        name: of the manifest.
        store: its location.
        stages: committed ones.
        summaries: stage -> its summary as JSON; see `summary`.
        funnel: documents after each step.
        losses: of sources, domains and languages.
        training: training -> its record.
        spikes: training -> steps that were skipped for their loss; in the report with
            the origins and judgements of documents.
        cuts: rules that dropped most, of the report alone.
        packed: the mixture.
        evaluation: measurements of models.
    """

    name: str = ""
    store: str = ""
    stages: Sequence[StageFacts] = ()
    summaries: dict[str, ByName[object]] = field(default_factory=dict)
    funnel: Sequence[StageCounts] = ()
    losses: LossReport = field(default_factory=LossReport)
    training: dict[str, Record] = field(default_factory=dict)
    spikes: dict[str, Sequence[SpikeReport]] = field(default_factory=dict)
    cuts: Sequence[Cut] = ()
    packed: Packed | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)

    def summary(self, name: str, kind: type[Kind]) -> Kind:
        """The summary of a stage; one of defaults if it is not committed."""
        return read_as(kind, self.summaries.get(name, {}))

    def step(self, name: str) -> StepSummary:
        """The summary of a step that reads or judges documents."""
        return self.summary(name, StepSummary)

    def trained(self, name: str) -> TrainingSummary:
        """The summary of a training."""
        return self.summary(name, TrainingSummary)


TOPICS: dict[str, type[Summary]] = {"packed": Packed, "evaluation": Evaluation}
"""Topic that a stage writes for every reader (`Stage.topics`) -> its type."""


def read_facts(
    folders: ByName[StageFolder], kinds: ByName[Stage], steps: Iterable[str]
) -> Facts:
    """Facts in committed outputs.

    Args:
        folders: of the stages.
        kinds: descriptions of the stages that wrote them, as far as they are known.
        steps: the names of the steps of `prepare`, in their order.
    """
    facts = Facts()
    stages = []
    for name, folder in folders.items():
        manifest = folder.manifest()
        facts.summaries[name] = manifest["summary"]
        size = sum(file["bytes"] for file in manifest["files"].values())
        cost = read_as(Cost, manifest["cost"]) if "cost" in manifest else None
        stages.append(
            StageFacts(name, manifest["seconds"], size, cost, manifest["versions"])
        )
    facts.stages = stages
    facts.funnel = funnel(facts.summaries, steps)
    for name, kind in kinds.items():
        if name not in folders:
            continue
        if kind.training is not None:
            facts.training[name] = training(folders[name])
            reports = spike_reports(folders[name])
            facts.spikes[name] = read_as(list[SpikeReport], reports)
        for topic, file in kind.topics.items():
            value = read_as(TOPICS[topic], read_json(folders[name].data / file))
            setattr(facts, topic, value)
    return facts


def gather_facts(session: Session, whole: bool = True) -> Facts:
    """Everything that a summary or a report shows.

    Args:
        session: an opened manifest.
        whole: also topics of the report alone, which read the tables of all documents.
    """
    folders = committed_folders(session)
    kinds = {name: node.stage for name, node in session.plan.items()}
    facts = read_facts(folders, kinds, session.manifest.steps)
    facts.name = session.manifest.name
    facts.store = mask_text(str(session.store.root))
    facts.losses = report_losses(session.manifest, facts.summaries)
    if not whole:
        return facts
    inputs = committed_inputs(session)
    if INGEST in inputs:
        facts.cuts = describe_cuts(session, inputs, facts.summaries)
    is_known = MIX in inputs and bool(corpora(inputs))
    for name in facts.spikes:
        if is_known and kinds[name].row_kind == "documents":
            reports = with_origins(spike_reports(folders[name]), inputs[MIX], inputs)
            facts.spikes[name] = read_as(list[SpikeReport], reports)
    return facts


def funnel(
    summaries: ByName[ByName[object]], steps: Iterable[str]
) -> list[StageCounts]:
    """A row per stage that read documents, with tokens: counted after the last stage,
    estimated by source before it.

    Args:
        summaries: of the committed stages.
        steps: the names of the steps of `prepare`, in their order.
    """
    rows = [
        replace(read_as(StageCounts, summaries[name]["counts"]), stage=name)
        for name in (INGEST, *steps)
        if "counts" in summaries.get(name, {})
    ]
    if TOKENIZE not in summaries:
        return rows
    return with_tokens(rows, read_as(Tokenized, summaries[TOKENIZE]))


def with_tokens(rows: Sequence[StageCounts], tokenized: Tokenized) -> list[StageCounts]:
    """The funnel with tokens: counted after the last stage, estimated by source before
    it.
    """
    tokens = tokenized.tokens_per_source
    average = sum(tokens.values()) / max(tokenized.counts.bytes_kept, 1)
    per_byte = {
        name: tokens.get(name, 0) / max(counts.bytes_kept, 1)
        for name, counts in tokenized.counts.sources.items()
    }
    rows_with_tokens = []
    for row in rows:
        is_last = row is rows[-1]
        sources = {}
        for name, counts in row.sources.items():
            estimate = counts.bytes_kept * per_byte.get(name, average)
            kept = tokens.get(name, 0) if is_last else estimate
            sources[name] = replace(counts, tokens_kept=kept)
        total = sum(counts.tokens_kept or 0 for counts in sources.values())
        rows_with_tokens.append(
            replace(row, tokens_exact=is_last, tokens_kept=total, sources=sources)
        )
    return rows_with_tokens


def training(folder: StageFolder) -> list[MetricsLine]:
    """The record of a training so far, without a line that is being written."""
    for part in (folder.data, folder.work):
        path = part / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as lines:
                return [json.loads(line) for line in lines if line.endswith(b"\n")]
    return []
