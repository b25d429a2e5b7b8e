"""The sections `reward` and `rl`: reward models, rewards of answers, and reinforcement
learning.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gristmill.mixtures.base import (
    Count,
    Fraction,
    InnerFraction,
    Name,
    NonEmpty,
    NotNegative,
    OutsidePath,
    PartialShare,
    Positive,
    PositiveFloat,
    RowLength,
    Section,
    Text,
    repeated,
)
from gristmill.mixtures.objectives.rl_tools import AnyTool
from gristmill.mixtures.schema.optimizer import TuningOptimizer
from gristmill.mixtures.schema.posttraining import Examples, Lora, PreferencePairs
from gristmill.mixtures.schema.pretrain import Spikes, Training, TrainingInEpochs
from gristmill.mixtures.steps.asked_model import HOW, AskedModel
from gristmill.mixtures.user_code import (
    OwnCall,
    OwnFunction,
    check_signature,
    name_of,
    stated_signature,
)

ANSWER, MESSAGES = "answer", "messages"
"""Names under which the user's rewards get a prompt's right answer, and its turns."""


GIVEN = ("prompts", "completions")
"""Keyword arguments of the user's rewards that accept them."""
TURNS = "turns"
"""Keyword argument passed only if a reward names it: TRL's functions, which accept
others as `**others`, do not know it.
"""


class AnswerReward(Section):
    """Settings of every reward. An answer's reward is the weighted sum of all of
    them.
    """

    name: Name | None = None
    """Name of the reward in the metrics; its kind, or its function, if absent. Names
    must be distinct.
    """
    weight: float = 1.0
    """Factor of the reward; a negative one punishes."""


class Exact(AnswerReward):
    """1 if the answer is the prompt's own answer, ignoring blanks at both ends."""

    kind: Literal["exact"]
    """Selects this reward."""
    ignore_case: bool = False
    """Treat upper and lower case as equal."""


class Contains(AnswerReward):
    """1 if the answer contains a text."""

    kind: Literal["contains"]
    """Selects this reward."""
    text: Text | None = None
    """The text; the prompt's own answer if absent."""
    ignore_case: bool = False
    """Treat upper and lower case as equal."""


class Number(AnswerReward):
    """1 if the last number in the answer is the last number of the prompt's own answer;
    1,234.50 is 1234.5.
    """

    kind: Literal["number"]
    """Selects this reward."""
    tolerance: NotNegative = 1e-6
    """Largest difference, as a share of the right number."""


class Mathematics(AnswerReward):
    """1 if the final answer has the value of the prompt's own answer: `\\frac{1}{2}` is
    0.5, `2(x+1)` is `2x + 2`.

    The final answer is the last `\\boxed{...}`, else the text after the last `####`,
    else the last line, after its last `=` or `is`. Numbers, variables, roots, powers,
    sin, cos, tan, log, exp and tuples are parsed, in LaTeX or plain; anything else must
    be the same text.
    """

    kind: Literal["math"]
    """Selects this reward."""


class Regex(AnswerReward):
    """1 if a regular expression (Python's `re`) matches somewhere in the answer."""

    kind: Literal["regex"]
    """Selects this reward."""
    pattern: Text
    """The expression, searched anywhere; `.` matches line ends too."""
    captures_answer: bool = False
    """Require the first group of the last match to be the prompt's own answer, ignoring
    blanks at both ends.
    """

    def _problems(self) -> Iterator[str]:
        try:
            if not re.compile(self.pattern).groups and self.captures_answer:
                yield (
                    "captures_answer needs a group in the pattern, as in "
                    "`answer is (.+)`"
                )
        except re.error as error:
            yield f"pattern is not a regular expression: {error}"


class Length(AnswerReward):
    """1 at a target length, falling linearly with the distance from it: 0 at no tokens
    and at twice as many or more.
    """

    kind: Literal["length"]
    """Selects this reward."""
    target_tokens: Positive
    """Target length in tokens."""


class Format(AnswerReward):
    """1 if the answer consists of certain tagged parts, in order, each exactly once and
    not empty.

    Like DeepSeek-R1's format reward (2025): `<think>...</think> <answer>...</answer>`.
    """

    kind: Literal["format"]
    """Selects this reward."""
    tags: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")], ...],
        Field(min_length=1),
    ] = (
        "think",
        "answer",
    )
    """Names of the tags."""


class ModelReward(AnswerReward):
    """Score of the conversation by a reward model; not limited to 0 to 1."""

    kind: Literal["model"]
    """Selects this reward."""
    path: OutsidePath | None = None
    """The model's folder, which transformers would load as
    LlamaForSequenceClassification with one label; the model of the stage `reward` if
    absent.
    """


class OwnReward(AnswerReward, OwnCall):
    """Reward computed by a function of your own: `use: ./rewards.py:polite`, instead of
    a kind.

    It is called with `prompts` and `completions`, lists of texts, and with the columns
    of the prompts' records that it takes by name, lists of their unchanged values, and
    returns a list of numbers: a function for TRL's GRPOTrainer works unchanged if it
    takes texts. If it names `turns`, it also gets the messages of each answer, with
    calls of tools and their answers; `completions` has the last of them. Examples are
    in docs/own-training.md.
    """

    kind: Literal["own"] = "own"
    """May be left out beside `use`."""
    columns: tuple[str, ...] = ()
    """Keys of the prompts' records that it needs though its source does not name them,
    for functions of installed packages; `answer` is the right answer if a record has no
    such key, `messages` the whole prompt.
    """

    def check_code(self, code: OwnFunction) -> None:
        """Check that the function takes its columns and options; see
        `OwnPlace.check_code`.
        """
        signature = stated_signature(code)
        if signature is not None:
            names = [name for name in (*GIVEN, TURNS) if name in signature.parameters]
            names += [*self.columns, *_required(signature)]
            check_signature(
                code, signature, (), {**dict.fromkeys(names), **self.options}
            )

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Keys that every record must have: `columns`, and the arguments that the
        function's source requires.
        """
        signature = stated_signature(self.use)
        required = () if signature is None else _required(signature)
        provided = {*GIVEN, TURNS, *self.options}
        return tuple(
            dict.fromkeys(
                name for name in (*self.columns, *required) if name not in provided
            )
        )

    @property
    def takes_other_columns(self) -> bool:
        """True if it may take columns that it does not need."""
        signature = stated_signature(self.use)
        if signature is None:
            return True
        known_names = {*GIVEN, TURNS, *self.options, *self.needed_columns}
        return any(
            parameter.kind is parameter.VAR_KEYWORD or name not in known_names
            for name, parameter in signature.parameters.items()
        )


def _required(signature: inspect.Signature) -> list[str]:
    """Return the arguments without a default value."""
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def kind_of_own(value: Any) -> Any:
    """Add the kind of a user's reward, which need not be written."""
    return (
        {"kind": "own", **value}
        if isinstance(value, Mapping) and "use" in value
        else value
    )


AnyReward = Annotated[
    Annotated[
        Exact
        | Contains
        | Number
        | Mathematics
        | Regex
        | Length
        | Format
        | ModelReward
        | OwnReward,
        Field(discriminator="kind"),
    ],
    BeforeValidator(kind_of_own),
]


def wants_answer(reward: AnswerReward) -> bool:
    """Return True if a reward compares with a prompt's own answer."""
    match reward:
        case Exact() | Number() | Mathematics():
            return True
        case Contains():
            return reward.text is None
        case Regex():
            return reward.captures_answer
        case OwnReward():
            return ANSWER in reward.needed_columns
    return False


@dataclass(frozen=True)
class RecordColumns:
    """Keys of the prompts' records that rewards receive.

    Attributes:
        needed: keys that every record must have.
        optional: keys that rewards receive if a record has them.
        all: True if they receive every other key, too.
    """

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    all: bool = False


def columns_of(rewards: Sequence[AnswerReward]) -> RecordColumns:
    """Return the keys that rewards receive, except those that every prompt has under a
    name of our own.
    """
    own_rewards = [reward for reward in rewards if isinstance(reward, OwnReward)]
    needed = dict.fromkeys(
        name for reward in own_rewards for name in reward.needed_columns
    )
    return RecordColumns(
        tuple(name for name in needed if name not in (ANSWER, MESSAGES)),
        (ANSWER,) if ANSWER in needed else (),
        any(reward.takes_other_columns for reward in own_rewards),
    )


class RewardOptimizer(TuningOptimizer):
    """The update rule of `reward`."""

    learning_rate: PositiveFloat = 1e-4
    """Learning rate at the peak of the schedule (TRL's reward training: 1e-4)."""


class Reward(Training):
    """A reward model (Christiano et al. 2017; Stiennon et al. 2020): the tuned model
    with one number as its output, trained so that the chosen answer of each pair gets
    the larger number (Bradley & Terry 1952). transformers loads the stage's `model/`
    with AutoModelForSequenceClassification.
    """

    data: NonEmpty[PreferencePairs] | None = None
    """Sets of pairs; if absent those of `dpo`, each read once whatever the weights of
    the sets.
    """
    margin: NotNegative = 0.0
    """Margin by which a chosen answer's score should be larger: subtracted from the
    difference inside the loss (Touvron et al. 2023b, equation 2).
    """
    center_weight: NotNegative = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores around zero,
    since the loss itself depends only on differences (Eisenstein et al. 2023: 0.01).
    """
    sequence_length: RowLength | None = None
    """Largest number of tokens per conversation; the context of the starting model if
    absent. A pair with a longer answer is left out and counted, since an answer without
    its end is not the one that was judged.
    """
    holdout: InnerFraction = 0.1
    """Share of pairs, chosen by hash of the prompt, that are used only to measure the
    accuracy; the same pairs as in `dpo` if share and seed are the same.
    """
    measured_pairs: Count = 10_000
    """Number of training pairs that are scored again after the last step, like every
    held-out one: the first by their ids, which are hashes. `margins.parquet` has all of
    them, the report those that are ranked wrong by the largest margin.
    """
    optimizer: RewardOptimizer = RewardOptimizer()
    """The update rule."""
    lora: Lora | None = None
    """Train only adapters and the scoring row; if absent, the whole model. Adapters are
    merged into `model/` and not kept beside it.
    """


class Prompts(Examples):
    """A set of prompts to answer."""

    format: Literal[
        "auto", "prompts", "messages", "sharegpt", "completion", "instruction"
    ] = "auto"
    """`prompts`: `prompt` or `question`, a text or messages; the others are those of
    `sft.data`, whose last answer is not shown to the model and counts as the right one.
    """
    answer: Text = "answer"
    """Key of the right answer, a text or a number, for the rewards that compare with
    one.
    """


class RlOptimizer(TuningOptimizer):
    """The update rule of `rl`."""

    learning_rate: PositiveFloat = 1e-6
    """Learning rate at the peak of the schedule (TRL's GRPOTrainer for whole models:
    1e-6).
    """


class RlSpikes(Spikes):
    """Rules for bad steps of `rl`: those of a pre-training, except for the deviations
    of its loss.
    """

    sigma: PositiveFloat | None = None
    """Deviations above the running mean from which a loss is a spike; null: only a loss
    or gradient of NaN or Inf makes a step bad. A surrogate loss is around zero by
    construction, so that its size is not informative.
    """


class Curriculum(Section):
    """More frequent instructive prompts: online difficulty filtering (Bae et al. 2025;
    prime-rl). GRPO learns nothing from a group whose answers all have the same reward,
    and most from one of which half pass.

    Prompts are drawn in their seeded order, as without a curriculum. A prompt is
    skipped, except for a share `again`, if the share of its answers that passed, when
    it was last asked, is not within `between`; a prompt that was never asked is not
    skipped.
    """

    between: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Range of useful pass rates, both ends excluded: a prompt that no answer has
    passed, or that every answer has passed, is skipped (as in DAPO's dynamic sampling,
    Yu et al. 2025, equation 11).
    """
    again: Fraction = 0.1
    """Share of the prompts outside the range that are asked nevertheless, so that their
    rate is measured again: chosen by a hash of seed and turn.
    """
    passed_at: float = 1.0
    """Weighted sum of rewards from which an answer has passed."""

    def _problems(self) -> Iterator[str]:
        if self.between[0] >= self.between[1]:
            yield (
                f"rl.curriculum.between is {list(self.between)}; the "
                "first must be below the second"
            )


Scale = Literal["group", "batch", "none", "leave_one_out"]
KlEstimator = Literal["k1", "k2", "k3"]
Normalisation = Literal["sequence", "token", "constant"]


class Rl(TrainingInEpochs):
    """Reinforcement learning from rewards of the model's own answers (GRPO), or
    distillation on these answers.

    The current model answers a batch of prompts, `group_size` times each; the answers
    are rewarded, and `steps_per_batch` x `epochs_per_batch` updates learn from them.
    The defaults are GRPO with DAPO's normalisation.
    """

    added = (
        "epochs",
        "teacher",
        "teacher_endpoint",
        "beta",
        "ratio",
        "tools",
        "turns",
        "tool_answer_tokens",
        "curriculum",
    )

    algorithm: Literal["grpo", "distill"] = "grpo"
    """`grpo`: an answer's advantage is its reward relative to those of the same prompt
    (Shao et al. 2024, section 4.1). `distill`: on-policy distillation, which learns
    from `teacher` alone: the loss is a divergence of policy and teacher at the tokens
    of the answers (Agarwal et al. 2024, "GKD", with lambda 1); rewards are only
    measured.
    """
    teacher: OutsidePath | None = None
    """For `distill`: the folder of a model of the same vocabulary, such as one that
    `export` wrote.
    """
    teacher_endpoint: AskedModel | None = None
    """For `distill`: a model behind vLLM's completions API instead, with `endpoint`,
    `model` and `api_key_env`. It returns the log-probabilities of drawn tokens
    (`prompt_logprobs`), so `beta` must be absent and `temperature` 1 (Lu & Thinking
    Machines Lab 2025, "On-Policy Distillation"). The text of each of its ids is compared
    with the run's tokenizer before the first step.
    """
    beta: Fraction | None = None
    """For `distill`: the divergence, over the whole vocabulary. 0: KL(teacher ||
    policy); 1: KL(policy || teacher); between: the generalised Jensen-Shannon
    divergence, with the teacher's share of the mixture to which both are compared
    (Agarwal et al. 2024, equation 1). If absent, KL(policy || teacher) by policy
    gradient, of which each drawn token is a sample: cheaper, but of larger variance.
    """
    start_from: Literal["auto", "pretrain", "merge", "sft", "dpo"] = "auto"
    """The stage whose model is the start and the reference; `auto`: the last of these
    that exists.
    """
    data: NonEmpty[Prompts]
    """Sets of prompts."""
    rewards: NonEmpty[AnyReward]
    """Rewards of an answer."""
    tools: tuple[AnyTool, ...] = ()
    """Tools that the model may call while it answers: `{python: {...}}`, `{use: ...}`.
    A tool's answers have no loss, and an error is an answer too. See
    docs/how-to/training/tools-in-rl.md.
    """
    turns: Positive = 4
    """Largest number of the assistant's turns in an answer with `tools`; an answer that
    calls in its last turn is cut.
    """
    tool_answer_tokens: Positive = 256
    """Largest number of tokens of a tool's answer; a longer one is cut."""
    curriculum: Curriculum | None = None
    """Rule for more frequent prompts; all prompts are equally frequent if absent."""
    group_size: Positive = 8
    """Answers per prompt."""
    global_batch_size: Positive = 64
    """Answers per optimizer step, over all ranks and micro-batches: a multiple of
    `group_size`.
    """
    micro_batch_size: Positive = 8
    """Largest number of answers per forward pass of the training on one rank."""
    steps_per_batch: Positive = 1
    """Number of optimizer steps among which the answers to a batch of prompts are
    divided.
    """
    epochs_per_batch: Positive = 1
    """Number of passes over these answers."""
    temperature: PositiveFloat = 1.0
    """Divisor of the logits, both when answers are drawn and when they are learned
    from: this is the policy that improves.
    """
    max_new_tokens: Positive = 256
    """Largest number of tokens of an answer, its end included; with `tools` those of
    all its turns and of the tools' answers. A longer answer is cut.
    """
    generation_rows: Positive = 64
    """Largest number of answers that are generated at the same time on one rank."""
    sequence_length: RowLength | None = None
    """Largest number of tokens of prompt and answer; the context of the starting model
    if absent. A larger number becomes the new context. Prompts that leave less than
    `max_new_tokens` are left out, and counted.
    """
    clip: PositiveFloat = 0.2
    """Largest change of the ratio of new to old probability, below or above 1, that is
    still rewarded (Schulman et al. 2017, equation 7).
    """
    clip_high: PositiveFloat | None = None
    """Largest rise of the ratio, if it differs (DAPO, Yu et al. 2025: 0.28); `clip` if
    absent.
    """
    ratio: Literal["token", "sequence"] = "token"
    """Ratio of new to old probability that is clipped: that of each token, or the
    geometric mean over an answer's tokens (GSPO, Zheng et al. 2025, equation 7, who
    take `normalisation: sequence`, a `clip` of 3e-4 and a `clip_high` of 4e-4).
    """
    kl_weight: NotNegative = 0.04
    """Strength of the tie to the starting model (Shao et al. 2024: 0.04); 0 needs no
    reference in memory.
    """
    kl_estimator: KlEstimator = "k3"
    """Estimator of the divergence from drawn tokens (Schulman 2020), which `grpo` adds
    to the loss.
    """
    kl_correction: bool = True
    """Multiply `grpo`'s estimate by the ratio of new to old probability, so that its
    gradient is that of the divergence even if an update is not the first of its answers
    (DeepSeek-V3.2 2025, section 3.1; TRL 1.16 does so too). The first GRPO used k3
    without it, whose gradient is another divergence's.
    """
    advantage_scale: Scale = "group"
    """Divisor of `grpo`'s advantages: the standard deviation of the rewards of the same
    prompt (Shao et al. 2024), of the whole batch, or none (Dr. GRPO, Liu et al. 2025,
    which finds that the first prefers prompts that are too easy or too hard).
    `leave_one_out` is `none` with the mean of the other answers' rewards in place of
    that of all (RLOO, Ahmadian et al. 2024).
    """
    normalisation: Normalisation = "token"
    """Units over which a step's loss is averaged: answers, each the mean of its tokens
    (GRPO), tokens (DAPO), or tokens out of `max_new_tokens` per answer, so that an
    answer's length does not change the weight of its tokens (Dr. GRPO).
    """
    mask_truncated: bool = False
    """Exclude cut answers from the loss (DAPO's overlong filtering); they still count
    as answers of their group.
    """
    holdout: PartialShare = 0.1
    """Share of prompts, chosen by hash, that are never trained on: their greedy answers
    are rewarded before and after.
    """
    holdout_limit: Positive = 256
    """Largest number of held-out prompts to answer, the first by hash."""
    samples_every: Positive = 50
    """Batches of prompts between those of which `rollouts.json` shows some answers,
    besides the first and the last. Every answer is kept, and `gristmill trace --stage
    rl --step N` shows those of a step.
    """
    optimizer: RlOptimizer = RlOptimizer()
    """The update rule."""
    spikes: RlSpikes = RlSpikes()
    """Rules for skipping steps."""
    lora: Lora | None = None
    """Train adapters only; the reference is then the model without them. If absent, the
    whole model is trained.
    """
    validate_every: Positive | None = None
    """Steps between measurements of the pre-training's held-out rows, which show
    forgetting, in the units of `pretrain`; also measured after the last step. Not
    measured if absent.
    """

    @property
    def updates_per_batch(self) -> int:
        """Number of optimizer steps until the model answers again."""
        return self.steps_per_batch * self.epochs_per_batch

    @property
    def rollouts_per_batch(self) -> int:
        """Number of answers that are generated at once."""
        return self.global_batch_size * self.steps_per_batch

    def steps_of_epochs(self, epochs: float, rows: int) -> int:
        """Return the steps that ask `rows` prompts `epochs` times."""
        prompts_per_batch = self.rollouts_per_batch // self.group_size
        return math.ceil(epochs * rows / prompts_per_batch) * self.updates_per_batch

    @property
    def needs_reference(self) -> bool:
        """True if answers are compared with the starting model, or with a teacher."""
        return self.algorithm == "distill" or self.kl_weight > 0.0

    def _problems(self) -> Iterator[str]:
        endpoint = self.teacher_endpoint
        if self.algorithm == "distill" and (self.teacher is None) == (endpoint is None):
            yield (
                "rl.algorithm: distill needs either rl.teacher, a model's folder, or "
                "rl.teacher_endpoint"
            )
        if endpoint is not None and (self.beta is not None or self.temperature != 1.0):
            yield (
                "rl.teacher_endpoint returns log-probabilities of drawn tokens at "
                "temperature 1: remove rl.beta, which compares whole distributions, and "
                "rl.temperature, or give rl.teacher, a model's folder"
            )
        if endpoint and (keys := endpoint.model_fields_set - {"model", *HOW}):
            yield f"rl.teacher_endpoint has no {', '.join(sorted(keys))}; remove it"
        for key in ("teacher", "teacher_endpoint", "beta"):
            if self.algorithm != "distill" and getattr(self, key) is not None:
                yield (
                    f"rl.{key} has no effect on {self.algorithm}, whose tie to the "
                    "starting model is rl.kl_weight; set rl.algorithm: distill, or "
                    "remove it"
                )
        if self.algorithm != "grpo" and self.ratio == "sequence":
            yield (
                "rl.ratio: sequence needs the same advantage for all tokens of an "
                f"answer, which {self.algorithm} does not have; remove it"
            )
        if self.algorithm == "grpo" and self.group_size < 2:
            yield (
                "rl.group_size is 1, but grpo compares the answers to a prompt with "
                "one another; give at least 2 (8 is usual)"
            )
        if self.global_batch_size % self.group_size:
            yield (
                f"rl.global_batch_size ({self.global_batch_size}) answers per step "
                "are not whole groups "
                f"of group_size ({self.group_size}); make it a multiple"
            )
        for key, names in (
            ("rewards", [*map(name_of, self.rewards)]),
            ("tools", [*map(name_of, self.tools)]),
        ):
            if twice := repeated(names):
                yield f"rl.{key}: two are called {twice}; give each a `name` of its own"
        if self.curriculum is not None and self.group_size < 2:
            yield (
                "rl.curriculum needs a group_size of 2 or more: the "
                "pass rate of one answer is 0 or 1"
            )
        if (
            self.algorithm == "grpo"
            and self.kl_estimator == "k1"
            and not self.kl_correction
        ):
            yield (
                "rl.kl_estimator cannot be k1 with grpo and no kl_correction: in a "
                "loss its gradient is zero on average, so it would have no effect; "
                "choose k2 or k3, or kl_correction: true"
            )
