"""The worked examples of pages of docs/ run in an empty folder and print the pages'
output: `make test-docs`.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.checkout import ROOT
from gristmill.mixtures.loader import parse_manifest
from gristmill.mixtures.steps.asked_model import AskedModel
from tests.chat_endpoint import Endpoint
from tests.flows.doc_pages import BLOCK, MARKED, run_page

MODELS_READ = ("annotators.md", "judges.md", "examples.md", "meaning.md")
"""Pages about models in the data path."""
NEEDED: dict[str, Any] = {
    "name": "page",
    "sources": {"web": {"path": "web.jsonl"}},
    "tokenizer": {"vocab_size": 300},
    "mix": {"tokens": 1000, "sequence_length": 32},
    "pretrain": {"steps": 10},
    "evaluate": {},
    "sft": {"data": [{"path": "chats.jsonl"}], "steps": 10},
    "dpo": {"data": [{"path": "pairs.jsonl"}], "steps": 10},
}
"""Keys that complete the manifest fragments of a page."""
ADDRESS = "http://127.0.0.1:8000/v1"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["meaning.md", "trace-text.md"])
def test_examples_of_the_page_run_as_documented(name: str, tmp_path: Path) -> None:
    assert run_page(ROOT / "docs" / name, tmp_path) >= 3


def answer(prompt: str, earlier_requests: int) -> str:
    """Return a lesson, a sum that is right every other time, or a judgement of a
    text.
    """
    if '"score"' in prompt:
        return json.dumps({"score": 4, "reason": "it teaches"})
    number = re.search(r"What is (\d+) and", prompt)
    return (
        f"A lesson about {prompt[-60:-40]}."
        if number is None
        else f"{int(number[1]) * 2 + earlier_requests % 2}"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["judges.md", "examples.md"])
def test_examples_of_the_page_run_against_a_model_endpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRITER_KEY", "key")
    with Endpoint(answer) as endpoint:
        assert run_page(ROOT / "docs" / name, tmp_path, {ADDRESS: endpoint.url}) >= 2
        assert endpoint.answered.total() > 0


@pytest.mark.parametrize("name", MODELS_READ)
def test_every_block_of_the_page_has_a_test_mark(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    assert [block["text"] for block in MARKED.finditer(text)] == [
        block_text for _, block_text in BLOCK.findall(text)
    ]


@pytest.mark.parametrize("name", MODELS_READ)
def test_sections_of_the_page_form_a_valid_manifest(name: str, tmp_path: Path) -> None:
    marked = [
        (block["mark"], block["text"])
        for block in MARKED.finditer((ROOT / "docs" / name).read_text())
    ]
    sections = [text for mark, text in marked if mark == "manifest"]
    assert sections
    for text in sections:
        fragment = yaml.safe_load(textwrap.dedent(text))
        fragment = {"prepare": fragment} if isinstance(fragment, list) else fragment
        manifest_keys = {
            **NEEDED,
            **{
                key: {**NEEDED[key], **section}
                if isinstance(NEEDED.get(key), dict)
                else section
                for key, section in fragment.items()
            },
        }
        parse_manifest(yaml.safe_dump(manifest_keys), str(tmp_path / "page.yaml"))
    for text in (text for mark, text in marked if mark == "models"):
        for line in text.splitlines():
            AskedModel.model_validate(yaml.safe_load(line)["model"])
