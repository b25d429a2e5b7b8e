"""Encoder: ModernBERT's (Warner et al. 2024) with rotary positions, GeGLU and full
attention in every layer.

Every token attends to its whole row, or its whole document. Parameters have the names
and layouts of transformers' ModernBertForMaskedLM, so that exports copy tensors. It is
called like the decoder (see `decoder.Llama`); shapes are those of decoder.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.models.attention import Visible, attend, see_documents
from gristmill.train.models.bert import Bert
from gristmill.train.models.decoder import (
    Cache,
    Head,
    Layer,
    Llama,
    ShapedModel,
    Stack,
    logits_head,
)
from gristmill.train.models.encoder_decoder import EncoderDecoder
from gristmill.train.models.model_config import Shape
from gristmill.train.models.rope import Rotary, rotary_table, rotate


class EncoderAttention(nn.Module):
    """Bidirectional self-attention with a joint projection of queries, keys and
    values.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.channels = shape.head_width
        self.Wqkv = nn.Linear(shape.width, 3 * shape.attention_width, bias=False)
        self.Wo = nn.Linear(shape.attention_width, shape.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, visible: Visible) -> Tensor:
        """Attend (n, t, d) -> (n, t, d); see `decoder.Attention` for the arguments."""
        queries, keys, values = (
            self.Wqkv(x).unflatten(2, (3, -1, self.channels)).permute(2, 0, 3, 1, 4)
        )
        mixed = attend(
            rotate(queries, *rotary),
            rotate(keys, *rotary),
            values,
            visible,
            causal=False,
        )
        return self.Wo(mixed.transpose(1, 2).flatten(2))


class EncoderFeedForward(nn.Module):
    """GeGLU (Shazeer 2020): Wo(gelu(a) * b), with a and b the halves of Wi(x)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.Wi = nn.Linear(shape.width, 2 * shape.ffn_width, bias=False)
        self.Wo = nn.Linear(shape.ffn_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) -> (n, t, d)."""
        activated, gate = self.Wi(x).chunk(2, dim=-1)
        return self.Wo(F.gelu(activated) * gate)


class EncoderBlock(Layer):
    """Layer of attention and feed-forward, each with a pre-norm and a residual
    connection.

    The first layer's attention has no norm, as the embeddings are already normalised.
    """

    def __init__(self, shape: Shape, is_first: bool) -> None:
        super().__init__()
        self.attn_norm = nn.Identity() if is_first else _norm(shape)
        self.attn = EncoderAttention(shape)
        self.mlp_norm = _norm(shape)
        self.mlp = EncoderFeedForward(shape)

    def compute(self, x: Tensor, rotary: Rotary, visible: Visible) -> Tensor:
        """(n, t, d) -> (n, t, d)."""
        cosines, sines = rotary
        x = x + self.attn(
            self.attn_norm(x), (cosines.to(x.dtype), sines.to(x.dtype)), visible
        )
        return x + self.mlp(self.mlp_norm(x))


class Embeddings(nn.Module):
    """Token embeddings with a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.padded_vocab_size, shape.width)
        self.norm = _norm(shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (n, t) -> (n, t, d)."""
        return self.norm(self.tok_embeddings(ids))


class EncoderStack(Stack):
    """Embeddings, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = Embeddings(shape)
        self.layers = nn.ModuleList(
            EncoderBlock(shape, number == 0) for number in range(shape.layers)
        )
        self.final_norm = _norm(shape)

    def run(self, ids: Tensor, rotary: Rotary, visible: Visible) -> Tensor:
        """Ids (n, t) -> normalised hidden states (n, t, d)."""
        hidden = self.embeddings(ids)
        for layer in self.layers:
            hidden = layer(hidden, rotary, visible)
        return self.final_norm(hidden)


class PredictionHead(nn.Module):
    """Transform of hidden states before the output matrix (`transform` in the code of
    Devlin et al. 2019).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.width, bias=False)
        self.norm = _norm(shape)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) -> (n, t, d)."""
        return self.norm(F.gelu(self.dense(x)))


class Encoder(ShapedModel):
    """Masked language model, whose logits predict the token at their own place."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, EncoderStack(shape))
        self.head = PredictionHead(shape)
        if not shape.tied_embeddings:
            self.decoder = nn.Linear(shape.width, shape.padded_vocab_size, bias=False)

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
    ) -> Any:
        """Run the model and apply a head to its last hidden states; see
        `Llama.forward`.

        Args:
            ids, head: see `Llama.forward`.
            cache: must be None: later tokens change earlier hidden states, so nothing
                can be cached.
            positions: (n, t) of each token in its document, negative for padding, which
                no other token attends to. Without them a token attends to its whole
                row.
            trained: ignored, as there are no experts.
        """
        if cache is not None:
            raise ValueError("an encoder fills in masked tokens and cannot write text")
        places = torch.arange(ids.shape[1], device=ids.device)
        visible: Visible = None
        if positions is not None:
            visible = see_documents(positions, dense=self.is_compiled, causal=False)
            places = positions.clamp(min=0).unsqueeze(1)
        rotary = rotary_table(
            places,
            self.shape.head_width,
            self.shape.rope_theta,
            self.shape.rope_scaling,
        )
        hidden = self.head(self.model(ids, rotary, visible))
        matrix: Tensor = (
            self.model.embeddings.tok_embeddings
            if self.shape.tied_embeddings
            else self.decoder
        ).weight
        return head(hidden, matrix[: self.shape.vocab_size])


def _norm(shape: Shape) -> nn.LayerNorm:
    return nn.LayerNorm(shape.width, eps=shape.norm_eps, bias=False)


def model_of(shape: Shape) -> Llama | Encoder | Bert | EncoderDecoder:
    """Construct the model of a shape."""
    if shape.encoder:
        return Bert(shape) if shape.bert else Encoder(shape)
    if shape.encoder_decoder:
        return EncoderDecoder(shape)
    return Llama(shape)
