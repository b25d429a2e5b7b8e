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
        """Return True if this rater sees the second model's answer on the left."""
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
    if other is not None:
        return [
            _rated_model(side, stage, f"{side.manifest.name}/")
            for side, stage in ((session, first), (other, second))
        ]
    trained = _stages_with_model(session, committed=True)
    if (first is None or second is None) and len(trained) < 2:
        raise ModelNotFoundError(
            f"{session.manifest_file} has made "
            f"{' and '.join(trained) or 'no model yet'}; two models are compared: run "
            "the stages that train them, or give another manifest with --other"
        )
    latest = trained[::-1]
    second = second or next(name for name in latest if name != first)
    first = first or next(name for name in latest if name != second)
    if first == second:
        raise ModelNotFoundError(
            f"both models are {first}; name two different stages with --first and "
            "--second"
        )
    return [_rated_model(session, name) for name in (first, second)]


def _stages_with_model(session: Session, committed: bool = False) -> list[str]:
    return [
        name
        for name, node in session.plan.items()
        if node.stage.output == "model"
        and not (committed and session.committed(name) is None)
    ]


def _rated_model(session: Session, stage: str | None, prefix: str = "") -> RatedModel:
    makers = _stages_with_model(session)
    if stage is None:
        trained = _stages_with_model(session, committed=True)
        if not trained:
            raise ModelNotFoundError(
                f"{session.manifest_file}: no model is trained yet; run: "
                f"{session.command('run')}"
            )
        stage = trained[-1]
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
    weights = folder.data / "model"
    return RatedModel(prefix + stage, node.identity, weights, tokenizer.data, is_chat)


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
        kept: the file of answers; rewritten if it contains those of other models,
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
    labels = [model.label for model in models]
    if stored.get("key") != key:
        by_model = [
            _answers(model, prompts, sampling, max_new_tokens) for model in models
        ]
        answers = [list(pair) for pair in zip(*by_model, strict=True)]
        stored = {"key": key, "models": labels, "answers": answers}
        write_json(kept, stored)
    fingerprints = [model.fingerprint for model in models]
    pairs, same, failed = {}, 0, {}
    for (number, prompt), answers in zip(
        prompts.items(), stored["answers"], strict=True
    ):
        errors = [
            f"{label}: {answer['error']}"
            for label, answer in zip(labels, answers, strict=True)
            if "error" in answer
        ]
        if errors:
            failed[number] = errors[0]
            continue
        first, second = (answer["text"] for answer in answers)
        if first.strip() == second.strip():
            same += 1
            continue
        question = prompt["prompt"] if "prompt" in prompt else prompt["messages"]
        text = canonical_json(question).decode()
        id_ = _digest("pair", *fingerprints, text, first, second).hex()
        pairs[id_] = AnswerPair(id_, question, labels[0], labels[1], (first, second))
    return AnswerPairs(list(pairs.values()), same, failed)


def _answers(
    model: RatedModel,
    prompts: Mapping[int, Prompt],
    sampling: Sampling,
    max_new_tokens: int,
) -> list[dict[str, str]]:
    """Per prompt `text`, or the reason for its absence as `error`."""
    language = open_language_model(model.weights, model.tokenizer)
    requests = dict(prompts)
    if model.chat and language.chat is not None:
        for number, prompt in prompts.items():
            if "prompt" in prompt:
                message: Message = {"role": "user", "content": prompt["prompt"]}
                requests[number] = {"messages": [message]}
    scheduler = Scheduler(language.model, BATCH)
    generated = generate_lines(language, scheduler, requests, sampling, max_new_tokens)
    del language, scheduler
    gc.collect()  # one model at a time
    return [
        {"text": completion.text}
        if completion.error is None
        else {"error": completion.error}
        for completion in generated.completions
    ]


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b(canonical_json(list(parts)), digest_size=16).digest()
