"""`gristmill bench objectives`: a step of each objective beside the same in
transformers, with the same draws.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measuring import Row, row
from benchmarks.train.masked import first_rows, masking, ordinary_rows
from benchmarks.train.small_models import (
    EOS,
    PAD,
    Action,
    hf_step,
    our_step,
    per_second,
)
from benchmarks.train.step import LENGTH, ROWS, SECTION, VOCAB
from gristmill.mixtures.objectives.span_objectives import (
    BlankInfilling,
    SpanCorruption,
    Ul2,
)
from gristmill.mixtures.objectives.token_objectives import PrefixLm
from gristmill.train.distributed.process_groups import World, single_process
from gristmill.train.models.hf_configs import hf_config
from gristmill.train.models.model_config import BERT_FFN, Shape, shape_of
from gristmill.train.objectives.glm import Blanks, Marks
from gristmill.train.objectives.prediction_targets import Laid, Layout
from gristmill.train.objectives.prefix_rows import PrefixCut
from gristmill.train.objectives.span_rows import Corruption

SENTINELS, MODE = 70, 3
"""Number of sentinel tokens, and the first id of the tokens of modes and blanks."""


class Comparison(NamedTuple):
    """A model, the layout of its rows, and transformers' step on rows laid out so."""

    shape: Shape
    layout: Layout
    peer_step: Callable[[Shape, Laid, World], Action]


def rows() -> Iterator[Row]:
    """Measure a step of each objective."""
    shape = shape_of(SECTION, VOCAB, LENGTH)
    with single_process() as world, tempfile.TemporaryDirectory() as folder:
        packed = ordinary_rows(Path(folder))
        read = first_rows(packed)
        for name, (model_shape, layout, peer_step) in comparisons(shape).items():
            our_action = our_step(model_shape, packed, layout, world, ROWS)
            ours, peer = per_second(
                ROWS * LENGTH,
                world,
                our_action,
                peer_step(model_shape, layout(read, 0), world),
            )
            yield row(name, ours, peer, "tokens/s")


def comparisons(shape: Shape) -> dict[str, Comparison]:
    """Row name -> what is compared."""
    prefix_lm = replace(shape, prefix_lm=True)
    glm = replace(shape, prefix_lm=True, qkv_bias=True, rotary_share=0.5)
    t5 = replace(
        shape, kv_heads=shape.heads, tied_embeddings=False, encoder_decoder=True
    )
    bert = replace(
        shape_of(SECTION, VOCAB, LENGTH, encoder=True),
        bert=True,
        ffn_width=BERT_FFN * shape.width,
    )
    sentinels = np.arange(VOCAB - SENTINELS, VOCAB)
    modes = tuple(range(MODE, MODE + len(Ul2().denoisers)))
    spans = Corruption(SpanCorruption().denoisers, (), 0, sentinels, EOS, PAD)
    ul2 = Corruption(Ul2().denoisers, modes, 0, sentinels, EOS, PAD)
    marks = Marks(3, 4, 5, 6, 7, PAD)
    blanks = Blanks(
        BlankInfilling(document_share=0.5), marks, 0, np.zeros(VOCAB, dtype=bool), EOS
    )
    return {
        "prefix step, vs transformers Llama given the mask": Comparison(
            prefix_lm, PrefixCut(PrefixLm(), 0), decoder_step
        ),
        "blank step, vs transformers Glm given rows and mask": Comparison(
            glm, blanks, decoder_step
        ),
        "span step, vs transformers T5, rows laid out for it": Comparison(
            t5, spans, t5_step
        ),
        "UL2 step, vs transformers T5, rows laid out for it": Comparison(
            t5, ul2, t5_step
        ),
        "UL2 step of a decoder, vs transformers Llama": Comparison(
            prefix_lm, replace(ul2, joined=True), decoder_step
        ),
        "masked step of a BERT, vs transformers Bert": Comparison(
            bert, masking(), bert_step
        ),
    }


def decoder_step(shape: Shape, laid: Laid, world: World) -> Action:
    """Return a step of LlamaForCausalLM or GlmForCausalLM with a mask of (rows, 1,
    tokens, tokens).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    assert laid.prefix is not None
    places, targets = torch.arange(LENGTH), torch.from_numpy(laid.targets)
    mask = ((places[:, None] >= places) | torch.from_numpy(laid.prefix)[:, None, :])[
        :, None
    ]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**hf_config(shape, "float32", [EOS], PAD))
    )
    return _step(model, laid, world, attention_mask=mask, shift_labels=targets)


def bert_step(shape: Shape, laid: Laid, world: World) -> Action:
    """Return a step of BertForMaskedLM."""
    from transformers import BertConfig, BertForMaskedLM

    return _step(
        BertForMaskedLM(BertConfig(**hf_config(shape, "float32", [EOS], PAD))),
        laid,
        world,
    )


def t5_step(shape: Shape, laid: Laid, world: World) -> Action:
    """Return a step of T5ForConditionalGeneration."""
    from transformers import T5Config, T5ForConditionalGeneration

    return _step(
        T5ForConditionalGeneration(T5Config(**hf_config(shape, "float32", [EOS], PAD))),
        laid,
        world,
    )


def _step(model: Any, laid: Laid, world: World, **more: torch.Tensor) -> Action:
    batch = {
        "input_ids": torch.from_numpy(laid.inputs),
        "labels": torch.from_numpy(laid.targets),
        **more,
    }
    placed = {name: tensor.to(world.device) for name, tensor in batch.items()}
    return hf_step(model, world, lambda: placed)
