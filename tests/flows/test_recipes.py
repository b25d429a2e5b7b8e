"""Manifests that come with the package: they are found by name from any folder, and every one runs to its end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import gristmill.flows.stages.registry  # noqa: F401 - lets the steps of `prepare` stand in manifests
from gristmill.dataprep.judges.fasttext.fasttext_models import MODEL_VARIABLE
from gristmill.flows.cli.completion import complete_manifest, complete_recipe
from gristmill.flows.cli.main import app
from gristmill.mixtures.load import ManifestError, load_manifest
from gristmill.mixtures.recipes.named_recipes import describe_recipe, is_named, recipe_file, recipe_names
from tests.chat_endpoint import Does, Endpoint
from tests.dataprep.small_models import random_texts, write_classifier, write_word_vectors
from tests.flows.corpus import prose, source_code
from tests.flows.small_writer import small_writer
from tests.flows.test_begin_anywhere import write_small_model, write_small_reward_model
from tests.flows.test_languages_page import TEXTS
from tests.warm_commands import gristmill_command

MODEL = Path(__file__).resolve().parents[3] / "shared" / "data" / "langid" / "lid176" / "lid.176.ftz"
TRAINING = ["tokenizer.vocab_size=512", "mix.sequence_length=64", "pretrain.model={layers: 1, width: 32, heads: 2}",
            "pretrain.steps=2", "pretrain.global_batch_size=4", "pretrain.micro_batch_size=4",
            "pretrain.schedule.warmup_steps=1"]
TUNING = ["model.path=model", "sequence_length=64", "steps=1", "global_batch_size=4", "micro_batch_size=4",
          "schedule.warmup_steps=0", "holdout=0.3"]
REINFORCING = ["rl.sequence_length=64", "rl.max_new_tokens=8", "rl.group_size=2", "rl.steps=1",
               "rl.global_batch_size=4", "rl.micro_batch_size=4", "rl.holdout=0.3"]
LLAMA = ("commoncrawl", "c4", "github", "wikipedia", "books", "arxiv", "stackexchange")
OLMO = ("web", "pdfs", "code", "math", "arxiv", "wiki", "questions", "thinking", "instructions")
SMOLLM = ("fineweb-edu", "cosmopedia", "python-edu", "open-web-math", "stackoverflow")
CODE = ("github", "code", "python-edu")


def tuning(section: str) -> list[str]:
    return [one if one.startswith("model") else f"{section}.{one}" for one in TUNING]


def reading(*names: str) -> list[str]:
    return [part for name in names for part in (f"sources.{name}.path={name}.jsonl", f"sources.{name}.max_epochs=9")]


SMALLER = {
    "best-of-n": [*tuning("sft"), "examples.best.model.folder=model", "examples.best.model.max_tokens=4",
                  "examples.best.cut=keep", "examples.best.per_prompt=3", "examples.best.rewards.0.path=reward-model"],
    "constitutional": [*tuning("sft"), *tuning("dpo")[1:], "examples.revised.model={url}",
                       "examples.preferred.model={url}", "examples.preferred.compare.model={url}"],
    "self-instruct": [*tuning("sft"), "examples.instructed.model={url}", "examples.instructed.grow.number=9",
                      "examples.instructed.grow.shown=2"],
    "annealing": ["sources.web.path=c4.jsonl", "sources.best.path=books.jsonl", "mix.tokens=2000",
                  "sources.web.max_epochs=9", *TRAINING],
    "code-fim": ["sources.code.path=code.jsonl", "sources.text.path=c4.jsonl", "mix.tokens=2000", *TRAINING],
    "continued": ["sources.field.path=books.jsonl", "sources.replay.path=c4.jsonl", "mix.tokens=2000", *TRAINING[1:2],
                  *TRAINING[3:], "pretrain.model.init_from=model", "tokenizer.path=model/tokenizer.json"],
    "dclm-baseline": ["sources.crawl.path=pages", "sources.crawl.format=html",
                      f"quality.classifier={{model: {MODEL}, label: __label__en}}"],
    "distillation": [*tuning("sft"), "sft.distill.teacher=model", "sft.lora={rank: 2, alpha: 4}"],
    "fineweb-2": ["sources.crawl.path=pages-of-two-languages", "sources.crawl.format=html", f"langid.model={MODEL}",
                  "langid.keep={de: 0.5, fr: 0.5}"],
    "judged": ["sources.web.path=web.parquet", "edu.judge.model={url}", "edu.embedding.path=vectors",
               "edu.min_quality=0.1"],
    "long-context": ["sources.text.path=c4.jsonl", "sources.long.path=books.jsonl", "mix.tokens=2000", *TRAINING,
                     "pretrain.phases=[{sequence_length: 16}, {learning_rate_scale: 0.69}]"],
    "olmo3": [*reading(*OLMO), "sources.questions.path=books.jsonl", "mix.tokens=2000", *TRAINING,
              *tuning("sft")[1:], *tuning("dpo")[1:], *REINFORCING, "rl.steps_per_batch=1"],
    "smollm": [*reading(*SMOLLM), "mix.tokens=2000", *TRAINING],
    "c4": ["sources.crawl.path=c4.jsonl", "sources.crawl.format=auto"],
    "dpo-only": tuning("dpo"),
    "fineweb": ["sources.crawl.path=pages", "sources.crawl.format=html"],
    "fineweb-edu": ["sources.web.path=web.parquet", "edu.min={edu: -100}"],
    "grpo": ["model.path=model", *REINFORCING],
    "llama1": [*reading(*LLAMA), "sources.commoncrawl.where=quality >= 0", "mix.tokens=2000", *TRAINING],
    "lora": tuning("sft"),
    "sft-only": tuning("sft"),
}
"""What makes a run of each recipe small, and lets it read what `stand_ins` wrote, and ask `write` by the address."""


def write(asked: str, before: int) -> Does:
    """A model that writes tasks of the words that the small one knows, answers, revises, judges by chance, and prefers
    what is longer."""
    if "on a scale from 0 to 5" in asked or "from 0 to 5:" in asked:
        return json.dumps({"score": sum(map(ord, asked)) % 6})
    return small_writer(asked) or "sky " * (1 + before % 3)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The model that `write` is, as a recipe names it."""
    with Endpoint(write) as endpoint:
        yield f"{{endpoint: '{endpoint.url}', model: writer, temperature: 1.0}}"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    random_ = random.Random(3)
    for name in dict.fromkeys([*LLAMA, *OLMO, *SMOLLM]):
        write = source_code if name in CODE else prose
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": write(random_)}) + "\n" for _ in range(25)))
    (folder / "pages").mkdir()
    for number in range(12):
        lines = "".join(f"<p>{line}</p>" for line in prose(random_, 60).split("\n"))
        (folder / "pages" / f"{number}.html").write_text(f"<html><body><article>{lines}</article></body></html>")
    (folder / "pages-of-two-languages").mkdir()
    for language in ("de", "fr"):
        for number in range(6):
            said = " ".join(random_.sample(TEXTS[language], 6) * 2).format(n=number)
            (folder / "pages-of-two-languages" / f"{language}{number}.html").write_text(
                f"<html><body><article><p>{said}</p></article></body></html>")
    write_word_vectors(folder / "vectors")
    pq.write_table(pa.table({"text": [f"a {text}" for text in random_texts(20, 4)]}), folder / "web.parquet")
    words = write_small_model(folder)
    write_small_reward_model(folder)
    said = [" ".join(random_.choices(words, k=5)) for _ in range(16)]
    for file, rows in {
        "chats": [{"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": one[::-1]}]}
                  for one in said],
        "pairs": [{"prompt": one, "chosen": f"{one} yes", "rejected": f"no {number}"}
                  for number, one in enumerate(said)],
        "red-team": [{"prompt": one} for one in said],
        "seeds": [{"prompt": one} for one in said],
        "questions": [{"question": one, "answer": f"#### {number}"} for number, one in enumerate(said)],
    }.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_valid_and_says_its_sources_and_what_differs(name: str) -> None:
    assert load_manifest(f"recipe:{name}").name == name
    text = recipe_file(name).read_text()
    assert describe_recipe(name).endswith(".")
    for part in ("# Sources: ", "# Needs: ", "# What differs, and why:"):
        assert part in text
    assert name in SMALLER, "every recipe is run to its end, below"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not MODEL.exists(), reason="lid.176.ftz is not here")
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_runs_through_its_last_stage_on_a_little_data(
    name: str, stand_ins: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stand_ins)
    monkeypatch.setenv(MODEL_VARIABLE, str(MODEL))
    if name == "fineweb-edu":
        write_classifier(stand_ins / "models" / "fineweb-edu-classifier")
    settings = [part for setting in SMALLER[name]
                for part in ("--set", setting.replace("{url}", address))]
    done = gristmill_command(["run", f"recipe:{name}", "--no-ui", *settings])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(called("status", f"recipe:{name}", "--json", *settings).stdout)
    assert {row["state"] for row in rows} == {"committed"}


def test_paths_of_a_named_manifest_are_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_manifest("recipe:c4", ["sources.crawl.path=mine/*.jsonl"])
    assert loaded.sources["crawl"].path == str(tmp_path / "mine" / "*.jsonl")
    assert load_manifest("demo").name == "demo"


def test_a_file_of_the_same_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_named("demo")
    (tmp_path / "demo").write_text("name: mine\nsources: {a: {path: a}}\n")
    assert load_manifest("demo").name == "mine"


def test_a_name_that_there_is_not_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ManifestError, match="no recipe is called 'finweb', did you mean 'fineweb'"):
        load_manifest("recipe:finweb")
    assert "there are annealing" in called("recipes", "finweb").output
    assert load_manifest("recipe:llama").name == "llama1", "the beginning of a name that no other has"
    with pytest.raises(ManifestError, match="no recipe is called 'fine'"):
        load_manifest("recipe:fine")


def test_recipes_are_listed_shown_and_completed() -> None:
    assert [row["name"] for row in json.loads(called("recipes", "--json").stdout)] == recipe_names()
    assert called("recipes", "lora").stdout == recipe_file("lora").read_text()
    assert "fineweb-edu" in called("recipes").stdout
    assert complete_manifest("recipe:fine") == [f"recipe:{one}" for one in ("fineweb", "fineweb-2", "fineweb-edu")]
    assert complete_recipe("lor") == [("lora", describe_recipe("lora"))]


def test_a_copy_of_a_recipe_has_the_paths_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    done = called("new", "sub/mine.yaml", "--recipe", "annealing", "--source", "web=data/*.jsonl")
    assert done.exit_code == 0, done.output
    assert "\nneeds: --set sources.web.path=... and --set sources.best.path=...\n" in done.output
    loaded = load_manifest("sub/mine.yaml")
    assert Path(loaded.sources["web"].path).resolve() == tmp_path / "data" / "*.jsonl"
    assert "# Sources: Hu et al. 2024" in (tmp_path / "sub" / "mine.yaml").read_text(), "its comments stay"
    wrong = called("new", "other.yaml", "--recipe", "annealing", "--source", "wep=data")
    assert (wrong.exit_code, "did you mean 'web'" in wrong.output) == (2, True)
    assert not (tmp_path / "other.yaml").exists()
    assert "written: llama1.yaml\n" in called("new", "--recipe", "llama").output


def test_the_demo_is_planned_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = called("demo", "--dry-run", "--until", "dedup")
    assert shown.exit_code == 0, shown.output
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:5]] == ["ingest", "langid", "filter", "dedup"]
