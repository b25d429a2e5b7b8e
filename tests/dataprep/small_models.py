"""Small models with random weights in transformers' folder layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MOST_TOKENS = 32
"""Context length of a small model."""


def random_texts(number: int, seed: int, most_words: int = 90) -> list[str]:
    """Texts of 0 to `most_words` WORDS; some exceed the model's context."""
    draw = np.random.default_rng(seed)
    return [
        " ".join(draw.choice(WORDS, draw.integers(0, most_words)))
        for _ in range(number)
    ]


def write_tokenizer(folder: Path) -> None:
    """Write a word tokenizer whose file asks for padding and truncation, as many do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_word_vectors(folder: Path) -> Path:
    """Write a model2vec model: 16 numbers for each of WORDS; a text's vector is their
    mean.
    """
    tensors = pytest.importorskip("safetensors.numpy")
    write_tokenizer(folder)
    vectors = (
        np.random.default_rng(5)
        .normal(size=(len(SPECIAL) + len(WORDS), 16))
        .astype(np.float32)
    )
    tensors.save_file({"embeddings": vectors}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "model2vec"}')
    return folder


def write_classifier(
    folder: Path, kind: str = "bert", classes: Sequence[str] = (), **settings: Any
) -> Path:
    """Write a transformers classifier, with one output if `classes` is empty."""
    transformers, torch = (
        pytest.importorskip("transformers"),
        pytest.importorskip("torch"),
    )
    labels = list(classes) or ["LABEL_0"]
    shapes: Mapping[str, Any] = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "pad_token_id": 0,
        "max_position_embeddings": MOST_TOKENS,
        "initializer_range": 0.5,
    }
    if kind == "deberta-v2":
        shapes = {
            **shapes,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "pooler_hidden_size": 16,
        }
    config = transformers.AutoConfig.for_model(
        kind,
        id2label=dict(enumerate(labels)),
        label2id={name: place for place, name in enumerate(labels)},
        **shapes,
        **settings,
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def plain_logits(folder: Path, texts: Sequence[str]) -> np.ndarray:
    """Logits of each text's first window, one text at a time, by transformers alone."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True
    ).eval()
    numbers = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    logits = []
    with torch.inference_mode():
        for text in texts:
            words = [numbers[word] for word in re.findall(r"\w+", text)][
                : MOST_TOKENS - 2
            ]
            logits.append(
                model(input_ids=torch.tensor([[2, *words, 3]]))
                .logits[0]
                .float()
                .numpy()
            )
    return np.stack(logits)
