"""Fine-tuning of an encoder-decoder: the prompt is encoded, the answer decoded, next to
the same module in plain PyTorch, and generation as transformers does it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from gristmill.mixtures.loader import ManifestError
from gristmill.tokenize.packed import PackedSet
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.decoded_answers import DecodedAnswers
from gristmill.train.objectives.losses import IGNORED
from tests.flows.test_begin_anywhere import made, opened
from tests.jsonl import write_jsonl
from tests.train import plain_tuning

SPECIAL = ["<pad>", "</s>", "<unk>"]
WORDS = [f"w{number}" for number in range(30)]
SFT = {
    **plain_tuning.SFT,
    "task": "text2text",
    "data": [{"path": "pairs.jsonl"}],
    "steps": 150,
    "sequence_length": 24,
}


def pairs(count: int) -> list[dict[str, str]]:
    """The answer is the first word of the prompt, twice."""
    draw = np.random.default_rng(2)
    prompts = [draw.choice(WORDS, draw.integers(2, 9)) for _ in range(count)]
    return [
        {"prompt": " ".join(words), "completion": f"{words[0]} {words[0]}"}
        for words in prompts
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny T5 with its tokenizer, as transformers writes it, and examples."""
    ids = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    (tmp_path / "t5").mkdir()
    tokenizer.save(str(tmp_path / "t5" / "tokenizer.json"))
    plain_tuning.write_tokenizer_config(
        tmp_path / "t5", eos="</s>", pad="<pad>", unk="<unk>"
    )
    torch.manual_seed(4)
    config = transformers.T5Config(
        vocab_size=len(ids),
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    write_jsonl(tmp_path / "pairs.jsonl", pairs(200))
    return tmp_path


def manifest(**sft: Any) -> str:
    section = {**SFT, **sft}
    return json.dumps(
        {"name": "t", "model": {"path": "t5"}, "sft": section, "export": {}}
    )


@pytest.mark.slow
def test_answers_are_learnt_and_equal_those_of_the_exported_model(folder: Path) -> None:
    session = opened(folder, manifest(holdout=0.1))
    summaries = made(session)
    sft = summaries["sft"]
    assert sft["held_out"]["loss"] < 0.5 * sft["held_out_before"]["loss"]
    exported = session.folder("export").data
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    ours = load_model(session.folder("sft").data / "model", kind="encoder_decoder")
    examples = pairs(20)
    right = []
    for example in examples:
        ids = tokenizer(example["prompt"], return_tensors="pt")["input_ids"]
        (expected,) = theirs.generate(ids, max_new_tokens=6, do_sample=False).tolist()
        answer = [0]
        while len(answer) < len(expected):
            logits = ours(ids, decoder_ids=torch.tensor([answer]))
            answer.append(int(logits[0, -1].argmax()))
        assert answer == expected
        text = tokenizer.decode(expected, skip_special_tokens=True)
        right.append(text == example["completion"])
    assert np.mean(right) > 0.5


@pytest.mark.slow
def test_losses_equal_a_plain_loop_over_the_module(folder: Path) -> None:
    session = opened(folder, manifest(steps=plain_tuning.STEPS))
    made(session)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(
        folder / "t5", dtype=torch.float32
    ).eval()
    packed = PackedSet(session.folder("sft_data").data)
    turns = DecodedAnswers(packed, SFT["seed"], torch.ones(33), 1.0)

    def loss_of(rows: np.ndarray) -> torch.Tensor:
        nll = torch.zeros(())
        for row in rows:
            batch = turns.prepare(row[None])
            is_prompt = (~batch.trained[0]).cumprod(0).bool()
            ids, labels = batch.ids[0][is_prompt], batch.ids[0][batch.trained[0]]
            assert ids[-1] == labels[-1] == 1
            logits = theirs(input_ids=ids[None], labels=labels[None]).logits[0]
            nll = nll + torch.nn.functional.cross_entropy(
                logits, labels, ignore_index=IGNORED, reduction="sum"
            )
        return nll / turns.weight(rows)

    plain_tuning.assert_equal_losses(session, theirs, turns.order, loss_of)


def test_encoder_decoder_is_not_tuned_on_conversations(folder: Path) -> None:
    with pytest.raises(ManifestError, match="encoder-decoder"):
        opened(folder, manifest(task="chat"))
