"""Answers of a model to probes, and their judgement: refusals, toxicity, and the
verdict of a judge.

Answers are saved part by part in the stage's work folder, so a new attempt continues
after the last complete part. Answers of a judge are cached like all answers of language
models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.files import canonical_json, read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.examples.conversations import Message
from gristmill.dataprep.llm.client import Asking
from gristmill.dataprep.llm.prompt_templates import read_template
from gristmill.dataprep.llm.prompting import prompt
from gristmill.dataprep.user_functions import blaming, call_own, load_own, wrong
from gristmill.mixtures.sections.evaluation import (
    QUESTION,
    OwnToxicity,
    RedTeam,
    Toxicity,
)
from gristmill.train.data.conversation_tokens import ChatError
from gristmill.train.evaluation.answering import Reader, written
from gristmill.train.evaluation.likelihood import continuation
from gristmill.train.evaluation.probes import Probe

PART = 256
"""Prompts whose answers are saved together."""
SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "refused": {"type": "boolean"},
        "harmful": {"type": "boolean"},
        "reason": {"type": "string"},
    },
    "required": ["refused", "harmful"],
}
Rate = Callable[[Sequence[str]], np.ndarray]
"""Function from texts to their toxicity (n,)."""


class Verdict(TypedDict):
    """Verdict of the judge on an answer, of the form of SCHEMA."""

    refused: bool
    harmful: bool
    reason: NotRequired[str]


@dataclass(frozen=True)
class Said:
    """Answer of a model to a probe.

    Attributes:
        texts: generated texts; several only for sampled continuations, empty for
            choices.
        choice: index of the likeliest answer, for probes with choices.
        error: error that prevented the question, or None.
        refused: True if the text refuses, by the rules.
        toxicity: of the most toxic text; None without a classifier.
        worst: index of that text.
        judged: verdict of the judge; None without one, or without a usable answer.
    """

    texts: tuple[str, ...] = ()
    choice: int | None = None
    error: str | None = None
    refused: bool = False
    toxicity: float | None = None
    worst: int = 0
    judged: Verdict | None = None


@dataclass(frozen=True)
class Judges:
    """Refusal rule, toxicity function and judging model of a red team.

    Attributes:
        refuses: True for a text that refuses.
        rate: toxicity of texts, if configured.
        asking: connection to the model that judges, if there is one.
    """

    refuses: Callable[[str], bool]
    rate: Rate | None
    asking: Asking | None


def refusal_rule(phrases: Sequence[str], characters: int) -> Callable[[str], bool]:
    """Predicate for refusals: a phrase starts within the first `characters` of an
    answer, at the start of a word.
    """
    phrase_pattern = re.compile(
        "|".join(rf"(?<!\w){re.escape(_plain(phrase))}(?!\w)" for phrase in phrases)
    )

    def refuses(text: str) -> bool:
        match = phrase_pattern.search(_plain(text))
        return match is not None and match.start() < characters

    return refuses


def _plain(text: str) -> str:
    return " ".join(
        text.replace("\u2019", "'")
        .replace("\u2018", "'")
        .replace("`", "'")
        .casefold()
        .split()
    )


@contextmanager
def open_judges(section: RedTeam, context: Context) -> Iterator[Judges]:
    """Load the classifier or function of toxicity, and connect to the judge.

    Raises:
        gristmill.dataprep.encoders.model_folders.ModelFolderError: the classifier
            cannot be loaded.
        OwnCodeError: the function cannot be loaded.
        gristmill.dataprep.llm.client.AskingError: the judge does not answer.
    """
    with ExitStack() as opened:
        asking = None
        if section.judge is not None:
            asking = opened.enter_context(Asking(section.judge.model, context))
        yield Judges(
            refusal_rule(section.refusals, section.refusal_characters),
            None if section.toxicity is None else toxicity_of(section.toxicity),
            asking,
        )


def toxicity_of(section: Toxicity) -> Rate:
    """Function that rates the toxicity of texts."""
    if isinstance(section, OwnToxicity):
        function = load_own(section, "texts")

        def rate_by_function(texts: Sequence[str]) -> np.ndarray:
            if not texts:
                return np.zeros(0)
            returned = call_own(section, function, list(texts))
            with blaming(section.use):
                values = np.asarray(returned, dtype=np.float64)
            if values.shape != (len(texts),) or not np.isfinite(values).all():
                raise wrong(
                    section,
                    f"returned values of shape {values.shape} for {len(texts)} texts, "
                    "or not finite ones; return a list with a finite number for each "
                    "text",
                )
            return values

        return rate_by_function
    from gristmill.dataprep.encoders.document_scores import announce, load_scorer
    from gristmill.dataprep.encoders.model_folders import folder_sha256

    columns = list(announce(section.model).numbers)
    place = columns.index(section.chosen(columns))
    score = load_scorer(section.model, folder_sha256(section.model.path))

    def rate(texts: Sequence[str]) -> np.ndarray:
        # An empty text has no words to score, so its toxicity is 0.
        some = [number for number, text in enumerate(texts) if text.strip()]
        toxicity = np.zeros(len(texts))
        if some:
            toxicity[some] = score(
                pa.array([texts[number] for number in some], pa.string())
            ).numbers[:, place]
        return toxicity

    return rate


def answer_probes(
    reader: Reader,
    sets: Mapping[str, Sequence[Probe]],
    section: RedTeam,
    judges: Judges,
    seed: int,
    kept: Path,
    chat: bool,
) -> dict[str, list[Said]]:
    """Ask a model all prompts of all sets, and judge its answers.

    Args:
        reader: the model.
        sets: name -> prompts.
        section: settings of the questions.
        judges: judges of the answers.
        seed: of sampled continuations.
        kept: folder of saved answers.
        chat: ask through the chat template; else the model continues the prompt as a
            text.
    """
    answers = {}
    for place, (name, probes) in enumerate(sets.items()):
        judged: list[Said] = []
        for start in range(0, len(probes), PART):
            part = probes[start : start + PART]
            file = kept / f"{place:03d}-{start:08d}.json"
            if not file.exists():
                kept.mkdir(parents=True, exist_ok=True)
                new_answers = _ask(reader, part, section, seed, chat)
                write_json(file, [asdict(answer) for answer in new_answers])
            judged += [
                Said(**{**answer, "texts": tuple(answer["texts"])})
                for answer in read_json(file)
            ]
        to_judge = [
            number
            for number, (probe, probe_answer) in enumerate(
                zip(probes, judged, strict=True)
            )
            if probe_answer.texts and probe.expected in ("refuse", "comply")
        ]
        for number in to_judge:
            refused = judges.refuses(judged[number].texts[0])
            judged[number] = replace(judged[number], refused=refused)
        if judges.rate is not None:
            texts = [text for probe_answer in judged for text in probe_answer.texts]
            rates = iter(judges.rate(texts).tolist())
            for number, probe_answer in enumerate(judged):
                if toxicities := [next(rates) for _ in probe_answer.texts]:
                    worst = toxicities.index(max(toxicities))
                    judged[number] = replace(
                        probe_answer, toxicity=toxicities[worst], worst=worst
                    )
        if section.judge is not None and judges.asking is not None:
            template = read_template(section.judge.template, QUESTION)
            answer_schema = canonical_json(SCHEMA).decode()
            requests = []
            for number in to_judge:
                values = {
                    "prompt": probes[number].prompt,
                    "answer": judged[number].texts[0][: section.judge.characters],
                    "answer_schema": answer_schema,
                }
                requests.append(prompt(template.fill(values), SCHEMA))
            verdicts = list(judges.asking.answers(requests))
            for number, verdict in zip(to_judge, verdicts, strict=True):
                if verdict.error is None:
                    judged[number] = replace(judged[number], judged=verdict.value)
        answers[name] = judged
    return answers


def _ask(
    reader: Reader, probes: Sequence[Probe], section: RedTeam, seed: int, chat: bool
) -> list[Said]:
    answers = [Said()] * len(probes)
    to_choose = [
        number for number, probe in enumerate(probes) if probe.expected == "choose"
    ]
    choices = _choose(reader, [probes[number] for number in to_choose], chat)
    for number, answer in zip(to_choose, choices, strict=True):
        answers[number] = answer
    for continued in (False, True):
        numbers = [
            number
            for number, probe in enumerate(probes)
            if probe.expected != "choose"
            and (probe.expected == "continue") == continued
        ]
        through_chat = chat and not continued
        prompts = {}
        for number in numbers:
            text = probes[number].prompt
            try:
                # In the packed set, every document follows an end-of-text token.
                ids: list[int] = (
                    reader.chat()
                    .encode([{"role": "user", "content": text}], prompt=True)
                    .ids.tolist()
                    if through_chat
                    else [reader.prefix, *reader.encode(text)]
                )
            except ChatError as error:
                answers[number] = Said(error=str(error))
                continue
            if len(ids) + section.max_new_tokens > reader.length:
                reason = (
                    f"{len(ids)} tokens leave no room for {section.max_new_tokens} in "
                    f"the model's {reader.length}"
                )
                answers[number] = Said(error=reason)
            else:
                prompts[number] = ids
        stops = reader.chat().stops if through_chat else reader.stops
        samples, temperature = (
            (section.samples, section.temperature) if continued else (1, 0.0)
        )
        drawn = [
            written(
                reader,
                list(prompts.values()),
                section.max_new_tokens,
                stops,
                temperature,
                seed + sample,
            )
            for sample in range(samples)
        ]
        for number, texts in zip(prompts, zip(*drawn, strict=True), strict=True):
            answers[number] = Said(texts)
    return answers


def _choose(reader: Reader, probes: Sequence[Probe], chat: bool) -> list[Said]:
    """Choose the likeliest answer of each question, the first of equal ones."""
    requests = []
    errors = {}
    for number, probe in enumerate(probes):
        assert probe.bias is not None
        before = probe.prompt
        delimiter = " "
        if chat:
            message: Message = {"role": "user", "content": probe.prompt}
            delimiter = ""
            try:
                before = reader.chat().text([message], prompt=True)
            except ChatError as error:
                errors[number] = str(error)
                continue
        requests += [
            continuation(reader.encode, reader.prefix, before, delimiter + answer)
            for answer in probe.bias.answers
        ]
    scores = iter(reader.score(requests))
    return [
        Said(error=errors[number])
        if number in errors
        else Said(choice=int(np.argmax([next(scores).logp for _ in range(3)])))
        for number in range(len(probes))
    ]
