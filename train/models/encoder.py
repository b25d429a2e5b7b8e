"""Encoders and encoder-decoders of transformers, such as BERT (Devlin et al. 2019),
ModernBERT (Warner et al. 2024) and T5 (Raffel et al. 2020), and models of any shape.

Shapes are those of transformer.py; s encoded tokens, t decoded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.train.models.attention import document_numbers
from gristmill.train.models.model_config import (
    BERT_FFN,
    Kind,
    StoredShape,
    TransformersShape,
    WeightsError,
)
from gristmill.train.models.tensor_files import Tensors
from gristmill.train.models.transformer import Head, Llama, logits_head
from gristmill.train.models.transformers_decoder import (
    UNLIMITED_CONTEXT,
    Documents,
    TransformersDecoder,
    TransformersModule,
    build_module,
    documents_as_rows,
    module_shape,
)

SPECIAL_IDS = ("bos", "eos", "pad", "cls", "sep")
"""Tokens with an id in a config.json."""


class Encoder(TransformersModule):
    """Masked language model, whose logits predict the token at their own place."""

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
    ) -> Any:
        """Run the module and apply a head; see `Llama.forward`.

        Args:
            ids, head: see `Llama.forward`.
            positions: (n, t) of each token in its document, negative for padding, which
                no other token attends to. Without them a token attends to its whole
                row.
            trained: ignored, as there are no experts.
        """
        inputs: dict[str, Any] = {"input_ids": ids}
        documents: Documents | None = None
        if positions is not None and not self.separates_documents:
            documents = documents_as_rows(ids, positions)
            inputs = {"input_ids": documents.ids, "attention_mask": documents.mask}
        elif positions is not None:
            inputs["position_ids"] = positions.clamp(min=0)
            inputs["attention_mask"] = self._document_mask(positions)
        hidden, matrix, _ = self.states(**inputs)
        if documents is not None:
            hidden = hidden[documents.rows, documents.places]
        return head(hidden, matrix)

    def _document_mask(self, positions: Tensor) -> Tensor | Tensors:
        """Mask of attention within documents, (n, 1, t, t) bool; by kind of layer if some
        attend to a window.
        """
        numbers = document_numbers(positions)[:, None]
        mask = numbers[..., None] == numbers[..., None, :]
        config: Any = self.config
        if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            return mask
        places = torch.arange(positions.shape[1], device=positions.device)
        is_near = (places - places[:, None]).abs() <= config.sliding_window
        return {"full_attention": mask, "sliding_attention": mask & is_near}


class EncoderDecoder(TransformersModule):
    """Model that encodes a text and decodes another."""

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
        *,
        decoder_ids: Tensor,
    ) -> Any:
        """Run the module and apply a head to the decoder's hidden states; see
        `Llama.forward`.

        Args:
            ids: (n, s) int64, inputs of the encoder.
            head: see `Llama.forward`.
            positions: (n, s), negative for padding, which no token attends to; no
                padding without them.
            trained: ignored, as there are no experts.
            decoder_ids: (n, t) int64, inputs of the decoder.
        """
        hidden, matrix, _ = self.states(
            input_ids=ids,
            attention_mask=None if positions is None else positions >= 0,
            decoder_input_ids=decoder_ids,
            use_cache=False,
        )
        return head(hidden, matrix)


class Classifier(TransformersModule):
    """Encoder that assigns texts to classes."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits of the classes (n, c), float32, of texts.

        Args:
            ids: (n, t) int64.
            mask: (n, t) bool, false for padding.
        """
        logits: Tensor = self.output(input_ids=ids, attention_mask=mask).logits
        return logits.float()


BASES: dict[Kind, type[TransformersModule]] = {
    "decoder": TransformersDecoder,
    "encoder": Encoder,
    "encoder_decoder": EncoderDecoder,
    "classifier": Classifier,
}
"""Calling convention of a kind of model."""


def model_of(shape: StoredShape) -> Llama | TransformersModule:
    """Construct the model of a shape; its parameters have no memory."""
    if isinstance(shape, TransformersShape):
        return build_module(shape, BASES[shape.kind])
    with torch.device("meta"):
        return Llama(shape)


def new_encoder(section: Pretrain, vocab_size: int, length: int) -> TransformersShape:
    """Shape of a new encoder or encoder-decoder for rows of a length, from its sizes
    and objective.
    """
    model = section.model
    no_ids = {f"{name}_token_id": None for name in SPECIAL_IDS}
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.feed_forward_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": length,
        "tie_word_embeddings": model.tied_embeddings,
    }
    if section.masked is None:
        config = {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "vocab_size": vocab_size,
            "d_model": model.width,
            "d_kv": model.head_width or model.width // model.heads,
            "d_ff": model.feed_forward_width,
            "num_layers": model.layers,
            "num_heads": model.heads,
            "layer_norm_epsilon": model.norm_eps,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "decoder_start_token_id": None,
        }
    elif section.masked.shape == "bert":
        config = {
            **sizes,
            "architectures": ["BertForMaskedLM"],
            "model_type": "bert",
            "intermediate_size": model.ffn_width or BERT_FFN * model.width,
            "layer_norm_eps": model.norm_eps,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
    else:
        rope = {"rope_type": "default", "rope_theta": model.rope_theta}
        config = {
            **sizes,
            "architectures": ["ModernBertForMaskedLM"],
            "model_type": "modernbert",
            "max_position_embeddings": max(length, UNLIMITED_CONTEXT),
            "norm_eps": model.norm_eps,
            "layer_types": ["full_attention"] * model.layers,
            "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
            "decoder_bias": False,
            # A tokenizer that is trained here has no [CLS].
            "classifier_pooling": "mean",
        }
    return replace(
        module_shape({**config, **no_ids}, {}),
        sequence_length=length,
        document_mask=model.document_mask,
    )


def classifier_shape(encoder: StoredShape, classes: Sequence[str]) -> TransformersShape:
    """Shape of a classifier with the layers of an encoder.

    Raises:
        WeightsError: it is not an encoder, or transformers has no classifier of its
            family.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES,
    )

    if (
        not isinstance(encoder, TransformersShape)
        or encoder.kind != "encoder"
        or encoder.family not in NAMES
    ):
        raise WeightsError(
            "sft.task is classify, but the model is not an encoder that has a "
            "...ForSequenceClassification in transformers"
        )
    config = {
        **encoder.config,
        "architectures": [NAMES[encoder.family]],
        "problem_type": "single_label_classification",
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
    }
    return replace(
        module_shape(config, encoder.files), sequence_length=encoder.sequence_length
    )
