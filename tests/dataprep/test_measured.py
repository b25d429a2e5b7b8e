"""Stages write only the columns that they announce."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.public_data import language_model
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import JUDGEMENT_COLUMNS, column_names, shard_names
from gristmill.flows.stages.registry import STAGES, measured_by
from gristmill.flows.stages.stage import imported
from gristmill.mixtures.schema.prepare import STEP_SECTIONS, Step
from tests.chat_endpoint import Endpoint
from tests.dataprep.back_off_model import BackOffModel
from tests.dataprep.small_models import write_word_vectors

PROSE = (
    "The river carried its silt slowly toward the quiet sea while old stories "
    "were told by those who stayed. "
)
ITEM = (
    "which of these seven rivers carried the most silt toward the quiet northern "
    "sea in that long year of floods"
)
COUNT = """
def count(text: str) -> dict:
    return {"commas": text.count(","), "begins": text[:4]}

def shorten(text: str) -> str:
    return text[4:]
"""
STEPS: list[dict[str, Any]] = [
    {
        "clean": {
            "fix_unicode": True,
            "normalise": "NFC",
            "lines": ["c4", "dclm"],
            "max_newlines": 2,
            "mask": ["email", "ip", "phone", "iban", "card"],
        }
    },
    {
        "filter": {
            "rules": [
                "gopher_quality",
                "gopher_repetition",
                "c4",
                "mc4",
                "fineweb",
                "curator",
                "code",
            ]
        }
    },
    {
        "filter": {
            "rules": [
                {"gopher_quality": {"dialect": "dolma"}},
                {"gopher_repetition": {"dialect": "curator"}},
            ]
        }
    },
    {"dedup": {"url": True, "minhash": {"threshold": 0.8}}},
    {"canaries": {"copies": [1, 2], "secrets": 1}},
    {"dedup_lines": {}},
    {"dedup_substrings": {}},
    {"langid": {"keep": ["en"]}},
    {"licences": {"allow": ["MIT", "unknown"]}},
    {"opt_outs": {}},
    {"quality": {"perplexity": {"kenlm": "m.arpa", "buckets": [0.3, 0.6]}}},
    {"decontaminate": {"against": ["items.jsonl"]}},
    {"decontaminate": {"against": ["items.jsonl"], "action": "excise"}},
    {
        "annotate": {
            "use": {
                "function": "steps:count",
                "files": {"steps.py": COUNT},
                "distribution": "",
            }
        }
    },
    {"dedup_semantic": {}},
    {"cluster": {"k": 3}},
    {"judge": {}},
    {
        "edit": {
            "use": {
                "function": "steps:shorten",
                "files": {"steps.py": COUNT},
                "distribution": "",
            }
        }
    },
]


def complete_step(
    step: dict[str, Any], endpoint: Endpoint, folder: Path
) -> dict[str, Any]:
    """Complete a step with the files that it names and the endpoint that it asks."""
    [(name, section)] = step.items()
    match name:
        case "langid":
            if (model := language_model()) is None:
                pytest.skip("lid.176.ftz is missing")
            return {name: {**section, "model": model}}
        case "decontaminate":
            (folder / "items.jsonl").write_text(json.dumps({"text": ITEM}) + "\n")
            return {name: {**section, "against": [str(folder / "items.jsonl")]}}
        case "quality" if "perplexity" in section:
            pytest.importorskip("kenlm")
            (folder / "m.arpa").write_text(BackOffModel([PROSE], 2).arpa())
            perplexity = {**section["perplexity"], "kenlm": str(folder / "m.arpa")}
            return {name: {**section, "perplexity": perplexity}}
        case "dedup_semantic" | "cluster":
            (folder / "words").mkdir()
            return {
                name: {**section, "model": str(write_word_vectors(folder / "words"))}
            }
        case "judge":
            return {
                name: {**section, "model": {"endpoint": endpoint.url, "model": "small"}}
            }
    return step


def test_every_stage_of_prepare_is_covered() -> None:
    assert {name for step in STEPS for name in step} == set(STEP_SECTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=lambda step: next(iter(step)))
def test_stage_writes_only_announced_columns(
    step: dict[str, Any],
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
) -> None:
    texts = [
        PROSE * 3,
        PROSE * 3,
        PROSE + ITEM,
        *(f"{PROSE}\nNumber {number}.\n" * 4 for number in range(20)),
    ]
    inputs = {
        "ingest": write_ingest(
            "ingest", [[("web", str(row), text) for row, text in enumerate(texts)]]
        )
    }
    out = tmp_path / "out"
    with Endpoint(lambda prompt, before: '{"score": 3, "reason": "plain"}') as endpoint:
        parsed = Step.model_validate(complete_step(step, endpoint, tmp_path))
        imported(STAGES[parsed.stage].run)(
            inputs, parsed.config.model_dump(mode="json"), out, make_context("work")
        )
    written = set(column_names(out / shard_names(inputs["ingest"])[0])) - set(
        JUDGEMENT_COLUMNS
    )

    assert written
    assert written <= set(measured_by(parsed))
