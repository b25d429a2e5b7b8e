"""A classifier of texts from labels to its use: an encoder is fine-tuned and exported,
and the next run filters documents by its classes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from gristmill.core.files import read_json
from gristmill.flows.running.run import Runner
from gristmill.mixtures.loader import ManifestError
from gristmill.tokenize.packed import PackedSet
from gristmill.train import trainer
from gristmill.train.data.labelled_texts import CLASSES
from gristmill.train.models.encoder import classifier_shape
from gristmill.train.models.model_config import TransformersShape
from gristmill.train.models.weights import (
    WeightsError,
    load_model,
    read_shape,
    with_new_head,
)
from gristmill.train.objectives.labelled_texts import LabelledTexts
from gristmill.train.objectives.sft import AssistantTurns
from tests.dataprep.small_models import SPECIAL, WORDS, write_tokenizer
from tests.flows.test_begin_anywhere import made, opened
from tests.jsonl import write_jsonl
from tests.train import plain_tuning
from tests.train.trained import assert_same_output

GOOD, BAD = WORDS[:20], WORDS[20:40]
SIZES = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", SIZES),
    "modernbert": (
        "ModernBertConfig",
        {
            **SIZES,
            "pad_token_id": 0,
            "cls_token_id": 2,
            "sep_token_id": 3,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
        },
    ),
}
SFT = {
    **plain_tuning.SFT,
    "task": "classify",
    "steps": 30,
    "validate_every": 15,
    "holdout": 0.2,
}


def labelled_texts(count: int) -> list[dict[str, Any]]:
    """Texts of good or bad words and a few others; some exceed the model's context."""
    draw = np.random.default_rng(2)
    texts = []
    for number in range(count):
        label = ("good", "bad")[number % 2]
        own = draw.choice(GOOD if label == "good" else BAD, draw.integers(3, 50))
        words = [*own, *draw.choice(WORDS[40:], 3)]
        draw.shuffle(words)
        texts.append({"text": " ".join(words), "label": label})
    return texts


def write_encoder(family: str, folder: Path) -> None:
    """Write a masked language model with its tokenizer, as transformers does."""
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    plain_tuning.write_tokenizer_config(
        folder, cls="[CLS]", sep="[SEP]", pad="[PAD]", mask="[MASK]"
    )
    name, sizes = CONFIGS[family]
    torch.manual_seed(4)
    config = getattr(transformers, name)(**sizes)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "labels.jsonl", labelled_texts(120))
    for family in CONFIGS:
        write_encoder(family, tmp_path / family)
    return tmp_path


def manifest(family: str, **sft: Any) -> str:
    section = {**SFT, "data": [{"path": "labels.jsonl"}], **sft}
    return json.dumps(
        {"name": "c", "model": {"path": family}, "sft": section, "export": {}}
    )


@pytest.mark.slow
def test_classifier_is_trained_exported_and_filters_the_next_run(folder: Path) -> None:
    session = opened(folder, manifest("bert", steps=0, epochs=2.5))
    assert list(session.plan) == "tokenizer model sft_data sft export".split()
    summaries = made(session)
    assert summaries["sft_data"]["sets"][0]["truncated"] > 0
    assert summaries["sft"]["steps"] == math.ceil(2.5 * summaries["sft"]["rows"] / 8)
    held_out = summaries["sft"]["held_out"]
    assert (
        held_out["text_accuracy"]
        > 0.9
        > summaries["sft"]["held_out_before"]["text_accuracy"]
    )
    assert set(held_out["f1"]) == {"good", "bad"}
    assert held_out["mean_f1"] == pytest.approx(np.mean([*held_out["f1"].values()]))
    exported = session.folder("export").data
    config = read_json(exported / "config.json")
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert "AutoModelForSequenceClassification" in (exported / "README.md").read_text()
    classify = transformers.pipeline("text-classification", str(exported))
    texts = labelled_texts(120)
    answers = classify([text["text"] for text in texts], truncation=True, max_length=39)
    right = [answer["label"] == text["label"] for answer, text in zip(answers, texts)]
    assert np.mean(right) > 0.9
    with pytest.raises(WeightsError):
        load_model(exported)
    write_jsonl(folder / "web.jsonl", [{"text": text["text"]} for text in texts])
    step = {"model": {"path": str(exported), "name": "kind"}, "min": {"kind_good": 0.5}}
    session = opened(
        folder,
        json.dumps(
            {
                "name": "filtered",
                "sources": {"web": {"path": "web.jsonl"}},
                "prepare": [{"annotate": step}],
            }
        ),
    )
    counts = made(session)["annotate"]["counts"]
    assert counts["kept"] == sum(answer["label"] == "good" for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_losses_equal_a_plain_loop_over_the_module(family: str, folder: Path) -> None:
    session = opened(folder, manifest(family, steps=plain_tuning.STEPS))
    made(session)
    data = session.folder("sft_data").data
    start = session.folder("model").data / "model"
    classes = read_json(data / CLASSES)
    encoder = read_shape(start)
    assert isinstance(encoder, TransformersShape)
    shape = classifier_shape(encoder, classes)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / family,
        num_labels=2,
        dtype=torch.float32,
    ).eval()
    tensor_of = with_new_head(start, shape, SFT["seed"])
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(tensor_of(name, parameter.shape))
    rows = LabelledTexts(classes, PackedSet(data), SFT["seed"], torch.ones(1), 1.0)

    def loss_of(numbers: np.ndarray) -> torch.Tensor:
        total = torch.zeros(())
        for number in numbers:
            batch = AssistantTurns.prepare(rows, number[None])
            *ids, label = batch.ids[0, : int(batch.trained[0].nonzero()) + 1].tolist()
            total = (
                total
                + theirs(
                    input_ids=torch.tensor([ids]), labels=torch.tensor([label])
                ).loss
            )
        return total / len(numbers)

    plain_tuning.assert_equal_losses(session, theirs, rows.order, loss_of)


@pytest.mark.slow
def test_resumed_training_has_the_same_bits(
    run_stage: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(folder, manifest("modernbert"))
    runner = Runner(session, lambda event: None)
    for name in ("tokenizer", "model"):
        runner.run_stage(name)
    inputs = {name: session.folder(name).data for name in ("tokenizer", "model")}
    data = [{"path": str(folder / "labels.jsonl")}]
    config = {**SFT, "data": data, "steps": 6}
    run_stage("sft", inputs, config, folder / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("gristmill.train.loop.step.stop_requested", lambda: True)
        with pytest.raises(trainer.StoppedError):
            run_stage("sft", inputs, config, folder / "cut")
        torch.distributed.destroy_process_group()
    run_stage("sft", inputs, config, folder / "cut")
    assert_same_output(folder / "cut", folder / "whole")


def test_texts_of_one_class_are_refused(folder: Path) -> None:
    texts = [text for text in labelled_texts(20) if text["label"] == "good"]
    write_jsonl(folder / "labels.jsonl", texts)
    with pytest.raises(Exception, match="class good"):
        made(opened(folder, manifest("bert")))


@pytest.mark.parametrize(
    ("sections", "place"),
    [
        ({"sft": {**SFT, "replay": 0.1}}, "replay"),
        ({"sft": {**SFT, "lora": {"rank": 4}}}, "lora"),
        ({"evaluate": {}}, "evaluate"),
        ({"dpo": {"data": [{"path": "p.jsonl"}], "steps": 1}}, "dpo"),
    ],
)
def test_settings_that_a_classifier_lacks_are_refused(
    folder: Path, sections: dict[str, Any], place: str
) -> None:
    text = json.loads(manifest("bert"))
    for name, section in sections.items():
        text[name] = {**text.get(name, {}), **section}
    with pytest.raises(ManifestError, match=place):
        opened(folder, json.dumps(text))
