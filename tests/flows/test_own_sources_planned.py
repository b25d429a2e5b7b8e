"""User code in sources and chat formats, as seen by plans and folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.flows.models.find_model import ModelNotFoundError, find_model
from gristmill.flows.running.session import Session, open_session
from gristmill.mixtures.load import ManifestError
from gristmill.mixtures.sections.model import Model
from gristmill.mixtures.sections.tokenizer import OwnFormatter
from gristmill.mixtures.user_code import OwnFunction, take_code
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn, save_model
from gristmill.train.stages import export

MANIFEST = """name: own
sources:
  cards:
    list: {use: ./own.py:files, with: {ending: txt}}
    read: {use: ./own.py:read}
"""
CODE = """import beside
def files(path, ending):
    (path / "ran").touch()
    return [f"a.{ending}"]
def read(path, least=0):
    yield {"text": beside.TEXT}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "m.yaml": MANIFEST,
        "own.py": CODE,
        "beside.py": "TEXT = 'x'\n",
        "a.txt": "a",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def opened(folder: Path, *overrides: str, allow: bool = False) -> Session:
    return open_session(
        str(folder / "m.yaml"), list(overrides), str(folder / "store"), allow_code=allow
    )


@pytest.mark.slow
def test_listing_code_runs_only_if_allowed(folder: Path) -> None:
    with pytest.raises(
        ManifestError,
        match=r"m.yaml:4: sources.cards.list: planning would run own:files "
        r"\(own.py: 6 lines, beside.py: 1 lines\)",
    ):
        opened(folder)
    assert not (folder / "ran").exists()
    allowed_fingerprint = opened(folder, allow=True).plan["ingest"].fingerprint
    assert (folder / "ran").exists()
    assert opened(folder).plan["ingest"].fingerprint == allowed_fingerprint
    with pytest.raises(ManifestError, match="planning would run own:files"):
        opened(folder, "sources.cards.list.with={ending: md}")
    (folder / "own.py").write_text(CODE.replace("touch()", "unlink()"))
    with pytest.raises(ManifestError, match="planning would run own:files"):
        opened(folder)


@pytest.mark.slow
def test_fingerprint_depends_only_on_code_options_and_listing(
    folder: Path,
) -> None:
    def fingerprint(*overrides: str) -> str:
        return opened(folder, *overrides, allow=True).plan["ingest"].fingerprint

    original = fingerprint()
    (folder / "other.py").write_text("# imported by nothing")
    assert fingerprint("engine.workers=1") == original
    (folder / "b.md").write_text("b")
    distinct_fingerprints = {
        original,
        fingerprint("sources.cards.read.with={least: 1}"),
    }
    (folder / "beside.py").write_text("TEXT = 'y'\n")
    distinct_fingerprints.add(fingerprint())
    (folder / "a.txt").write_text("longer")
    distinct_fingerprints.add(fingerprint())
    assert len(distinct_fingerprints) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "sources.cards.format=jsonl",
            "`read` and `format: jsonl` both determine how files are read",
        ),
        (
            "sources.cards.read.use=./own.py:raed",
            "own.py defines no 'raed', did you mean 'read'?",
        ),
        (
            "sources.cards.read.use=https://example.org/own.py:read",
            "code must come from a file beside the manifest",
        ),
        (
            "sources.cards.read.with={leas: 1}",
            "own.py, line 5: read has no parameter 'leas', did you mean 'least'?",
        ),
        (
            "sources.cards.read.use=./own.py:files",
            "m.yaml:5: sources.cards.read: own.py, line 2: files has the parameter "
            "'ending', which `with` does not give",
        ),
        (
            "tokenizer={chat_formatter: {use: ./own.py:files}}",
            "tokenizer.chat_formatter: own.py, line 2: files has the",
        ),
        (
            "tokenizer={chat_formatter: {use: ./own.py:read}, chat_template: x}",
            "both define the format of conversations",
        ),
    ],
)
def test_invalid_key_is_reported_with_its_line(
    folder: Path, setting: str, message: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        opened(folder, setting, allow=True)
    assert message in str(caught.value)


@pytest.mark.slow
def test_error_of_a_listing_is_reported_at_its_key(folder: Path) -> None:
    (folder / "own.py").write_text(
        CODE.replace('(path / "ran").touch()', "raise KeyError(ending)")
    )
    with pytest.raises(
        ManifestError,
        match=r"m.yaml:4: sources.cards.list: KeyError: 'txt' \(own.py, line 3\)",
    ):
        opened(folder, allow=True)


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """The folder of a training whose conversations a user function formatted."""
    stage, tokenizer = (
        tmp_path / "store" / "sft" / "tiny--12",
        tmp_path / "store" / "tokenizer" / "tiny--34" / "data",
    )
    (tmp_path / "chat.py").write_text(
        "def write(messages):\n    for one in messages:\n        yield one['role'] + "
        "': ', False\n"
        "        yield one['content'] + '<|end|>', one['role'] == 'assistant'\n      "
        "  yield '\\n', False\n"
    )
    formatter = OwnFormatter(use=take_code(OwnFunction("./chat.py:write"), tmp_path))
    write_tokenizer(
        train(TokenizerSample({"all": ["red blue one two sky " * 20]}, {}), 300),
        tokenizer,
        formatter,
    )
    shape = shape_of(Model(layers=1, width=32, heads=4, kv_heads=2), 300, 32)
    with torch.device("meta"):
        parameters = {
            name: parameter.shape for name, parameter in Llama(shape).named_parameters()
        }
    save_model(
        stage / "data" / "model",
        shape,
        {name: drawn(shape, 0)(name, size) for name, size in parameters.items()},
    )
    write_json(
        stage / "stage.json",
        {"inputs": [{"stage": "tokenizer", "folder": str(tokenizer)}]},
    )
    return stage


def test_export_warns_that_it_cannot_include_a_chat_function(
    tuned: Path, tmp_path: Path
) -> None:
    events: list[dict[str, object]] = []
    tokenizer = tuned.parent.parent / "tokenizer" / "tiny--34" / "data"
    out = tmp_path / "exported"
    export.run(
        {"tokenizer": tokenizer, "sft": tuned / "data"},
        {},
        out,
        Context(work=tmp_path, emit=events.append),
    )
    assert not (out / "chat_template.jinja").exists()
    assert not list(out.glob("*formatter*"))
    (warning,) = [
        str(event["message"]) for event in events if event["event"] == "warning"
    ]
    assert "has no chat template: chat:write writes its conversations" in warning
    card = (out / "README.md").read_text()
    assert (
        "system: Probe of the system.<|end|>\nuser: First probe of the "
        "user.<|end|>\nassistant: First" in card
    )
    assert find_model(str(out), None).tokenizer == out


def test_model_folder_with_code_is_rejected_without_a_manifest(
    tuned: Path,
) -> None:
    with pytest.raises(
        ModelNotFoundError,
        match=r"chat:write\), and code runs only where a manifest names it",
    ):
        find_model(str(tuned), None)
