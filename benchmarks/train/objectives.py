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
from benchmarks.train.masked import (
    encoder_shape,
    first_rows,
    masking,
    ordinary_rows,
)
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
from gristmill.train.models.model_config import Shape, TransformersShape, shape_of
from gristmill.train.models.transformers_decoder import module_of
from gristmill.train.objectives.glm import Blanks
from gristmill.train.objectives.prediction_targets import Laid, Layout
from gristmill.train.objectives.prefix_rows import PrefixCut
from gristmill.train.objectives.span_rows import Corruption

SENTINELS, MODE = 70, 3
"""Number of sentinel tokens, and the first id of the tokens of modes and blanks."""


class Comparison(NamedTuple):
    """A model, the layout of its rows, and transformers' step on rows laid out so."""

    shape: Shape | TransformersShape
    layout: Layout
    peer_step: Callable[[Any, Laid, World], Action]


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
    t5 = encoder_shape(span_corruption={})
    bert = encoder_shape(masked={"shape": "bert"})
    sentinels = np.arange(VOCAB - SENTINELS, VOCAB)
    modes = tuple(range(MODE, MODE + len(Ul2().denoisers)))
    spans = Corruption(SpanCorruption().denoisers, (), 0, sentinels, EOS, PAD)
    ul2 = Corruption(Ul2().denoisers, modes, 0, sentinels, EOS, PAD)
    ends_sentence = np.zeros(VOCAB, dtype=bool)
    blanks = Blanks(
        BlankInfilling(document_share=0.5), 0, ends_sentence, 3, 4, 5, 6, 7, PAD, EOS
    )
    return {
        "prefix step, vs transformers Llama given the mask": Comparison(
            prefix_lm, PrefixCut(PrefixLm(), 0), decoder_step
        ),
        "blank step, vs transformers Glm given rows and mask": Comparison(
            glm, blanks, decoder_step
        ),
        "span step, vs transformers T5, rows laid out for it": Comparison(
            t5, spans, encoder_step
        ),
        "UL2 step, vs transformers T5, rows laid out for it": Comparison(
            t5, ul2, encoder_step
        ),
        "UL2 step of a decoder, vs transformers Llama": Comparison(
            prefix_lm, replace(ul2, joined=True), decoder_step
        ),
        "masked step of a BERT, vs transformers Bert": Comparison(
            bert, masking(), encoder_step
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


def encoder_step(shape: TransformersShape, laid: Laid, world: World) -> Action:
    """Return a step of the class of transformers of a shape."""
    config = {**shape.config, "pad_token_id": PAD, "decoder_start_token_id": PAD}
    return _step(module_of(config), laid, world)


def _step(model: Any, laid: Laid, world: World, **more: torch.Tensor) -> Action:
    batch = {
        "input_ids": torch.from_numpy(laid.inputs),
        "labels": torch.from_numpy(laid.targets),
        **more,
    }
    placed = {name: tensor.to(world.device) for name, tensor in batch.items()}
    return hf_step(model, world, lambda: placed)
