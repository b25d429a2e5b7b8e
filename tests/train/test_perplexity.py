"""Document scores of an exported model, against their definition and through the stage
`quality`.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.core.files import sha256_file, write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    document_id,
    read_table,
    write_table,
)
from gristmill.dataprep.quality import quality
from gristmill.mixtures.schema.model import Model
from gristmill.tokenize.encoding.tokenizer import load as load_tokenizer
from gristmill.train.eval.document_scorer import (
    ModelFolderError,
    load_scorer,
    score_document,
)
from gristmill.train.models.hf_configs import hf_config
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.tensor_files import write_tensors
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import load_model, save_model
from gristmill.train.stages.export import exported_tensors

TEXTS = [
    "Return the text of a module.",
    "def close(self):\n    return None\n",
    "x",
    "",
    "Socket é中 " * 60,
]


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of(
        Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48),
        vocab_size=400,
        sequence_length=24,
    )


@pytest.fixture
def exported(
    tmp_path: Path,
    shape: Shape,
    make_model: Callable[[Shape], Llama],
    tokenizer_folder: Path,
) -> Path:
    """A model folder as the stage `export` writes it."""
    save_model(tmp_path / "trained", shape, dict(make_model(shape).named_parameters()))
    folder = tmp_path / "exported"
    write_json(folder / "config.json", hf_config(shape, "float32", [0], 1))
    write_tensors(
        folder / "model.safetensors",
        exported_tensors(tmp_path / "trained", shape, torch.float32),
    )
    (folder / "tokenizer.json").write_bytes(
        (tokenizer_folder / "tokenizer.json").read_bytes()
    )
    return folder


def scorer(folder: Path, max_tokens: int = 1024) -> Any:
    return load_scorer(
        str(folder), sha256_file(folder / "model.safetensors"), max_tokens
    )


def plain_nll(model: Llama, ids: list[int]) -> float:
    """Sum the loss of every token given those before it in its window, with one forward
    pass each.
    """
    step, total = model.shape.sequence_length - 1, 0.0
    for position in range(1, len(ids)):
        begin = (position - 1) // step * step
        with torch.no_grad():
            logits = model(torch.tensor([ids[begin:position]]))[0, -1]
        total -= float(torch.log_softmax(logits, -1)[ids[position]])
    return total


@pytest.mark.slow
def test_every_token_is_scored_once_from_its_window(
    exported: Path, tokenizer_folder: Path
) -> None:
    model, tokenizer = load_model(exported), load_tokenizer(tokenizer_folder)
    scores = scorer(exported)(TEXTS)
    for row, text in enumerate(TEXTS):
        ids = [tokenizer.eos, *tokenizer.encode([text])[0].ids]
        if len(ids) == 1:
            assert math.isnan(scores["model_perplexity"][row])
            assert math.isnan(scores["bits_per_byte"][row])
            continue
        nll = plain_nll(model, ids)
        assert score_document(model, np.array(ids)) == pytest.approx(nll, rel=1e-4)
        assert scores["model_perplexity"][row] == pytest.approx(
            math.exp(nll / (len(ids) - 1)), rel=1e-3
        )
        assert scores["bits_per_byte"][row] == pytest.approx(
            nll / math.log(2) / len(text.encode()), rel=1e-4
        )
    # several windows
    assert len(load_tokenizer(tokenizer_folder).encode([TEXTS[-1]])[0].ids) > 3 * 24


def test_score_does_not_depend_on_the_batch_and_only_the_first_tokens_count(
    exported: Path,
) -> None:
    together = scorer(exported)(TEXTS)["bits_per_byte"].tolist()
    alone = [scorer(exported)([text])["bits_per_byte"][0] for text in TEXTS]
    assert np.array_equal(together, alone, equal_nan=True)
    short = scorer(exported, 5)
    assert (
        short([TEXTS[-1]])["bits_per_byte"][0]
        == short([TEXTS[-1] + " more of it"])["bits_per_byte"][0]
    )


def test_folder_without_a_model_is_rejected_with_the_missing_files(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ModelFolderError, match=r"config\.json, model\.safetensors, tokenizer\.json"
    ):
        load_scorer(str(tmp_path), "", 10)


def test_stage_scores_and_filters_by_the_model(exported: Path, tmp_path: Path) -> None:
    rows = [
        {
            "id": document_id("web", str(n), text),
            "source": "web",
            "locator": str(n),
            "text": text,
            "metadata": "{}",
        }
        for n, text in enumerate(TEXTS)
    ]
    import pyarrow as pa

    write_table(
        tmp_path / "ingest" / "part-00000.parquet",
        pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA),
    )
    (tmp_path / "work").mkdir()
    context = Context(work=tmp_path / "work", emit=lambda event: None)
    config = {
        "perplexity": {"model": str(exported)},
        "keep_top": 0.5,
        "keep_top_by": "bits_per_byte",
    }
    summary = quality.run(
        {"ingest": tmp_path / "ingest"}, config, tmp_path / "out", context
    )
    judged = read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    expected = scorer(exported)(TEXTS)["bits_per_byte"]
    assert [row["bits_per_byte"] for row in judged] == [
        None if math.isnan(x) else x for x in expected.tolist()
    ]
    # documents without a score pass
    best = set(np.argsort(expected)[:2].tolist()) | {TEXTS.index("")}
    assert [row["keep"] for row in judged] == [
        number in best for number in range(len(TEXTS))
    ]
    assert summary.counts["dropped"] == {"quality/keep_top": 2}


@pytest.mark.slow
def test_other_scores_load_no_torch() -> None:
    code = (
        "import sys; from gristmill.dataprep.quality import quality, scorers; "
        "from gristmill.mixtures.steps.quality import Quality; "
        "scorers.make_measure(Quality(perplexity={'kenlm': 'm.arpa'}), {}); print('torch' in "
        "sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"
