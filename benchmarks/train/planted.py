"""`gristmill bench results`: whether `gristmill ablate` finds harms that were planted
into real text, and finds nothing where there is nothing.

Sets, arms and rule were committed before the first run, and every run is a row. The
text is documentation and source code of installed packages; an arm replaces a share of
the tokens by one harm, which takes the place of documentation, the kind of text that is
measured. It counts as found if the ablation decides as expected.
`EQUAL_ARMS` further arms train on random halves of the documents, more than they can
read: each is judged by itself, and every decision on it is a false alarm.
"""

from __future__ import annotations

import codecs
import os
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

import gristmill
from benchmarks.installed_texts import CORPUS, DOCSTRING, documentation, modules
from benchmarks.measuring import Row, cost_row, row
from gristmill.core.files import write_json_lines, write_text
from gristmill.core.processes import ONE_THREAD, in_environment
from gristmill.dataprep.user_code.shuffled_words import shuffle_words
from gristmill.flows.sweeps.ablation import (
    plan_ablation,
    prepared_run,
    read_ablation,
)
from gristmill.flows.sweeps.ablation_results import AblationResults, compare
from gristmill.flows.sweeps.paired_differences import (
    Decision,
    Difference,
    decide,
)

PIECES = 3600
"""Pieces of documentation, 5 MB."""
HELD_OUT_EVERY, PLANTED_EVERY = 60, 10
"""One of so many pieces is held out; of the others one of so many is only planted."""
CODE_MODULES, MODULE_CHARACTERS = 400, 4000
CODE_SHARE = 0.3
"""Of the tokens of the manifest itself; the rest is documentation."""
COPIED = 2
"""Documents that are read again and again: about 2 % of what a proxy reads."""
SPAM_SENTENCES = 12
SPAM = (
    "Buy the best {0} {1} online today and save {2} percent on every {1}.",
    "Our {0} {1} ships within {2} hours, so order your {1} now!",
    "Customers who bought this {1} gave it {2} stars: a truly {0} {1}.",
    "Click here to win one of {2} {0} {1}s, no card required.",
)
ADJECTIVES = ("cheap", "premium", "luxury", "genuine", "discount", "exclusive")
NOUNS = ("watch", "handbag", "phone", "mattress", "sofa", "camera", "ticket", "pill")
BUDGET: dict[str, Any] = {
    "sizes": ["50k"],
    "tokens_per_parameter": 1,
    "rates": {"tuned": 1.0},
    "seeds": 3,
}
"""Of every ablation: a fifth of the tokens that `--quick` takes."""
EQUAL_ARMS = 20
HARMS: dict[str, tuple[str, float]] = {
    "spam-30": ("spam", 0.3),
    "shuffled-sentences-30": ("sentences", 0.3),
    "shuffled-words-30": ("words", 0.3),
    "other-language-30": ("language", 0.3),
    "duplicates-10": ("copies", 0.1),
    "duplicates-30": ("copies", 0.3),
    "duplicates-50": ("copies", 0.5),
}
"""Arm -> planted source, and its share of the tokens."""
GOOD = "no-code"
"""Arm that reads documentation alone, the kind of text that is measured."""
CHANCE = 0.05
"""Nominal rate of false alarms: 1 - `decide.confidence`."""


def rows() -> Iterator[Row]:
    """Run the ablation with planted effects, then those of equal arms."""
    with (
        tempfile.TemporaryDirectory(prefix="gristmill-planted-") as name,
        in_environment(dict.fromkeys(ONE_THREAD, "1")),
    ):
        folder = Path(name)
        write_corpus(folder, documentation(PIECES))
        yield from planted_rows(folder)
        yield from equal_rows(folder)


def write_corpus(folder: Path, pieces: Sequence[str]) -> None:
    """Write the held-out documents, all sources and the manifest."""
    held_out, clean, planted = split(pieces)
    code = [
        DOCSTRING.sub("", module)[:MODULE_CHARACTERS]
        for module in islice(modules(), CODE_MODULES)
    ]
    texts = {
        "held_out": held_out,
        "documentation": clean,
        "code": code,
        "spam": [spam(number) for number in range(len(planted))],
        "sentences": shuffle_sentences(planted),
        "words": [shuffle_words(text) for text in planted],
        "language": [codecs.encode(text, "rot13") for text in planted],
        "copies": planted[:COPIED],
    }
    for name, documents in texts.items():
        write_json_lines(
            folder / f"{name}.jsonl", ({"text": text} for text in documents)
        )
    weights = {"documentation": 1 - CODE_SHARE, "code": CODE_SHARE}
    manifest = {
        "name": "planted",
        "seed": 1,
        "sources": {
            name: {
                "path": str(folder / f"{name}.jsonl"),
                "weight": weights.get(name, 0.0),
            }
            for name in texts
            if name != "held_out"
        },
        "tokenizer": {"vocab_size": 2048},
        "mix": {"tokens": 1_000_000, "sequence_length": 256},
        "engine": {"runner": "local", "workers": 1},
    }
    write_text(folder / "planted.yaml", yaml.safe_dump(manifest, sort_keys=False))


def split(pieces: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split pieces into those held out, clean ones, and those that become harms, all of
    the same modules.
    """
    rest = [text for number, text in enumerate(pieces) if number % HELD_OUT_EVERY]
    clean = [text for number, text in enumerate(rest) if number % PLANTED_EVERY]
    return list(pieces[::HELD_OUT_EVERY]), clean, rest[::PLANTED_EVERY]


def spam(number: int) -> str:
    """Return a document of sentences from few templates."""
    source = random.Random(number)
    return " ".join(
        source.choice(SPAM).format(
            source.choice(ADJECTIVES), source.choice(NOUNS), source.randint(2, 99)
        )
        for _ in range(SPAM_SENTENCES)
    )


def shuffle_sentences(texts: Sequence[str]) -> list[str]:
    """Return as many texts, of sentences of all of them in a random order."""
    sentences = [part for text in texts for part in re.split(r"(?<=[.!?])\s+", text)]
    random.Random(0).shuffle(sentences)
    return [" ".join(sentences[number :: len(texts)]) for number in range(len(texts))]


def planted_arms() -> dict[str, Any]:
    """Return the arms of the ablation with planted effects."""
    arms: dict[str, Any] = {}
    for name, (source, share) in HARMS.items():
        weights = {"documentation": 1 - CODE_SHARE - share, source: share}
        arms[name] = {
            "set": {f"sources.{key}.weight": weight for key, weight in weights.items()}
        }
    return {**arms, GOOD: {"without": ["code"]}}


def settings(folder: Path, arms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an ablation of the planted manifest."""
    held_out = {"documentation": str(folder / "held_out.jsonl")}
    return {**BUDGET, "arms": dict(arms), "held_out": held_out}


def planted_rows(folder: Path) -> Iterator[Row]:
    """Measure how many harms, and whether the good, are found."""
    results = gristmill.ablate(
        folder / "planted.yaml",
        settings(folder, planted_arms()),
        store=folder / "store",
        progress=False,
    )
    yield from result_rows("planted", results)
    harms = [results.decisions[name] == "worse" for name in HARMS]
    note = f"decided as expected; proxies of 50k weights, {CORPUS}"
    yield row("planted, harms found", sum(harms), len(harms), "harms", note)
    is_good = results.decisions[GOOD] == "better"
    yield row("planted, good found", is_good, 1, "goods", note)


def equal_rows(folder: Path) -> Iterator[Row]:
    """Measure how often equal arms are called different."""
    # A binary digit of the draw: an independent half of the documents for each arm.
    halves = {
        f"half-{number}": {"where": f"draw * {2**number} % 2 < 1"}
        for number in range(1, EQUAL_ARMS + 1)
    }
    read = read_ablation(settings(folder, halves), each_rule=False, is_quick=False)
    plan = plan_ablation(read, str(folder / "planted.yaml"), [], str(folder / "store"))
    (trial,) = plan.trials
    with open(os.devnull, "w") as output, prepared_run(plan, output) as run:
        pool: dict[str, float] = {}
        arms = [(variant, pool) for variant in plan.variants]
        reference, *trained = run.train_arms(trial, arms)
    rule, target = read.decide, {"documentation": 1.0}
    num_decided, num_significant = 0, 0
    for arm in trained:
        change = compare(arm, reference, target, rule)
        decision = decide(
            change.mean, change.p, rule.confidence, rule.smallest_difference
        )
        num_decided += decision != "cannot tell"
        num_significant += change.p < CHANCE
        yield difference_row(f"equal arms, {arm.name}", change, decision)
    note = f"of {EQUAL_ARMS} arms, against the nominal rate"
    for name, count in (
        ("equal arms, decided", num_decided),
        ("equal arms, p below 0.05", num_significant),
    ):
        yield cost_row(name, count / EQUAL_ARMS, CHANCE, "of arms", note)


def result_rows(title: str, results: AblationResults) -> Iterator[Row]:
    """Yield a row for each arm and control of an ablation of one trial."""
    (trial,) = results.trials
    for arm in trial.arms:
        name = f"{title}, {arm.arm}"
        yield difference_row(name, arm.difference, results.decisions[arm.arm])
        if arm.random_drop is not None:
            smaller, larger = trial.by_size(arm)
            yield difference_row(
                f"{name}: {smaller} beside a random part of {larger}", arm.random_drop
            )
    for control in trial.controls:
        note = "holds" if control.holds else "does not hold"
        yield difference_row(
            f"{title}, control {control.name}", control.difference, note
        )


def difference_row(name: str, change: Difference, decision: Decision | str = "") -> Row:
    """Return a difference in bits per byte with its interval."""
    interval = f"[{change.low:+.4f}, {change.high:+.4f}]"
    note = f"{interval} {decision}".strip()
    return row(name, change.mean, None, "bits/byte", note)
