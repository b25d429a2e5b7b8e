"""GGUF files and Modelfiles: their contents, and models and tokenizers that are
rejected early.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.evaluation import Export
from gristmill.mixtures.schema.model import Model, Moe, RopeScaling
from gristmill.tokenize.chat_template import (
    CHAT_TEMPLATE,
    PROBE,
    as_plain_jinja,
)
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.llama_cpp_vocabulary import (
    NotForLlamaCppError,
    llama_cpp_vocabulary,
)
from gristmill.tokenize.encoding.pretokens import LLAMA3
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.data.conversation_tokens import TEMPLATE_FILE, Chat
from gristmill.train.models.gguf_model import GgufError, write_gguf
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.ollama import go_template, modelfile
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import save_model
from gristmill.train.stages import export
from gristmill.train.stages.export import run, write_gguf_files

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
LARGEST_ERROR = {
    "f32": 0.0,
    "f16": 2**-11,
    "bf16": 2**-8,
    "q8_0": 1 / 254,
    "q4_0": 1 / 8,
}
"""Largest error relative to the largest number of a block: half of the last digit, half
of a step, or a step of 1/8.
"""
DENSE = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn_width": 96}


@pytest.fixture
def exported(
    tmp_path: Path, make_model: Callable[[Shape], Llama], tokenizer_folder: Path
) -> Callable[..., tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Export a model in some kinds, and return the summary and the tensors of the
    model.
    """

    def make(
        model: Model, *kinds: str, length: int = 64
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        shape = shape_of(model, 400, length)
        tensors = dict(make_model(shape).named_parameters())
        save_model(tmp_path / "pretrain" / "model", shape, tensors)
        summary = run(
            {"tokenizer": tokenizer_folder, "pretrain": tmp_path / "pretrain"},
            {"gguf": list(kinds)},
            tmp_path / "out",
            Context(tmp_path / "work", "export"),
        )
        return summary, {name: tensor.detach() for name, tensor in tensors.items()}

    return make


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Read the fields of a file, its tensors as float32, and their data types."""
    reader = gguf.GGUFReader(path)
    return (
        {name: field.contents() for name, field in reader.fields.items()},
        {
            tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(
                tensor.shape[::-1]
            )
            for tensor in reader.tensors
        },
        {tensor.name: tensor.tensor_type.name for tensor in reader.tensors},
    )


def test_every_kind_stores_weights_to_its_precision(
    exported: Any, tmp_path: Path
) -> None:
    summary, ours = exported(Model(**DENSE), *LARGEST_ERROR)
    for kind, share in LARGEST_ERROR.items():
        path = tmp_path / "out" / f"model-{kind}.gguf"
        assert path.stat().st_size == summary["gguf"][kind]
        _, tensors, types = read(path)
        down = ours["model.layers.1.mlp.down_proj.weight"].numpy()
        largest = (
            np.abs(down.reshape(-1, 32)).max(axis=1, keepdims=True)
            if kind.startswith("q")
            else np.abs(down.reshape(-1, 32))
        )
        error = np.abs(tensors["blk.1.ffn_down.weight"] - down).reshape(-1, 32)
        rounded_scale = 2**-11 if kind.startswith("q") else 0.0
        assert (error <= (share + rounded_scale) * largest + 1e-7).all(), kind
        assert kind == "f32" or error.max() > 0
        np.testing.assert_array_equal(
            tensors["output_norm.weight"], ours["model.norm.weight"].numpy()
        )
        assert types["blk.0.attn_norm.weight"] == "F32"
        assert types["blk.0.ffn_up.weight"] == kind.upper()
        assert types["token_embd.weight"] == (
            "Q8_0" if kind == "q4_0" else kind.upper()
        )
        # without padding rows of the vocabulary
        assert tensors["token_embd.weight"].shape == (400, 64)
    assert (
        summary["gguf"]["q4_0"]
        < summary["gguf"]["q8_0"]
        < summary["gguf"]["f16"]
        < summary["gguf"]["f32"]
    )


@pytest.mark.parametrize("missing", [1, 1000, 20_000])
def test_full_disk_is_an_error_without_a_file(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    summary, _ = exported(Model(**DENSE), "f16")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write(path: Path, *arguments: Any) -> int:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (summary["gguf"]["f16"] - missing, hard)
        )
        try:
            return write_gguf(path, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(export, "write_gguf", write)
    (tmp_path / "out" / "model-f16.gguf").unlink()
    with pytest.raises(OSError, match=r"not written whole|too large"):
        exported(Model(**DENSE), "f16")
    assert not list((tmp_path / "out").glob("model-f16.gguf*"))


def test_llama_keys_are_permuted_and_qwen_keys_are_not(
    exported: Any, tmp_path: Path
) -> None:
    _, ours = exported(Model(**DENSE), "f32")
    _, tensors, _ = read(tmp_path / "out" / "model-f32.gguf")
    # 2 heads of 16 channels
    keys = ours["model.layers.0.self_attn.k_proj.weight"].numpy()
    permuted_keys = tensors["blk.0.attn_k.weight"]
    for head in range(2):
        np.testing.assert_array_equal(
            permuted_keys[head * 16 : head * 16 + 16 : 2],
            keys[head * 16 : head * 16 + 8],
        )
        np.testing.assert_array_equal(
            permuted_keys[head * 16 + 1 : head * 16 + 16 : 2],
            keys[head * 16 + 8 : head * 16 + 16],
        )
    np.testing.assert_array_equal(
        tensors["blk.0.attn_v.weight"], ours["model.layers.0.self_attn.v_proj.weight"]
    )
    _, ours = exported(Model(**DENSE, qk_norm=True), "f32")
    fields, tensors, _ = read(tmp_path / "out" / "model-f32.gguf")
    assert fields["general.architecture"] == "qwen3"
    np.testing.assert_array_equal(
        tensors["blk.0.attn_k.weight"], ours["model.layers.0.self_attn.k_proj.weight"]
    )


def test_experts_are_stacked_with_separate_gates_and_ups(
    exported: Any, tmp_path: Path
) -> None:
    _, ours = exported(Model(**DENSE, moe=Moe(experts=3)), "f32")
    fields, tensors, _ = read(tmp_path / "out" / "model-f32.gguf")
    gate_up = ours["model.layers.1.mlp.experts.gate_up_proj"].numpy()
    np.testing.assert_array_equal(
        tensors["blk.1.ffn_gate_exps.weight"], gate_up[:, :96]
    )
    np.testing.assert_array_equal(tensors["blk.1.ffn_up_exps.weight"], gate_up[:, 96:])
    np.testing.assert_array_equal(
        tensors["blk.1.ffn_down_exps.weight"],
        ours["model.layers.1.mlp.experts.down_proj"],
    )
    assert fields["llama.expert_count"] == 3
    assert fields["llama.expert_used_count"] == 2


def test_row_that_is_not_a_multiple_of_a_block_stays_in_half_precision(
    exported: Any, tmp_path: Path
) -> None:
    exported(Model(**{**DENSE, "ffn_width": 72}), "q8_0")
    _, _, types = read(tmp_path / "out" / "model-q8_0.gguf")
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == "Q8_0"


def test_file_has_the_tokenizer_and_the_ids_that_end_an_answer(
    exported: Any, tmp_path: Path, tokenizer_folder: Path
) -> None:
    exported(Model(**DENSE), "q8_0")
    fields, _, _ = read(tmp_path / "out" / "model-q8_0.gguf")
    chat = Chat(tokenizer_folder)
    ids = chat.tokenizer.get_vocab(with_added_tokens=True)
    assert [ids[token] for token in fields["tokenizer.ggml.tokens"]] == list(range(400))
    special = {
        number
        for number, token in chat.tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    assert {
        place
        for place, kind in enumerate(fields["tokenizer.ggml.token_type"])
        if kind == 3
    } == special
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert fields["tokenizer.ggml.bos_token_id"] == ids["<|endoftext|>"]
    assert fields["tokenizer.ggml.eos_token_id"] == ids["<|endoftext|>"]
    assert fields["tokenizer.ggml.eot_token_id"] == ids["<|end|>"]
    assert fields["llama.context_length"] == 64
    assert "generation" not in fields["tokenizer.chat_template"].replace(
        "add_generation_prompt", ""
    )


def test_template_without_generation_marks_renders_the_same_text(
    tokenizer_folder: Path,
) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True
    ).from_string(as_plain_jinja(CHAT_TEMPLATE))
    chat = Chat(tokenizer_folder)
    for messages in (PROBE, PROBE[1:4]):
        ours = chat.text(messages, prompt=True)
        theirs = plain.render(
            messages=messages, add_generation_prompt=True, bos_token="<|endoftext|>"
        )
        assert theirs == ours


@pytest.mark.parametrize(
    ("pretokenizer", "name"),
    [("gpt2", "gpt-2"), ("llama3", "dbrx"), ("digits", "smollm")],
)
def test_pretokenizers_have_names_in_llama_cpp(pretokenizer: str, name: str) -> None:
    tokenizer = train(
        TokenizerSample({"a": ["some words and 1234 numbers " * 9]}, {}),
        300,
        pretokenizer,
    )
    assert llama_cpp_vocabulary(tokenizer, 300).pre_tokenizer == name


def test_tokenizer_unknown_to_llama_cpp_is_rejected() -> None:
    from tokenizers import Tokenizer, models

    of_characters = models.BPE(vocab={"a": 0}, merges=[], byte_fallback=True)
    of_bytes = models.BPE(vocab={"a": 0}, merges=[])
    for model, reason in (
        (of_characters, "a BPE over characters"),
        (models.Unigram([("a", 0.0)], 0), "it is Unigram"),
        (of_bytes, "splits text"),
    ):
        with pytest.raises(NotForLlamaCppError, match=reason):
            llama_cpp_vocabulary(Tokenizer(model), 600)


def test_ignore_merges_is_supported_with_the_llama_3_pattern_only() -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], ignore_merges=True
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    assert llama_cpp_vocabulary(tokenizer, 5).pre_tokenizer == "llama-bpe"
    assert llama_cpp_vocabulary(tokenizer, 5).kinds == [1, 1, 1, 5, 5]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=True
    )
    with pytest.raises(NotForLlamaCppError, match="without their merges"):
        llama_cpp_vocabulary(tokenizer, 5)


def test_llama3_rope_scaling_is_rejected_for_qwen(exported: Any) -> None:
    scaling = RopeScaling(kind="llama3", factor=4.0, original_length=32)
    with pytest.raises(GgufError, match=r"qwen3 .*llama3.* linear or yarn"):
        exported(Model(**DENSE, qk_norm=True, rope_scaling=scaling), "f16")


def test_modelfile_has_weights_stops_and_template(tokenizer_folder: Path) -> None:
    chat = Chat(tokenizer_folder)
    assert modelfile(
        "model-q8_0.gguf", chat, 64, go_template(chat, "<|endoftext|>")
    ) == (
        "FROM ./model-q8_0.gguf\nPARAMETER num_ctx 64\nPARAMETER stop "
        '"<|endoftext|>"\nPARAMETER stop "<|end|>"\n'
        'TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|system|>\n{{ '
        ".Content }}<|end|>\n"
        '{{ else if eq .Role "assistant" }}<|assistant|>\n{{ .Content }}<|end|>\n'
        '{{ else if eq .Role "user" }}<|user|>\n{{ .Content }}<|end|>\n{{ end }}{{ '
        'end }}<|assistant|>\n"""\n'
    )


@pytest.mark.parametrize(
    "template",
    [
        # The system prompt is within the first message of the user, as in Llama 2.
        "{% for m in messages %}{% if m['role'] == 'system' %}[{{ m['content'] }}]{% "
        "elif m['role'] == 'user' %}<|user|>"
        "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}S{% endif %}{{ "
        "m['content'] }}<|end|>{% else %}"
        "<|assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        # Text that Go would parse as an action.
        "{% for m in messages %}<|{{ m['role'] }}|>{{ '{{' }}{{ m['content'] "
        "}}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ '{{' }}{% endif %}",
    ],
)
def test_untranslatable_template_is_left_out_of_the_modelfile(
    tmp_path: Path,
    tokenizer_folder: Path,
    template: str,
    make_model: Callable[[Shape], Llama],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    chat = Chat(tmp_path)
    assert chat.text(PROBE[1:2]).endswith("First probe of the user.<|end|>")
    assert go_template(chat) is None
    shape = shape_of(Model(**DENSE), 400, 64)
    save_model(tmp_path / "model", shape, dict(make_model(shape).named_parameters()))
    write_gguf_files(
        tmp_path / "model",
        shape,
        chat,
        Export(gguf=("q8_0",)),
        tmp_path / "out",
        "m",
        Context(tmp_path / "work", "export"),
        [],
        is_tuned=False,
    )
    assert "TEMPLATE" not in (tmp_path / "out" / "Modelfile").read_text()
    assert "TEMPLATE" in capsys.readouterr().out


def test_unwritable_gguf_is_rejected_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models

    from gristmill.flows.running.preflight import find_problems
    from gristmill.flows.stages import export
    from gristmill.mixtures.loader import open_manifest

    (tmp_path / "a.txt").write_text("text")

    unigram = Tokenizer(models.Unigram([("a", 0.0), ("<eos>", 0.0)], 0))
    unigram.add_special_tokens(["<eos>"])
    unigram.save(str(tmp_path / "tokenizer.json"))

    def problems(section: str) -> list[str]:
        text = (
            f"name: a\nsources: {{a: {{path: '{tmp_path}/*.txt'}}}}\ntokenizer: {section}\n"
            "mix: {tokens: 2000, sequence_length: 32}\npretrain: {steps: 1}\nexport: "
            "{gguf: [q8_0]}\n"
        )
        (tmp_path / "m.yaml").write_text(text)
        manifest, manifest_text = open_manifest(tmp_path / "m.yaml")
        return [
            str(problem)
            for problem in find_problems(manifest, manifest_text, ["export"])
        ]

    assert problems("{}") == []
    (message,) = problems(f"{{path: '{tmp_path}/tokenizer.json'}}")
    assert "export.gguf" in message
    assert "Unigram" in message
    manifest, _ = open_manifest(tmp_path / "m.yaml")
    assert [*export.libraries(manifest)] == [("gguf", "export.gguf")]
