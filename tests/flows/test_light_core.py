"""What `pip install gristmill` alone installs prepares, tokenises and mixes; what needs more names the extra."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.dataprep.jobs.errors import WorkerError
from gristmill.dataprep.jobs.runner import check_cluster
from gristmill.flows.cli.main import app
from gristmill.flows.running import extras
from gristmill.flows.running.extras import EXTRA_OF
from gristmill.flows.running.session import open_session
from gristmill.flows.stages.registry import STAGES
from tests.test_architecture import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MANIFEST = """\
name: light
sources: {docs: {path: "python-docs://", limit: 80}}
prepare:
  - filter: {rules: [gopher_quality, gopher_repetition, c4]}
  - dedup
tokenizer: {vocab_size: 512}
mix: {tokens: 10_000, sequence_length: 64, validation: 0.1}
pretrain: {steps: 2}
"""
TRAINED = """\
name: trained
sources: {docs: {path: "python-docs://"}, code: {path: "python-stdlib://"}}
prepare:
  - quality: {classifier: {positive: [docs], negative: [code]}}
"""


@pytest.fixture
def light(tmp_path: Path) -> Path:
    """A folder from which Python, in every process, finds none of what the extras bring."""
    blocked = "".join(f"sys.modules[{library!r}] = None\n" for library in EXTRA_OF)
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(f"import sys\n{blocked}")
    (tmp_path / "light.yaml").write_text(MANIFEST)
    (tmp_path / "trained.yaml").write_text(TRAINED)
    return tmp_path


def done(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(folder / "blocked")}
    return subprocess.run([sys.executable, *command], cwd=folder, env=variables, capture_output=True, text=True,
                          check=False)


def gristmill(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return done(folder, "-m", "gristmill", *arguments)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", requirement)[0] for requirement in requirements}


def test_the_core_requires_none_of_what_an_extra_brings() -> None:
    extras = PROJECT["optional-dependencies"]
    assert names(PROJECT["dependencies"]) & set(EXTRA_OF) == set()
    for library, extra in EXTRA_OF.items():
        assert library in names(extras[extra])


def test_every_extra_that_a_message_or_a_page_names_is_there() -> None:
    places = [path for folder in ("mixtures", "dataprep", "tokenize", "train", "flows", "docs")
              for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")]
    named = {name for path in places for names in re.findall(r"gristmill\[([a-z0-9,]+)\]", path.read_text())
             for name in names.split(",")}
    assert named >= {"train", "ui", "eval", "engines", "fasttext"}
    assert named - PROJECT["optional-dependencies"].keys() == set()


def test_an_engine_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(WorkerError, match=r"pip install 'gristmill\[engines\]'"):
        check_cluster({"dask_client_address": "tcp://127.0.0.1:1"})


def test_every_stage_whose_module_needs_torch_says_so(light: Path) -> None:
    code = ("import importlib, json\nfrom gristmill.flows.stages.registry import STAGES\nfound = []\n"
            "for name, stage in STAGES.items():\n"
            "    try:\n        importlib.import_module(stage.run.partition(':')[0])\n"
            "    except ImportError as error:\n        found.append((name, error.name))\n"
            "print(json.dumps(found))")
    shown = done(light, "-c", code)
    assert shown.returncode == 0, shown.stderr
    failing = dict(json.loads(shown.stdout))
    assert set(failing) == {name for name, stage in STAGES.items() if stage.needs_torch}
    assert set(failing.values()) == {"torch"}


@pytest.mark.parametrize(("command", "sentence"), [
    ("run light.yaml --no-ui", "the stage pretrain needs torch, which is not installed; install it with: pip"),
    ("up", "this command needs prefect, which is not installed; install it with: pip install 'gristmill[ui]'"),
    ("serve", "this command needs prefect"),
    ("run trained.yaml --no-ui", "the step quality needs fasttext, which is not installed; install it, which needs a "
                                 "C++ compiler, with: pip install 'gristmill[fasttext]'"),
])  # fmt: skip
def test_what_is_missing_is_one_sentence_with_the_command_that_installs_it(
    command: str, sentence: str, light: Path
) -> None:
    shown = gristmill(light, *command.split())
    assert shown.returncode != 0
    assert sentence in shown.stdout + shown.stderr
    assert len((shown.stdout + shown.stderr).strip().splitlines()) == 1
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_prepares_tokenises_mixes_and_exports_without_any_extra(light: Path) -> None:
    ran = gristmill(light, "run", "light.yaml", "--until", "mix")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Mixture" in ran.stdout
    for command in (["export-documents", "light.yaml", "--format", "jsonl", "--out", "documents"],
                    ["export-tokens", "light.yaml", "--format", "llmc", "--out", "tokens"],
                    ["report", "light.yaml"], ["plan", "light.yaml"]):
        shown = gristmill(light, *command)
        assert shown.returncode == 0, shown.stdout + shown.stderr


@pytest.mark.parametrize(("setting", "library", "said"), [
    ("engine.trackio={project: p}", "trackio", "engine.trackio needs trackio"),
    ("pretrain.optimizer.kind=adamw8bit", "torchao", "pretrain.optimizer.kind needs torchao"),
    ("pretrain.float8=rowwise", "torchao", "pretrain.float8 needs torchao"),
    ("evaluate.tasks=[{name: t, kind: generate, path: light.yaml, metrics: [rouge1]}]", "rouge_score",
     "evaluate.tasks.t.metrics needs rouge-score"),
    ("sft={data: [{path: chats.jsonl}], lora: {base: nf4}, steps: 1}", "bitsandbytes",
     "sft.lora.base needs bitsandbytes"),
])
def test_what_only_a_later_stage_would_miss_is_said_before_any_work(
    setting: str, library: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "light.yaml").write_text(MANIFEST)
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    monkeypatch.setattr(extras, "is_installed", lambda name: name != library)
    run = CliRunner().invoke(app, ["run", str(tmp_path / "light.yaml"), "--no-ui", "--store", str(tmp_path / "store"),
                                   "--set", setting])
    assert run.exit_code == 2, run.output
    extra = {"trackio": "trackio", "rouge_score": "eval"}.get(library, "quant")
    assert f"{said}, which is not installed; install it with: pip install 'gristmill[{extra}]'" in run.output
    assert not (tmp_path / "store").exists()
    monkeypatch.setattr(extras, "is_installed", lambda name: True)
    session = open_session(str(tmp_path / "light.yaml"), [setting], str(tmp_path / "store"))
    assert extras.why_not_runnable(session, list(session.plan)) is None
