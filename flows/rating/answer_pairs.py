"""Pairs of answers of two models to the prompts of a file, and the order and sides in
which a rater sees them.

The answers are written once and kept in a file; the side of each is drawn from a hash
of pair and rater.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gristmill.core.files import canonical_json, read_json, write_json
from gristmill.dataprep.examples.conversations import Message
from gristmill.flows.models.find_model import ModelNotFoundError
from gristmill.flows.models.generate import Prompt, generate_lines
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import TOKENIZER
from gristmill.train.generation.language_model import open_language_model
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Scheduler

BATCH = 32
"""Answers that are written at the same time."""


@dataclass(frozen=True)
class RatedModel:
    """A model whose answers are compared.

    Attributes:
        label: its name in the results; raters do not see it.
        fingerprint: of the stage that made it.
        weights, tokenizer: folders.
        chat: prompts go through the chat template; else it continues texts.
    """

    label: str
    fingerprint: str
    weights: Path
    tokenizer: Path
    chat: bool


@dataclass(frozen=True)
class AnswerPair:
    """Two answers to one prompt.

    Attributes:
        id: a hash of models, prompt and answers.
        prompt: a text, or messages.
        first, second: the models' labels.
        answers: of the first and the second.
    """

    id: str
    prompt: str | list[Message]
    first: str
    second: str
    answers: tuple[str, str]

    def is_swapped(self, rater: str) -> bool:
        """Whether this rater sees the second model's answer on the left."""
        return bool(_digest("side", self.id, rater)[0] & 1)

    def place(self, rater: str) -> bytes:
        """Key that sorts pairs into this rater's order."""
        return _digest("order", self.id, rater)


@dataclass(frozen=True)
class AnswerPairs:
    """Pairs made of a file of prompts.

    Attributes:
        pairs: with different answers.
        same: number of prompts with equal answers, which are not rated.
        failed: number of the prompt in its file -> why it could not be answered.
    """

    pairs: list[AnswerPair]
    same: int
    failed: dict[int, str]


def models_to_rate(
    session: Session, other: Session | None, first: str | None, second: str | None
) -> list[RatedModel]:
    """The two models.

    Args:
        session: the manifest of the first, and of the second unless there is `other`.
        other: the manifest of the second.
        first, second: stages; the last two that made a model, or the last one of each
            manifest, if absent.

    Raises:
        ModelNotFoundError: a stage makes no model, or has not made it yet.
    """
    trained = _stages_with_model(session)
    if other is not None:
        first_stage = first or _last(session, trained)
        second_stage = second or _last(other, _stages_with_model(other))
        return [
            _rated_model(
                session, first_stage, f"{session.manifest.name}/{first_stage}"
            ),
            _rated_model(other, second_stage, f"{other.manifest.name}/{second_stage}"),
        ]
    if (first is None or second is None) and len(trained) < 2:
        raise ModelNotFoundError(
            f"{session.manifest_file} has made "
            f"{' and '.join(trained) or 'no model yet'}; two models are compared: run "
            "the stages that train them, or give another manifest with --other"
        )
    second_stage = second or next(name for name in reversed(trained) if name != first)
    first_stage = first or next(
        name for name in reversed(trained) if name != second_stage
    )
    if first_stage == second_stage:
        raise ModelNotFoundError(
            f"both models are {first_stage}; name two different "
            "stages with --first and --second"
        )
    return [_rated_model(session, name, name) for name in (first_stage, second_stage)]


def _stages_with_model(session: Session) -> list[str]:
    return [
        name
        for name, node in session.plan.items()
        if node.stage.output == "model" and session.committed(name) is not None
    ]


def _last(session: Session, trained: Sequence[str]) -> str:
    if not trained:
        raise ModelNotFoundError(
            f"{session.manifest_file}: no model is trained yet; "
            f"run: {session.command('run')}"
        )
    return trained[-1]


def _rated_model(session: Session, stage: str, label: str) -> RatedModel:
    makers = [
        name for name, node in session.plan.items() if node.stage.output == "model"
    ]
    if stage not in makers:
        raise ModelNotFoundError(
            f"{session.manifest_file}: {stage!r} makes no model; those that do are "
            f"{', '.join(makers) or 'none'}"
        )
    folder, tokenizer = session.committed(stage), session.committed(TOKENIZER)
    if folder is None or tokenizer is None:
        raise ModelNotFoundError(
            f"{session.manifest_file}: {stage} has made no model yet; run: "
            f"{session.command('run', '--until', stage)}"
        )
    node = session.plan[stage]
    is_chat = node.stage.row_kind != "documents"  # pre-training makes a model of texts
    return RatedModel(
        label, node.identity, folder.data / "model", tokenizer.data, is_chat
    )


def make_pairs(
    models: Sequence[RatedModel],
    prompts: Mapping[int, Prompt],
    sampling: Sampling,
    max_new_tokens: int,
    kept: Path,
) -> AnswerPairs:
    """Answer the prompts by both models, or read the kept answers.

    Args:
        models: the first and the second.
        prompts: by their numbers in their file.
        sampling: of the answers.
        max_new_tokens: longest answer.
        kept: the file of answers; written anew if it holds those of other models,
            prompts or settings.
    """
    settings = {
        "models": [[model.label, model.fingerprint] for model in models],
        "prompts": list(prompts.values()),
        "sampling": asdict(sampling),
        "max_new_tokens": max_new_tokens,
    }
    key = hashlib.sha256(canonical_json(settings)).hexdigest()
    stored = read_json(kept) if kept.exists() else {}
    if stored.get("key") != key:
        first, second = (
            _answers(model, prompts, sampling, max_new_tokens) for model in models
        )
        stored = {
            "key": key,
            "models": [model.label for model in models],
            "answers": [list(answers) for answers in zip(first, second, strict=True)],
        }
        write_json(kept, stored)
    return _pair_answers(models, prompts, stored["answers"])


def _answers(
    model: RatedModel,
    prompts: Mapping[int, Prompt],
    sampling: Sampling,
    max_new_tokens: int,
) -> list[dict[str, str]]:
    """Per prompt `text`, or why there is none as `error`."""
    language = open_language_model(model.weights, model.tokenizer)
    requests = dict(prompts)
    if model.chat and language.chat is not None:
        for number, prompt in prompts.items():
            if "prompt" in prompt:
                requests[number] = {
                    "messages": [{"role": "user", "content": prompt["prompt"]}]
                }
    completions = generate_lines(
        language, Scheduler(language.model, BATCH), requests, sampling, max_new_tokens
    ).completions
    del language
    gc.collect()  # one model at a time
    return [
        {"text": completion.text}
        if completion.error is None
        else {"error": completion.error}
        for completion in completions
    ]


def _pair_answers(
    models: Sequence[RatedModel],
    prompts: Mapping[int, Prompt],
    answers: Sequence[Sequence[Mapping[str, str]]],
) -> AnswerPairs:
    first, second = models
    pairs, same, failed = {}, 0, {}
    for (number, prompt), both_answers in zip(prompts.items(), answers, strict=True):
        errors = [
            f"{model.label}: {answer['error']}"
            for model, answer in zip(models, both_answers, strict=True)
            if "error" in answer
        ]
        if errors:
            failed[number] = errors[0]
            continue
        texts = both_answers[0]["text"], both_answers[1]["text"]
        if texts[0].strip() == texts[1].strip():
            same += 1
            continue
        question = prompt["prompt"] if "prompt" in prompt else prompt["messages"]
        id_ = _digest(
            "pair",
            first.fingerprint,
            second.fingerprint,
            canonical_json(question).decode(),
            *texts,
        ).hex()
        pairs[id_] = AnswerPair(id_, question, first.label, second.label, texts)
    return AnswerPairs(list(pairs.values()), same, failed)


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b(canonical_json(list(parts)), digest_size=16).digest()
