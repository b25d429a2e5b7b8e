"""Summaries of stages, with the fields that reports show; fields that a stage did not
measure have defaults.

Shares are from 0 to 1, sizes are bytes of UTF-8, losses are nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gristmill.dataprep.cleaning.found_pii import PersonalData
from gristmill.dataprep.conservation import RuleCounts
from gristmill.dataprep.decontamination.evaluation_sets import SetReport
from gristmill.dataprep.dedup.repeats import Cluster, Repeat, RepeatedUnit
from gristmill.dataprep.examples.kept_examples import PreparedSet
from gristmill.dataprep.examples.preferences import Audit
from gristmill.dataprep.llm.request_counts import GeneratedSource
from gristmill.dataprep.quality.separation import DistilledAgreement
from gristmill.dataprep.readers.document_shards import Loss
from gristmill.flows.pages.page_elements import ByName, Measure
from gristmill.tokenize.encoding.token_report import GroupTokens
from gristmill.tokenize.mixing.mix_summary import MixedPhase
from gristmill.tokenize.packing.packing_cost import PackingCost

Kind = TypeVar("Kind")


_adapters: dict[object, TypeAdapter[Any]] = {}


def read_as(kind: type[Kind], value: object) -> Kind:
    """JSON as an object of a type; keys that the type does not have are ignored."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    adapter: TypeAdapter[Kind] = _adapters[kind]
    return adapter.validate_python(value)


class Summary(BaseModel):
    """A summary, or a part of one."""

    model_config = ConfigDict(frozen=True, defer_build=True)


Row: TypeAlias = ByName[object]
"""Values as a stage wrote them, which a table shows one by one."""


class MetricsLine(TypedDict, total=False):
    """A line of a training's record: measures of a logged step, or of a validation
    after it. Further numbers have separate keys, such as `rewards/chosen`.

    `sources` and `validation` are source -> measures.
    """

    step: int
    loss: float
    label_loss: float
    divergence: float
    reward: float
    bits_per_byte: float
    sources: ByName[ByName[float]]
    validation: ByName[ByName[float]]
    held_out: ByName[float]


Record = Sequence[MetricsLine]
"""The record of a training."""


@dataclass(frozen=True)
class Interval(Measure):
    """A measure of `units` documents, items or pairs, with its interval of 95 %."""

    units: int = 0


@dataclass(frozen=True)
class Counts:
    """Documents of a source that a stage read, kept, dropped by rule, and
    quarantined.
    """

    read: int = 0
    kept: int = 0
    dropped: ByName[int] = field(default_factory=dict)
    quarantined: int = 0
    bytes_kept: int = 0
    tokens_kept: float | None = None


@dataclass(frozen=True)
class StageCounts(Counts):
    """Documents of all sources of a stage: a row of the funnel."""

    stage: str = ""
    sources: ByName[Counts] = field(default_factory=dict)
    tokens_exact: bool = False
    """Tokens are counted, not estimated from bytes."""


class ReaderTally(Summary):
    """The model that scored documents, and the amount of text that it read."""

    model: str
    documents: int
    windows: int
    tokens: int
    cut: int


class Leaks(Summary):
    """Summary of `decontaminate`."""

    sets: ByName[SetReport] = {}
    matches: Sequence[Row] = ()


class Binned(Summary):
    """Numbers of values below the first edge, between edges, and from the last one
    on.
    """

    edges: Sequence[float]
    counts: Sequence[int]


class Domain(Summary):
    """A cluster of documents about one subject, and the middle of them on the map."""

    domain: int
    name: str
    documents: int
    x: float = 0.0
    y: float = 0.0


class StepSummary(Summary):
    """Summary of `ingest` or of a step that judges documents.

    Attributes:
        counts: of its documents.
        rules: rule -> documents that no other rule drops.
        histograms: column -> its values.
        by_language: documents by the language whose rules judged them.
        languages, languages_kept: language -> documents.
        licences, licences_kept: SPDX expression, or `unknown` -> documents.
        edits: changes by rule.
        personal_data: masked values by source and kind.
        code, differs: sentences on the user's code.
        reader: the model that scored documents.
        domains, map, sample: clusters by subject, (x, y, domain) of documents, and
            their number.
        most_repeated, largest_repeats: lines and passages that were cut.
        clusters, cluster_sizes, largest_clusters, dropped_by_rule: of duplicates.
        reserved: opt-out -> documents with it, dropped or not.
        addressed, with_site_text: documents with an address; kind of a text of a site ->
            those with such a text.
        histogram: source -> documents by quality score.
        auc, length_auc, held_out: of a classifier on so many held-out documents, and of
            their length alone.
        distilled: a classifier that learnt from a judge.
        asked, unusable: of a judge.
        generated: sources that a model wrote.
        damaged, lost, quarantined, skipped: files that ended early with their records,
            records that could not be read, and those that are not documents, by kind.
    """

    counts: StageCounts = StageCounts()
    rules: RuleCounts = {}
    histograms: ByName[Binned] = {}
    by_language: ByName[Counts] = {}
    languages: ByName[int] = {}
    languages_kept: ByName[int] | None = None
    licences: ByName[int] = {}
    licences_kept: ByName[int] = {}
    edits: ByName[ByName[int]] = {}
    personal_data: Sequence[PersonalData] = ()
    code: str = ""
    differs: str = ""
    reader: ReaderTally | None = None
    domains: Sequence[Domain] = ()
    map: Sequence[tuple[float, float, int]] = ()
    sample: int = 0
    most_repeated: Sequence[RepeatedUnit] = ()
    largest_repeats: Sequence[Repeat] = ()
    clusters: int = 0
    cluster_sizes: ByName[int] = {}
    largest_clusters: Sequence[Cluster] = ()
    dropped_by_rule: ByName[int] = {}
    reserved: ByName[int] = {}
    addressed: int = 0
    with_site_text: ByName[int] = {}
    histogram: ByName[Sequence[int]] | None = None
    auc: float | None = None
    length_auc: float | None = None
    held_out: int = 0
    distilled: DistilledAgreement | None = None
    asked: Sequence[Row] = ()
    unusable: int = 0
    generated: ByName[GeneratedSource] = {}
    damaged: Sequence[Loss] = ()
    lost: int = 0
    quarantined: Sequence[Row] = ()
    skipped: ByName[int] = {}


class ReadSource(Summary):
    """Summary of a source in `ingest`."""

    formats: Sequence[str] = ()
    crawls: Sequence[ByName[str]] = ()


class ReadSources(Summary):
    """Summary of `ingest`."""

    sources: ByName[ReadSource] = {}


class Tokenized(Summary):
    """Summary of `tokenize`."""

    counts: StageCounts = StageCounts()
    tokens_per_source: ByName[int] = {}
    sources: ByName[GroupTokens] = {}
    languages: ByName[GroupTokens] | None = None
    encoder: str = ""


class LearntTokenizer(Summary):
    """Summary of `tokenizer`; `bytes_per_token` is of text that it did not learn
    from.
    """

    bytes_per_token: ByName[float | None] | None = None


class Requested(Summary):
    """Share of a source in the mixture by its weight, and its limit."""

    share: float
    max_epochs: float
    epochs: str | float | None = None


class Realised(Summary):
    """Tokens, share and epochs of a source in the mixture."""

    tokens: int
    share: float
    epochs: float


class PackedTokenizer(Summary):
    """The tokenizer of a packed set."""

    vocab_size: int = 0


class Packed(Summary):
    """The packed set of a mixture (`packed.json`); `redistributed` is what limits gave
    to or took from a source.
    """

    sources: Sequence[str] = ()
    sequence_length: int = 0
    tokenizer: PackedTokenizer = PackedTokenizer()
    requested: ByName[Requested] = {}
    realised: ByName[Realised] = {}
    redistributed: ByName[int] = {}
    shares: Sequence[MixedPhase] = ()
    packing: str = ""
    packing_cost: PackingCost | None = None


class PreparedStep(Summary):
    """A step that judged examples, and the view of them that it judged."""

    stage: str
    judges: str
    counts: Counts
    sets: ByName[SetReport] = {}
    matches: Sequence[Row] = ()
    biases: Row = {}
    asked: Sequence[Row] = ()


class PreparedExamples(Summary):
    """Summary of `sft_prepare` and `dpo_prepare`."""

    sets: Sequence[PreparedSet] = ()
    steps: Sequence[PreparedStep] = ()


class EncodedSet(Summary):
    """Examples of a set, encoded for a training; shares are of tokens."""

    name: str
    records: int
    refused: int
    unrenderable: int
    dropped: int
    truncated: int
    used: int
    quarantined: int = 0
    prepared_dropped: ByName[int] = {}
    held_out: int = 0
    drawn_share: float = 0.0
    trained_share: float = 0.0
    end_of_turn_share: float = 0.0
    audit: Audit | None = None

    @property
    def dropped_before(self) -> int:
        """Records that the preparation dropped or could not judge."""
        return sum(self.prepared_dropped.values()) + self.quarantined


class Replay(Summary):
    """Rows of pre-training among those of fine-tuning."""

    rows: int = 0
    share: float = 0.0


class TuningData(Summary):
    """Summary of `sft_data` and `dpo_data`; `fill` is the share of rows without
    padding.
    """

    sets: Sequence[EncodedSet] = ()
    rows: int = 0
    sequence_length: int = 0
    fill: float = 0.0
    replay: Replay = Replay()


class StoppedBy(Summary):
    """The callback that ended a training."""

    callback: str
    step: int
    reason: str


class FirstStep(Summary):
    """Checks before the first step: the loss of packed rows and of examples one by one,
    and the distance of accumulated gradients from those of one batch.
    """

    loss: float = 0.0
    loss_unpacked: float = 0.0
    accumulation_difference: float = 0.0


class HeldOut(Summary):
    """Measures on held-out examples after a training; None where its objective has no
    such measure.
    """

    loss: float | None = None
    reward_accuracy_interval: Interval | None = None
    chosen_more_likely_before: float | None = None
    chosen_more_likely_interval: Interval | None = None
    text_accuracy: float | None = None
    mean_f1: float | None = None
    accuracy: Interval | None = None
    longer_chosen: Interval | None = None
    margin: float | None = None
    length_correlation: float | None = None
    mean: float | None = None
    deviation: float | None = None
    reward_before: float = 0.0
    reward: float = 0.0
    difference: Measure | None = None


class MarginPart(Summary):
    """Margins of a set's pairs; `wrong` is the share that is not positive."""

    measured: int
    wrong: float
    median: float


class MarginSet(Summary):
    """Margins of a set of preferences."""

    name: str
    held_out: MarginPart | None = None
    trained: MarginPart | None = None


class WorstMargin(Summary):
    """A pair that a model still ranks wrong."""

    id: str
    set: str
    held_out: bool
    margin: float
    prompt_text: str = ""
    chosen_text: str = ""
    rejected_text: str = ""


class Margins(Summary):
    """Margins after a training (`margins.parquet`); `right` is the share of positive
    ones, of trained and of held-out pairs.
    """

    right: ByName[Interval] = {}
    sets: Sequence[MarginSet] = ()
    worst: Sequence[WorstMargin] = ()


class Decline(Summary):
    """Alarm for chosen answers that keep becoming less likely."""

    alarm_step: int | None = None


class DrawnSet(Summary):
    """Pairs of a set that an epoch draws."""

    name: str = ""
    held_out: int = 0
    drawn: int = 0
    drawn_share: float = 0.0


class RewardedSample(Summary):
    """A held-out prompt with its answers before and after reinforcement learning."""

    prompt: str
    before: str
    reward_before: float
    after: str
    reward: float


class TrainingSummary(Summary):
    """Summary of a training.

    Attributes:
        tokens: that it read.
        stopped_by: the callback that ended it.
        step_0: checks before the first step.
        held_out_before, held_out: measures on held-out examples.
        objective: of preference optimisation.
        margins, chosen_decline: of preferences.
        training_pairs, held_out_pairs, too_long_pairs, held_out_prompts: counts.
        sets: pairs that an epoch draws.
        algorithm, started_from: of reinforcement learning.
        first_rewards, last_rewards: reward -> mean of the first and last logged step.
        samples: answers before and after.
    """

    tokens: int | None = None
    stopped_by: StoppedBy | None = None
    step_0: FirstStep | None = None
    held_out_before: HeldOut | None = None
    held_out: HeldOut | None = None
    objective: str = ""
    margins: Margins | None = None
    chosen_decline: Decline = Decline()
    training_pairs: int = 0
    held_out_pairs: int = 0
    too_long_pairs: int = 0
    held_out_prompts: int = 0
    sets: Sequence[DrawnSet] = ()
    algorithm: str = ""
    started_from: str = ""
    first_rewards: ByName[float] = {}
    last_rewards: ByName[float] = {}
    samples: Sequence[RewardedSample] = ()


class TeacherSummary(Summary):
    """Kept predictions of a teacher; `rest_mass` is the probability of ids that are not
    kept.
    """

    tokens: int
    top_k: int
    rest_mass: float
    temperature: float
    loss: float


class SourceMeasures(Summary):
    """Measures of a model on held-out text of a source: of next tokens, or of hidden
    ones, which an encoder has masked and an encoder-decoder in spans.
    """

    documents: int | None = None
    bits_per_byte: Interval | None = None
    perplexity: Interval | None = None
    token_accuracy: float | None = None
    hidden_loss: float | None = None
    hidden_accuracy: Interval | None = None


class Sample(Summary):
    """A prompt, and the text that a model wrote after it."""

    prompt: str
    completion: str


class SuiteTask(Summary):
    """Accuracy of a model in a task of a suite, and the same with chance at 0."""

    shots: int
    accuracy: Interval
    baseline: float
    centred: Interval
    items: int


class SuiteReference(Summary):
    """A published score."""

    model: str
    score: float
    source: str


class SuiteResult(Summary):
    """Scores of a model in a suite."""

    title: str
    limit: int | None
    score: Interval
    tasks: ByName[SuiteTask]
    references: Sequence[SuiteReference]


class Memorised(Summary):
    """Memorisation of the secrets with one number of copies."""

    copies: int
    read: float
    secrets: int
    exposure: Interval
    extracted: float
    loss: float


class ModelMeasures(Summary):
    """Measurements of a model; `tasks` are counts and metrics by name."""

    sources: ByName[SourceMeasures] = {}
    samples: Sequence[Sample] = ()
    tasks: ByName[ByName[object]] = {}
    suites: ByName[SuiteResult] = {}
    canaries: Sequence[Memorised] = ()


@dataclass(frozen=True)
class Difference(Measure):
    """Difference of two models in a metric of a task."""

    significant: bool = False
    from_: Annotated[str, Field(alias="from")] = ""
    to: str = ""
    task: str = ""
    metric: str = ""


class Evaluation(Summary):
    """Result of `evaluate` (`evaluation.json`); `contamination` is model -> task ->
    counts and metrics by name.
    """

    models: ByName[ModelMeasures] = {}
    differences: Sequence[Difference] = ()
    contamination: ByName[ByName[ByName[object]]] = {}
