"""`gristmill dialects`: keep rates by each project's definitions, and the documents on which they disagree."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.flows.cli.main import app

pytestmark = pytest.mark.slow

DIALECTS = ["dclm", "datatrove", "dolma", "curator", "redpajama"]


def words(source: random.Random, number: int) -> str:
    """Words with little in common, and a few of English."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    made = ["".join(source.choices(letters, k=source.randint(4, 7))) for _ in range(number)]
    made[3::9] = ["the", "of", "and", "with"] * (len(made[3::9]) // 4) + ["to"] * (len(made[3::9]) % 4)
    return " ".join(made)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments that name a manifest and a store in which its documents are committed."""
    folder = tmp_path_factory.mktemp("dialects")
    source = random.Random(3)
    block = words(source, 60)
    texts = [words(source, 200) for _ in range(10)]
    texts += [f"{words(source, 210)} {block} {words(source, 105)} {block} {words(source, 105)}"]  # 60 of 540 twice
    texts += ["too short"] * 2 + ["\n".join(f"- {words(source, 30)}" for _ in range(10))]  # bullets for three of five
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "m.yaml").write_text("""\
name: small
sources: {web: {path: texts.jsonl}}
prepare: [{filter: {}}]
engine: {workers: 1}
""")
    named = [str(folder / "m.yaml"), "--store", str(folder / "store")]
    result = CliRunner().invoke(app, ["run", *named, "--until", "ingest", "--no-ui"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return named


def compared(arguments: list[str]) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["dialects", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_each_dialect_has_its_keep_rates(committed: list[str]) -> None:
    found = compared(committed)
    assert (found["documents"], found["of"], list(found["dialects"])) == (14, 14, DIALECTS)
    kept = {
        dialect: [round(14 * sets[name]["documents"]) for name in ("gopher_quality", "gopher_repetition", "both")]
        for dialect, sets in found["dialects"].items()
    }
    # Two are too short, and all repetition where no n-gram has to be repeated; one is a list, one has the block.
    assert kept == {
        "dclm": [11, 13, 10],
        "datatrove": [11, 12, 11],
        "dolma": [11, 11, 10],
        "curator": [12, 11, 11],
        "redpajama": [12, 13, 11],
    }
    assert all(0 < sets["both"]["bytes"] < 1 for sets in found["dialects"].values())


def test_documents_on_which_they_disagree_come_with_each_verdict_and_value(committed: list[str]) -> None:
    found = compared(committed)
    assert found["disagreeing"] == len(found["examples"]) == 2
    by_rule = {example["verdicts"]["dclm"].get("rule"): example for example in found["examples"]}
    block = by_rule["gopher_repetition/max_duplicate_5gram_char_ratio"]
    assert block["locator"].startswith("texts.jsonl")
    assert block["verdicts"]["datatrove"] == {"keep": True}
    assert block["verdicts"]["dclm"]["value"] == pytest.approx(120 / 540, rel=0.1)
    assert block["verdicts"]["dclm"]["bound"] == 0.15
    bullets = by_rule["gopher_quality/max_bullet_line_ratio"]
    assert {dialect for dialect, verdict in bullets["verdicts"].items() if verdict["keep"]} == {"curator", "redpajama"}


def test_a_sample_is_chosen_by_the_documents_alone(committed: list[str]) -> None:
    first, again = compared([*committed, "--sample", "5"]), compared([*committed, "--sample", "5"])
    assert first == again
    assert (first["documents"], first["of"]) == (5, 14)


def test_the_manifests_thresholds_are_used(committed: list[str]) -> None:
    found = compared([*committed, "--set", "prepare.0.filter.rules.gopher_quality.min_words=1000"])
    assert all(sets["gopher_quality"]["documents"] == 0 for sets in found["dialects"].values())


def test_the_table_fits_sixty_columns(committed: list[str]) -> None:
    result = CliRunner(env={"COLUMNS": "60"}).invoke(app, ["dialects", *committed], catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert [line.split()[0] for line in lines if line.startswith(tuple(DIALECTS))] == DIALECTS
    assert any("max_duplicate_5gram_char_ratio 0.2" in line for line in lines)


def test_without_documents_the_command_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "m.yaml").write_text("name: small\nsources: {web: {path: a.txt}}\n")
    result = CliRunner().invoke(app, ["dialects", str(tmp_path / "m.yaml"), "--store", str(tmp_path / "store")])
    assert result.exit_code == 2
    assert "ingest is not committed" in result.output
    assert "run" in result.output
