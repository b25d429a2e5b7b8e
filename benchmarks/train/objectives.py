"""`gristmill bench objectives`: a step of each objective beside the same in transformers, with the same draws; with
further tokens, which transformers does not train, beside our own without."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.measuring import Row, row
from benchmarks.train.masked import EOS, PAD, masking, our_step, packed_set, step_of
from benchmarks.train.step import LENGTH, ROWS, SECTION, VOCAB, Action, per_second
from gristmill.mixtures.objectives.span_objectives import BlankInfilling, SpanCorruption, Ul2
from gristmill.mixtures.objectives.token_objectives import PrefixLm
from gristmill.train.models.hf_configs import hf_config
from gristmill.train.models.model_config import BERT_FFN, Shape, shape_of
from gristmill.train.objectives.glm import Blanks, Marks
from gristmill.train.objectives.prediction_targets import Laid, Layout, Read
from gristmill.train.objectives.prefix_rows import PrefixCut
from gristmill.train.objectives.span_rows import Corruption
from gristmill.train.parallel.process_groups import World, single_process

SENTINELS, MODE = 70, 3
"""How many there are, and the first id of what stands for modes and blanks."""
Peer = Callable[[Shape, Laid, World], Action]


def rows() -> Iterator[Row]:
    """Measure, both sides by turns here and now."""
    with single_process() as world, tempfile.TemporaryDirectory() as folder:
        packed, shape = packed_set(Path(folder)), shape_of(SECTION, VOCAB, LENGTH)
        numbers = np.arange(ROWS)
        read = Read(
            packed.tokens(numbers),
            np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
            numbers,
            np.zeros(ROWS, dtype=np.int64),
        )
        prefixed, glm = replace(shape, prefix_lm=True), replace(shape, prefix_lm=True, qkv_bias=True, rotary_share=0.5)
        t5 = replace(shape, kv_heads=shape.heads, tied_embeddings=False, encoder_decoder=True)
        bert = replace(shape_of(SECTION, VOCAB, LENGTH, encoder=True), bert=True, ffn_width=BERT_FFN * shape.width)
        sentinels, modes = np.arange(VOCAB - SENTINELS, VOCAB), tuple(range(MODE, MODE + len(Ul2().denoisers)))
        spans = Corruption(SpanCorruption().denoisers, (), 0, sentinels, EOS, PAD)
        mixed = Corruption(Ul2().denoisers, modes, 0, sentinels, EOS, PAD)
        blanks = Blanks(
            BlankInfilling(document_share=0.5), Marks(3, 4, 5, 6, 7, PAD), 0, np.zeros(VOCAB, dtype=bool), EOS
        )
        sides: dict[str, tuple[Shape, Layout, Peer]] = {
            "prefix step, vs transformers Llama given the mask": (prefixed, PrefixCut(PrefixLm(), 0), decoder_step),
            "blank step, vs transformers Glm given rows and mask": (glm, blanks, decoder_step),
            "span step, vs transformers T5, rows laid out for it": (t5, spans, t5_step),
            "UL2 step, vs transformers T5, rows laid out for it": (t5, mixed, t5_step),
            "UL2 step of a decoder, vs transformers Llama": (prefixed, replace(mixed, joined=True), decoder_step),
            "masked step of a BERT, vs transformers Bert": (bert, masking(), bert_step),
        }
        for name, (one, how, peer_of) in sides.items():
            ours, peer = per_second(
                ROWS * LENGTH, world, our_step(one, packed, how, world), peer_of(one, how(read, 0), world)
            )
            yield row(name, ours, peer, "tokens/s")
        further = replace(shape, multi_token=1)
        ours, peer = per_second(
            ROWS * LENGTH, world, our_step(further, packed, None, world), our_step(shape, packed, None, world)
        )
        yield row(
            "step with a further token, vs without",
            ours,
            peer,
            "tokens/s",
            f"arithmetic: {shape.flops_per_token(LENGTH) / further.flops_per_token(LENGTH):.2f}",
        )


def decoder_step(shape: Shape, laid: Laid, world: World) -> Action:
    """LlamaForCausalLM, or GlmForCausalLM, with a mask of (rows, 1, tokens, tokens) and its own loss, in the same
    precision."""
    from transformers import AutoConfig, AutoModelForCausalLM

    assert laid.prefix is not None
    here, ids, targets = torch.arange(LENGTH), *map(torch.from_numpy, (laid.inputs, laid.targets))
    mask = ((here[:, None] >= here) | torch.from_numpy(laid.prefix)[:, None, :])[:, None]
    asked = {"input_ids": ids, "attention_mask": mask, "labels": targets, "shift_labels": targets}
    placed = {name: part.to(world.device) for name, part in asked.items()}
    config = AutoConfig.for_model(**hf_config(shape, "float32", [EOS], PAD))
    return step_of(AutoModelForCausalLM.from_config(config), world, lambda: placed)


def bert_step(shape: Shape, laid: Laid, world: World) -> Action:
    """BertForMaskedLM with its own loss, in the same precision."""
    from transformers import BertConfig, BertForMaskedLM

    asked = {"input_ids": torch.from_numpy(laid.inputs), "labels": torch.from_numpy(laid.targets)}
    placed = {name: part.to(world.device) for name, part in asked.items()}
    return step_of(BertForMaskedLM(BertConfig(**hf_config(shape, "float32", [EOS], PAD))), world, lambda: placed)


def t5_step(shape: Shape, laid: Laid, world: World) -> Action:
    """T5ForConditionalGeneration with its own loss, in the same precision."""
    from transformers import T5Config, T5ForConditionalGeneration

    asked = {"input_ids": torch.from_numpy(laid.inputs), "labels": torch.from_numpy(laid.targets)}
    placed = {name: part.to(world.device) for name, part in asked.items()}
    return step_of(
        T5ForConditionalGeneration(T5Config(**hf_config(shape, "float32", [EOS], PAD))), world, lambda: placed
    )
