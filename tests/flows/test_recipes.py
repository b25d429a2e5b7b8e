"""Recipes of the package: they are found by name from any folder, and every one runs to
its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gristmill.flows.stages.registry  # noqa: F401 - lets the steps of `prepare` stand in manifests
from benchmarks.checkout import ROOT
from gristmill.dataprep.fasttext.fasttext_models import MODEL_VARIABLE
from gristmill.flows.cli.completion import complete_manifest
from gristmill.flows.report.facts import gather_facts
from gristmill.flows.report.training import loss_rows
from gristmill.flows.running.session import open_session
from gristmill.mixtures.loader import ManifestError, load_manifest
from gristmill.mixtures.recipes.named_recipes import (
    DEMOS,
    describe_recipe,
    is_named,
    recipe_file,
    recipe_names,
)
from tests.chat_endpoint import Endpoint
from tests.commands import call
from tests.flows.recipe_stand_ins import (
    MODEL,
    SMALLER,
    model_at,
    settings_of,
    write,
    write_stand_ins,
)
from tests.warm_commands import gristmill_command

GALLERY = ROOT / "docs" / "gallery.md"
PAGE = GALLERY.with_name("recipe-runs.md")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The model `write` as the model section of a recipe."""
    with Endpoint(write) as endpoint:
        yield model_at(endpoint.url)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    write_stand_ins(folder)
    return folder


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_is_valid_and_names_its_sources_and_differences(name: str) -> None:
    assert load_manifest(f"recipe:{name}").name == name
    text = recipe_file(name).read_text()
    assert describe_recipe(name).endswith(".")
    for part in (
        "# Sources: ",
        "# Needs: ",
        "# It worked if: ",
        "# What differs, and why:",
    ):
        assert part in text
    assert name in SMALLER, "a test below runs every recipe to its end"


def section_of(name: str) -> str:
    """Return a recipe's section of the page of small runs."""
    section = re.search(rf"(?ms)^## {name}\n(.*?)(?=^## |\Z)", PAGE.read_text())
    assert section is not None, f"make recipes writes a section for {name}"
    return section[1]


@pytest.mark.parametrize("name", recipe_names())
def test_small_runs_page_shows_time_steps_and_success_criterion_of_a_recipe(
    name: str,
) -> None:
    text, loaded = section_of(name), load_manifest(f"recipe:{name}")
    assert text.startswith(f"\n{describe_recipe(name)}\n")
    assert re.search(
        r"\n\*\*\d+ s\*\* of processors, \d+ s by the clock \(\d{4}-\d\d-\d\d .*\d+ cores",
        text,
    )
    page_text = " ".join(text.split())
    criterion = re.search(
        r"(?ms)^# It worked if: (.*?)\n# What differs", recipe_file(name).read_text()
    )
    assert criterion is not None
    assert (
        f"*It worked if* {' '.join(criterion[1].replace('#', '').split())}" in page_text
    )
    for training in ("pretrain", "sft", "dpo", "rl"):
        assert (getattr(loaded, training) is not None) == (
            f"\n| {training} | " in text
        ), training
    assert (
        f"| [`{name}`](recipe-runs.md#{name}) | `gristmill run recipe:{name} "
        in GALLERY.read_text()
    )
    assert len(text.splitlines()) <= 36


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not MODEL.exists(), reason="lid.176.ftz is missing")
@pytest.mark.parametrize("name", recipe_names())
def test_recipe_runs_to_its_last_stage_on_small_data(
    name: str, stand_ins: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stand_ins)
    monkeypatch.setenv(MODEL_VARIABLE, str(MODEL))
    monkeypatch.setenv("GRISTMILL_STORE", str(stand_ins / "stores" / name))
    settings = settings_of(name, address)
    process = gristmill_command(["run", f"recipe:{name}", "--no-ui", *settings])
    assert process.returncode == 0, process.stdout + process.stderr
    rows = json.loads(call("status", f"recipe:{name}", "--json", *settings).stdout)[
        "stages"
    ]
    assert {row["state"] for row in rows} == {"committed"}
    facts = gather_facts(
        open_session(f"recipe:{name}", settings[1::2], None), whole=False
    )
    funnel = [f"| {row.stage} | {row.read:,} | {row.kept:,} |" for row in facts.funnel]
    # make recipes
    assert [line for line in funnel if line not in section_of(name)] == []
    for row in loss_rows(facts):
        assert row.last < row.first or row.stage == "rl", row


def test_paths_of_a_named_manifest_are_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_manifest("recipe:c4", ["sources.crawl.path=mine/*.jsonl"])
    assert loaded.sources["crawl"].path == str(tmp_path / "mine" / "*.jsonl")
    for name in DEMOS:
        assert load_manifest(name).name == name


def test_chat_demo_tunes_the_model_of_the_demo() -> None:
    demo, chat = map(load_manifest, DEMOS)
    for section in ("seed", "sources", "prepare", "tokenizer", "mix", "pretrain"):
        assert getattr(chat, section) == getattr(demo, section)
    assert demo.sft is None
    assert chat.sft is not None


def test_file_takes_precedence_over_a_recipe_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_named("demo")
    (tmp_path / "demo").write_text("name: mine\nsources: {a: {path: a}}\n")
    assert load_manifest("demo").name == "mine"


def test_unknown_recipe_error_lists_known_recipes() -> None:
    with pytest.raises(
        ManifestError, match="no recipe is called 'finweb', did you mean 'fineweb'"
    ):
        load_manifest("recipe:finweb")
    assert "there are annealing" in call("recipes", "finweb", code=2).output
    assert load_manifest("recipe:llama").name == "llama1", "a unique prefix of a name"
    with pytest.raises(ManifestError, match="no recipe is called 'fine'"):
        load_manifest("recipe:fine")


@pytest.mark.slow
def test_recipes_are_listed_shown_and_completed() -> None:
    assert [
        row["name"] for row in json.loads(call("recipes", "--json").stdout)
    ] == recipe_names()
    assert call("recipes", "lora").stdout == recipe_file("lora").read_text()
    assert "fineweb-edu" in call("recipes").stdout
    assert complete_manifest("recipe:fine") == [
        f"recipe:{recipe}" for recipe in ("fineweb", "fineweb-2", "fineweb-edu")
    ]


@pytest.mark.slow
def test_demo_is_planned_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = call("plan", "demo")
    assert [line.split()[0] for line in outcome.stdout.splitlines()[1:5]] == [
        "ingest",
        "langid",
        "filter",
        "dedup",
    ]
