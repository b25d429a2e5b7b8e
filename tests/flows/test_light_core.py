"""`pip install gristmill` alone prepares, tokenizes and mixes; every feature that needs
more names its extra.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gristmill as gristmill_package
from benchmarks.checkout import ROOT
from gristmill.dataprep.readers import sources
from gristmill.dataprep.runners.connections import connect
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.flows.running import missing_libraries
from gristmill.flows.running.missing_libraries import EXTRA_OF, check_libraries
from gristmill.flows.running.session import open_session
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.schema.engine import BeamEngine
from tests.test_architecture import LAYERS

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
BLOCKING = """\
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *more: None if name.partition(".")[0] in {} else find(name, *more))
"""
TRAINED = """\
name: trained
sources: {docs: {path: "python-docs://"}, code: {path: "python-stdlib://"}}
prepare:
  - quality: {classifier: {positive: [docs], negative: [code]}}
"""


@pytest.fixture
def light(tmp_path: Path) -> Path:
    """A folder whose Python processes find no library of the extras."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(
        BLOCKING.format(set(EXTRA_OF))
    )
    (tmp_path / "light.yaml").write_text(MANIFEST)
    (tmp_path / "trained.yaml").write_text(TRAINED)
    return tmp_path


def done(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "blocked")},
        capture_output=True,
        text=True,
        check=False,
    )


def gristmill(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return done(folder, "-m", "gristmill", *arguments)


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("s3://bucket/a.jsonl", "s3"),
        ("gs://bucket/a.jsonl", "gcs"),
        ("az://bucket/a.jsonl", "azure"),
        ("https://127.0.0.1:1/a.jsonl", "http"),
    ],
)
def test_unsupported_url_names_the_extra(
    url: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(path: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(sources, "find", missing)
    with pytest.raises(
        sources.SourceError, match=rf"pip install 'gristmill\[{extra}\]'$"
    ):
        sources.find_at("source 'web'", url)


def names(requirements: list[str]) -> set[str]:
    return {
        canonicalize_name(Requirement(requirement).name) for requirement in requirements
    }


def required_by(requirements: list[str]) -> set[str]:
    """Return the import names of requirements and their dependencies."""
    queue, distributions = (
        [Requirement(requirement) for requirement in requirements],
        set[str](),
    )
    while queue:
        requirement = queue.pop()

        def applies(dependency, extras=(*requirement.extras, "")):
            return dependency.marker is None or any(
                dependency.marker.evaluate({"extra": extra}) for extra in extras
            )

        name = canonicalize_name(requirement.name)
        if name not in distributions:
            distributions.add(name)
            queue += filter(applies, map(Requirement, requires(name) or ()))
    return {
        module
        for module, owners in packages_distributions().items()
        if distributions & set(map(canonicalize_name, owners))
    }


def imported() -> dict[str, set[str]]:
    """Return every library that the product imports, with the files that import it.

    `_typeshed` is of the type checker alone.
    """
    files_by_library: dict[str, set[str]] = {}
    for file in (file for layer in LAYERS for file in (ROOT / layer).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            libraries = {module.partition(".")[0] for module in modules}
            for library in libraries - sys.stdlib_module_names - {"_typeshed"}:
                files_by_library.setdefault(library, set()).add(
                    str(file.relative_to(ROOT))
                )
    return files_by_library


def test_core_requires_no_library_of_an_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    extra_libraries = {canonicalize_name(library) for library in EXTRA_OF} | {
        "mlflow-skinny",
        "openlineage-python",
    }
    assert names(PROJECT["dependencies"]) & extra_libraries == set()
    for library, extra in EXTRA_OF.items():
        packages = {library} | {
            f"{library}-{suffix}" for suffix in ("lxml", "python", "skinny")
        }
        packages.add(library.replace("sklearn", "scikit-learn"))
        assert set(map(canonicalize_name, packages)) & names(extras[extra]), library


@pytest.mark.slow
def test_every_import_belongs_to_the_core_or_to_a_named_extra() -> None:
    """`others` lists libraries whose importers have messages of their own."""
    others = {
        "adlfs": "azure",
        "aiohttp": "gcs",
        "azure": "azure",
        "gcsfs": "gcs",
        "aiobotocore": "s3",
        "botocore": "s3",
        "s3fs": "s3",
        "distributed": "engines",
        "ray": "engines",
        "pyspark": "Spark's own",
        "pyiceberg": "iceberg",
        "mammoth": "documents",
        "pypdfium2": "documents",
    }
    core = required_by(PROJECT["dependencies"])
    assert {"numpy", "apache_beam", "lxml", "yaml"} <= core
    unlisted = {
        library: files
        for library, files in imported().items()
        if library not in core | {"gristmill"} and library not in EXTRA_OF
    }
    assert unlisted.keys() - others.keys() == set(), unlisted
    assert others.keys() - unlisted.keys() == set()


def test_every_extra_named_in_messages_and_pages_exists() -> None:
    paths = [
        path
        for folder in (
            "mixtures",
            "core",
            "dataprep",
            "tokenize",
            "train",
            "flows",
            "docs",
        )
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".yaml")
    ]
    named_extras = {
        name
        for path in paths
        for names in re.findall(r"gristmill\[([a-z0-9,]+)\]", path.read_text())
        for name in names.split(",")
    }
    assert named_extras >= {"train", "ui", "engines", "fasttext"}
    assert named_extras - PROJECT["optional-dependencies"].keys() == set()


@pytest.mark.parametrize(
    ("runner", "module"), [("dask", "distributed"), ("ray", "ray")]
)
def test_an_engine_that_is_not_installed_names_its_extra(
    runner: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(WorkerError, match=r"pip install 'gristmill\[engines\]'"):
        connect(BeamEngine(runner=runner, address="127.0.0.1:1"))


@pytest.mark.slow
def test_every_stage_that_imports_torch_declares_it(light: Path) -> None:
    code = (
        "import importlib, json\nfrom gristmill.flows.stages.registry import "
        "STAGES\nfound = []\n"
        "for name, stage in STAGES.items():\n"
        "    try:\n        importlib.import_module(stage.module)\n"
        "    except ImportError as error:\n        found.append((name, error.name))\n"
        "print(json.dumps(found))"
    )
    process = done(light, "-c", code)
    assert process.returncode == 0, process.stderr
    failing = dict(json.loads(process.stdout))
    assert set(failing) == {name for name, stage in STAGES.items() if stage.torch}
    assert set(failing.values()) == {"torch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            "run light.yaml --no-ui",
            "torch is not installed (needed by pretrain); install it with: pip",
        ),
        (
            "up",
            "prefect is not installed (needed by this command); install it with: "
            "pip install 'gristmill[ui]'",
        ),
        ("serve", "prefect is not installed (needed by this command)"),
        ("browse light.yaml", "starlette is not installed (needed by this command)"),
        (
            "run trained.yaml --no-ui",
            "fasttext is not installed (needed by quality); install it, which needs a "
            "C++ compiler, with: pip install 'gristmill[fasttext]'",
        ),
    ],
)
def test_missing_library_error_is_one_sentence_with_the_install_command(
    command: str, sentence: str, light: Path
) -> None:
    process = gristmill(light, *command.split())
    assert process.returncode != 0
    assert sentence in process.stdout + process.stderr
    assert len((process.stdout + process.stderr).strip().splitlines()) == 1
    assert "Traceback" not in process.stderr


def missing_for(
    settings: list[str],
    present: set[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> str:
    """Return the error of a run of the demo with some settings, if only some libraries
    of the extras are installed.
    """
    monkeypatch.setattr(
        missing_libraries, "is_installed", lambda library: library in present
    )
    session = open_session("demo-chat", settings, str(tmp_path / "store"))
    with pytest.raises(gristmill_package.MissingLibraryError) as raised:
        check_libraries(session, list(session.plan))
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "pretrain.optimizer.kind=adamw8bit",
            "torchao is not installed (needed by pretrain.optimizer.kind); install it "
            "with: pip install 'gristmill[quant]'",
        ),
        (
            "evaluate.tasks=[{name: hellaswag, path: .}]",
            "lm_eval is not installed (needed by evaluate.tasks); install it "
            "with: pip install 'gristmill[eval]'",
        ),
        (
            "pretrain.tasks=[{name: hellaswag, path: .}]",
            "lm_eval is not installed (needed by pretrain.tasks)",
        ),
        ("pretrain.float8=rowwise", "torchao is not installed (needed by pretrain.fl"),
        ("sft.lora.base=nf4", "bitsandbytes is not installed (needed by sft.lora.base"),
        (
            "engine.wandb.project=mine",
            "wandb is not installed (needed by engine.wandb); install it with: pip "
            "install 'gristmill[wandb]'",
        ),
        (
            "prepare=[{filter: {rules: [{gopher_quality: {dialect: datatrove}}]}}]",
            "spacy is not installed (needed by filter); install it with: pip install "
            "'gristmill[spacy]'",
        ),
        (
            "prepare=[{filter: {rules: [{fineweb: {words: language}}]}}]",
            "datatrove is not installed (needed by filter)",
        ),
        (
            "prepare=[{quality: {perplexity: {kenlm: given.arpa}}}]",
            "kenlm is not installed (needed by quality); install it, which needs a C++ "
            "compiler and Python 3.12 or older, with: pip install 'gristmill[kenlm]'",
        ),
        (
            "examples.sums={data: [{path: sums.jsonl}], model: {model: m, endpoint: "
            "'http://127.0.0.1:1/v1', temperature: 1}, "
            "per_prompt: 2, rewards: [{kind: model, path: judge}]}",
            "torch is not installed (needed by examples-sums, pretrain, sft, "
            "reference, dpo, evaluate, export); install it with: pip install "
            "'gristmill[train]'",
        ),
    ],
)
def test_libraries_required_by_settings_are_checked_before_any_work(
    setting: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, line in (
        ("said.jsonl", '{"prompt": "a", "answer": "b"}'),
        ("given.arpa", "x"),
        ("sums.jsonl", '{"prompt": "1+1", "answer": "2"}'),
    ):
        (tmp_path / name).write_text(line)
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    present = {"fasttext"} if sentence.startswith("torch ") else {"fasttext", "torch"}
    assert sentence in missing_for([setting], present, monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_prepares_tokenises_mixes_and_exports_without_any_extra(
    light: Path,
) -> None:
    run_process = gristmill(light, "run", "light.yaml", "--until", "mix")
    assert run_process.returncode == 0, run_process.stdout + run_process.stderr
    assert "Mixture" in run_process.stdout
    for command in (
        ["export-documents", "light.yaml", "--format", "jsonl", "--out", "documents"],
        ["export-tokens", "light.yaml", "--format", "llmc", "--out", "tokens"],
        ["report", "light.yaml"],
        ["plan", "light.yaml"],
    ):
        process = gristmill(light, *command)
        assert process.returncode == 0, process.stdout + process.stderr
