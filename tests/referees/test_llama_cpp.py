"""llama.cpp on exported GGUF files, and Go's templates on the Modelfile, against our
model and tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.evaluation import GgufKind
from gristmill.mixtures.schema.model import Model, Moe, RopeScaling
from gristmill.tokenize.chat_template import PROBE
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.models.hf_configs import hf_config
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.ollama import go_template
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn, save_model
from gristmill.train.stages.export import run

pytestmark = pytest.mark.referee
needs_llama_cpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)

VOCABULARY, LENGTH = 400, 64
SIZES = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn_width": 96}
MODELS = {
    "llama": Model(**SIZES),
    "untied": Model(**SIZES, tied_embeddings=False),
    "linear": Model(**SIZES, rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    "llama3": Model(
        **SIZES, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_length=16)
    ),
    "yarn": Model(
        **SIZES, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_length=16)
    ),
    "warmer-yarn": Model(
        **SIZES,
        rope_scaling=RopeScaling(
            kind="yarn",
            factor=4.0,
            original_length=16,
            beta_fast=8.0,
            attention_factor=1.5,
        ),
    ),
    "mixtral": Model(**SIZES, moe=Moe(experts=4)),
    "qwen3": Model(**SIZES, qk_norm=True),
    "qwen3-moe": Model(**SIZES, qk_norm=True, moe=Moe(experts=4)),
}
TOLERANCES: dict[GgufKind, float] = {
    "f32": 0.002,
    "f16": 0.005,
    "bf16": 0.02,
    "q8_0": 0.06,
    "q4_0": 0.5,
}
"""Largest root mean square of the differences of logits, as a share of their standard
deviation: keys and values are cached in half precision, and with quantised weights
activations are rounded to 8 bits.
"""
TEXTS = (
    'def wrap(text, width=70):\n    """Wrap 1234567 words."""\n\n\n    return  text\n',
    "   ",
    "\n",
    " a\t\tb  c\r\n\r\n d",
    "It's what they'RE saying: 3.14, ½ and ٣٤ — Größe, 你好，世界! "
    "\U0001f469\u200d\U0001f469 \u00a0end",
)


def make_folder(
    folder: Path, section: Model, pretokenizer: str, kinds: list[GgufKind]
) -> tuple[Llama, Chat]:
    """Export a model with large random weights under `folder/out`."""
    import inspect
    import textwrap

    sample = [inspect.getsource(textwrap), *TEXTS]
    write_tokenizer(
        train(TokenizerSample({"a": sample}, {}), VOCABULARY, pretokenizer),
        folder / "tokenizer",
    )
    chat = Chat(folder / "tokenizer")
    shape = shape_of(section, chat.tokenizer.get_vocab_size(), LENGTH)
    model, tensor_of = Llama(shape), drawn(shape, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                tensor_of(name, parameter.shape) * (4.0 if parameter.ndim > 1 else 1.0)
            )
    save_model(folder / "pretrain" / "model", shape, dict(model.named_parameters()))
    run(
        {"tokenizer": folder / "tokenizer", "pretrain": folder / "pretrain"},
        {"gguf": kinds},
        folder / "out",
        Context(folder / "work", "export"),
    )
    return model.eval(), chat


def open_llama_cpp(path: Path, **options: Any) -> Any:
    from llama_cpp import Llama as Theirs

    return Theirs(
        str(path),
        n_ctx=LENGTH,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        verbose=False,
        flash_attn=False,
        **options,
    )


def their_logits(path: Path, ids: list[int]) -> np.ndarray:
    theirs = open_llama_cpp(path)
    theirs.eval(ids)
    logits: np.ndarray = np.array(theirs.scores[: len(ids)])
    theirs.close()
    return logits


@needs_llama_cpp
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    kinds: list[GgufKind] = list(TOLERANCES) if name == "llama" else ["f32", "q8_0"]
    model, chat = make_folder(tmp_path, MODELS[name], "gpt2", kinds)
    ids = torch.randint(
        6,
        chat.tokenizer.get_vocab_size(),
        (48,),
        generator=torch.Generator().manual_seed(1),
    )
    with torch.no_grad():
        ours = model(ids[None])[0, :, : model.shape.vocab_size].numpy()
    for kind in kinds:
        theirs = their_logits(tmp_path / "out" / f"model-{kind}.gguf", ids.tolist())
        deviation = float(np.sqrt(((theirs - ours) ** 2).mean()) / ours.std())
        print(f"{name} {kind}: logits differ by {deviation:.5f}")
        # Rounding may send a token to another expert.
        assert deviation < TOLERANCES[kind] * (
            3 if model.shape.experts and kind == "q8_0" else 1
        ), kind


@needs_llama_cpp
def test_gguf_file_has_the_biases_of_qwen2(tmp_path: Path) -> None:
    from dataclasses import replace

    from gristmill.tokenize.encoding.llama_cpp_vocabulary import llama_cpp_vocabulary
    from gristmill.train.models.gguf_model import Labels, write_gguf

    _, chat = make_folder(tmp_path, MODELS["llama"], "gpt2", ["f32"])
    shape: Shape = replace(
        shape_of(MODELS["llama"], chat.tokenizer.get_vocab_size(), LENGTH),
        qkv_bias=True,
    )
    assert hf_config(shape, "float32", [0], 1)["model_type"] == "qwen2"
    model = Llama(shape).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    save_model(tmp_path / "qwen2", shape, dict(model.named_parameters()))
    labels = Labels(
        "qwen2",
        llama_cpp_vocabulary(chat.tokenizer, shape.vocab_size),
        start_of_text=0,
        adds_start=False,
        end_of_text=0,
        pad=1,
        end_of_turn=None,
        chat_template="",
    )
    write_gguf(
        tmp_path / "qwen2.gguf",
        tmp_path / "qwen2" / "model.safetensors",
        shape,
        "f32",
        labels,
        tmp_path,
    )
    ids = list(range(10, 50))
    with torch.no_grad():
        ours = model(torch.tensor([ids]))[0, :, : shape.vocab_size].numpy()
    theirs = their_logits(tmp_path / "qwen2.gguf", ids)
    assert np.sqrt(((theirs - ours) ** 2).mean()) < TOLERANCES["f32"] * ours.std()


@needs_llama_cpp
@pytest.mark.parametrize("pretokenizer", ["gpt2", "llama3", "digits"])
def test_llama_cpp_encodes_and_decodes_like_the_tokenizer(
    tmp_path: Path, pretokenizer: str
) -> None:
    _, chat = make_folder(tmp_path, MODELS["llama"], pretokenizer, ["q8_0"])
    theirs = open_llama_cpp(tmp_path / "out" / "model-q8_0.gguf")
    for text in TEXTS:
        ours = chat.tokenizer.encode(text, add_special_tokens=False).ids
        assert theirs.tokenize(text.encode(), add_bos=True, special=False) == ours, text
        assert theirs.detokenize(ours).decode() == text
    conversation = chat.text(PROBE[:4], prompt=True)
    assert (
        theirs.tokenize(conversation.encode(), add_bos=True, special=True)
        == chat.encode(PROBE[:4], prompt=True).ids.tolist()
    )
    assert theirs.token_eos() == chat.end_of_text
    theirs.close()


@needs_llama_cpp
def test_llama_cpp_answers_a_chat_with_our_greedy_tokens(tmp_path: Path) -> None:
    from gristmill.train.generation.scheduler import generate

    model, chat = make_folder(tmp_path, MODELS["llama"], "gpt2", ["f32"])
    prompt = chat.encode(
        [{"role": "user", "content": "wrap"}], prompt=True
    ).ids.tolist()
    (ours,) = generate(model, [prompt], 12, chat.stops)
    theirs = open_llama_cpp(tmp_path / "out" / "model-f32.gguf")
    completion = theirs.create_chat_completion(
        [{"role": "user", "content": "wrap"}], max_tokens=12, temperature=0.0
    )
    assert (
        completion["choices"][0]["message"]["content"].strip()
        == chat.decode(ours).strip()
    )
    theirs.close()


PROGRAM = """
package main

import (
	"encoding/json"
	"os"
	"text/template"
)

type Message struct{ Role, Content string }

func main() {
	var request struct {
		Template string
		Messages []Message
	}
	if err := json.NewDecoder(os.Stdin).Decode(&request); err != nil {
		panic(err)
	}
	parsed := template.Must(template.New("").Option("missingkey=zero").Parse(request.Template))
	if err := parsed.Execute(os.Stdout, map[string]any{"Messages": request.Messages}); err != nil {
		panic(err)
	}
}
"""


@pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed")
def test_go_renders_the_modelfile_template_like_jinja(tmp_path: Path) -> None:
    _, chat = make_folder(tmp_path, MODELS["llama"], "gpt2", ["q8_0"])
    (tmp_path / "main.go").write_text(PROGRAM)
    subprocess.run(
        ["go", "build", "-o", "render", "main.go"],
        cwd=tmp_path,
        check=True,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "GOCACHE": str(tmp_path / "cache"),
            "GO111MODULE": "off",
        },
    )
    for messages in (PROBE, PROBE[1:2], PROBE[:2], PROBE[1:4]):
        request = json.dumps(
            {"Template": go_template(chat), "Messages": list(messages)}
        )
        process = subprocess.run(
            [tmp_path / "render"],
            input=request,
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout == chat.text(messages, prompt=True)
