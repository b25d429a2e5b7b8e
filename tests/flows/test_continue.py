"""`gristmill continue`: a training whose mixture changes after some step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.flows.cli.main import app

MANIFEST = """
name: c
seed: 3
sources:
  prose: {path: prose.jsonl, weight: 0.7, max_epochs: 4}
  code: {path: code.jsonl, weight: 0.3, max_epochs: 8}
tokenizer: {vocab_size: 300}
mix: {tokens: 12000, sequence_length: 32, validation: 0.1}
pretrain: {model: {layers: 1, width: 32, heads: 2}, steps: 20, global_batch_size: 8, log_every: 1, validate_every: 20}
engine: {checkpoint_every: 6, permanent_every: 6}
"""
WORDS = [
    first + vowel + last
    for first in ("gr", "m", "st", "tr")
    for vowel in "iao"
    for last in ("st", "nd", "ll")
]


def called(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def losses(folder: Path) -> dict[int, float]:
    lines = [
        json.loads(line)
        for line in (folder / "data" / "metrics.jsonl").read_text().splitlines()
    ]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_finished_training_continues_with_new_weights_and_stays_traceable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source, number in (("prose", 150), ("code", 60)):
        random_ = random.Random(source)
        Path(f"{source}.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "text": " ".join(
                            random_.choices(WORDS, k=random_.randint(30, 80))
                        )
                        + f" {item}."
                    }
                )
                + "\n"
                for item in range(number)
            )
        )
    Path("c.yaml").write_text(MANIFEST)
    called("run", "c.yaml", "--store", "store", "--no-ui")
    (original_folder,) = Path("store/pretrain").iterdir()

    def json_output(*arguments: str) -> Any:
        return json.loads(called(*arguments, "--store", "store", "--json"))

    weights = "mix.weights={prose: 0.2, code: 0.8}"
    continuation = json_output(
        "continue", "c.yaml", "--from-step", "10", "--set", weights
    )
    assert (
        continuation["manifest"],
        continuation["rows"],
        continuation["checkpoint"],
    ) == ("c-from-10.yaml", 80, 6)
    assert continuation["shares"] == {"code": 0.3, "prose": 0.7}
    assert continuation["command"].endswith("run c-from-10.yaml --store store")
    called("run", "c-from-10.yaml", "--store", "store", "--no-ui")
    (new_folder,) = (
        item for item in Path("store/pretrain").iterdir() if item != original_folder
    )
    original_losses, new_losses = losses(original_folder), losses(new_folder)
    assert sorted(new_losses) == list(range(7, 21))
    assert [new_losses[step] for step in range(7, 11)] == [
        original_losses[step] for step in range(7, 11)
    ]
    trace_difference = json_output("trace", "c-from-10.yaml", "--against", "c.yaml")
    assert (
        trace_difference["first_difference"],
        trace_difference["same_set"],
        trace_difference["attested"],
    ) == (
        11,
        False,
        [True, True],
    )
    for step in (3, 10):
        documents = [
            [
                (item["id"], item["tokens"], item["copies"])
                for item in json_output("trace", manifest, "--step", str(step))[
                    "documents"
                ]
            ]
            for manifest in ("c.yaml", "c-from-10.yaml")
        ]
        assert documents[0] == documents[1]
    traced_document = json_output("trace", "c-from-10.yaml", "--step", "15")[
        "documents"
    ][0]
    steps = json_output("trace", "c-from-10.yaml", "--document", traced_document["id"])[
        "steps"
    ]
    assert {entry["step"]: entry["rows"] for entry in steps}[15] == traced_document[
        "rows"
    ]

    message = called(
        "continue",
        "c.yaml",
        "--from-step",
        "10",
        "--set",
        "mix.validation=0.2",
        "--store",
        "store",
        code=2,
    )
    assert (
        "mix.validation: decides what the first 10 steps read and cannot change"
        in message
    )
    message = called(
        "continue", "c.yaml", "--from-step", "21", "--store", "store", code=2
    )
    assert "--from-step 21: pretrain has 20 steps; give 1 to 20" in message
    message = called(
        "continue",
        "c.yaml",
        "--from-step",
        "10",
        "--set",
        "mix.weights={code: 1}",
        "--store",
        "store",
        code=2,
    )
    assert "c-from-10.yaml exists with other content" in message
