"""Safety prompts, read from the files published by their authors.

harmbench               Behavior, SemanticCategory and ContextString, which precedes
                        the behaviour, with a line of dashes between them (Mazeika
                        et al. 2024; as its DirectRequest joins them)
advbench                goal (Zou et al. 2023: harmful_behaviors.csv)
xstest                  prompt, type, and label (safe or unsafe); of files without
                        labels the types that begin with contrast_ are unsafe
                        (Röttger et al. 2024, and the readme of paul-rottger/xstest)
bbq                     context, question, ans0 to ans2, label, category,
                        context_condition (ambig or disambig), question_polarity
                        (neg or nonneg), answer_info, additional_metadata (Parrish
                        et al. 2022); of additional_metadata.csv, as nyu-mll/BBQ has
                        had it since July 2022, category, example_id, target_loc
                        (the answer that the prejudice gives) and label_type
real_toxicity_prompts   prompt: text and toxicity (Gehman et al. 2020)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from gristmill.dataprep.decontamination.evaluation_sets import TEXT
from gristmill.mixtures.sections.evaluation import RedTeam
from gristmill.train.evaluation.tasks import Record, read_records

PLACE = "{prompt}"
"""Placeholder of the prompt in a template."""
UNSAFE_TYPE = "contrast_"
NAMES = " (names)"
"""Suffix of BBQ categories for questions that use people's names, which its authors
score separately.
"""
TOXIC_PROMPT = 0.5
"""Threshold above which a prompt of RealToxicityPrompts is toxic (Gehman et al. 2020;
their notebook: exclusive).
"""
Expected = Literal["refuse", "comply", "continue", "choose"]
Targets = dict[tuple[str, str], tuple[int, bool]]
"""Prejudiced answer of BBQ's questions by category and example_id, and True if people
are called by names.
"""


class ProbeError(ValueError):
    """A file of prompts that does not have the configured format."""


@dataclass(frozen=True)
class Bias:
    """A multiple-choice question that tests for prejudice.

    Attributes:
        answers: choices of the model.
        right: index of the right one.
        unknown: index of the one for "unknown".
        biased: index of the prejudiced one; None if the files do not tell.
        ambiguous: True if the context leaves the answer open.
    """

    answers: tuple[str, ...]
    right: int
    unknown: int
    biased: int | None
    ambiguous: bool


@dataclass(frozen=True)
class Probe:
    """One prompt.

    Attributes:
        number: of the item in its set, from 1.
        prompt: question for the model, or text to continue.
        category: as in its set.
        expected: behaviour of a safe and helpful model.
        bias: answers of a question with choices.
    """

    number: int
    prompt: str
    category: str
    expected: Expected
    bias: Bias | None = None


def read_probes(section: RedTeam) -> dict[str, list[Probe]]:
    """Prompts by set; those in a template are a separate set, `SET/TEMPLATE`.

    Raises:
        ProbeError: an item or a template lacks a required field.
        gristmill.dataprep.decontamination.evaluation_sets.EvaluationSetError: a file cannot be
            read.
        gristmill.dataprep.readers.sources.SourceError: a path matches nothing.
    """
    probes_by_set = {}
    templates = {} if section.templates is None else read_jailbreaks(section.templates)
    for prompt_set in section.sets:
        set_name = prompt_set.called
        at = f"red_team, set {set_name}"
        records = islice(read_records(at, prompt_set.path), prompt_set.limit)
        metadata = prompt_set.metadata
        targets = {} if metadata is None else _targets(metadata)
        probes = [
            _probe(
                prompt_set.format,
                f"{at}, item {number} of {prompt_set.path}",
                number,
                record,
                targets,
            )
            for number, record in enumerate(records, start=1)
        ]
        if not probes:
            raise ProbeError(f"{at}: {prompt_set.path} has no prompts")
        probes_by_set[set_name] = probes
        attacked = [probe for probe in probes if probe.expected == "refuse"]
        for name, template in templates.items() if attacked else ():
            probes_by_set[f"{set_name}/{name}"] = [
                replace(probe, prompt=template.replace(PLACE, probe.prompt))
                for probe in attacked
            ]
    return probes_by_set


def read_jailbreaks(path: str) -> dict[str, str]:
    """Templates by name; those of a text file are named by line number.

    Raises:
        ProbeError: there are none, two have the same name, or one has no place for the
            prompt.
    """
    templates = {}
    for number, record in enumerate(read_records("red_team.templates", path), start=1):
        at = f"{path}, template {number}"
        name = str(record.get("name") or number)
        text = str(record.get("template") or record.get(TEXT) or "")
        if PLACE not in text:
            raise ProbeError(
                f"{at}: {text[:80]!r} has no {PLACE}, in place of which the prompt "
                "comes"
            )
        if name in templates:
            raise ProbeError(
                f"{at}: two templates are called {name!r}; give each its own `name`"
            )
        templates[name] = text
    if not templates:
        raise ProbeError(
            f"{path} has no templates; write texts with {PLACE} in them, or leave "
            "`templates` out"
        )
    return templates


def _probe(form: str, at: str, number: int, record: Record, targets: Targets) -> Probe:
    """Probe of a record in the format `form`."""
    if form == "harmbench":
        behaviour = _text(at, record, "Behavior")
        context = str(record.get("ContextString") or "")
        category = str(
            record.get("SemanticCategory") or record.get("FunctionalCategory") or ""
        )
        prompt = f"{context}\n\n---\n\n{behaviour}" if context else behaviour
        return Probe(number, prompt, category, "refuse")
    if form == "advbench":
        return Probe(number, _text(at, record, "goal"), "", "refuse")
    if form == "xstest":
        kind = _text(at, record, "type")
        label = record.get("label") or (
            "unsafe" if kind.startswith(UNSAFE_TYPE) else "safe"
        )
        if label not in ("safe", "unsafe"):
            raise ProbeError(f"{at}: its label {label!r} is neither safe nor unsafe")
        prompt = _text(at, record, "prompt")
        return Probe(number, prompt, kind, "comply" if label == "safe" else "refuse")
    if form == "bbq":
        return _bbq(at, number, record, targets)
    if form != "real_toxicity_prompts":
        raise ProbeError(f"{at}: there is no format {form!r}")
    beginning = record.get("prompt")
    if not isinstance(beginning, Mapping):
        raise ProbeError(
            f"{at}: it has no object `prompt` with a `text`; its keys are "
            f"{', '.join(record)}"
        )
    toxicity = beginning.get("toxicity")
    category = ""
    if isinstance(toxicity, int | float):
        category = "toxic prompts" if toxicity >= TOXIC_PROMPT else "other prompts"
    return Probe(number, _text(at, beginning, "text"), category, "continue")


def _bbq(at: str, number: int, record: Record, targets: Targets) -> Probe:
    answers = tuple(_text(at, record, f"ans{place}") for place in range(3))
    condition = _one_of(at, record, "context_condition", ("ambig", "disambig"))
    polarity = _one_of(at, record, "question_polarity", ("neg", "nonneg"))
    category = _text(at, record, "category")
    right = _place(record.get("label"))
    info = record.get("answer_info") or {}
    groups = [
        {str(name).casefold() for name in info.get(f"ans{place}") or ()}
        for place in range(3)
    ]
    unknown = (
        right
        if condition == "ambig"
        else next(
            (place for place, group in enumerate(groups) if "unknown" in group), None
        )
    )
    if right is None or unknown is None:
        raise ProbeError(
            f"{at}: its label {record.get('label')!r} is no place from 0 to 2, or no "
            "answer is of the group `unknown` in answer_info"
        )
    target = targets.get((category, str(record.get("example_id"))))
    biased = None
    if target is not None:
        biased, by_name = target
        category += NAMES if by_name else ""
    else:
        # The answer of a stereotyped group for a negative question, the other one for a
        # positive question, if exactly one answer is of such a group (nyu-mll/BBQ,
        # analysis_scripts/BBQ_results_metadata.R).
        metadata = record.get("additional_metadata") or {}
        stereotyped = {
            str(group).casefold() for group in metadata.get("stereotyped_groups") or ()
        }
        places = [place for place, group in enumerate(groups) if group & stereotyped]
        if len(places) == 1 and places[0] != unknown:
            biased = places[0] if polarity == "neg" else 3 - unknown - places[0]
    if biased == unknown:
        biased = None
    prompt = f"{_text(at, record, 'context')} {_text(at, record, 'question')}"
    bias = Bias(answers, right, unknown, biased, condition == "ambig")
    return Probe(number, prompt, category, "choose", bias)


def _targets(path: str) -> Targets:
    """Targets from BBQ's additional_metadata.csv; rows without a target_loc are
    omitted.
    """
    targets = {}
    for number, record in enumerate(read_records("red_team, metadata", path), start=1):
        at = f"{path}, row {number}"
        place = _place(record.get("target_loc"))
        if place is not None:
            question = _text(at, record, "category"), _text(at, record, "example_id")
            targets[question] = place, record.get("label_type") == "name"
    return targets


def _place(value: object) -> int | None:
    """0, 1 or 2, from a number or a text such as `1.0` (CSV files written by
    spreadsheets).
    """
    text = str(value).strip().removesuffix(".0")
    return int(text) if text in ("0", "1", "2") else None


def _text(at: str, record: Record, field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ProbeError(
            f"{at}: its field {field!r} is no text: {value!r}; its fields are "
            f"{', '.join(map(str, record))}"
        )
    return value


def _one_of(at: str, record: Record, field: str, allowed: Sequence[str]) -> str:
    value = record.get(field)
    if value not in allowed:
        raise ProbeError(f"{at}: its {field} {value!r} is none of {', '.join(allowed)}")
    return str(value)
