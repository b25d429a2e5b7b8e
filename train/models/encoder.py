"""Encoders and the encoder-decoder, of the layers of transformers: BERT (Devlin et al.
2019), ModernBERT (Warner et al. 2024) with full attention in every layer, and T5 v1.1
(Raffel et al. 2020; Shazeer 2020).

Attention and masks are those of attention.py. Models are called like the decoder (see
`transformer.Llama`); `hf_encoder_configs` has their names in transformers. Shapes are
those of transformer.py; s encoded tokens, t decoded tokens. transformers is imported
when one is built.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.models.attention import Visible, attend, see_documents
from gristmill.train.models.hf_configs import hf_config
from gristmill.train.models.model_config import (
    BUCKETS,
    MOST_DISTANCE,
    Shape,
    TransformersShape,
)
from gristmill.train.models.rope import rotary_table
from gristmill.train.models.transformer import (
    Cache,
    Head,
    Llama,
    RMSNorm,
    ShapedModel,
    logits_head,
)
from gristmill.train.models.transformers_decoder import (
    TransformersDecoder,
    build_decoder,
)

ATTENTION = "gristmill"
"""Name of `hf_attention` in transformers."""


def hf_attention(
    module: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visible,
    scaling: float,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: queries (n, h, t, c) -> (n, t, h, c).

    T5's layers pass a mask that is added to scores, or a bool mask, as `position_bias`.
    """
    if position_bias is not None:
        visible = position_bias
    mixed = attend(queries, keys, values, visible, causal=False, scale=scaling)
    return mixed.transpose(1, 2), None


def layer_config(shape: Shape, **settings: Any) -> Any:
    """Configuration of the layers of a shape in transformers."""
    from transformers import AttentionInterface, AutoConfig

    AttentionInterface.register(ATTENTION, hf_attention)
    padded = replace(shape, vocab_size=shape.padded_vocab_size)
    config = AutoConfig.for_model(
        **hf_config(padded, "float32", [0], 0),
        **settings,
        attn_implementation=ATTENTION,
    )
    # The embedding of padding would get no gradient.
    config.pad_token_id = None
    return config


class BertStack(nn.Module):
    """Embeddings and layers of BERT. All tokens have type 0; the embedding of type 1 is
    initialised for fine-tuning.
    """

    def __init__(self, config: Any) -> None:
        from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

        super().__init__()
        self.embeddings = BertEmbeddings(config)
        # `forward` passes positions and types, and buffers have no values on "meta".
        del self.embeddings.position_ids, self.embeddings.token_type_ids
        self.layers = nn.ModuleList(
            BertLayer(config) for _ in range(config.num_hidden_layers)
        )

    def forward(self, ids: Tensor, places: Tensor, visible: Visible) -> Tensor:
        """Ids (n, t) at places (n or 1, t) -> hidden states (n, t, d)."""
        types = torch.zeros_like(places)
        hidden = self.embeddings(ids, position_ids=places, token_type_ids=types)
        for layer in self.layers:
            hidden = layer(hidden, visible)
        return hidden


class ModernBertStack(nn.Module):
    """Embeddings, layers and final norm of ModernBERT."""

    def __init__(self, config: Any, shape: Shape) -> None:
        from transformers.models.modernbert.modeling_modernbert import (
            ModernBertEmbeddings,
            ModernBertEncoderLayer,
        )

        super().__init__()
        self.shape = shape
        self.embeddings = ModernBertEmbeddings(config)
        self.layers = nn.ModuleList(
            ModernBertEncoderLayer(config, number) for number in range(shape.layers)
        )
        self.final_norm = nn.LayerNorm(shape.width, eps=shape.norm_eps, bias=False)

    def forward(self, ids: Tensor, places: Tensor, visible: Visible) -> Tensor:
        """Ids (n, t) at places (n or 1, t) -> normalised hidden states (n, t, d)."""
        hidden = self.embeddings(ids)
        cosines, sines = rotary_table(
            places, self.shape.head_width, self.shape.rope_theta
        )
        rotary = (cosines.to(hidden.dtype), sines.to(hidden.dtype))
        for layer in self.layers:
            hidden = layer(hidden, visible, rotary)
        return self.final_norm(hidden)


class Encoder(ShapedModel):
    """Masked language model, whose logits predict the token at their own place."""

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

        Raises:
            ValueError: a cache is given, or a row, or a document, exceeds the number of
                learned positions.
        """
        if cache is not None:
            raise ValueError("an encoder fills in masked tokens and cannot write text")
        if self.shape.bert and ids.shape[1] > self.shape.sequence_length:
            raise ValueError(
                f"a row of {ids.shape[1]} tokens is longer than the "
                f"{self.shape.sequence_length} positions that this encoder has"
            )
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        visible: Visible = None
        if positions is not None:
            visible = see_documents(positions, dense=self.is_compiled, causal=False)
            places = positions.clamp(min=0)
        return self.predict(self.model(ids, places, visible), head)

    def predict(self, hidden: Tensor, head: Head) -> Any:
        """Apply a head to the transform of hidden states (n, t, d)."""
        raise NotImplementedError


class ModernBert(Encoder):
    """ModernBERT, with the names of transformers' ModernBertForMaskedLM."""

    def __init__(self, shape: Shape) -> None:
        from transformers.models.modernbert.modeling_modernbert import (
            ModernBertPredictionHead,
        )

        config = layer_config(shape)
        super().__init__(shape, ModernBertStack(config, shape))
        self.head = ModernBertPredictionHead(config)
        if not shape.tied_embeddings:
            self.decoder = nn.Linear(shape.width, shape.padded_vocab_size, bias=False)

    def predict(self, hidden: Tensor, head: Head) -> Any:
        """Apply a head to the transform of hidden states (n, t, d)."""
        matrix: Tensor = (
            self.model.embeddings.tok_embeddings
            if self.shape.tied_embeddings
            else self.decoder
        ).weight
        return head(self.head(hidden), matrix[: self.shape.vocab_size])


class Bert(Encoder):
    """BERT, whose output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        from transformers.models.bert.modeling_bert import BertPredictionHeadTransform

        config = layer_config(shape)
        super().__init__(shape, BertStack(config))
        self.head = BertPredictionHeadTransform(config)
        self.output_bias = nn.Parameter(torch.empty(shape.padded_vocab_size))

    def predict(self, hidden: Tensor, head: Head) -> Any:
        """Apply a head to the transform of hidden states (n, t, d)."""
        # Heads take no bias: biases are an extra column of the matrix, multiplied by a
        # channel of ones.
        matrix = torch.cat(
            (self.model.embeddings.word_embeddings.weight, self.output_bias[:, None]),
            dim=1,
        )
        transformed = F.pad(self.head(hidden), (0, 1), value=1.0)
        return head(transformed, matrix[: self.shape.vocab_size])


class RelativeBias(nn.Module):
    """Bias of a head's scores by the distance of two tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(BUCKETS, shape.heads))

    def forward(self, length: int, both_ways: bool) -> Tensor:
        """(1, h, length, length)."""
        from transformers.models.t5.modeling_t5 import T5Attention

        places = torch.arange(length, device=self.weight.device)
        buckets = T5Attention._relative_position_bucket(
            places - places[:, None], both_ways, BUCKETS, MOST_DISTANCE
        )
        return F.embedding(buckets, self.weight).permute(2, 0, 1)[None]


class T5Layer(nn.Module):
    """Layer of T5's encoder or decoder, which attends to encoded tokens too."""

    def __init__(self, config: Any, number: int) -> None:
        from transformers.models.t5.modeling_t5 import T5Block

        super().__init__()
        self.block = T5Block(config, layer_idx=number)

    def forward(
        self,
        x: Tensor,
        visible: Tensor,
        encoded: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """(n, t, d) -> (n, t, d).

        Args:
            x: hidden states.
            visible: (n or 1, h, t, t), added to scores.
            encoded: (n, s, d), in the decoder.
            real: (n, 1, t, s) bool, true for encoded tokens that are not padding.
        """
        hidden, *_ = self.block(x, None, visible, encoded, None, real)
        return hidden


class T5Stacks(nn.Module):
    """Embedding, the layers of the encoder followed by those of the decoder, and the
    norm of each.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.padded_vocab_size, shape.width)
        self.encoder_bias = RelativeBias(shape)
        self.decoder_bias = RelativeBias(shape)
        self.layers = nn.ModuleList(
            T5Layer(layer_config(shape, is_decoder=of_decoder), number)
            for of_decoder in (False, True)
            for number in range(shape.layers)
        )
        self.encoder_norm = RMSNorm(shape.width, shape.norm_eps)
        self.norm = RMSNorm(shape.width, shape.norm_eps)

    def forward(self, ids: Tensor, decoder_ids: Tensor, is_real: Tensor) -> Tensor:
        """Ids (n, s) and (n, t) -> normalised hidden states (n, t, d); `is_real` (n, s)
        is false for padding.
        """
        encoded = self.embed_tokens(ids)
        hidden = self.embed_tokens(decoder_ids)
        t = decoder_ids.shape[1]
        real = is_real[:, None, None, :]
        encoder_bias = (
            self.encoder_bias(ids.shape[1], both_ways=True)
            .to(encoded.dtype)
            .masked_fill(~real, -torch.inf)
        )
        is_later = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        decoder_bias = (
            self.decoder_bias(t, both_ways=False)
            .to(hidden.dtype)
            .masked_fill(is_later, -torch.inf)
        )
        real = real.expand(-1, -1, t, -1)
        middle = len(self.layers) // 2
        for layer in self.layers[:middle]:
            encoded = layer(encoded, encoder_bias)
        encoded = self.encoder_norm(encoded)
        for layer in self.layers[middle:]:
            hidden = layer(hidden, decoder_bias, encoded, real)
        return self.norm(hidden)


class EncoderDecoder(ShapedModel):
    """T5 v1.1. Scores are not scaled by the root of the head width, and input and output
    do not share a matrix.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, T5Stacks(shape))
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
        is_real = ids >= 0 if positions is None else positions >= 0
        hidden = self.model(ids, decoder_ids, is_real)
        return head(hidden, self.lm_head.weight[: self.shape.vocab_size])


def model_of(
    shape: Shape | TransformersShape,
) -> Llama | Encoder | EncoderDecoder | TransformersDecoder:
    """Construct the model of a shape; inside `torch.device("meta")` its parameters have
    no memory.
    """
    if isinstance(shape, TransformersShape):
        return build_decoder(shape)
    if shape.encoder:
        return Bert(shape) if shape.bert else ModernBert(shape)
    if shape.encoder_decoder:
        return EncoderDecoder(shape)
    return Llama(shape)
