"""BERT's encoder (Devlin et al. 2019): learned positions, post-norm layers, GELU, and
biases everywhere.

Exports copy tensors to transformers' BertForMaskedLM (`hf_encoder_configs.bert_name`).
Every token attends to its whole row, or its whole document, whose positions start at 0.
All tokens have type 0; the embedding of type 1 is initialised for fine-tuning. Shapes
are those of decoder.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.models.attention import Visible, attend, see_documents
from gristmill.train.models.decoder import (
    Cache,
    Head,
    Layer,
    ShapedModel,
    Stack,
    logits_head,
)
from gristmill.train.models.model_config import TOKEN_TYPES, Shape


class BertAttention(nn.Module):
    """Bidirectional self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.channels = shape.head_width
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(shape.width, shape.width) for _ in range(4)
        )

    def forward(self, x: Tensor, visible: Visible) -> Tensor:
        """Attend (n, t, d) -> (n, t, d)."""
        queries, keys, values = (
            project(x).unflatten(2, (-1, self.channels)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(queries, keys, values, visible, causal=False)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class BertFeedForward(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.width, shape.ffn_width)
        self.down_proj = nn.Linear(shape.ffn_width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) -> (n, t, d)."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class BertBlock(Layer):
    """Layer of attention and feed-forward, each with a residual connection followed by
    a norm.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = BertAttention(shape)
        self.attention_norm = _norm(shape)
        self.mlp = BertFeedForward(shape)
        self.output_norm = _norm(shape)

    def compute(self, x: Tensor, visible: Visible) -> Tensor:
        """(n, t, d) -> (n, t, d)."""
        x = self.attention_norm(x + self.self_attn(x, visible))
        return self.output_norm(x + self.mlp(x))


class BertStack(Stack):
    """Embeddings of tokens, positions and types, their norm, and the layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.padded_vocab_size, shape.width)
        self.embed_positions = nn.Embedding(shape.sequence_length, shape.width)
        self.embed_types = nn.Embedding(TOKEN_TYPES, shape.width)
        self.embedding_norm = _norm(shape)
        self.layers = nn.ModuleList(BertBlock(shape) for _ in range(shape.layers))

    def run(self, ids: Tensor, places: Tensor, visible: Visible) -> Tensor:
        """Ids (n, t) at places (n or 1, t) -> hidden states (n, t, d)."""
        hidden = (
            self.embed_tokens(ids)
            + self.embed_types(torch.zeros_like(places))
            + self.embed_positions(places)
        )
        hidden = self.embedding_norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden, visible)
        return hidden


class BertHead(nn.Module):
    """Transform of hidden states before the output matrix (`transform` in the authors'
    code).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.width)
        self.norm = _norm(shape)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) -> (n, t, d)."""
        return self.norm(F.gelu(self.dense(x)))


class Bert(ShapedModel):
    """Masked language model, whose logits predict the token at their own place. The
    output matrix is the embedding.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, BertStack(shape))
        self.head = BertHead(shape)
        self.output_bias = nn.Parameter(torch.empty(shape.padded_vocab_size))

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
    ) -> Any:
        """Run the model and apply a head to its last hidden states; see
        encoder.Encoder.forward.

        Raises:
            ValueError: a row, or a document, exceeds the number of positions, or a
                cache is given.
        """
        if cache is not None:
            raise ValueError("an encoder fills in masked tokens and cannot write text")
        if ids.shape[1] > self.shape.sequence_length:
            raise ValueError(
                f"a row of {ids.shape[1]} tokens is longer than the "
                f"{self.shape.sequence_length} positions that this encoder has"
            )
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        visible = None
        if positions is not None:
            visible = see_documents(positions, dense=self.is_compiled, causal=False)
            places = positions.clamp(min=0)
        hidden = self.head(self.model(ids, places, visible))
        # Heads take no bias: biases are an extra column of the matrix, multiplied by a
        # channel of ones.
        matrix = torch.cat(
            (self.model.embed_tokens.weight, self.output_bias[:, None]), dim=1
        )
        return head(F.pad(hidden, (0, 1), value=1.0), matrix[: self.shape.vocab_size])


def _norm(shape: Shape) -> nn.LayerNorm:
    return nn.LayerNorm(shape.width, eps=shape.norm_eps)
