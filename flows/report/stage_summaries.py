"""Summaries that stages wrote, as readers of them need them: what nobody shows is left
out, and what a stage did not measure has its default.

Shares are from 0 to 1, sizes are bytes of UTF-8, losses are nats per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict, TypeVar

from pydantic import Field, TypeAdapter

from gristmill.flows.pages.dot_map import Domain
from gristmill.flows.pages.page_elements import Measure

Kind = TypeVar("Kind")


_adapters: dict[object, TypeAdapter[Any]] = {}


def read_as(kind: type[Kind], value: object) -> Kind:
    """JSON as an object of a type; keys that the type does not have are ignored."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    adapter: TypeAdapter[Kind] = _adapters[kind]
    return adapter.validate_python(value)


class MetricsLine(TypedDict, total=False):
    """A line of a training's record: measures of a logged step, or of a validation
    after it. Further numbers have keys of their own, such as `rewards/chosen`.

    `sources` and `validation` are source -> measures.
    """

    step: int
    loss: float
    label_loss: float
    divergence: float
    reward: float
    bits_per_byte: float
    sources: Mapping[str, Mapping[str, float]]
    validation: Mapping[str, Mapping[str, float]]
    held_out: Mapping[str, float]


Record = Sequence[MetricsLine]
"""The record of a training."""


@dataclass(frozen=True)
class Interval(Measure):
    """A measure of `units` documents, items or pairs, with its interval of 95 %."""

    units: int = 0


@dataclass(frozen=True)
class Bounds:
    """An interval of 95 % beside the value that it is of."""

    low: float
    high: float


def measure_of(value: float | None, bounds: Bounds | Interval | None) -> Measure | None:
    """A value with its interval; None without a value."""
    if value is None:
        return None
    return Measure(value) if bounds is None else Measure(value, bounds.low, bounds.high)


@dataclass(frozen=True)
class Counts:
    """Documents of a source that a stage read, kept, dropped by rule, and
    quarantined.
    """

    read: int = 0
    kept: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
    bytes_kept: int = 0
    tokens_kept: float | None = None


@dataclass(frozen=True)
class StageCounts(Counts):
    """Documents of all sources of a stage: a row of the funnel."""

    stage: str = ""
    sources: Mapping[str, Counts] = field(default_factory=dict)
    tokens_exact: bool = False
    """Tokens are counted, not estimated from bytes."""


@dataclass(frozen=True)
class Binned:
    """Numbers of values below the first edge, between edges, and from the last one
    on.
    """

    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True)
class RuleTally:
    """Documents that fail a rule and no other one."""

    only: int


@dataclass(frozen=True)
class EditTally:
    """Changes of a rule of cleaning; `bytes` are those that it took out."""

    documents: int
    times: int
    bytes: int


@dataclass(frozen=True)
class ReaderTally:
    """The model that scored documents, and how much of them it read."""

    model: str
    documents: int
    windows: int
    tokens: int
    cut: int


@dataclass(frozen=True)
class RepeatedText:
    """A line or a passage that was cut, and how often it stands in documents."""

    text: str
    documents: int = 0
    copies: int = 0
    words: int = 0


@dataclass(frozen=True)
class Cluster:
    """A large cluster of duplicates; `survivor` is an id."""

    survivor: str
    size: int
    locator: str = ""


@dataclass(frozen=True)
class LeakedSet:
    """Items of an evaluation set that documents hold."""

    items: int
    checked: int
    contaminated: int
    contaminated_share: float = 0.0


@dataclass(frozen=True)
class LeakedItem:
    """An item of an evaluation set, and the document that holds it."""

    set: str
    item: str | int
    item_text: str | int | float
    contamination: float
    source: str
    locator: str


@dataclass(frozen=True)
class Leaks:
    """Summary of `decontaminate`."""

    sets: Mapping[str, LeakedSet] = field(default_factory=dict)
    matches: Sequence[LeakedItem] = ()


@dataclass(frozen=True)
class RequestTally:
    """Requests to a language model."""

    model: str = ""
    asked: int = 0
    kept: int = 0
    retried: int = 0
    repaired: int = 0
    unusable: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    money: float | None = None


@dataclass(frozen=True)
class Agreement:
    """Agreement of two judges; a statistic is None where it is undefined."""

    documents: int
    same: float | None = None
    kappa: float | None = None
    weighted_kappa: float | None = None
    correlation: float | None = None
    difference: float | None = None


@dataclass(frozen=True)
class Diversity:
    """Lengths and diversity of a sample of generated texts (dataprep/llm)."""

    sampled: int
    characters: Sequence[int] = ()
    distinct: Mapping[str, float | None] = field(default_factory=dict)
    self_similarity: float | None = None
    parent_self_similarity: float | None = None
    parent_similarity: float | None = None


@dataclass(frozen=True)
class Separation:
    """Precision and recall of a classifier at a cut."""

    cut: float
    f1: float
    precision: float = 0.0
    recall: float = 0.0


@dataclass(frozen=True)
class Confusion:
    """Documents by what the judge and what the classifier said of them."""

    good_kept: int
    good_dropped: int
    other_kept: int
    other_dropped: int


@dataclass(frozen=True)
class CalibrationBin:
    """Documents whose score begins at `from_`, and what the judge said of them."""

    from_: Annotated[float, Field(alias="from")]
    documents: int
    score: float
    good: float


@dataclass(frozen=True)
class Distilled:
    """A classifier that learnt from a judge, measured on held-out documents."""

    sample: int
    good: int
    learnt: int
    held_out: int
    auc: float
    at_cut: Separation
    best: Separation
    confusion: Confusion
    calibration: Sequence[CalibrationBin]


@dataclass(frozen=True)
class GeneratedSource:
    """Yield of a source whose documents a model wrote."""

    style: str
    made_from: Sequence[str]
    parents: int
    used: int
    requests: int
    kept: int
    dropped: Mapping[str, int]
    quarantined: int
    bytes: int
    texts: Diversity
    asked: RequestTally


@dataclass(frozen=True)
class DamagedFile:
    """A file that could not be read to its end; `lost` is estimated."""

    file: str
    lost: int
    source: str = ""
    records: int = 0
    error: str = ""


@dataclass(frozen=True)
class QuarantinedRecord:
    """A record that could not be read."""

    file: str
    error: str
    record: str | int | None = None


@dataclass(frozen=True)
class StepSummary:
    """Summary of `ingest` or of a step that judges documents.

    Attributes:
        counts: of its documents.
        rules: rule -> documents that no other rule drops.
        histograms: column -> its values.
        by_language: documents by the language whose rules judged them.
        languages, languages_kept: language -> documents.
        edits: changes by rule.
        code, differs: sentences on the user's code.
        reader: the model that scored documents.
        domains, map, sample: clusters by subject, (x, y, domain) of documents, and
            their number.
        most_repeated, largest_repeats: lines and passages that were cut.
        clusters, largest_clusters, dropped_by_rule: of duplicates.
        histogram: source -> documents by quality score.
        auc, length_auc, held_out: of a classifier on so many held-out documents, and of
            their length alone.
        distilled: a classifier that learnt from a judge.
        asked, unusable, agreement: of judges.
        generated: sources that a model wrote.
        damaged, lost, quarantined, skipped: files that ended early with their records,
            records that could not be read, and those that are not documents, by kind.
    """

    counts: StageCounts = StageCounts()
    rules: Mapping[str, RuleTally] = field(default_factory=dict)
    histograms: Mapping[str, Binned] = field(default_factory=dict)
    by_language: Mapping[str, Counts] = field(default_factory=dict)
    languages: Mapping[str, int] = field(default_factory=dict)
    languages_kept: Mapping[str, int] | None = None
    edits: Mapping[str, EditTally] = field(default_factory=dict)
    code: str = ""
    differs: str = ""
    reader: ReaderTally | None = None
    domains: Sequence[Domain] = ()
    map: Sequence[tuple[float, float, int]] = ()
    sample: int = 0
    most_repeated: Sequence[RepeatedText] = ()
    largest_repeats: Sequence[RepeatedText] = ()
    clusters: int = 0
    largest_clusters: Sequence[Cluster] = ()
    dropped_by_rule: Mapping[str, int] = field(default_factory=dict)
    histogram: Mapping[str, Sequence[int]] | None = None
    auc: float | None = None
    length_auc: float | None = None
    held_out: int = 0
    distilled: Distilled | None = None
    asked: Sequence[RequestTally] = ()
    unusable: int = 0
    agreement: Mapping[str, Agreement] | None = None
    generated: Mapping[str, GeneratedSource] = field(default_factory=dict)
    damaged: Sequence[DamagedFile] = ()
    lost: int = 0
    quarantined: Sequence[QuarantinedRecord] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenGroup:
    """Fit of a tokenizer to the documents of a source or a language."""

    documents: int
    bytes: int
    tokens: int
    bytes_per_token: float | None
    characters_per_token: float | None
    tokens_per_word: float | None


@dataclass(frozen=True)
class TokenCount:
    """A token of a vocabulary, its bytes, and how often it occurs."""

    text: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Vocabulary:
    """Use of a vocabulary."""

    size: int = 0
    used: int = 0
    never_used: int = 0
    used_share: float = 0.0
    single_byte_share: float = 0.0
    most_frequent: Sequence[TokenCount] = ()
    longest: Sequence[TokenCount] = ()


@dataclass(frozen=True)
class Tokenized:
    """Summary of `tokenize`."""

    counts: StageCounts = StageCounts()
    tokens_per_source: Mapping[str, int] = field(default_factory=dict)
    vocabulary: Vocabulary | None = None
    sources: Mapping[str, TokenGroup] = field(default_factory=dict)
    languages: Mapping[str, TokenGroup] | None = None
    encoder: str = ""


@dataclass(frozen=True)
class LearntTokenizer:
    """Summary of `tokenizer`; `bytes_per_token` is of text that it did not learn
    from.
    """

    model: str | None = None
    bytes_per_token: Mapping[str, float | None] | None = None


@dataclass(frozen=True)
class Drift:
    """Largest distance of a prefix of the training order from the mixture, in rows."""

    largest_drift_rows: float
    bound_rows: float


@dataclass(frozen=True)
class MixSummary:
    """Summary of `mix`."""

    prefixes: Mapping[str, Drift] = field(default_factory=dict)


@dataclass(frozen=True)
class Requested:
    """Share of a source in the mixture by its weight, and its limits."""

    share: float
    max_epochs: float
    min_tokens: int | None = None
    max_tokens: int | None = None
    epochs: str | float | None = None


@dataclass(frozen=True)
class Realised:
    """Tokens, share and epochs of a source in the mixture."""

    tokens: int
    share: float
    epochs: float


@dataclass(frozen=True)
class MixturePhase:
    """Shares of sources up to a share of the training."""

    until: float
    tokens: int
    requested: Mapping[str, float]
    realised: Mapping[str, float]


@dataclass(frozen=True)
class PackingCosts:
    """Rows of a packing, and the tokens that they hold, cut, drop and pad."""

    rows: int
    tokens: int
    padding_tokens: int
    dropped_tokens: int
    documents: int
    split_documents: int
    split_tokens: int


@dataclass(frozen=True)
class PackedTokenizer:
    """The tokenizer of a packed set."""

    vocab_size: int = 0


@dataclass(frozen=True)
class Packed:
    """The packed set of a mixture (`packed.json`); `redistributed` is what limits gave
    to or took from a source.
    """

    sources: Sequence[str] = ()
    sequence_length: int = 0
    tokenizer: PackedTokenizer = PackedTokenizer()
    requested: Mapping[str, Requested] = field(default_factory=dict)
    realised: Mapping[str, Realised] = field(default_factory=dict)
    redistributed: Mapping[str, int] = field(default_factory=dict)
    shares: Sequence[MixturePhase] = ()
    packing: str = ""
    packings: Mapping[str, PackingCosts] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardSpread:
    """Rewards of answers: their mean, and percentiles 10, 50 and 90."""

    answers: int
    mean: float
    percentiles: Sequence[float]


@dataclass(frozen=True)
class GrownPrompts:
    """Prompts that a model wrote."""

    kept: int
    rounds: int
    requests: int
    dropped: Mapping[str, int]


@dataclass(frozen=True)
class AnswerCounts:
    """Answers that a model was asked for."""

    asked: int
    dropped: Mapping[str, int]


@dataclass(frozen=True)
class MadeExamples:
    """Summary of a set of examples that a model wrote; `gives` is what they are."""

    gives: str
    examples: int
    prompts: Counts
    answers: AnswerCounts
    texts: Diversity
    rewards: Mapping[str, RewardSpread]
    asked: Sequence[RequestTally]
    principles: Mapping[str, int] | None = None
    licences: Sequence[str] = ()
    grown: GrownPrompts | None = None


@dataclass(frozen=True)
class PreparedSet:
    """Records of a set that were refused, left out, dropped by rule, and kept."""

    name: str
    records: int
    refused: int
    quarantined: int
    beyond_limit: int
    kept: int
    dropped: Mapping[str, int]


@dataclass(frozen=True)
class PairBias:
    """Shares of pairs by what a judge preferred, None without pairs."""

    model: str
    pairs: int
    decided: float | None
    confirmed: float | None
    first_taken: float | None
    longer_taken: float | None
    longer_chosen: float | None


@dataclass(frozen=True)
class PreparedStep:
    """A step that judged examples, and the view of them that it judged."""

    stage: str
    judges: str
    counts: Counts
    sets: Mapping[str, LeakedSet] = field(default_factory=dict)
    matches: Sequence[LeakedItem] = ()
    biases: Sequence[PairBias] = ()
    agreement: Agreement | None = None
    asked: Sequence[RequestTally] = ()


@dataclass(frozen=True)
class PreparedExamples:
    """Summary of `sft_prepare` and `dpo_prepare`."""

    sets: Sequence[PreparedSet] = ()
    steps: Sequence[PreparedStep] = ()


@dataclass(frozen=True)
class PairLeak:
    """Items of an evaluation set that pairs hold."""

    items: int
    leaked: int
    texts: int


@dataclass(frozen=True)
class PairAudit:
    """Defects of a set of preferences."""

    pairs: int
    prompts: int
    duplicates: int
    contradictions: int
    near_identical: int
    same_answers: int
    longer_chosen: float | None
    leaks: Mapping[str, PairLeak] | None = None


@dataclass(frozen=True)
class EncodedSet:
    """Examples of a set, encoded for a training; shares are of tokens."""

    name: str
    records: int
    refused: int
    unrenderable: int
    dropped: int
    truncated: int
    used: int
    quarantined: int = 0
    prepared_dropped: Mapping[str, int] = field(default_factory=dict)
    held_out: int = 0
    drawn_share: float = 0.0
    trained_share: float = 0.0
    end_of_turn_share: float = 0.0
    audit: PairAudit | None = None

    @property
    def dropped_before(self) -> int:
        """Records that the preparation dropped or could not judge."""
        return sum(self.prepared_dropped.values()) + self.quarantined


@dataclass(frozen=True)
class MaskedSample:
    """An example in spans, each with whether it is trained on."""

    set: str
    example: str
    spans: Sequence[tuple[str, bool]]


@dataclass(frozen=True)
class Replay:
    """Rows of pre-training among those of fine-tuning."""

    rows: int = 0
    share: float = 0.0


@dataclass(frozen=True)
class TuningData:
    """Summary of `sft_data` and `dpo_data`; `fill` is the share of rows without
    padding.
    """

    sets: Sequence[EncodedSet] = ()
    samples: Sequence[MaskedSample] = ()
    rows: int = 0
    sequence_length: int = 0
    fill: float = 0.0
    replay: Replay = Replay()


@dataclass(frozen=True)
class StoppedBy:
    """The callback that ended a training."""

    callback: str
    step: int
    reason: str


@dataclass(frozen=True)
class FirstStep:
    """Checks before the first step: the loss of packed rows and of examples one by one,
    and the distance of accumulated gradients from those of one batch.
    """

    loss: float = 0.0
    loss_unpacked: float = 0.0
    accumulation_difference: float = 0.0


@dataclass(frozen=True)
class HeldOut:
    """Measures on held-out examples after a training; None where its objective has no
    such measure.
    """

    loss: float | None = None
    reward_accuracy: float | None = None
    reward_accuracy_interval: Interval | None = None
    chosen_more_likely: float | None = None
    chosen_more_likely_before: float | None = None
    chosen_more_likely_interval: Interval | None = None
    ranked_right: float | None = None
    ranked_right_interval: Interval | None = None
    accuracy: Interval | None = None
    longer_chosen: Interval | None = None
    margin: float | None = None
    length_correlation: float | None = None
    mean: float | None = None
    deviation: float | None = None
    reward_before: float = 0.0
    reward: float = 0.0
    difference: Measure | None = None


@dataclass(frozen=True)
class MarginPart:
    """Margins of a set's pairs; `wrong` is the share that is not positive."""

    measured: int
    wrong: float
    median: float


@dataclass(frozen=True)
class MarginSet:
    """Margins of a set of preferences."""

    name: str
    held_out: MarginPart | None = None
    trained: MarginPart | None = None


@dataclass(frozen=True)
class WorstMargin:
    """A pair, or a single answer, that a model still ranks wrong."""

    id: str
    set: str
    held_out: bool
    margin: float
    rejected: float | None = None
    prompt_text: str = ""
    chosen_text: str = ""
    rejected_text: str = ""
    completion_text: str | None = None


@dataclass(frozen=True)
class Margins:
    """Margins after a training (`margins.parquet`); `right` is the share of positive
    ones, of trained and of held-out pairs.
    """

    right: Mapping[str, Interval] = field(default_factory=dict)
    sets: Sequence[MarginSet] = ()
    worst: Sequence[WorstMargin] = ()


@dataclass(frozen=True)
class Decline:
    """Shares of answers that became less likely, and the step of the alarm."""

    alarm_step: int | None = None
    fell_chosen: float | None = None
    fell_rejected: float | None = None


@dataclass(frozen=True)
class DrawnSet:
    """Pairs of a set that an epoch draws."""

    name: str = ""
    held_out: int = 0
    drawn: int = 0
    drawn_share: float = 0.0


@dataclass(frozen=True)
class RewardedSample:
    """A held-out prompt with its answers before and after reinforcement learning."""

    prompt: str
    before: str
    reward_before: float
    after: str
    reward: float


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of a training, or of merged checkpoints.

    Attributes:
        tokens: that it read.
        stopped_by: the callback that ended it.
        step_0: checks before the first step.
        held_out_before, held_out: measures on held-out examples.
        objective: of preference optimisation.
        margins, chosen_decline: of preferences.
        training_pairs, held_out_pairs, too_long_pairs, held_out_prompts: counts.
        held_out_answers: label -> number.
        sets: pairs that an epoch draws.
        algorithm, started_from: of reinforcement learning.
        first_rewards, last_rewards: reward -> mean of the first and last logged step.
        samples: answers before and after.
        sources: source -> measures of merged checkpoints.
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
    held_out_answers: Mapping[str, int] = field(default_factory=dict)
    sets: Sequence[DrawnSet] = ()
    algorithm: str = ""
    started_from: str = ""
    first_rewards: Mapping[str, float] = field(default_factory=dict)
    last_rewards: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[RewardedSample] = ()
    sources: Mapping[str, SourceMeasures] = field(default_factory=dict)


@dataclass(frozen=True)
class TeacherSummary:
    """Kept predictions of a teacher; `rest_mass` is the probability of ids that are not
    kept.
    """

    tokens: int
    top_k: int
    rest_mass: float
    temperature: float
    loss: float


@dataclass(frozen=True)
class RoundingCost:
    """Perplexity on held-out rows before and after rounding, None without such rows."""

    rows: int
    perplexity_before: float | None = None
    perplexity: float | None = None
    growth: float | None = None


@dataclass(frozen=True)
class Exported:
    """Summary of `export`."""

    int8: RoundingCost | None = None


@dataclass(frozen=True)
class SourceMeasures:
    """Measures of a model on held-out text of a source, by its kind: of next tokens, of
    masked tokens, of hidden spans.
    """

    documents: int | None = None
    bits_per_byte: float | None = None
    bits_per_byte_interval: Bounds | None = None
    perplexity: float | None = None
    perplexity_interval: Bounds | None = None
    token_accuracy: float | None = None
    pseudo_perplexity: float | None = None
    pseudo_perplexity_interval: Bounds | None = None
    masked_accuracy: float | None = None
    masked_accuracy_interval: Bounds | None = None
    span_loss: float | None = None
    span_accuracy: float | None = None
    span_accuracy_interval: Bounds | None = None


@dataclass(frozen=True)
class Sample:
    """A prompt, and the text that a model wrote after it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ReliabilityBin:
    """Answers of about the same confidence, and their accuracy."""

    confidence: float
    accuracy: float
    items: int


@dataclass(frozen=True)
class Calibration:
    """Accuracy against confidence; `ece` are expected calibration errors."""

    ece_equal_width: float
    ece_equal_mass: float
    reliability: Sequence[ReliabilityBin]


@dataclass(frozen=True)
class SuiteTask:
    """Accuracy of a model in a task of a suite, and the same with chance at 0."""

    shots: int
    accuracy: Interval
    baseline: float
    centred: Interval
    items: int


@dataclass(frozen=True)
class SuiteReference:
    """A published score."""

    model: str
    score: float
    source: str


@dataclass(frozen=True)
class SuiteResult:
    """Scores of a model in a suite."""

    title: str
    limit: int | None
    score: Interval
    tasks: Mapping[str, SuiteTask]
    references: Sequence[SuiteReference]


@dataclass(frozen=True)
class MemorisedGroup:
    """Documents that were read equally often, and how a model continues them."""

    documents: int
    memorised: Interval
    mean_right_tokens: float


@dataclass(frozen=True)
class ProbeSet:
    """Prompts of a red team: counts, and measure -> category -> share or mean."""

    prompts: int
    not_asked: int
    empty: int
    unjudged: int
    without_target: int
    measures: Mapping[str, Mapping[str, Interval]]
    first_error: str = ""


@dataclass(frozen=True)
class WorstAnswer:
    """An answer of a model that may offend, and what is wrong with it."""

    set: str
    item: int | str
    category: str
    why: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class RedTeam:
    """Results of a red team against a model."""

    sets: Mapping[str, ProbeSet]
    worst: Sequence[WorstAnswer]


@dataclass(frozen=True)
class ModelMeasures:
    """Measurements of a model; `tasks` are counts and metrics by name."""

    sources: Mapping[str, SourceMeasures] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    tasks: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    suites: Mapping[str, SuiteResult] = field(default_factory=dict)
    memorisation: Mapping[str, MemorisedGroup] = field(default_factory=dict)
    reward_accuracy: float | None = None
    reward_accuracy_interval: Interval | None = None
    red_team: RedTeam | None = None


@dataclass(frozen=True)
class Difference(Measure):
    """Difference of two models in a metric of a task, or in a measure of a red team."""

    significant: bool = False
    from_: Annotated[str, Field(alias="from")] = ""
    to: str = ""
    task: str = ""
    metric: str = ""
    set: str = ""
    measure: str = ""


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate` (`evaluation.json`); `contamination` is model -> task ->
    counts and metrics by name.
    """

    models: Mapping[str, ModelMeasures] = field(default_factory=dict)
    differences: Sequence[Difference] = ()
    red_team_differences: Sequence[Difference] = ()
    contamination: Mapping[str, Mapping[str, Mapping[str, object]]] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class MergedModel:
    """Held-out measurements of a checkpoint, of an average of them, or of the last
    one.
    """

    model: str
    share: float | None
    sources: Mapping[str, SourceMeasures]


@dataclass(frozen=True)
class MergedModels:
    """Result of `merge` (`merged.json`)."""

    models: Sequence[MergedModel] = ()
