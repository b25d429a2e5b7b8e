"""Tokens before a text: exports begin it as the model's training did, in transformers,
in llama.cpp's files and in our own generation.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from gristmill.core.files import read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.evaluation import Evaluate, Export
from gristmill.mixtures.schema.model import Model
from gristmill.train.data.conversation_tokens import TEMPLATE_FILE
from gristmill.train.generation.language_model import (
    open_language_model,
    with_tokenizer,
)
from gristmill.train.models.model_config import Published, Shape, shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import load_model, save_model
from gristmill.train.stages.evaluate import sample
from gristmill.train.stages.export import run, write_folder

transformers = pytest.importorskip("transformers")
END, PAD = 0, 1
PROMPTS = ("Wrap the text", "def close(self):\n    ", "é")
CONVERSATION = [{"role": "user", "content": "Wrap it."}]
PLAIN_TEMPLATE = """\
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
"""Chat template that writes no start of text."""


@pytest.fixture
def base_shape() -> Shape:
    section = Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48)
    return shape_of(section, 400, 64)


@pytest.fixture
def trained(
    tmp_path: Path, make_model: Callable[[Shape], Llama], tokenizer_folder: Path
) -> Callable[..., Path]:
    """Folder `trained` of a model with large random weights; beside it the folder
    `tokenizer`, with some settings of its tokenizer_config.json.
    """

    def make(shape: Shape, template: str | None = None, **settings: object) -> Path:
        tokenizer = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
        config = tokenizer / "tokenizer_config.json"
        write_json(config, {**read_json(config), **settings})
        if template is not None:
            (tokenizer / TEMPLATE_FILE).write_text(template)
        tensors = dict(make_model(shape).named_parameters())
        save_model(tmp_path / "trained" / "model", shape, tensors)
        return tmp_path / "trained"

    return make


def published(shape: Shape, bos: int | None) -> Shape:
    return replace(shape, published=Published("llama", (END,), None, bos))


@pytest.mark.parametrize(
    ("change", "settings", "start", "config_bos"),
    [
        pytest.param(lambda shape: shape, {}, [END], END, id="trained here"),
        pytest.param(
            lambda shape: replace(shape, document_mask=True), {}, [], END, id="masked"
        ),
        pytest.param(
            lambda shape: published(shape, PAD),
            {"bos_token": "<|pad|>"},
            [PAD],
            PAD,
            id="published with a start",
        ),
        pytest.param(
            lambda shape: published(shape, None),
            {"bos_token": None},
            [],
            None,
            id="published without a start",
        ),
    ],
)
def test_transformers_continues_a_text_as_evaluate_and_generate_do(
    trained: Any,
    base_shape: Shape,
    tmp_path: Path,
    change: Callable[[Shape], Shape],
    settings: dict[str, object],
    start: list[int],
    config_bos: int | None,
) -> None:
    source = trained(change(base_shape), **settings) / "model"
    tokenizer_folder, out = tmp_path / "tokenizer", tmp_path / "out"
    if start == [PAD]:
        tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single="<|pad|> $A", special_tokens=[("<|pad|>", PAD)]
        )
        tokenizer.save(str(tokenizer_folder / "tokenizer.json"))
    write_folder(source, tokenizer_folder, Export(dtype="fp32"), out)
    auto = transformers.AutoTokenizer.from_pretrained(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert auto("").input_ids == start
    assert theirs.config.bos_token_id == config_bos
    assert theirs.generation_config.bos_token_id == config_bos
    section = Evaluate(prompts=PROMPTS, max_new_tokens=12, temperature=0.0)
    answers = sample(
        with_tokenizer(load_model(source), tokenizer_folder), section, asked=False
    )
    language = open_language_model(source, tokenizer_folder)
    exported = with_tokenizer(load_model(out), out)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        encoded = auto(prompt, return_tensors="pt", return_token_type_ids=False)
        ids = encoded.input_ids[0].tolist()
        assert list(language.text_prompt(prompt)) == exported.prompt(prompt) == ids
        generated = theirs.generate(**encoded, max_new_tokens=12, do_sample=False)[0]
        completion = auto.decode(generated[len(ids) :], skip_special_tokens=True)
        assert answer["completion"] == completion


def test_a_conversation_begins_with_one_start(
    trained: Any, base_shape: Shape, tmp_path: Path
) -> None:
    source = trained(base_shape) / "model"
    write_folder(source, tmp_path / "tokenizer", Export(), tmp_path / "out")
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = auto.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    language = open_language_model(source, tmp_path / "tokenizer")
    assert ids["input_ids"] == list(language.chat_prompt(CONVERSATION))
    assert ids["input_ids"].count(END) == 1
    language = with_tokenizer(load_model(tmp_path / "out"), tmp_path / "out")
    text = language.template.text(CONVERSATION, prompt=True)
    assert language.prompt(text) == ids["input_ids"]


@pytest.mark.parametrize(
    ("stage", "template", "document_mask", "adds"),
    [
        ("pretrain", None, False, True),
        ("pretrain", None, True, False),
        ("pretrain", PLAIN_TEMPLATE, False, True),
        ("sft", None, False, True),
        # llama.cpp would put the start before its conversations too.
        ("sft", PLAIN_TEMPLATE, False, False),
    ],
)
def test_gguf_adds_the_start_unless_it_would_change_conversations(
    trained: Any,
    base_shape: Shape,
    tmp_path: Path,
    stage: str,
    template: str | None,
    document_mask: bool,
    adds: bool,
) -> None:
    gguf = pytest.importorskip("gguf")
    folder = trained(replace(base_shape, document_mask=document_mask), template)
    run(
        {"tokenizer": tmp_path / "tokenizer", stage: folder},
        {"gguf": ["f32"]},
        tmp_path / "out",
        Context(tmp_path / "work", "export"),
    )
    fields = gguf.GGUFReader(tmp_path / "out" / "model-f32.gguf").fields
    assert fields["tokenizer.ggml.bos_token_id"].contents() == END
    assert fields["tokenizer.ggml.add_bos_token"].contents() is adds
    go_template = (tmp_path / "out" / "Modelfile").read_text().partition("TEMPLATE")[2]
    writes_start = "<|endoftext|>" in go_template
    assert writes_start == (document_mask and template is None)
