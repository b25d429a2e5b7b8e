"""The sections `sft` and `dpo`: fine-tuning of the pre-trained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag

from gristmill.mixtures.base import (
    Count,
    Fraction,
    InnerFraction,
    NonEmpty,
    NotNegative,
    OutsidePath,
    PartialShare,
    Positive,
    PositiveFloat,
    RowLength,
    Section,
    Seeded,
    Share,
)
from gristmill.mixtures.objectives.token_objectives import Kind
from gristmill.mixtures.schema.optimizer import TuningOptimizer
from gristmill.mixtures.schema.prepare import Prepared
from gristmill.mixtures.schema.pretrain import Precision, TrainingInEpochs
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.mixtures.user_code import NAME_TAG, OWN_TAG, Own, own_or_name

LinearLayer = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]
"""Linear layers of a decoder layer, by their names in transformers and PEFT."""

RoundedBase = Literal["nf4", "int8"]
"""Data type of a frozen weight."""


class Lora(Section):
    """Low-rank adaptation (Hu et al. 2022): the model is frozen, and W x becomes W x +
    scale B A x.

    The adapters are merged into the weights of the stage's model; `adapter/` beside it
    is for PEFT. A learning rate ten times that of full training is usual
    (alignment-handbook's recipe for Zephyr: 2e-4 for 2e-5).
    """

    rank: Positive = 16
    """Rows of A and columns of B (alignment-handbook's recipe for Zephyr: 16)."""
    alpha: PositiveFloat = 16.0
    """The scale is alpha / rank (the same recipe: 16)."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that large ranks learn as fast as small ones
    (Kalajdzievski 2023).
    """
    dora: bool = False
    """Train each output's magnitude separately from its direction (Liu et al. 2024,
    equation 5).
    """
    targets: NonEmpty[LinearLayer] | None = None
    """Linear layers that get adapters, in every layer; all of the model's if absent
    (Dettmers et al. 2023, section 4: matching full fine-tuning takes all of them).
    """
    base: RoundedBase | None = None
    """Store the adapted layers' frozen weights in fewer bits (QLoRA, Dettmers et al.
    2023): `nf4` in 4 (bitsandbytes, extra `quant`; 0.52 bytes a weight), `int8` in 8,
    with a scale per row. Processes that shard each hold a share of the bytes, and
    gather those of a matrix while it is multiplied. The adapters learn to compensate
    for rounding along with the task, and the stage's model is the rounded one with them
    merged; a reference model is rounded in the same way. float32 if absent. Not
    together with `dora` or `engine.compute.compile`.
    """

    def _problems(self) -> Iterator[str]:
        if self.base is not None and self.dora:
            yield (
                "lora.dora computes the norms of the frozen weights' rows in every "
                "step, which lora.base has rounded; remove one of the two"
            )

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


Divergence = Literal["forward", "reverse", "jsd"]
BETA = 0.5


class TeacherKeys(Section):
    """Settings of `sft.distill` that determine a teacher's distributions: all that the
    stage `teacher` receives.
    """

    teacher: Literal["pretrain"] | OutsidePath
    """A model's folder (config.json with its weights, ours or transformers'), whose
    vocabulary must be the run's own; or `pretrain`: the run's own model before
    fine-tuning, which then keeps the tuned model near its start.
    """
    temperature: PositiveFloat = 1.0
    """Divisor of the logits of both models (Hinton et al. 2015, equation 1); the
    divergence is multiplied by its square, so that gradients keep their size (section
    2).
    """
    top_k: Positive | Literal["all"] = 64
    """Number of the teacher's most likely ids kept per trained token, 8 bytes each,
    with the probability of all others as one more outcome: the divergence is then a
    lower bound of the full one. `all` keeps the full distribution.
    """


class Distill(TeacherKeys):
    """Learning of a teacher's distributions on the trained tokens of `sft`, which the
    stage `teacher` computes beforehand.
    """

    kind: Divergence = "forward"
    """`forward`: KL(teacher || student), which covers all that the teacher may say;
    `reverse`: KL(student || teacher), which avoids what the teacher would not say (Gu
    et al. 2024); `jsd`: the generalised Jensen-Shannon divergence between them (Agarwal
    et al. 2024, equation 1).
    """
    beta: InnerFraction = BETA
    """For `jsd`: the teacher's share of the mixture to which both are compared (near 0
    like `forward`, near 1 like `reverse`, up to a factor).
    """
    weight: Share = 0.5
    """Weight of the divergence; the loss on the labels has the remaining weight
    (torchtune's recipes: 0.5).
    """

    @property
    def teacher_share(self) -> float:
        """Share of the teacher in the mixture of `distillation.generalised_jsd`."""
        return {"forward": 0.0, "reverse": 1.0}.get(self.kind, self.beta)

    def _problems(self) -> Iterator[str]:
        if self.beta != BETA and self.kind != "jsd":
            yield (
                "sft.distill.beta has no effect on the divergence "
                f"{self.kind}; choose jsd, or remove it"
            )


class Teach(TeacherKeys):
    """Settings of the stage `teacher`."""

    precision: Precision = "auto"
    """Compute dtype, the same as in `sft`."""
    micro_batch_size: Positive = 16
    """Largest number of rows per forward pass on one rank."""


MarginLoss = Literal[
    "sigmoid",
    "cdpo",
    "robust",
    "hinge",
    "ipo",
    "ipo_sum",
    "sigmoid_norm",
    "exo_pair",
    "discopop",
]
"""Losses of the difference of two rewards, which an f-divergence defines."""
PreferenceLoss = Literal[
    MarginLoss,
    "simpo",
    "orpo",
    "cpo",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
]
PolicyDivergence = Literal["reverse_kl", "forward_kl", "js"] | InnerFraction


class OwnLoss(Own):
    """A loss of your own: a function of log-probabilities; docs/own-training.md has an
    example.
    """

    takes: ClassVar[tuple[str, ...] | None] = (
        "chosen_logps",
        "rejected_logps",
        "ref_chosen_logps",
        "ref_rejected_logps",
    )


LossOfPairs = Annotated[
    Annotated[PreferenceLoss, Tag(NAME_TAG)] | Annotated[OwnLoss, Tag(OWN_TAG)],
    Discriminator(own_or_name),
]


class Examples(Section):
    """A set of instructions or preferences. A set of several forms needs no `format`:
    each record's keys tell.
    """

    path: OutsidePath
    """JSON lines (`.jsonl`, compressed or not), a list of JSON (`.json`), Parquet; a
    file, a glob, a folder or an fsspec URL of one of these; `python-docs://`; or
    `examples://NAME`, which the section `examples` writes.
    """
    limit: Positive | None = None
    """Largest number of examples to read, the first in the order of the hashes of their
    contents.
    """
    max_quarantined: Fraction = 0.0
    """Share of the records that may have an unknown form before the stage fails. Each
    such record is quarantined: written to `refused.jsonl` with its place and the
    reason, and counted.
    """


class Instructions(Examples):
    """A set of conversations to learn from."""

    format: Literal[
        "auto", "messages", "sharegpt", "completion", "instruction", "labelled"
    ] = "auto"
    """`messages`: OpenAI's, with tools; `sharegpt`: `conversations` of `from` and
    `value`, where `function_call` and `observation` are a tool call and its answer;
    `completion`: `prompt` and `completion` (or `response`), texts or messages;
    `instruction`: Alpaca's `instruction`, `input`, `output`, with LLaMA-Factory's
    `history`; `labelled`: `text` and `label`, which is its answer. Messages after the last answer are context; an answer with a `weight` (or
    `loss_weight`) of 0 has no loss.
    """
    weight: PositiveFloat | None = None
    """Share of the trained tokens, relative to the other sets' weights: the set that is
    largest for its weight is read once, examples of the others are repeated. Set it for
    all sets or for none; without weights, each example is read once.
    """
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens that have a loss: those of the assistant's turns with the end of each
    turn, those of its last turn only, or all except the first one of the conversation.
    """


class PreferencePairs(Examples):
    """A set of preferences to learn from."""

    format: Literal["auto", "pairs", "transcripts", "scored"] = "auto"
    """`pairs`: `prompt`, `chosen`, `rejected`, texts or messages; without `prompt` it
    is the common beginning of both; the prompt may be `conversations`, `messages` or
    `instruction` and `input` (LLaMA-Factory's pairs); `transcripts`: `chosen` and
    `rejected` as whole dialogues, with Human: and Assistant: after blank lines
    (HH-RLHF); `scored`: several answers with scores, of which the best is chosen and
    the worst rejected. `tools` of a record are part of its prompt.
    """


class WeightedPairs(PreferencePairs):
    """A set of preferences with a weight among others."""

    weight: PositiveFloat | None = None
    """Share of the training pairs, relative to the other sets' weights: the set that is
    largest for its weight is read once, pairs of the others are repeated. Set it for
    all sets or for none; without weights, each pair is read once.
    """

    def unweighted(self) -> PreferencePairs:
        """Return the set without its weight."""
        return PreferencePairs.model_validate(self.model_dump(exclude={"weight"}))


def _weight_problems(
    section: str, data: Sequence[Instructions | WeightedPairs]
) -> Iterator[str]:
    unweighted_paths = [item.path for item in data if item.weight is None]
    if unweighted_paths and len(unweighted_paths) < len(data):
        yield (
            f"{section}.data: {unweighted_paths[0]} has no weight, though others have "
            "one; set it for all of them, or for none"
        )


class Gates(Section):
    """Conditions on the examples, checked before any model is loaded; the stage
    `sft_data` fails if one is not met.
    """

    min_end_of_turn_trained: Fraction = 0.99
    """Smallest share of the answers whose end of turn is trained; a model that does not
    learn it does not stop.
    """
    min_trained: Fraction = 0.01
    """Smallest share of the examples' tokens that are trained; less is more often a
    wrong mask than a property of the data.
    """
    max_truncated: Fraction = 1.0
    """Largest share of the examples whose end may be cut off; not limited unless
    set.
    """


class SftData(Seeded):
    """Settings of `sft` that determine the token rows and their loss masks: all that
    the stage `sft_data` receives.
    """

    task: Literal["chat", "classify", "text2text"] = "chat"
    """`chat`: learn the answers of conversations. `classify`: train an encoder to
    assign texts to classes: each example is a text and its class, such as `text` and
    `label`. See docs/how-to/training/classifier.md. `text2text`: train an
    encoder-decoder, such as T5, which encodes the message of each example and decodes
    its answer; the tokenizer's special tokens are added, and no chat template is used.
    """
    data: NonEmpty[Instructions]
    """Sets of examples."""
    sequence_length: RowLength | None = None
    """Tokens per row, and the limit per example, whose end is cut off; the mixture's if
    absent. Rows longer than those of pre-training become the context of the tuned
    model.
    """
    packing: Literal["best_fit", "none"] = "best_fit"
    """`best_fit`: several examples in a row, without cutting any, each invisible to the
    attention of the others; `none`: one example in a row, as always for other tasks than `chat`.
    """
    replay: PartialShare = 0.0
    """Share of the tokens that are pre-training rows, against forgetting: the first
    rows that it has read, in its order and with a loss on all of their tokens. Rounded
    to whole rows.
    """
    holdout: PartialShare = 0.0
    """Share of the conversations, chosen by hash of the messages before the first
    answer, that are never trained on: their loss, after every `validate_every` steps
    and the last, shows when the others are memorised.
    """
    gates: Gates = Gates()
    """Conditions on the examples."""
    seed: int | None = None
    """Seed of sampling and of the order; the manifest's if absent."""

    def _problems(self) -> Iterator[str]:
        yield from _weight_problems("sft", self.data)


class SftOptimizer(TuningOptimizer):
    """The update rule of `sft`."""

    learning_rate: PositiveFloat = 3e-4
    """Learning rate at the peak of the schedule."""


class Tuning(TrainingInEpochs):
    """Settings of `sft` that determine the training itself: all that the stage `sft`
    receives.
    """

    optimizer: SftOptimizer = SftOptimizer()
    """The update rule."""
    lora: Lora | None = None
    """Train adapters only; if absent, the whole model."""
    distill: Distill | None = None
    """Learn from a larger model too; if absent, only from the labels."""
    validate_every: Positive | None = None
    """Steps between measurements of the pre-training's held-out rows, which show
    forgetting, in the units of `pretrain`; also measured after the last step. Not
    measured if absent.
    """


class Sft(SftData, Prepared, Tuning):
    """Supervised fine-tuning on conversations, with loss on the assistant's turns. A
    row is one of the packed set's.
    """

    seed: int | None = None
    """Seed of sampling and of the order; the manifest's if absent."""

    @property
    def kind(self) -> Kind:
        """Kind of model that it starts from."""
        kinds: dict[str, Kind] = {"classify": "encoder", "text2text": "encoder_decoder"}
        return kinds.get(self.task, "decoder")

    def _problems(self) -> Iterator[str]:
        of_answers = ("lora", "distill", "replay")
        for key in of_answers if self.task != "chat" else ():
            if getattr(self, key):
                yield (
                    f"sft.{key} does not go with task: {self.task}; remove one of the two"
                )
        if any(step.judge_pairs is not None for step in self.prepare):
            yield (
                "sft.prepare: judge_pairs compares the answers of pairs, but sft has "
                "conversations; move it to dpo.prepare"
            )


class DpoData(Section):
    """Settings of `dpo` that determine the token rows: all that the stage `dpo_data`
    receives.
    """

    data: NonEmpty[WeightedPairs]
    """Sets of pairs."""
    sequence_length: RowLength | None = None
    """Tokens per row, and the limit per conversation, whose end is cut off; the
    mixture's if absent. Rows longer than the model's context become its new context.
    """
    leaks: Decontaminate | None = None
    """Evaluation sets, and the rule for leaks: a pair whose prompt and chosen answer
    contain an item of a set is counted and reported in a warning, but still trained on
    unless `prepare` drops it. If absent, the settings of `decontaminate` in the
    documents' `prepare`.
    """

    def _problems(self) -> Iterator[str]:
        yield from _weight_problems("dpo", self.data)


class Rounded(Section):
    """Rounding of a model's matrices."""

    base: RoundedBase
    """Data type after rounding."""
    targets: tuple[LinearLayer, ...] | None = None
    """Linear layers to round; all if absent."""


class Reference(Section):
    """Settings of `dpo` that determine log-probabilities of pairs besides the rows: all
    that the stage `reference` receives.
    """

    precision: Precision = "auto"
    """Compute dtype; `auto` is bf16 on a GPU and fp32 on a CPU."""
    micro_batch_size: Positive = 16
    """Largest number of pairs per forward pass on one rank."""
    rounded: Rounded | None = None
    """Rounding of the model, as by `dpo.lora.base`; not rounded if absent."""


class DpoOptimizer(TuningOptimizer):
    """The update rule of `dpo`."""

    learning_rate: PositiveFloat = 5e-5
    """Learning rate at the peak of the schedule."""


class LossSettings(Section):
    """Settings of `dpo` that determine the loss of a pair."""

    loss: LossOfPairs = "sigmoid"
    """`sigmoid`: DPO; `cdpo`, `robust`: for labels that are wrong with probability
    `label_smoothing`; `hinge`: SLiC's; `ipo`: over means of tokens, `ipo_sum`: over
    sums; `sigmoid_norm`: DPO over means of tokens; `simpo`, `orpo`, `cpo`: without a
    reference; the others are those of TRL's `loss_type`. The definitions are in
    train/objectives/preference_losses.py. Or a function of your own, `{use:
    ./losses.py:mine, with: {...}}`: see docs/own-training.md.
    """
    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference model."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """For `cdpo`, `robust` and `exo_pair`: probability that chosen and rejected answer
    are swapped; above 0 for `exo_pair` (TRL: 1e-3).
    """
    divergence: PolicyDivergence = "reverse_kl"
    """Divergence from the reference whose penalty defines the rewards, for losses of
    their difference (Wang et al. 2023, "f-DPO"): `reverse_kl` is DPO's, a number the
    alpha of an alpha-divergence, between `reverse_kl` (0) and `forward_kl` (1).
    """
    gamma_ratio: NotNegative = 0.5
    """SimPO's target margin as a multiple of beta (its authors: 0.3 to 0.8)."""
    odds_weight: PositiveFloat = 0.1
    """ORPO's lambda (its authors: 0.1)."""
    sft_weight: NotNegative = 0.0
    """Weight of the chosen answers' loss per token, added to any loss, against falling
    likelihoods of chosen answers (Pang et al. 2024: 1).
    """

    def _problems(self) -> Iterator[str]:
        if self.label_smoothing and self.loss not in ("cdpo", "robust", "exo_pair"):
            yield (
                f"label_smoothing has no effect on the loss {self.loss_name}; choose "
                "cdpo, robust or exo_pair, or remove it"
            )
        if self.loss == "exo_pair" and not self.label_smoothing:
            yield (
                "the loss exo_pair is infinite for a label_smoothing of 0; give the "
                "probability that a pair is swapped, such as 1e-3"
            )
        if self.divergence != "reverse_kl" and self.loss not in get_args(MarginLoss):
            yield (
                f"divergence has no effect on the loss {self.loss_name}; choose a loss "
                "of a margin, such as sigmoid, or remove it"
            )

    @property
    def loss_name(self) -> str:
        """Name of the loss in messages and summaries."""
        return self.loss.use.called if isinstance(self.loss, Own) else self.loss


class Dpo(LossSettings, DpoData, Prepared, TrainingInEpochs):
    """Direct preference optimisation (Rafailov et al. 2023) and related losses."""

    added = (*TrainingInEpochs.added, "divergence")

    holdout: InnerFraction = 0.1
    """Share of pairs, chosen by hash of the prompt, that are used only to measure the
    reward accuracy.
    """
    measured_pairs: Count = 10_000
    """Number of training pairs whose margin is measured again after the last step, like
    that of every held-out pair: the first by their ids, which are hashes. A pass over
    them costs about a third of training on them once. `margins.parquet` has all of
    them, the report those with the worst margins.
    """
    optimizer: DpoOptimizer = DpoOptimizer()
    """The update rule."""
    lora: Lora | None = None
    """Train adapters only; the reference is then the model without them. If absent, the
    whole model is trained.
    """
    validate_every: Positive | None = None
    """Steps between measurements of the pre-training's held-out rows, which show
    forgetting, in the units of `pretrain`; also measured after the last step. Not
    measured if absent.
    """
