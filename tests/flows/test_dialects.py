"""`gristmill dialects`: keep rates under each project's definitions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call
from tests.jsonl import write_jsonl

pytestmark = pytest.mark.slow

DIALECTS = ["dclm", "datatrove", "dolma", "curator", "redpajama"]


def words(source: random.Random, number: int) -> str:
    """Return random words with little in common, and some English ones."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    drawn_words = [
        "".join(source.choices(letters, k=source.randint(4, 7))) for _ in range(number)
    ]
    drawn_words[3::9] = ["the", "of", "and", "with"] * (len(drawn_words[3::9]) // 4) + [
        "to"
    ] * (len(drawn_words[3::9]) % 4)
    return " ".join(drawn_words)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a manifest and a store in which its documents are
    committed.
    """
    folder = tmp_path_factory.mktemp("dialects")
    source = random.Random(3)
    block = words(source, 60)
    texts = [words(source, 200) for _ in range(10)]
    # 60 of 540 words occur twice
    texts += [
        f"{words(source, 210)} {block} {words(source, 105)} {block} "
        f"{words(source, 105)}"
    ]
    # three of five projects count these as bullets
    texts += ["too short"] * 2 + [
        "\n".join(f"- {words(source, 30)}" for _ in range(10))
    ]
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in texts])
    (folder / "m.yaml").write_text("""\
name: small
sources: {web: {path: texts.jsonl}}
prepare: [{filter: {}}]
engine: {workers: 1}
""")
    arguments = [str(folder / "m.yaml"), "--store", str(folder / "store")]
    call("run", *arguments, "--until=ingest", "--no-ui", catch_exceptions=False)
    return arguments


def compared(arguments: list[str]) -> dict[str, Any]:
    result = call("dialects", *arguments, "--json", catch_exceptions=False)
    comparison: dict[str, Any] = json.loads(result.stdout)
    return comparison


def test_each_dialect_has_its_keep_rates(committed: list[str]) -> None:
    comparison = compared(committed)
    assert (comparison["documents"], comparison["of"]) == (14, 14)
    # Two documents are too short, and repetitive in dialects that count unrepeated
    # n-grams; one is a list, one has the block.
    assert {
        verdict["name"]: round(14 * verdict["documents"])
        for verdict in comparison["dialects"]
    } == {"dclm": 10, "datatrove": 11, "dolma": 10, "curator": 11, "redpajama": 11}
    for verdict in comparison["dialects"]:
        assert 0 < verdict["bytes"] < 1
        dropped = sum(verdict["dropped"].values())
        assert dropped == 14 - round(14 * verdict["documents"])


def test_sample_depends_only_on_document_ids(committed: list[str]) -> None:
    first, again = (
        compared([*committed, "--sample=5"]),
        compared([*committed, "--sample=5"]),
    )
    assert first == again
    assert (first["documents"], first["of"]) == (5, 14)


def test_the_manifests_thresholds_are_used(committed: list[str]) -> None:
    comparison = compared(
        [*committed, "--set=prepare.0.filter.rules.gopher_quality.min_words=1000"]
    )
    assert all(verdict["documents"] == 0 for verdict in comparison["dialects"])


def test_words_by_language_are_those_of_datatrove_alone(committed: list[str]) -> None:
    key = "prepare.0.filter.rules.gopher_quality"
    words = f"{key}={{dialect: datatrove, words: language}}"
    dialects = compared([*committed, "--set", words])["dialects"]
    assert dialects[0] == compared(committed)["dialects"][0]


def test_the_table_fits_sixty_columns(committed: list[str]) -> None:
    result = call("dialects", *committed, env={"COLUMNS": "60"}, catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert [
        line.split()[0] for line in lines if line.startswith(tuple(DIALECTS))
    ] == DIALECTS


def test_missing_documents_error_names_the_command_to_run(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "m.yaml").write_text("name: small\nsources: {web: {path: a.txt}}\n")
    result = call(
        "dialects", tmp_path / "m.yaml", "--store", tmp_path / "store", code=2
    )
    assert "no documents are read yet" in result.output
    assert "run" in result.output
