"""Export of a model as a GGUF file for llama.cpp and tools based on it (Ollama, LM
Studio).

Layout and quantisation are those of the package gguf, keys those of llama.cpp (ggml's
docs/gguf.md). Queries and keys of its `llama` are reordered: llama.cpp rotates adjacent
channels there, transformers halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gristmill.core.files import foreign_file
from gristmill.mixtures.schema.evaluation import GgufKind
from gristmill.tokenize.encoding.llama_cpp_vocabulary import Vocabulary
from gristmill.train.models.hf_configs import family_of, interleave_halves
from gristmill.train.models.initialisation import VOCABULARY_TENSORS
from gristmill.train.models.model_config import Shape
from gristmill.train.models.rope import frequencies
from gristmill.train.models.tensor_files import TensorFile

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter, TensorNameMap

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
"""model_type of transformers -> architecture of llama.cpp."""
TURNS_NEIGHBOURS = "llama"
"""Architecture whose rotary positions rotate channels 2i and 2i + 1; all others rotate
i and i + width / 2.
"""
ROPE_FACTORS = "rope_freqs.weight"
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


class GgufError(ValueError):
    """GGUF does not support a model."""


@dataclass(frozen=True)
class Labels:
    """Metadata of a file.

    Attributes:
        name: of the model.
        vocabulary: its tokens.
        start_of_text, end_of_text, pad: ids.
        adds_start: whether llama.cpp begins texts with `start_of_text`.
        end_of_turn: id that ends an answer; None if only the end of the text does.
        chat_template: Jinja.
    """

    name: str
    vocabulary: Vocabulary
    start_of_text: int
    adds_start: bool
    end_of_text: int
    pad: int
    end_of_turn: int | None
    chat_template: str


@dataclass(frozen=True)
class _Piece:
    """Tensor of the file: name, shape, and function that reads it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def check_gguf(shape: Shape) -> None:
    """Raise GgufError for a model that llama.cpp would compute differently."""
    scaling = shape.rope_scaling
    family = family_of(shape)
    if family not in ARCHITECTURES:
        raise GgufError(
            f"export.gguf writes models of {', '.join(ARCHITECTURES)}, but this one "
            f"is {family}; remove it"
        )
    if shape.prefix_lm:
        raise GgufError(
            "export.gguf: llama.cpp reads prompts from left to right, but this model "
            "reads them in both directions (pretrain.prefix_lm); remove it"
        )
    if not shape.norm_topk_prob:
        raise GgufError(
            "export.gguf: llama.cpp divides the weights of a token's experts by "
            "their sum, and this model does not "
            "(norm_topk_prob: false); leave export.gguf out"
        )
    if (
        ARCHITECTURES[family] != TURNS_NEIGHBOURS
        and scaling is not None
        and scaling.kind == "llama3"
    ):
        raise GgufError(
            f"export.gguf: llama.cpp's {family} has no rope_scaling of the kind "
            "llama3; choose linear or yarn, or leave export.gguf out"
        )


def write_gguf(
    path: Path,
    weights: Path,
    shape: Shape,
    kind: GgufKind,
    labels: Labels,
    scratch: Path,
) -> int:
    """Write a GGUF file atomically, with one tensor in memory at a time.

    Args:
        path: destination.
        weights: safetensors of a trained model, with our names.
        shape: of the model.
        kind: data type of the matrices; vectors are float32, and matrices whose rows
            are not multiples of the block size float16. Embedding and output of `q4_0`
            are `q8_0`, as their error affects every token.
        labels: metadata.
        scratch: local folder for the file while it is written, if `path` is not local.

    Returns:
        bytes of the file.

    Raises:
        GgufError: see `check_gguf`.
        IncompleteFileError: gguf did not write the complete file.
    """
    import gguf

    check_gguf(shape)
    file = TensorFile(weights)
    architecture = ARCHITECTURES[family_of(shape)]
    pieces = [
        piece
        for name in file.names()
        for piece in _pieces(file, name, shape, architecture)
    ]
    if shape.rope_scaling is not None and shape.rope_scaling.kind == "llama3":
        # llama.cpp divides the frequencies by them.
        plain, stretched = (
            frequencies(
                shape.head_width, shape.rope_theta, scaling, torch.device("cpu")
            )[0]
            for scaling in (None, shape.rope_scaling)
        )
        factors = plain / stretched
        pieces.append(_Piece(ROPE_FACTORS, tuple(factors.shape), lambda: factors))
    tensors: list[tuple[_Piece, GGMLQuantizationType]] = [
        (piece, _type_of(piece, kind)) for piece in pieces
    ]
    with foreign_file(path, partial(_check_whole, len(tensors)), scratch) as local_path:
        writer = gguf.GGUFWriter(local_path, architecture)
        _write_sizes(writer, shape)
        vocabulary = labels.vocabulary
        writer.add_name(labels.name)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
        writer.add_token_list(list(vocabulary.tokens))
        writer.add_token_types(list(vocabulary.kinds))
        writer.add_token_merges(list(vocabulary.merges))
        writer.add_bos_token_id(labels.start_of_text)
        writer.add_add_bos_token(labels.adds_start)
        writer.add_eos_token_id(labels.end_of_text)
        writer.add_pad_token_id(labels.pad)
        if labels.end_of_turn is not None:
            writer.add_eot_token_id(labels.end_of_turn)
        writer.add_chat_template(labels.chat_template)
        writer.add_file_type(
            gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"]
        )
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for piece, data_type in tensors:
            size = gguf.quant_shape_to_byte_shape(piece.shape, data_type)
            writer.add_tensor_info(
                piece.name, size, np.dtype(np.uint8), math.prod(size), data_type
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for piece, data_type in tensors:
            matrix = piece.read().float().contiguous().numpy()
            writer.write_tensor_data(gguf.quantize(matrix, data_type))
        writer.close()
    return path.stat().st_size


def _check_whole(tensors: int, file: Path) -> None:
    """Raise ValueError unless a file holds this number of tensors completely: gguf
    ignores a full disk.
    """
    import gguf

    stored = gguf.GGUFReader(file).tensors
    end = max((tensor.data_offset + tensor.n_bytes for tensor in stored), default=0)
    if len(stored) != tensors or file.stat().st_size < end:
        raise ValueError(
            f"{len(stored)} of {tensors} tensors, {file.stat().st_size:,} of {end:,} "
            "bytes"
        )


def _pieces(
    file: TensorFile, name: str, shape: Shape, architecture: str
) -> Iterator[_Piece]:
    """Tensors of the file for one of ours: expert matrices are stacked, gate and up
    projections separate.
    """
    size = file.shape(name)
    if name in VOCABULARY_TENSORS:
        size = (shape.vocab_size, *size[1:])
    if GATE_UP in name:
        layer = f"blk.{name.split('.')[2]}"
        half = size[1] // 2
        yield _Piece(
            f"{layer}.ffn_gate_exps.weight",
            (size[0], half, size[2]),
            lambda: file.read(name)[:, :half],
        )
        yield _Piece(
            f"{layer}.ffn_up_exps.weight",
            (size[0], half, size[2]),
            lambda: file.read(name)[:, half:],
        )
    elif DOWN in name:
        gguf_name = f"blk.{name.split('.')[2]}.ffn_down_exps.weight"
        yield _Piece(gguf_name, size, lambda: file.read(name))
    else:
        gguf_name = _names(architecture, shape.layers).get_name(
            name, try_suffixes=(".weight", ".bias")
        )
        if gguf_name is None:
            raise GgufError(
                f"export.gguf: {name} has no place in a GGUF file of the "
                f"architecture {architecture}"
            )
        heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(
            name.split(".")[-2]
        )
        if heads is not None and architecture == TURNS_NEIGHBOURS:
            yield _Piece(
                gguf_name, size, lambda: interleave_halves(file.read(name), heads)
            )
        else:
            yield _Piece(gguf_name, size, lambda: file.read(name)[: size[0]])


@cache
def _names(architecture: str, layers: int) -> TensorNameMap:
    import gguf

    return gguf.get_tensor_name_map(
        next(
            key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture
        ),
        layers,
    )


def _type_of(piece: _Piece, kind: GgufKind) -> GGMLQuantizationType:
    """Data type of a tensor: that of the file for large matrices whose rows are
    multiples of the block size.
    """
    import gguf

    types = gguf.GGMLQuantizationType
    if len(piece.shape) == 1 or "ffn_gate_inp" in piece.name:
        return types.F32
    data_type = types[kind.upper()]
    if data_type == types.Q4_0 and piece.name in ("token_embd.weight", "output.weight"):
        data_type = types.Q8_0
    return (
        types.F16
        if piece.shape[-1] % gguf.GGML_QUANT_SIZES[data_type][0]
        else data_type
    )


def _write_sizes(writer: GGUFWriter, shape: Shape) -> None:
    import gguf

    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.sequence_length)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab_size)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_feed_forward_length(shape.ffn_width)
    scaling = shape.rope_scaling
    if scaling is None or scaling.kind == "llama3":
        return
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_orig_ctx_len(scaling.original_length or 0)
    writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    if scaling.attention_factor is not None:
        # llama.cpp multiplies this by the factor of the paper.
        writer.add_rope_scaling_attn_factors(
            scaling.attention_factor / (0.1 * math.log(scaling.factor) + 1.0)
        )
