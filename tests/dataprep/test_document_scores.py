"""The stage `annotate` with a model: columns are the model's scores, for any batches
and workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.dataprep.documents import column_names
from gristmill.dataprep.encoders.document_scores import BOUND, announce, load_scorer
from gristmill.dataprep.encoders.model_folders import ModelFolderError
from gristmill.dataprep.quality.classifier import train
from gristmill.dataprep.user_code import annotate
from gristmill.mixtures.schema.encoder_settings import ScoringModel
from gristmill.mixtures.steps.own_steps import Annotate
from gristmill.mixtures.steps.quality import Classifier
from tests.dataprep.document_shards import (
    MakeContext,
    WriteIngest,
    file_contents,
    rewrite_texts,
)
from tests.dataprep.own_steps import written
from tests.dataprep.small_models import (
    MOST_TOKENS,
    SPECIAL,
    WORDS,
    plain_logits,
    random_texts,
    write_classifier,
    write_tokenizer,
)

TEXTS = random_texts(240, seed=3)
CLASSES = ("Science", "Sports & Games", "News")
Run = Callable[..., tuple[dict[str, Any], list[Mapping[str, Any]]]]


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT with one output, like FineWeb-Edu's classifier."""
    return write_classifier(tmp_path_factory.mktemp("models") / "edu")


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeBERTa with classes."""
    return write_classifier(
        tmp_path_factory.mktemp("models") / "domains", "deberta-v2", CLASSES
    )


@pytest.fixture
def run_step(
    tmp_path: Path,
    write_ingest: WriteIngest,
    make_context: MakeContext,
) -> Run:
    """Run the step: (settings, shards, **settings of BeamEngine) -> summary, rows."""
    numbers = iter(range(100))

    def run(
        settings: Mapping[str, Any], shards: int = 3, **fields: Any
    ) -> tuple[dict[str, Any], list[Any]]:
        number = next(numbers)
        parts = [
            [("web", f"{place}", text) for place, text in enumerate(TEXTS)][
                shard::shards
            ]
            for shard in range(shards)
        ]
        ingest = write_ingest(f"ingest{number}", parts)
        config = Annotate.model_validate(settings).model_dump(mode="json")
        context = make_context(f"work{number}", "annotate", **fields)
        summary = annotate.run(
            {"ingest": ingest}, config, tmp_path / f"out{number}", context
        )
        return summary, written(tmp_path / f"out{number}")

    return run


def test_regression_is_a_column_with_thresholds(
    run_step: Run, regression: Path
) -> None:
    expected = plain_logits(regression, TEXTS)[:, 0]
    least = round(float(np.median(expected)), 1)
    summary, rows = run_step(
        {"model": {"path": str(regression), "name": "edu"}, "min": {"edu": least}},
        shards=1,
    )
    scores = np.array([row["edu"] for row in rows])
    assert np.abs(scores - expected).max() <= 0.0005 + BOUND
    assert [row["reason"] for row in rows] == [
        None if value >= least else "annotate/min_edu" for value in scores
    ]
    dropped = int((scores < least).sum())
    assert 0 < dropped < len(TEXTS)
    assert summary.counts["dropped"] == {"annotate/min_edu": dropped}
    assert summary.counts["kept"] == len(TEXTS) - dropped
    assert summary.rules == {"annotate/min_edu": {"failing": dropped, "only": dropped}}
    assert sum(summary.histograms["edu"]["counts"]) == len(TEXTS)
    assert summary.reader.documents == summary.reader.windows == len(TEXTS)
    assert summary.reader.cut == sum(len(text.split()) > 30 for text in TEXTS)
    assert summary.reader.tokens == sum(
        min(len(text.split()), 30) + 2 for text in TEXTS
    )


def test_classes_are_columns_beside_the_likeliest_class(
    run_step: Run, domains: Path
) -> None:
    logits = plain_logits(domains, TEXTS)
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    _, rows = run_step({"model": {"path": str(domains), "name": "domain"}}, shards=1)
    columns = ["domain_Science", "domain_Sports_Games", "domain_News"]
    probabilities = np.array([[row[name] for name in columns] for row in rows])
    assert np.abs(probabilities - expected).max() <= 0.0005 + BOUND
    assert [row["domain"] for row in rows] == [
        CLASSES[place] for place in probabilities.argmax(1)
    ]
    assert len({row["domain"] for row in rows}) > 1


@pytest.mark.slow
def test_head_on_the_first_token_is_that_of_nvidias_classifiers(
    run_step: Run, domains: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(domains)
    torch.manual_seed(3)
    encoder, head = AutoModel.from_config(config), torch.nn.Linear(16, len(CLASSES))
    folder = tmp_path / "nvidia"
    write_tokenizer(folder)
    tensors = {f"model.{name}": part for name, part in encoder.state_dict().items()}
    tensors |= {f"fc.{name}": part for name, part in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    described = json.loads((domains / "config.json").read_text())
    described |= {"base_model": "microsoft/deberta-v3-base", "fc_dropout": 0.2}
    (folder / "config.json").write_text(
        json.dumps({**described, "architectures": None})
    )
    _, rows = run_step({"model": {"path": str(folder), "name": "d"}}, shards=1)
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    encoder.eval()
    for row, text in list(zip(rows, TEXTS, strict=True))[:12]:
        ids = [2, *(words[word] for word in text.split()[: MOST_TOKENS - 2]), 3]
        with torch.inference_mode():
            states = encoder(input_ids=torch.tensor([ids])).last_hidden_state
            expected = head(states[0, 0]).softmax(0).tolist()
        columns = [row["d_Science"], row["d_Sports_Games"], row["d_News"]]
        assert columns == pytest.approx(expected, abs=0.0005 + BOUND)
        assert row["d"] == CLASSES[int(np.argmax(expected))]
    del tensors["model.encoder.layer.0.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"output\.dense\.weight"):
        load_scorer(ScoringModel(path=str(folder)), "other")


def test_classes_can_be_selected_and_scored_as_logits(
    run_step: Run, domains: Path
) -> None:
    model = {"path": str(domains), "classes": ["News"], "values": "logits"}
    _, rows = run_step({"model": model, "max": {"News": 0}}, shards=1)
    assert set(rows[0]) == {"id", "keep", "reason", "error", "News", "class"}
    scores = np.array([row["News"] for row in rows])
    assert np.abs(scores - plain_logits(domains, TEXTS)[:, 2]).max() <= 0.0005 + BOUND
    assert [row["keep"] for row in rows] == [value <= 0 for value in scores]


@pytest.mark.slow
def test_multi_label_classes_have_independent_probabilities(tmp_path: Path) -> None:
    folder = write_classifier(
        tmp_path / "toxic",
        classes=["toxic", "insult"],
        problem_type="multi_label_classification",
    )
    section = ScoringModel(path=str(folder))
    assert announce(section).columns == ["toxic", "insult"]
    probabilities = load_scorer(section, "")(pa.array(TEXTS)).numbers
    assert (
        np.abs(probabilities - 1 / (1 + np.exp(-plain_logits(folder, TEXTS)))).max()
        <= 0.0005 + BOUND
    )


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["first", "mean"])
def test_batches_and_shards_do_not_change_columns_or_verdicts(
    run_step: Run, regression: Path, pool: str
) -> None:
    """Batches differ by some 1e-6 in float32; columns are rounded far more coarsely."""
    least = round(float(np.median(plain_logits(regression, TEXTS))), 3)

    def settings(batch_tokens: int) -> dict[str, Any]:
        return {
            "model": {
                "path": str(regression),
                "name": "edu",
                "pool": pool,
                "batch_tokens": batch_tokens,
            },
            "min": {"edu": least},
        }

    runs = [
        {row["id"]: row for row in run_step(settings(batch), shards=shards)[1]}
        for batch, shards in ((4_096, 1), (40, 3), (333, 7))
    ]
    assert runs[0] == runs[1] == runs[2]
    assert {row["reason"] for row in runs[0].values()} == {None, "annotate/min_edu"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_workers_write_the_same_bytes(
    run_step: Run, tmp_path: Path, domains: Path, mode: str
) -> None:
    settings = {
        "model": {"path": str(domains), "pool": "mean"},
        "min": {"Science": 0.2},
    }
    alone, together = run_step(settings), run_step(settings, mode=mode, workers=2)
    assert alone == together
    assert file_contents(tmp_path / "out0") == file_contents(tmp_path / "out1")


def test_resumed_run_scores_only_missing_shards(
    tmp_path: Path,
    write_ingest: WriteIngest,
    make_context: MakeContext,
    regression: Path,
) -> None:
    ingest = write_ingest(
        "ingest",
        [[("web", f"{shard}", text) for text in TEXTS[:20]] for shard in range(4)],
    )
    config = Annotate.model_validate({"model": str(regression)}).model_dump(mode="json")
    context, out = replace(make_context("work"), stage="annotate"), tmp_path / "out"
    first = annotate.run({"ingest": ingest}, config, out, context)
    content = file_contents(out)
    written_at = {name: (out / name).stat().st_mtime_ns for name in content}
    (out / "part-00002.parquet").unlink()
    assert annotate.run({"ingest": ingest}, config, out, context) == first
    assert file_contents(out) == content
    again = {
        name for name in content if (out / name).stat().st_mtime_ns != written_at[name]
    }
    assert again == {"part-00002.parquet"}
    assert first.counts["read"] == first.reader.documents == 80


def test_text_that_is_not_utf8_is_quarantined_alone(
    tmp_path: Path,
    write_ingest: WriteIngest,
    make_context: MakeContext,
    regression: Path,
) -> None:
    ingest = write_ingest(
        "ingest", [[("web", f"{place}", text) for place, text in enumerate(TEXTS[:30])]]
    )
    rewrite_texts(
        ingest / "part-00000.parquet",
        [b"\xff\xfe", *(text.encode() for text in TEXTS[1:30])],
    )
    config = Annotate.model_validate({"model": str(regression)}).model_dump(mode="json")
    summary = annotate.run(
        {"ingest": ingest}, config, tmp_path / "out", make_context("work")
    )
    rows = written(tmp_path / "out")
    assert summary.counts["quarantined"] == 1
    assert rows[0]["score"] is None
    assert "UnicodeDecodeError" in rows[0]["error"]
    assert all(row["error"] is None and row["score"] is not None for row in rows[1:])


def test_sentence_embeddings_score_by_similarity_to_examples(mini_lm: Path) -> None:
    like = {
        "cats": ["The cat sleeps.", "Cats are animals."],
        "money": "The bank raised its interest rates.",
    }
    score = load_scorer(
        ScoringModel.model_validate({"path": str(mini_lm), "like": like}), ""
    )
    texts = ["My cat is asleep on the sofa.", "Inflation worries the central bank."]
    scores = score(pa.array(texts)).numbers
    assert scores[0, 0] > 0.6 > 0.1 > scores[0, 1]
    assert scores[1, 1] > 0.4 > 0.1 > scores[1, 0]
    assert np.array_equal(scores, np.round(scores, 3))


@pytest.mark.slow
def test_fasttext_model_scores_by_its_labels(run_step: Run, tmp_path: Path) -> None:
    model = tmp_path / "model.bin"
    lines = [
        (number % 2 == 0, " ".join(f"w{2 * word + number % 2}" for word in range(20)))
        for number in range(200)
    ]
    model.write_bytes(
        train(lines, Classifier(positive=("a",), negative=("b",)), 3, tmp_path)
    )
    summary, rows = run_step(
        {
            "model": {"path": str(model), "name": "dclm", "classes": ["positive"]},
            "min": {"dclm_positive": 0.5},
        },
        shards=1,
    )
    import fasttext

    loaded = fasttext.load_model(str(model))
    labels = [
        names[0].removeprefix("__label__") if names else None
        for names in loaded.predict(TEXTS, 1)[0]
    ]
    assert [row["dclm"] for row in rows] == labels
    assert {"positive", "negative"} <= set(labels)
    shares = [
        dict(zip(*prediction, strict=True)).get("__label__positive", 0)
        for prediction in zip(*loaded.predict(TEXTS, 2), strict=True)
    ]
    scores = np.array([row["dclm_positive"] for row in rows])
    assert np.abs(scores - np.clip(shares, 0, 1)).max() <= 0.0005 + BOUND
    assert [row["keep"] for row in rows] == (scores >= 0.5).tolist()
    assert summary.reader.model == "model.bin"


def refusal(**model: Any) -> str:
    with pytest.raises(ModelFolderError) as caught:
        announce(ScoringModel.model_validate(model))
    return str(caught.value)


def test_unusable_scoring_model_is_rejected(
    run_step: Run, tmp_path: Path, domains: Path, mini_lm: Path
) -> None:
    assert "'Sport'" in refusal(path=str(domains), classes=["Sport"])
    assert "classifier" in refusal(path=str(mini_lm))
    assert "absent.bin" in refusal(path=str(tmp_path / "absent.bin"))
    numbered = write_classifier(tmp_path / "stars", classes=["1 star", "2 stars"])
    assert "`name`" in refusal(path=str(numbered))
    assert announce(ScoringModel(path=str(numbered), name="of")).columns == [
        "of",
        "of_1_star",
        "of_2_stars",
    ]
    with pytest.raises(ModelFolderError, match=r"min.Sience: .*'Science'"):
        run_step({"model": str(domains), "min": {"Sience": 0.5}})
    with pytest.raises(ValueError, match="model"):
        Annotate.model_validate({})
    with pytest.raises(ValueError, match="`measures`"):
        Annotate.model_validate({"model": "x", "measures": ["y"]})


def test_columns_are_derived_without_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["BertForSequenceClassification"],
                "id2label": {"0": "LABEL_0"},
            }
        )
    )
    write_tokenizer(tmp_path)
    assert announce(ScoringModel(path=str(tmp_path))).columns == ["score"]
    assert announce(ScoringModel(path=str(tmp_path), name="edu")).columns == ["edu"]


def test_all_columns_are_written_even_if_no_document_is_judged(
    run_step: Run, tmp_path: Path, domains: Path
) -> None:
    run_step({"model": str(domains), "sources": ["elsewhere"]}, shards=1)
    names = column_names(tmp_path / "out0" / "part-00000.parquet")
    assert names == [
        "id",
        "keep",
        "reason",
        "error",
        "class",
        "Science",
        "Sports_Games",
        "News",
    ]
