"""The sections `reward` and `rl`: a model that scores answers, what answers are rewarded for, and learning from it."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gristmill.mixtures.base import NAME_PATTERN, Fraction, OutsidePath, Positive, PositiveFloat, Section
from gristmill.mixtures.objectives.rl_tools import AnyTool, name_of_tool
from gristmill.mixtures.posttraining import Examples, Lora, PreferencePairs
from gristmill.mixtures.training import Spikes, Training, TrainingInEpochs, TuningOptimizer
from gristmill.mixtures.user_code import OwnCall, OwnFunction, check_signature, stated_signature

ANSWER, MESSAGES = "answer", "messages"
"""What rewards of one's own call a prompt's right answer, and its turns."""


GIVEN = ("prompts", "completions")
"""What they are given by name, if they take it."""
TURNS = "turns"
"""What they are given besides, if they name it: TRL's functions, which take the rest as `**others`, know nothing of it.
"""


class AnswerReward(Section):
    """What all rewards have in common. An answer's reward is the sum of all of them, each times its weight."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """What the metrics call it; its kind if absent, or its function. No two may have the same."""
    weight: float = 1.0
    """What it is multiplied with; below zero it punishes."""


class Exact(AnswerReward):
    """1 where the answer is the prompt's own answer, blanks at both ends left out."""

    kind: Literal["exact"]
    """Names this reward."""
    ignore_case: bool = False
    """Whether upper and lower case are the same."""


class Contains(AnswerReward):
    """1 where the answer contains a text."""

    kind: Literal["contains"]
    """Names this reward."""
    text: Annotated[str, Field(min_length=1)] | None = None
    """Which; the prompt's own answer if absent."""
    ignore_case: bool = False
    """Whether upper and lower case are the same."""


class Number(AnswerReward):
    """1 where the last number in the answer is the last number of the prompt's own answer; 1,234.50 is 1234.5."""

    kind: Literal["number"]
    """Names this reward."""
    tolerance: Annotated[float, Field(ge=0.0)] = 1e-6
    """How far they may be apart, as a share of the right one."""


class Mathematics(AnswerReward):
    """1 where the final answer has the value of the prompt's own answer: `\\frac{1}{2}` is 0.5, `2(x+1)` is `2x + 2`.

    The final answer is the last `\\boxed{...}`, else what follows the last `####`, else the last line, behind its last
    `=` or `is`. Numbers, variables, roots, powers, sin, cos, tan, log, exp and tuples are read, in LaTeX or plain;
    anything else must be the same text.
    """

    kind: Literal["math"]
    """Names this reward."""


class Regex(AnswerReward):
    """1 where a regular expression (Python's `re`) is found in the answer."""

    kind: Literal["regex"]
    """Names this reward."""
    pattern: Annotated[str, Field(min_length=1)]
    """Searched for anywhere; `.` matches line ends too."""
    captures_answer: bool = False
    """Whether the last match's first group must also be the prompt's own answer, blanks at both ends left out."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from error
        if self.captures_answer and not groups:
            raise ValueError("captures_answer needs a group in the pattern, as in `answer is (.+)`")
        return self


class Length(AnswerReward):
    """1 at a target length, falling in proportion to the distance from it: 0 at no tokens and from twice as many on."""

    kind: Literal["length"]
    """Names this reward."""
    target_tokens: Positive
    """The length that is wanted."""


class Format(AnswerReward):
    """1 where the answer is nothing but certain tagged parts, in their order, each there once and not empty.

    As DeepSeek-R1's format reward (2025): `<think>...</think> <answer>...</answer>`.
    """

    kind: Literal["format"]
    """Names this reward."""
    tags: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")], ...], Field(min_length=1)] = (
        "think",
        "answer",
    )
    """Names of the tags."""


class ModelReward(AnswerReward):
    """What a reward model thinks of the conversation; not between 0 and 1."""

    kind: Literal["model"]
    """Names this reward."""
    path: OutsidePath | None = None
    """Its folder, which transformers would load as LlamaForSequenceClassification with one label; that of the stage
    `reward` if absent."""


class OwnReward(AnswerReward, OwnCall):
    """What a function of your own gives: `use: ./rewards.py:polite`, in place of a kind.

    It is called with `prompts` and `completions`, lists of texts, and with the columns of the prompts' records that it
    takes by name, lists of their values as they are, and gives a list of numbers: a function for TRL's GRPOTrainer
    works unchanged if it takes texts. If it names `turns` it also gets, for each answer, the messages that it consists
    of, with calls of tools and what they answered; `completions` has the last of them. Examples are in
    docs/own-training.md."""

    kind: Literal["own"] = "own"
    """Need not be given beside `use`."""
    columns: tuple[str, ...] = ()
    """Keys of the prompts' records that it needs though its source does not name them, which is for functions of
    installed packages; `answer` is the right answer where a record has no such key, `messages` the whole prompt."""

    def check_code(self, code: OwnFunction) -> None:
        """See that it takes its columns and options; see `OwnPlace.check_code`."""
        signature = stated_signature(code)
        if signature is not None:
            names = [name for name in (*GIVEN, TURNS) if name in signature.parameters]
            names += [*self.columns, *_required(signature)]
            check_signature(code, signature, (), {**dict.fromkeys(names), **self.options})

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Keys that every record must have: `columns`, and the arguments that its source requires."""
        signature = stated_signature(self.use)
        required = () if signature is None else _required(signature)
        own = {*GIVEN, TURNS, *self.options}
        return tuple(dict.fromkeys(name for name in (*self.columns, *required) if name not in own))

    @property
    def takes_other_columns(self) -> bool:
        """Whether it may take columns that it does not need."""
        signature = stated_signature(self.use)
        if signature is None:
            return True
        own = {*GIVEN, TURNS, *self.options, *self.needed_columns}
        return any(
            parameter.kind is parameter.VAR_KEYWORD or name not in own
            for name, parameter in signature.parameters.items()
        )


def _required(signature: inspect.Signature) -> list[str]:
    """Arguments without a default value."""
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def kind_of_own(value: Any) -> Any:
    """Rewards of one's own need not say that they are."""
    return {"kind": "own", **value} if isinstance(value, Mapping) and "use" in value else value


AnyReward = Annotated[
    Annotated[
        Exact | Contains | Number | Mathematics | Regex | Length | Format | ModelReward | OwnReward,
        Field(discriminator="kind"),
    ],
    BeforeValidator(kind_of_own),
]


def name_of(reward: AnswerReward) -> str:
    """What the metrics call a reward."""
    if reward.name is None and isinstance(reward, OwnReward):
        return reward.use.called
    return reward.name or str(reward.kind)  # type: ignore[attr-defined]


def wants_answer(reward: AnswerReward) -> bool:
    """Whether a reward compares with a prompt's own answer."""
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
    """Which keys of the prompts' records rewards get.

    Attributes:
        needed: that every record must have.
        optional: that they get where a record has them.
        all: whether they get every other key, too.
    """

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    all: bool = False


def columns_of(rewards: Sequence[AnswerReward]) -> RecordColumns:
    """The keys that rewards get, but for those that every prompt has under a name of our own."""
    own = [reward for reward in rewards if isinstance(reward, OwnReward)]
    needed = dict.fromkeys(name for reward in own for name in reward.needed_columns)
    return RecordColumns(
        tuple(name for name in needed if name not in (ANSWER, MESSAGES)),
        (ANSWER,) if ANSWER in needed else (),
        any(reward.takes_other_columns for reward in own),
    )


class RewardOptimizer(TuningOptimizer):
    """What an update of `reward` is."""

    learning_rate: PositiveFloat = 1e-4
    """At the peak of the schedule (TRL's reward training: 1e-4)."""


class Reward(Training):
    """A reward model (Christiano et al. 2017; Stiennon et al. 2020): the tuned model with one number as its output,
    trained so that of each pair the chosen answer's is the larger (Bradley & Terry 1952). The stage's `model/` is what
    transformers loads with AutoModelForSequenceClassification."""

    data: Annotated[tuple[PreferencePairs, ...], Field(min_length=1)] | None = None
    """Where the pairs are; those of `dpo` if absent, each once whatever the weights of the sets."""
    margin: Annotated[float, Field(ge=0.0)] = 0.0
    """By how much a chosen answer's score should be the larger: subtracted from the difference inside the loss
    (Touvron et al. 2023b, equation 2)."""
    center_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores around zero, where the loss itself sees
    differences alone (Eisenstein et al. 2023: 0.01)."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """Most tokens per conversation; the context of the model that begins if absent. A pair with a longer answer is left
    out and counted: an answer without its end is not the one that was judged."""
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of pairs, chosen by hash of the prompt, that only measure the accuracy; those of `dpo` where share and seed
    are the same."""
    measured_pairs: Annotated[int, Field(ge=0)] = 10_000
    """Training pairs that are scored once more after the last step, as every held-out one is: the first by their ids,
    which are hashes. `margins.parquet` has them all, the report those that are ranked wrong by the most."""
    optimizer: RewardOptimizer = RewardOptimizer()
    """What an update is; `sophia` needs labels to draw, which pairs have not."""
    lora: Lora | None = None
    """Train adapters and the scoring row only; the whole model is trained if absent. Adapters are merged into `model/`
    and not kept beside it."""

    @model_validator(mode="after")
    def _has_no_labels_to_draw(self) -> Self:
        if self.optimizer.kind == "sophia":
            raise ValueError(
                "reward.optimizer.kind cannot be sophia, which estimates curvature from labels that the "
                "model draws: a loss over pairs has none; choose another kind"
            )
        return self


class Prompts(Examples):
    """One set of prompts to answer."""

    format: Literal["auto", "prompts", "messages", "sharegpt", "completion", "instruction"] = "auto"
    """`prompts`: `prompt` or `question`, a text or messages; the others are those of `sft.data`, whose last answer is
    not shown to the model and is taken for the right one."""
    answer: Annotated[str, Field(min_length=1)] = "answer"
    """The key of the right answer, a text or a number, for the rewards that compare with one."""


class Critic(Section):
    """PPO's estimate of what reward is to come, a linear layer on the policy's last hidden states, and its use."""

    discount: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Gamma: what a reward is worth a token earlier (Stiennon et al. 2020: 1)."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation (Schulman et al. 2016, equation 16; their robots: 0.92 to 0.99)."""
    loss_weight: PositiveFloat = 0.1
    """Weight of the critic's loss beside the policy's (TRL's PPOTrainer: 0.1)."""
    clip: PositiveFloat | None = 0.2
    """How far an estimate may move from the one before the update and still lower the loss; not limited if null."""


class RlOptimizer(TuningOptimizer):
    """What an update of `rl` is."""

    learning_rate: PositiveFloat = 1e-6
    """At the peak of the schedule (TRL's GRPOTrainer for whole models: 1e-6)."""


class RlSpikes(Spikes):
    """What a bad step of `rl` is: as of a pre-training, but for the deviations of its loss."""

    sigma: PositiveFloat | None = None
    """Deviations over the running mean from which on a loss is a spike; null: only a loss or gradient of NaN or
    Inf makes a step bad. A surrogate loss lies around zero by its making, so that its size says nothing."""


class Curriculum(Section):
    """Prompts that teach come more often: online difficulty filtering (Bae et al. 2025; prime-rl). GRPO learns nothing
    from a group whose answers all have one reward, and most from one of which half pass.

    Prompts are taken in their seeded order, as without it. One whose share of answers that passed, the last time that
    it was asked, does not lie within `between` is passed over, but for a share `again`; one that was never asked is
    taken."""

    between: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Pass rates that are wanted, neither end included: what no answer has passed, or every one, is passed over (as
    DAPO's dynamic sampling, Yu et al. 2025, equation 11)."""
    again: Fraction = 0.1
    """Share of the prompts outside that are taken all the same when their turn comes, so that their rate is measured
    anew: chosen by a hash of seed and turn."""
    passed_at: float = 1.0
    """The reward, all of them weighted, from which on an answer has passed."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.between[0] >= self.between[1]:
            raise ValueError(f"rl.curriculum.between is {list(self.between)}; the first must be below the second")
        return self


class Rl(TrainingInEpochs):
    """Reinforcement learning from rewards of the model's own answers: GRPO or PPO.

    A batch of prompts is answered by the model as it is, `group_size` times each; the answers are rewarded, and
    `steps_per_batch` x `epochs_per_batch` updates learn from them. The defaults are GRPO with DAPO's normalisation.
    """

    added = (
        "epochs",
        "tools",
        "turns",
        "tool_answer_tokens",
        "curriculum",
        "rollouts",
        "rollouts_agree",
        "vllm_memory",
    )

    algorithm: Literal["grpo", "ppo"] = "grpo"
    """`grpo`: an answer's advantage is its reward beside those of the same prompt (Shao et al. 2024, section 4.1);
    `ppo`: a critic says what was to be expected of each token (Schulman et al. 2017; Ouyang et al. 2022)."""
    start_from: Literal["auto", "pretrain", "merge", "sft", "dpo"] = "auto"
    """The stage whose model begins, and is the reference; `auto`: the last of these that there is."""
    data: Annotated[tuple[Prompts, ...], Field(min_length=1)]
    """Where the prompts are."""
    rewards: Annotated[tuple[AnyReward, ...], Field(min_length=1)]
    """What an answer is rewarded for."""
    tools: tuple[AnyTool, ...] = ()
    """What the model may call while it answers: `calculator`, `{python: {...}}`, `{search: {...}}`, `{use: ...}`. What
    a tool answers has no loss, and an error is an answer too. See docs/how-to/training/tools-in-rl.md."""
    turns: Positive = 4
    """Most turns of the assistant in an answer with `tools`; an answer that calls in its last turn is cut."""
    tool_answer_tokens: Positive = 256
    """Most tokens of a tool's answer; a longer one is cut."""
    curriculum: Curriculum | None = None
    """Which prompts come more often; all alike if absent."""
    group_size: Positive = 8
    """Answers per prompt."""
    global_batch_size: Positive = 64
    """Answers per optimizer step, over all ranks and micro-batches: a multiple of `group_size`."""
    micro_batch_size: Positive = 8
    """Answers per forward pass of the training on one rank at the most."""
    steps_per_batch: Positive = 1
    """Optimizer steps that the answers to a batch of prompts are shared out to."""
    epochs_per_batch: Positive = 1
    """How often each of them is learned from."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, when answers are drawn and when they are learned from: it is that policy which
    improves."""
    max_new_tokens: Positive = 256
    """Most tokens of an answer, its end included, and with `tools` those of all its turns and of what they answer; an
    answer that is longer is cut."""
    generation_rows: Positive = 64
    """Answers that are generated at the same time on one rank at the most."""
    rollouts: Literal["own", "vllm"] = "own"
    """What draws answers: the engine that is here, or vLLM where it is installed, in one process (`engine.ranks: 1`).
    vLLM's log-probabilities of what it drew are compared with ours in every batch. Not tried with vLLM itself yet."""
    rollouts_agree: PositiveFloat = 0.02
    """Largest mean difference of these log-probabilities; beyond it the training is refused. bf16 rounds a logit of 5
    by up to 0.01."""
    vllm_memory: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    """Share of the device's memory that vLLM may take (its `gpu_memory_utilization`; TRL's colocated mode: 0.3)."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """Most tokens of prompt and answer; the context of the model that begins if absent. A longer one becomes the new
    context. Prompts that leave less than `max_new_tokens` are left out, and counted."""
    clip: PositiveFloat = 0.2
    """How far the ratio of new to old probability may fall below 1, or rise above it, and still be rewarded (Schulman
    et al. 2017, equation 7)."""
    clip_high: PositiveFloat | None = None
    """How far it may rise, where that differs (DAPO, Yu et al. 2025: 0.28); `clip` if absent."""
    kl_weight: Annotated[float, Field(ge=0.0)] = 0.04
    """Strength of the tie to the model that it starts from (Shao et al. 2024: 0.04); 0 needs no reference in memory."""
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """How the divergence is estimated from drawn tokens (Schulman 2020). `grpo` adds it to the loss, where `auto` is
    k3; `ppo` takes it from the reward of each token, where `auto` is k1."""
    kl_correction: bool = True
    """Multiply `grpo`'s estimate by the ratio of new to old probability, which makes its gradient that of the
    divergence, also where an update is not the first of its answers (DeepSeek-V3.2 2025, section 3.1; TRL 1.16 does so
    too). The first GRPO had k3 without it, whose gradient is another divergence's."""
    advantage_scale: Literal["group", "batch", "none"] = "group"
    """What `grpo` divides advantages by: the standard deviation of the rewards of the same prompt (Shao et al. 2024),
    of the whole batch, or nothing (Dr. GRPO, Liu et al. 2025, which finds that the first prefers prompts that are
    too easy or too hard)."""
    normalisation: Literal["sequence", "token", "constant"] = "token"
    """What a step's loss is the mean of: answers, each the mean of its tokens (GRPO), tokens (DAPO), or tokens out of
    `max_new_tokens` per answer, so that no answer's length changes the weight of its tokens (Dr. GRPO)."""
    mask_truncated: bool = False
    """Leave answers that were cut out of the loss (DAPO's overlong filtering); they count as answers of their group."""
    critic: Critic = Critic()
    """The critic of `ppo`."""
    holdout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of prompts, chosen by hash, that are never trained on: their likeliest answers are rewarded before and
    after."""
    holdout_limit: Positive = 256
    """Held-out prompts that are answered at the most, the first by hash."""
    samples_every: Positive = 50
    """Batches of prompts between those of which `rollouts.json` shows some answers, beside the first and the last.
    Every answer is kept, and `gristmill trace --stage rl --step N` shows those of a step."""
    optimizer: RlOptimizer = RlOptimizer()
    """What an update is; `sophia` needs labels to draw."""
    spikes: RlSpikes = RlSpikes()
    """Which steps are skipped."""
    lora: Lora | None = None
    """Train adapters only; the reference is then the model without them. The whole model is trained if absent."""
    validate_every: Positive | None = None
    """Steps between measurements of the pre-training's held-out rows, which show what is forgotten, in the units of
    `pretrain`; also measured after the last step. Nothing is measured if absent."""

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps until the model answers again."""
        return self.steps_per_batch * self.epochs_per_batch

    @property
    def rollouts_per_batch(self) -> int:
        """Answers that are generated at once."""
        return self.global_batch_size * self.steps_per_batch

    def steps_of_epochs(self, epochs: float, rows: int) -> int:
        """Steps that ask so many prompts that often."""
        prompts_per_batch = self.rollouts_per_batch // self.group_size
        return math.ceil(epochs * rows / prompts_per_batch) * self.updates_per_batch

    @property
    def kl_kind(self) -> Literal["k1", "k2", "k3"]:
        """The estimator that is meant."""
        if self.kl_estimator != "auto":
            return self.kl_estimator
        return "k3" if self.algorithm == "grpo" else "k1"

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Self:
        if self.algorithm == "grpo" and self.group_size < 2:
            raise ValueError(
                "rl.group_size is 1, but grpo compares the answers to a prompt with one another; give at "
                "least 2 (8 is usual), or choose algorithm: ppo"
            )
        if self.global_batch_size % self.group_size:
            raise ValueError(
                f"rl.global_batch_size ({self.global_batch_size}) answers per step are not whole groups "
                f"of group_size ({self.group_size}); make it a multiple"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [name_of(reward) for reward in self.rewards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rl.rewards: two are called {twice[0]}; give each a `name` of its own")
        return self

    @model_validator(mode="after")
    def _tools_differ(self) -> Self:
        names = [name_of_tool(tool) for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rl.tools: two are called {twice[0]}; give each a `name` of its own")
        return self

    @model_validator(mode="after")
    def _pass_rates_say_something(self) -> Self:
        if self.curriculum is not None and self.group_size < 2:
            raise ValueError("rl.curriculum needs a group_size of 2 or more: the pass rate of one answer is 0 or 1")
        return self

    @model_validator(mode="after")
    def _estimator_has_a_gradient(self) -> Self:
        if self.algorithm == "grpo" and self.kl_estimator == "k1" and not self.kl_correction:
            raise ValueError(
                "rl.kl_estimator cannot be k1 with grpo and no kl_correction: in a loss its gradient is "
                "zero on average, so it would hold nothing; choose k2 or k3, or kl_correction: true"
            )
        return self

    @model_validator(mode="after")
    def _fits_generation(self) -> Self:
        if self.optimizer.kind == "sophia":
            raise ValueError(
                "rl.optimizer.kind cannot be sophia, which estimates curvature from labels that the model "
                "draws: a reward has none; choose another kind"
            )
        if self.schedule.warmup_tokens is not None:
            raise ValueError(
                "rl.schedule.warmup_tokens: how many tokens a step has is known only once they are "
                "generated; give warmup_steps"
            )
        if self.spikes.rollback_after is not None:
            raise ValueError(
                "rl.spikes.rollback_after: going back would leave the answers that were learned from in "
                "between to another model; remove it"
            )
        return self
