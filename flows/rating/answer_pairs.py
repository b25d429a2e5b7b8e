"""Pairs of answers of two models to the prompts of a file, and what of them a rater sees.

The answers are written once and kept in a file; which of them stands left is drawn from a hash of pair and rater.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.core.files import canonical_json, read_json, write_json
from gristmill.flows.models.find_model import ModelNotFoundError
from gristmill.flows.models.generate import generate_lines
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import TOKENIZER
from gristmill.train.generation.language_model import open_language_model
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Scheduler

BATCH = 32
"""Answers that are written at the same time."""
Prompt = Mapping[str, Any]
"""`prompt`, a text, or `messages`, and perhaps more."""


@dataclass(frozen=True)
class RatedModel:
    """A model whose answers are compared.

    Attributes:
        label: what the results call it; no rater sees it.
        fingerprint: of the stage that made it.
        weights, tokenizer: folders.
        chat: whether it is asked through the chat template; else it continues texts.
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
    prompt: str | list[dict[str, str]]
    first: str
    second: str
    answers: tuple[str, str]

    def is_swapped(self, rater: str) -> bool:
        """Whether this rater sees the second model's answer on the left."""
        return bool(_hashed("side", self.id, rater)[0] & 1)

    def place(self, rater: str) -> bytes:
        """What the order is made by in which this rater sees the pairs."""
        return _hashed("order", self.id, rater)


@dataclass(frozen=True)
class AnswerPairs:
    """What was made of a file of prompts.

    Attributes:
        pairs: whose answers differ.
        same: prompts that both models answer alike: there is nothing to rate.
        failed: number of the prompt in its file -> why it could not be answered.
    """

    pairs: list[AnswerPair]
    same: int
    failed: dict[int, str]


def models_to_rate(session: Session, other: Session | None, first: str | None, second: str | None) -> list[RatedModel]:
    """The two models.

    Args:
        session: the manifest of the first, and of the second unless there is another one.
        other: the other one.
        first, second: stages; the last two that have made a model, or the last one of each manifest, if absent.

    Raises:
        ModelNotFoundError: a stage makes no model, or has not made it yet.
    """
    made = _made(session)
    if other is not None:
        of_first, of_second = first or _last(session, made), second or _last(other, _made(other))
        return [
            _rated(session, of_first, f"{session.manifest.name}/{of_first}"),
            _rated(other, of_second, f"{other.manifest.name}/{of_second}"),
        ]
    if (first is None or second is None) and len(made) < 2:
        raise ModelNotFoundError(
            f"{session.manifest_file} has made {' and '.join(made) or 'no model yet'}; two models "
            "are compared: run the stages that train them, or give another manifest with --other"
        )
    of_second = second or next(name for name in reversed(made) if name != first)
    of_first = first or next(name for name in reversed(made) if name != of_second)
    if of_first == of_second:
        raise ModelNotFoundError(f"both models are {of_first}; name two different stages with --first and --second")
    return [_rated(session, name, name) for name in (of_first, of_second)]


def _made(session: Session) -> list[str]:
    return [
        name for name, node in session.plan.items() if node.stage.makes_model and session.committed(name) is not None
    ]


def _last(session: Session, made: Sequence[str]) -> str:
    if not made:
        raise ModelNotFoundError(f"{session.manifest_file}: no model is trained yet; run: {session.command('run')}")
    return made[-1]


def _rated(session: Session, stage: str, label: str) -> RatedModel:
    makers = [name for name, node in session.plan.items() if node.stage.makes_model]
    if stage not in makers:
        raise ModelNotFoundError(
            f"{session.manifest_file}: {stage!r} makes no model; those that do are {', '.join(makers) or 'none'}"
        )
    folder, tokenizer = session.committed(stage), session.committed(TOKENIZER)
    if folder is None or tokenizer is None:
        raise ModelNotFoundError(
            f"{session.manifest_file}: {stage} has made no model yet; run: {session.command('run', '--until', stage)}"
        )
    return RatedModel(
        label,
        session.plan[stage].identity,
        folder.data / "model",
        tokenizer.data,
        session.plan[stage].stage.rows != "documents",
    )  # pre-training makes a model of texts


def make_pairs(
    models: Sequence[RatedModel], prompts: Mapping[int, Prompt], sampling: Sampling, max_new_tokens: int, kept: Path
) -> AnswerPairs:
    """Answer the prompts by both models, or read what was answered before.

    Args:
        models: the first and the second.
        prompts: by their numbers in their file.
        sampling: how answers are drawn.
        max_new_tokens: longest answer.
        kept: the file; it is written anew if it holds the answers of other models, prompts or settings.
    """
    asked = {
        "models": [[one.label, one.fingerprint] for one in models],
        "prompts": list(prompts.values()),
        "sampling": asdict(sampling),
        "max_new_tokens": max_new_tokens,
    }
    key = hashlib.sha256(canonical_json(asked)).hexdigest()
    found = read_json(kept) if kept.exists() else {}
    if found.get("key") != key:
        answered = [_answers(model, prompts, sampling, max_new_tokens) for model in models]
        found = {
            "key": key,
            "models": [one.label for one in models],
            "answers": [list(both) for both in zip(*answered, strict=True)],
        }
        write_json(kept, found)
    return _paired(models, prompts, found["answers"])


def _answers(
    model: RatedModel, prompts: Mapping[int, Prompt], sampling: Sampling, max_new_tokens: int
) -> list[dict[str, str]]:
    """Per prompt `text`, or why there is none as `error`."""
    language = open_language_model(model.weights, model.tokenizer)
    through_chat = model.chat and language.chat is not None
    asked = {
        number: {"messages": [{"role": "user", "content": prompt["prompt"]}]}
        if through_chat and "prompt" in prompt
        else prompt
        for number, prompt in prompts.items()
    }
    lines = generate_lines(language, Scheduler(language.model, BATCH), asked, sampling, max_new_tokens).lines
    del language
    gc.collect()  # one model at a time
    return [{"error": line["error"]} if "error" in line else {"text": line["completion"]} for line in lines]


def _paired(
    models: Sequence[RatedModel], prompts: Mapping[int, Prompt], answers: Sequence[Sequence[Mapping[str, str]]]
) -> AnswerPairs:
    labels, pairs, same, failed = [one.label for one in models], {}, 0, {}
    for (number, prompt), both in zip(prompts.items(), answers, strict=True):
        error = next(
            (f"{label}: {one['error']}" for label, one in zip(labels, both, strict=True) if "error" in one), None
        )
        if error is not None:
            failed[number] = error
            continue
        first, second = both[0]["text"], both[1]["text"]
        if first.strip() == second.strip():
            same += 1
            continue
        asked = prompt["prompt"] if "prompt" in prompt else prompt["messages"]
        named = _hashed("pair", *[one.fingerprint for one in models], canonical_json(asked).decode(), first, second)
        pairs[named] = AnswerPair(named.hex(), asked, labels[0], labels[1], (first, second))
    return AnswerPairs(list(pairs.values()), same, failed)


def _hashed(*parts: str) -> bytes:
    return hashlib.blake2b(canonical_json(list(parts)), digest_size=16).digest()
