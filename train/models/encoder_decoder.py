"""Encoder-decoder: T5 v1.1's (Raffel et al. 2020; Shazeer 2020) with relative
positions, RMSNorm and gated GELU.

Scores are not scaled by the root of the head width, and input and output do not share a
matrix. Exports copy tensors to transformers' T5ForConditionalGeneration
(`hf_encoder_configs.t5_name`). Shapes are those of decoder.py; s encoded tokens, t
decoded tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.models.attention import Visible, attend
from gristmill.train.models.decoder import (
    Cache,
    FeedForward,
    Head,
    Layer,
    RMSNorm,
    ShapedModel,
    Stack,
    logits_head,
)
from gristmill.train.models.model_config import BUCKETS, MOST_DISTANCE, Shape


class RelativeBias(nn.Module):
    """Bias of a head's scores by the distance of two tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(BUCKETS, shape.heads))

    def forward(self, length: int, both_ways: bool) -> Tensor:
        """(1, h, length, length)."""
        places = torch.arange(length, device=self.weight.device)
        buckets = bucket_of(places - places[:, None], both_ways)
        return F.embedding(buckets, self.weight).permute(2, 0, 1)[None]


def bucket_of(distance: Tensor, both_ways: bool) -> Tensor:
    """Bucket of a key's position minus a query's position, int64.

    Half of the buckets hold single distances, the others grow logarithmically. If
    tokens attend in both directions, half of all buckets are for later keys.

    >>> bucket_of(torch.tensor([0, -1, -7, -20, -500, 3]), both_ways=False).tolist()
    [0, 1, 7, 17, 31, 0]
    >>> bucket_of(torch.tensor([-1, 1, 7, 8, 500]), both_ways=True).tolist()
    [1, 17, 23, 24, 31]
    """
    buckets = BUCKETS // 2 if both_ways else BUCKETS
    offset = (
        (distance > 0).long() * buckets if both_ways else torch.zeros_like(distance)
    )
    distance = distance.abs() if both_ways else (-distance).clamp(min=0)
    single = buckets // 2
    logarithmic = (
        single
        + (
            torch.log(distance.clamp(min=1).float() / single)
            / math.log(MOST_DISTANCE / single)
            * (buckets - single)
        ).long()
    )
    return offset + torch.where(
        distance < single, distance, logarithmic.clamp(max=buckets - 1)
    )


class T5Attention(nn.Module):
    """Self-attention, or attention over encoded tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.channels = shape.head_width
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(shape.width, shape.attention_width, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(shape.attention_width, shape.width, bias=False)

    def forward(self, x: Tensor, seen: Tensor, visible: Visible) -> Tensor:
        """Attend (n, t, d) over (n, s, d) -> (n, t, d); `visible` is a float mask added
        to scores or a bool mask.
        """
        queries, keys, values = (
            project(source).unflatten(2, (-1, self.channels)).transpose(1, 2)
            for project, source in (
                (self.q_proj, x),
                (self.k_proj, seen),
                (self.v_proj, seen),
            )
        )
        mixed = attend(queries, keys, values, visible, causal=False, scale=1.0)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GatedGelu(FeedForward):
    """down(gelu(gate(x)) * up(x)), with the tanh approximation (Shazeer 2020; T5
    v1.1).
    """

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) -> (n, t, d)."""
        return self.down_proj(
            F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        )


class T5Block(Layer):
    """Layer of the encoder or decoder; the decoder's also attends to encoded tokens."""

    def __init__(self, shape: Shape, of_decoder: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = T5Attention(shape)
        if of_decoder:
            self.cross_layernorm = RMSNorm(shape.width, shape.norm_eps)
            self.cross_attn = T5Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = GatedGelu(shape)
        self.of_decoder = of_decoder

    def compute(
        self,
        x: Tensor,
        visible: Visible,
        encoded: Tensor | None = None,
        real: Visible = None,
    ) -> Tensor:
        """(n, t, d) -> (n, t, d).

        Args:
            x: hidden states.
            visible: (n or 1, h, t, t), added to scores.
            encoded: (n, s, d), in the decoder.
            real: (n, 1, t, s) bool, true for encoded tokens that are not padding; all
                if absent.
        """
        normal = self.input_layernorm(x)
        x = x + self.self_attn(normal, normal, visible)
        if self.of_decoder:
            x = x + self.cross_attn(self.cross_layernorm(x), encoded, real)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stacks(Stack):
    """Embedding, the layers of the encoder followed by those of the decoder, and the
    norm of each.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.padded_vocab_size, shape.width)
        self.encoder_bias = RelativeBias(shape)
        self.decoder_bias = RelativeBias(shape)
        self.layers = nn.ModuleList(
            T5Block(shape, of_decoder)
            for of_decoder in (False, True)
            for _ in range(shape.layers)
        )
        self.encoder_norm = RMSNorm(shape.width, shape.norm_eps)
        self.norm = RMSNorm(shape.width, shape.norm_eps)

    def run(self, ids: Tensor, decoder_ids: Tensor, is_real: Tensor | None) -> Tensor:
        """Ids (n, s) and (n, t) -> normalised hidden states (n, t, d); `is_real` (n, s)
        is false for padding.
        """
        encoded = self.embed_tokens(ids)
        hidden = self.embed_tokens(decoder_ids)
        t = decoder_ids.shape[1]
        encoder_bias = self.encoder_bias(ids.shape[1], both_ways=True).to(encoded.dtype)
        real = None
        if is_real is not None:
            encoder_bias = encoder_bias.masked_fill(
                ~is_real[:, None, None, :], -torch.inf
            )
            real = is_real[:, None, None, :].expand(-1, -1, t, -1)
        is_later = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        decoder_bias = (
            self.decoder_bias(t, both_ways=False)
            .to(hidden.dtype)
            .masked_fill(is_later, -torch.inf)
        )
        middle = len(self.layers) // 2
        for layer in self.layers[:middle]:
            encoded = layer(encoded, encoder_bias)
        encoded = self.encoder_norm(encoded)
        for layer in self.layers[middle:]:
            hidden = layer(hidden, decoder_bias, encoded, real)
        return self.norm(hidden)


class EncoderDecoder(ShapedModel):
    """Encoder-decoder language model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, Stacks(shape))
        self.lm_head = nn.Linear(shape.width, shape.padded_vocab_size, bias=False)

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
        decoder_ids: Tensor | None = None,
    ) -> Any:
        """Run the model and apply a head to the decoder's last hidden states; see
        `Llama.forward`.

        Args:
            ids: (n, s) int64, inputs of the encoder.
            head: see `Llama.forward`.
            cache: must be None: generation is not supported.
            positions: (n, s), negative for padding, which no token attends to; no
                padding without them.
            trained: ignored, as there are no experts.
            decoder_ids: (n, t) int64, inputs of the decoder.
        """
        if cache is not None or decoder_ids is None:
            raise ValueError(
                "an encoder-decoder fills in hidden spans and cannot continue a text"
            )
        hidden = self.model(
            ids, decoder_ids, None if positions is None else positions >= 0
        )
        return head(hidden, self.lm_head.weight[: self.shape.vocab_size])
