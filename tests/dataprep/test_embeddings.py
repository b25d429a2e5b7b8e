"""Sentence embeddings equal those of sentence-transformers and model2vec."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gristmill.dataprep.encoders.embeddings import Embedder, load_embedder
from gristmill.dataprep.encoders.model_folders import ModelFolderError, folder_sha256
from gristmill.dataprep.encoders.token_windows import (
    Windows,
    length_batches,
    pool_windows,
)
from gristmill.mixtures.schema.encoder_settings import ReadingModel

BOUND = 1e-5
"""Largest difference between the same vector from two batches, in float32."""
LONG = "The mill grinds slowly, but it grinds exceedingly fine. " * 60
TEXTS = [
    "The cat sits on the mat.",
    "A cat is sitting on a mat.",
    "Interest rates were raised by the central bank.",
    "",
    "Ein Satz in einer anderen Sprache.",
    LONG,
    "word " * 300,
    "x",
]


@pytest.fixture(scope="module")
def embedder(mini_lm: Path) -> Embedder:
    return load_embedder(ReadingModel(path=mini_lm.as_posix()))


def write_static(folder: Path) -> Path:
    """Write a small model2vec model: 40 words, vectors of 8 numbers, a weight for
    each.
    """
    model2vec = pytest.importorskip("model2vec")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", *(f"w{number}" for number in range(39))]
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(words)}, unk_token="[UNK]"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    rng = np.random.default_rng(11)
    vectors, weights = (
        rng.normal(size=(40, 8)).astype(np.float32),
        rng.random(40).astype(np.float32),
    )
    model = model2vec.StaticModel(
        vectors,
        tokenizer,
        weights=weights,
        normalize=True,
        max_length=6,
        config={"model_type": "model2vec"},
    )
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_vectors_equal_sentence_transformers(mini_lm: Path, embedder: Embedder) -> None:
    referee = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(mini_lm), device="cpu"
    )
    expected = referee.encode(TEXTS, normalize_embeddings=True)
    vectors = embedder.embed(TEXTS)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), embedder.dim) == (8, 384)
    assert np.abs(vectors - expected).max() < BOUND


def test_paraphrases_have_close_vectors(embedder: Embedder) -> None:
    cosines = embedder.embed(TEXTS[:3]) @ embedder.embed(TEXTS[:3]).T
    assert cosines[0, 1] > 0.9
    assert cosines[0, 2] < 0.2


@pytest.mark.slow
def test_vectors_do_not_depend_on_batches(mini_lm: Path, embedder: Embedder) -> None:
    together = embedder.embed(TEXTS)
    alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
    other_batches = load_embedder(
        ReadingModel(path=mini_lm.as_posix(), batch_tokens=300)
    ).embed(TEXTS[::-1])[::-1]
    assert np.abs(together - alone).max() < BOUND
    assert np.abs(together - other_batches).max() < BOUND
    assert np.array_equal(together, embedder.embed(TEXTS))


@pytest.mark.slow
def test_end_of_a_long_text_counts_only_with_pooled_windows(
    mini_lm: Path, embedder: Embedder
) -> None:
    other_end = LONG + "Interest rates were raised by the central bank. " * 20
    assert np.array_equal(*embedder.embed([LONG, other_end]))
    for pool in ("mean", "max", "tokens"):
        pooled = load_embedder(
            ReadingModel.model_validate({"path": mini_lm.as_posix(), "pool": pool})
        )
        vector, other_vector = pooled.embed([LONG, other_end])
        assert 0.3 < vector @ other_vector < 0.99, pool
        assert np.allclose(np.linalg.norm(vector), 1, atol=1e-6)
        # one window each
        assert np.abs(pooled.embed(TEXTS[:2]) - embedder.embed(TEXTS[:2])).max() < BOUND


def test_token_vectors_equal_model2vec(tmp_path: Path) -> None:
    folder = write_static(tmp_path / "static")
    referee = pytest.importorskip("model2vec").StaticModel.from_pretrained(folder)
    texts = ["w1 w2 w3", "w4 unknown w5 w5", "w7", "w1 w2 w3 w4 w5 w6 w7 w8 w9"]
    embedder = load_embedder(
        ReadingModel(path=folder.as_posix()), folder_sha256(str(folder))
    )
    assert (
        np.abs(embedder.embed(texts) - referee.encode(texts, max_length=6)).max() < 1e-6
    )
    assert np.array_equal(embedder.embed(["unknown", ""]), np.zeros((2, 8), np.float32))
    pooled = load_embedder(ReadingModel(path=folder.as_posix(), pool="tokens"))
    assert (
        np.abs(pooled.embed(texts) - referee.encode(texts, max_length=None)).max()
        < 1e-6
    )
    assert np.array_equal(pooled.embed(["unknown", ""]), np.zeros((2, 8), np.float32))


@pytest.mark.slow
def test_bfloat16_vectors_are_close_to_float32(
    mini_lm: Path, embedder: Embedder
) -> None:
    less_exact = load_embedder(
        ReadingModel(path=mini_lm.as_posix(), dtype="bfloat16")
    ).embed(TEXTS)
    assert less_exact.dtype == np.float32
    assert (less_exact * embedder.embed(TEXTS)).sum(1).min() > 0.999


def test_onnx_file_is_read_by_name(tmp_path: Path) -> None:
    """A token's vector depends on its id alone, so that the expected value can be
    computed here.
    """
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper

    write_static(tmp_path)
    vectors = np.random.default_rng(3).normal(size=(40, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["vectors", "input_ids"], ["last_hidden_state"])],
        "tokens",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n", "t"])],
        [
            helper.make_tensor_value_info(
                "last_hidden_state", TensorProto.FLOAT, ["n", "t", 4]
            )
        ],
        [numpy_helper.from_array(vectors, "vectors")],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    onnx.save(model, tmp_path / "made.onnx")
    for name, content in (
        ("config.json", {"model_type": "bert"}),
        ("modules.json", []),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    embedded = load_embedder(
        ReadingModel(path=tmp_path.as_posix(), onnx="made.onnx")
    ).embed(["w1 w2 w3", "w4"])
    expected = np.stack([vectors[[2, 3, 4]].mean(0), vectors[5]])
    assert (
        np.abs(
            embedded - expected / np.linalg.norm(expected, axis=1, keepdims=True)
        ).max()
        < BOUND
    )


def test_empty_input_has_no_vectors(embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, 384)


def refusal(**section: object) -> str:
    with pytest.raises(ModelFolderError) as caught:
        load_embedder(ReadingModel.model_validate(section))
    return str(caught.value)


def test_invalid_model_folder_is_rejected(tmp_path: Path, mini_lm: Path) -> None:
    assert "absent" in refusal(path=str(tmp_path / "absent"))
    (tmp_path / "notes.txt").write_text("nothing")
    message = refusal(path=str(tmp_path))
    assert "config.json" in message
    assert "notes.txt" in message
    broken = tmp_path / "other"
    shutil.copytree(mini_lm, broken, ignore=shutil.ignore_patterns("model.safetensors"))
    assert "transformers" in refusal(path=str(broken))
    modules = json.loads((broken / "modules.json").read_text())
    modules.append(
        {
            "idx": 3,
            "name": "3",
            "path": "3_Dense",
            "type": "sentence_transformers.models.Dense",
        }
    )
    (broken / "modules.json").write_text(json.dumps(modules))
    assert "'Dense'" in refusal(path=str(broken))
    assert "onnx/model.onnx" in refusal(path=str(mini_lm), onnx="onnx/model.onnx")
    assert " 4 " in refusal(path=str(mini_lm), window_tokens=10, overlap_tokens=4)


def test_missing_package_is_named_with_its_extra(
    mini_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    load_embedder.cache_clear()
    assert "pip install 'gristmill[models]'" in refusal(
        path=str(mini_lm), max_windows=3
    )


def test_batches_group_similar_lengths_and_hold_each_window_once() -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 200, 500)
    batches = list(length_batches(lengths, 1_000))
    assert sorted(np.concatenate(batches).tolist()) == list(range(500))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= 1_000
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    assert padded < 1.05 * lengths.sum()


@pytest.mark.parametrize(
    ("pool", "expected"),
    [("first", [1, 8]), ("mean", [3, 8]), ("max", [5, 8]), ("tokens", [2, 8])],
)
def test_window_values_are_pooled(pool: str, expected: Sequence[float]) -> None:
    windows = Windows(
        [np.zeros(30, np.int64), np.zeros(10, np.int64), np.zeros(4, np.int64)],
        np.array([0, 0, 1]),
        np.ones(2, bool),
    )
    pooled = pool_windows(np.array([[1], [5], [8]], np.float32), windows, pool)
    assert pooled[:, 0].tolist() == expected
