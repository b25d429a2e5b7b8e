"""The sections `sft` and `dpo`: what the pre-trained model is taught."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from gristmill.mixtures.base import Fraction, OutsidePath, Positive, PositiveFloat, Section, Seeded
from gristmill.mixtures.prepare import Prepared
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.mixtures.training import Precision, TrainingInEpochs, TuningOptimizer
from gristmill.mixtures.user_code import NAME_TAG, OWN_TAG, Own, own_or_name

LinearLayer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of a decoder's layer, by the names that transformers and PEFT give them."""

RoundedBase = Literal["nf4", "int8"]
"""How many bits a frozen weight has, and which."""


class Lora(Section):
    """Low-rank adaptation (Hu et al. 2022): the model is frozen, and W x becomes W x + scale B A x.

    The stage's model has the adapters merged into its weights; beside it lies `adapter/`, which PEFT loads. A learning
    rate ten times that of a full training is usual (alignment-handbook's recipe for Zephyr: 2e-4 for 2e-5).
    """

    rank: Positive = 16
    """Rows of A and columns of B (alignment-handbook's recipe for Zephyr: 16)."""
    alpha: PositiveFloat = 16.0
    """The scale is alpha / rank (the same recipe: 16)."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that large ranks learn as fast as small ones (Kalajdzievski 2023)."""
    dora: bool = False
    """Train each output's magnitude apart from its direction (Liu et al. 2024, equation 5)."""
    targets: Annotated[tuple[LinearLayer, ...], Field(min_length=1)] | None = None
    """The linear layers that get adapters, in every layer; all that the model has if absent (Dettmers et al. 2023,
    section 4: it takes all of them to match a full fine-tuning)."""
    base: RoundedBase | None = None
    """Hold the adapted layers' frozen weights in fewer bits (QLoRA, Dettmers et al. 2023): `nf4` in 4 (bitsandbytes,
    extra `quant`; 0.52 bytes a weight), `int8` in 8, with a scale per row. Processes that shard each hold a share of
    the bytes, and gather those of a matrix while it is multiplied. The adapters learn what rounding took away along
    with the task, and the stage's model is the rounded one with them merged; a reference is rounded alike. float32 if
    absent. Not together with `dora` or `engine.compute.compile`."""

    @model_validator(mode="after")
    def _has_rows_to_measure(self) -> Self:
        if self.base is not None and self.dora:
            raise ValueError(
                "lora.dora takes the norms of the frozen weights' rows in every step, which lora.base has "
                "rounded; remove one of the two"
            )
        return self

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


Divergence = Literal["forward", "reverse", "jsd"]
BETA = 0.5


class TeacherKeys(Section):
    """What the stage `teacher` gets of `sft.distill`: all that a teacher's distributions depend on."""

    teacher: Literal["pretrain"] | OutsidePath
    """A model's folder (config.json with its weights, ours or transformers'), whose vocabulary must be the run's own;
    or `pretrain`: the run's own model before the fine-tuning, which then holds it where it was."""
    temperature: PositiveFloat = 1.0
    """What logits of both models are divided by (Hinton et al. 2015, equation 1); the divergence is multiplied with its
    square, so that gradients keep their size (section 2)."""
    top_k: Positive | Literal["all"] = 64
    """How many of the teacher's likeliest ids are kept per trained token, 8 bytes each, with the mass of all others as
    one more outcome: the divergence is then a lower bound of the whole one. `all` keeps the whole distribution."""


class Distill(TeacherKeys):
    """Learn a teacher's distributions on the trained tokens of `sft`, which the stage `teacher` keeps beforehand."""

    kind: Divergence = "forward"
    """`forward`: KL(teacher || student), which covers what the teacher may say; `reverse`: KL(student || teacher),
    which avoids what it would not (Gu et al. 2024); `jsd`: the generalised Jensen-Shannon divergence between them
    (Agarwal et al. 2024, equation 1)."""
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] = BETA
    """For `jsd`: the teacher's share of the mixture that both are compared with (near 0 as `forward`, near 1 as
    `reverse`, but for a factor)."""
    weight: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Weight of the divergence; the labels' loss has the rest (torchtune's recipes: 0.5)."""

    @model_validator(mode="after")
    def _beta_is_used(self) -> Self:
        if self.beta != BETA and self.kind != "jsd":
            raise ValueError(f"sft.distill.beta means nothing to the divergence {self.kind}; choose jsd, or remove it")
        return self


class Teach(TeacherKeys):
    """The recipe of the stage `teacher`."""

    precision: Precision = "auto"
    """Compute dtype, that of `sft`."""
    micro_batch_size: Positive = 16
    """Rows per forward pass on one rank at the most."""


PreferenceLoss = Literal["sigmoid", "cdpo", "robust", "hinge", "ipo", "ipo_sum", "sigmoid_norm", "simpo", "orpo", "kto"]


class OwnLoss(Own):
    """A loss of your own: a function of log-probabilities, of which docs/own-training.md has an example."""

    takes: ClassVar[tuple[str, ...] | None] = (
        "chosen_logps",
        "rejected_logps",
        "ref_chosen_logps",
        "ref_rejected_logps",
    )


LossOfPairs = Annotated[
    Annotated[PreferenceLoss, Tag(NAME_TAG)] | Annotated[OwnLoss, Tag(OWN_TAG)], Discriminator(own_or_name)
]


class Examples(Section):
    """One set of instructions or preferences. A set of several forms needs no `format`: each record's keys tell."""

    path: OutsidePath
    """JSON lines (`.jsonl`, compressed or not), a list of JSON (`.json`), Parquet; a file, a glob, a folder or an
    fsspec URL of one of these; `python-docs://`; or `examples://NAME`, what the section `examples` makes."""
    limit: Positive | None = None
    """Read at most this many examples, the first in the order of the hashes of their contents."""
    max_quarantined: Fraction = 0.0
    """Share of the records that may be of no known form before the stage fails. Each is quarantined: written to
    `refused.jsonl` with its place and the reason, and counted."""


class Instructions(Examples):
    """One set of conversations to learn from."""

    format: Literal["auto", "messages", "sharegpt", "completion", "instruction"] = "auto"
    """`messages`: OpenAI's, with tools; `sharegpt`: `conversations` of `from` and `value`, where `function_call` and
    `observation` are a call of a tool and its answer; `completion`: `prompt` and `completion` (or `response`), texts or
    messages; `instruction`: Alpaca's `instruction`, `input`, `output`, with LLaMA-Factory's `history`. What follows the
    last answer is context; an answer with a `weight` (or `loss_weight`) of 0 has no loss."""
    weight: PositiveFloat | None = None
    """Share of the trained tokens, relative to the other sets' weights: the set that is largest for its weight is
    taken once, examples of the others are repeated. Given for all sets or for none; without any, each example is taken
    once."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens have a loss: those of the assistant's turns with the end of each turn, those of its last turn only,
    or all but the first one of the conversation."""


class PreferencePairs(Examples):
    """One set of preferences to learn from."""

    format: Literal["auto", "pairs", "transcripts", "scored", "labelled"] = "auto"
    """`pairs`: `prompt`, `chosen`, `rejected`, texts or messages; without `prompt` it is what both begin with; the
    prompt may be `conversations`, `messages` or `instruction` and `input` (LLaMA-Factory's pairs); `transcripts`:
    `chosen` and `rejected` as whole dialogues, with Human: and Assistant: behind blank lines (HH-RLHF); `scored`:
    several answers with scores, of which the best is chosen and the worst rejected; `labelled`: `prompt`, `completion`
    (or `response`) and `label` (or `kto_tag`), true or false, or `messages` with it, of which the last is the answer:
    single answers, which only the loss `kto` learns from. `tools` of a record are part of its prompt."""


class WeightedPairs(PreferencePairs):
    """One set of preferences among others."""

    weight: PositiveFloat | None = None
    """Share of the pairs that are trained on, relative to the other sets' weights: the set that is largest for its
    weight is taken once, pairs of the others are repeated. Given for all sets or for none; without any, each pair is
    taken once."""

    def unweighted(self) -> PreferencePairs:
        """The set alone."""
        return PreferencePairs.model_validate(self.model_dump(exclude={"weight"}))


def _check_weights(section: str, data: Sequence[Instructions | WeightedPairs]) -> None:
    without = [item.path for item in data if item.weight is None]
    if without and len(without) < len(data):
        raise ValueError(
            f"{section}.data: {without[0]} has no weight, though others have one; give all of them one, or none"
        )


class ElasticConsolidation(Section):
    """Elastic weight consolidation (Kirkpatrick et al. 2017): weights that the pre-training's rows need are held where
    they were, by a penalty whose gradient joins that of the loss."""

    weight: PositiveFloat
    """Lambda of their equation 3, beside a loss and a Fisher information that are per token; the line `elastic_penalty`
    of the metrics says what it amounts to."""
    fisher_rows: Positive = 200
    """Rows of the pre-training, the first that it has read, from which the Fisher information is estimated."""


class Gates(Section):
    """What must hold of the examples before any model is loaded; the stage `sft_data` fails otherwise."""

    min_end_of_turn_trained: Fraction = 0.99
    """Least share of the answers whose end of turn is trained; a model that does not learn it does not stop."""
    min_trained: Fraction = 0.01
    """Least share of the examples' tokens that are trained; less is a mask that went wrong more often than it is
    data."""
    max_truncated: Fraction = 1.0
    """Most of the examples whose end may be cut off; not limited unless it is given."""


class SftData(Seeded):
    """What the stage `sft_data` gets of the section `sft`: which rows of tokens are made, and what is trained."""

    data: Annotated[tuple[Instructions, ...], Field(min_length=1)]
    """Where the examples are."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """Tokens per row, and the most of an example, whose end is cut off; the mixture's if absent. Longer rows than those
    of pre-training become the context of the tuned model."""
    packing: Literal["best_fit", "none"] = "best_fit"
    """`best_fit`: several examples in a row, none cut by its end, each seen by attention as if it were alone; `none`:
    one example in a row."""
    replay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the tokens that are rows of pre-training, the first that it has read, in its order and with a loss on
    all of their tokens: against forgetting. Rounded to whole rows."""
    holdout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the conversations, chosen by hash of what is said before the first answer, that are never trained on:
    their loss, after every `validate_every` steps and the last, shows when the others are memorised."""
    gates: Gates = Gates()
    """What must hold of the examples."""
    seed: int | None = None
    """Seed of draws and of the order; the manifest's if absent."""

    @model_validator(mode="after")
    def _all_have_weights_or_none(self) -> Self:
        _check_weights("sft", self.data)
        return self


class SftOptimizer(TuningOptimizer):
    """What an update of `sft` is."""

    learning_rate: PositiveFloat = 3e-4
    """At the peak of the schedule."""


class Tuning(TrainingInEpochs):
    """What the stage `sft` gets of the section `sft`: the training itself."""

    optimizer: SftOptimizer = SftOptimizer()
    """What an update is."""
    lora: Lora | None = None
    """Train adapters only; the whole model is trained if absent."""
    distill: Distill | None = None
    """Learn from a larger model too; from the labels alone if absent."""
    ewc: ElasticConsolidation | None = None
    """Hold weights that the pre-training needs; not together with `lora`, which moves none of them."""
    validate_every: Positive | None = None
    """Steps between measurements of the pre-training's held-out rows, which show what is forgotten, in the units of
    `pretrain`; also measured after the last step. Nothing is measured if absent."""

    @model_validator(mode="after")
    def _holds_what_moves(self) -> Self:
        if self.ewc is not None and self.lora is not None:
            raise ValueError(
                "sft.ewc and sft.lora exclude each other: with adapters the model's own weights do not "
                "move; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _draws_from_one_model(self) -> Self:
        if self.distill is not None and self.optimizer.kind == "sophia":
            raise ValueError(
                "sft.optimizer.kind cannot be sophia together with sft.distill: it estimates curvature "
                "from labels that the model draws, and a teacher's distributions are none; choose another"
            )
        return self


class Sft(SftData, Prepared, Tuning):
    """Supervised fine-tuning on conversations; loss on the assistant's turns. A row is one of the packed set's."""

    seed: int | None = None
    """Seed of draws and of the order; the manifest's if absent."""

    @model_validator(mode="after")
    def _has_no_pairs(self) -> Self:
        if any(step.judge_pairs is not None for step in self.prepare):
            raise ValueError(
                "sft.prepare: judge_pairs compares the answers of pairs, which conversations are not; "
                "move it to dpo.prepare"
            )
        return self


class DpoData(Section):
    """What the stage `dpo_data` gets of the section `dpo`: which rows of tokens are made."""

    data: Annotated[tuple[WeightedPairs, ...], Field(min_length=1)]
    """Where the pairs are."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """Tokens per row, and the most of a conversation, whose end is cut off; the mixture's if absent. Rows that are
    longer than the model's context become its new one."""
    leaks: Decontaminate | None = None
    """Evaluation sets, and when a pair's prompt and chosen answer hold an item of one: such pairs are counted and
    warned of, and trained on all the same unless `prepare` drops them. What `decontaminate` of the documents'
    `prepare` says if absent."""

    @model_validator(mode="after")
    def _all_have_weights_or_none(self) -> Self:
        _check_weights("dpo", self.data)
        return self


class Rounded(Section):
    """Which of a model's matrices are rounded."""

    base: RoundedBase
    """To how many bits."""
    targets: tuple[LinearLayer, ...] | None = None
    """The linear layers; all if absent."""


class Reference(Section):
    """What the stage `reference` gets of the section `dpo`: what log-probabilities of pairs depend on beside the
    rows."""

    precision: Precision = "auto"
    """Compute dtype; `auto` is bf16 on a GPU and fp32 on a CPU."""
    micro_batch_size: Positive = 16
    """Pairs per forward pass on one rank at the most."""
    answers: bool = False
    """Whether the loss is of single answers (`kto`), with answers to other prompts beside them."""
    rounded: Rounded | None = None
    """How the model is rounded, if it is: as `dpo.lora.base` rounds it."""


class DpoOptimizer(TuningOptimizer):
    """What an update of `dpo` is."""

    learning_rate: PositiveFloat = 5e-5
    """At the peak of the schedule."""


class Dpo(DpoData, Prepared, TrainingInEpochs):
    """Direct preference optimisation (Rafailov et al. 2023) and its relatives."""

    loss: LossOfPairs = "sigmoid"
    """`sigmoid`: DPO; `cdpo`, `robust`: for labels that are wrong with the probability `label_smoothing`; `hinge`:
    SLiC's; `ipo`: over means of tokens, `ipo_sum`: over sums; `sigmoid_norm`: DPO over means of tokens; `simpo`,
    `orpo`: without a reference; `kto`: of single answers that are desirable or not (Ethayarajh et al. 2024), into which
    pairs are split: a batch is then of answers. The definitions are in train/objectives/preference_losses.py and
    kto.py. Or a function of your own, `{use: ./losses.py:mine, with: {...}}`: see docs/own-training.md."""
    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference model."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that a pair is the wrong way round; for `cdpo` and `robust`."""
    gamma_ratio: Annotated[float, Field(ge=0.0)] = 0.5
    """SimPO's target margin as a multiple of beta (its authors: 0.3 to 0.8)."""
    odds_weight: PositiveFloat = 0.1
    """ORPO's lambda (its authors: 0.1)."""
    desirable_weight: PositiveFloat = 1.0
    """For `kto`: weight of desirable (chosen) answers."""
    undesirable_weight: PositiveFloat = 1.0
    """For `kto`: weight of the others; the two kinds should weigh about the same in all (equation 8 of the paper)."""
    sft_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the chosen answers' loss per token, added to any loss: against falling likelihoods of chosen answers
    (Pang et al. 2024: 1), but `kto`."""
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of pairs, chosen by hash of the prompt, that only measure the reward accuracy."""
    measured_pairs: Annotated[int, Field(ge=0)] = 10_000
    """Training pairs (for `kto`, answers) whose margin is measured once more after the last step, as that of every
    held-out one is: the first by their ids, which are hashes. A pass over them costs about a third of training on them
    once. `margins.parquet` has them all, the report those with the worst."""
    optimizer: DpoOptimizer = DpoOptimizer()
    """What an update is; `sophia` needs labels to draw, which pairs have not."""
    lora: Lora | None = None
    """Train adapters only; the reference is then the model without them. The whole model is trained if absent."""
    validate_every: Positive | None = None
    """Steps between measurements of the pre-training's held-out rows, which show what is forgotten, in the units of
    `pretrain`; also measured after the last step. Nothing is measured if absent."""

    @model_validator(mode="after")
    def _has_no_labels_to_draw(self) -> Dpo:
        if self.optimizer.kind == "sophia":
            raise ValueError(
                "dpo.optimizer.kind cannot be sophia, which estimates curvature from labels that the "
                "model draws: a loss over pairs has none; choose another kind"
            )
        return self

    @property
    def loss_name(self) -> str:
        """What messages and summaries call the loss."""
        return self.loss.use.called if isinstance(self.loss, Own) else self.loss

    @model_validator(mode="after")
    def _smoothing_is_used(self) -> Dpo:
        if self.label_smoothing and self.loss not in ("cdpo", "robust"):
            raise ValueError(
                f"label_smoothing means nothing to the loss {self.loss_name}; choose cdpo or robust, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _kinds_are_weighed_by_kto(self) -> Dpo:
        if self.loss != "kto" and (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0):
            raise ValueError(
                f"desirable_weight and undesirable_weight mean nothing to the loss {self.loss_name}; "
                "choose kto, or remove them"
            )
        if self.loss == "kto" and self.sft_weight:
            raise ValueError("sft_weight is for losses over pairs, not for kto; remove it, or raise desirable_weight")
        return self
