"""The examples of docs/own-steps.md run: each Python block is the file that it names,
each YAML block part of a manifest.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from benchmarks.checkout import ROOT
from gristmill.dataprep.arrow_dataset import CorpusDataset
from gristmill.dataprep.corpus import Corpus
from gristmill.flows.cli.launch import launch
from gristmill.flows.questions.find_documents import committed_inputs
from tests.jsonl import write_jsonl
from tests.sessions import open_beside

pytestmark = pytest.mark.slow

GUIDE = ROOT / "docs" / "own-steps.md"
BLOCK = re.compile(
    r"^```python\n# (\S+\.py)\n(.*?)^```\n\n```yaml\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
EXAMPLES = {
    name: (source, manifest)
    for name, source, manifest in BLOCK.findall(GUIDE.read_text())
}
TEXTS = [
    "The xyzzy recipe.\nINGREDIENTS: grist, grist, grist, grist",
    "short",
    "An ordinary text about the mill. \nEnd",
]
KEPT = {
    "steps.py": [1, 2],
    "shape.py": [0, 2],
    "recipes.py": [0],
    "batches.py": [1, 2],
    "tidy.py": [0, 1, 2],
    "tables.py": [0, 1, 2],
}


def test_every_block_of_the_guide_is_one_of_its_examples() -> None:
    assert len(re.findall(r"^```", GUIDE.read_text(), re.MULTILINE)) == 4 * len(
        EXAMPLES
    )
    assert EXAMPLES.keys() == {*KEPT, "answers.py"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_guide_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, manifest = EXAMPLES[name]
    (tmp_path / name).write_text(source)
    write_jsonl(
        tmp_path / "web.jsonl",
        [
            {"text": text, "url": f"https://example.org/{row}"}
            for row, text in enumerate(TEXTS)
        ],
    )
    write_jsonl(
        tmp_path / "chats.jsonl",
        [
            {"prompt": f"say {answer}", "completion": answer}
            for answer in ("yes indeed", "no")
        ],
    )
    sections = {
        "name": "guide",
        "sources": {"web": {"path": "web.jsonl"}},
        "tokenizer": {"vocab_size": 300},
        **yaml.safe_load(manifest),
    }
    if "sft" in sections:
        sections |= {
            "mix": {"tokens": 16, "sequence_length": 8},
            "pretrain": {"steps": 1},
        }
    (tmp_path / "guide.yaml").write_text(yaml.safe_dump(sections))
    last_stage = "sft_prepare" if "sft" in sections else None
    session = open_beside(tmp_path / "guide.yaml", until=last_stage or "tokenizer")
    stages = (
        [last_stage]
        if last_stage
        else [stage for stage in session.plan if stage != "tokenizer"]
    )
    assert launch(session, stages, frozenset(), tracked=False, summarise=True) == 0, (
        capsys.readouterr().err
    )
    inputs = committed_inputs(session)
    if last_stage:
        (prepared_set,) = session.folder(last_stage).manifest()["summary"]["sets"]
        assert (prepared_set["dropped"], prepared_set["kept"]) == (
            {"annotate/min_words": 1},
            1,
        )
        return
    texts = (
        CorpusDataset.of(Corpus(inputs), ["text"])
        .scanner()
        .to_table()["text"]
        .to_pylist()
    )
    assert [text.strip() for text in texts] == [
        (TEXTS[row] if name != "tidy.py" else TEXTS[row].replace(" \n", "\n"))
        for row in KEPT[name]
    ]


def test_columns_of_two_steps_have_the_documented_names(
    tmp_path: Path,
) -> None:
    from gristmill.dataprep.where_sql import names_of
    from gristmill.flows.stages.registry import measured_by
    from gristmill.mixtures.loader import parse_manifest

    source, manifest = EXAMPLES["shape.py"]
    (tmp_path / "shape.py").write_text(source)
    sections = {
        "name": "guide",
        "sources": {"web": {"path": "web.jsonl"}},
        **yaml.safe_load(manifest),
    }
    steps = parse_manifest(yaml.safe_dump(sections), str(tmp_path / "guide.yaml")).steps
    column_names = names_of({name: measured_by(step) for name, step in steps.items()})
    assert (column_names["annotate"]["lines"], column_names["long_pages"]["lines"]) == (
        "annotate_lines",
        "long_pages_lines",
    )
