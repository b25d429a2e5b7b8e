"""`gristmill bench objectives`: a step of each objective beside the same in transformers, with the same draws; with
further tokens, which transformers does not train, beside our own without."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.measuring import Row, row
from benchmarks.train.masked import EOS, PAD, our_step, packed_set, step_of
from benchmarks.train.step import LENGTH, ROWS, SECTION, VOCAB, Action, per_second
from gristmill.mixtures.objectives.span_objectives import SpanCorruption
from gristmill.mixtures.objectives.token_objectives import PrefixLm
from gristmill.train.models.families import hf_config
from gristmill.train.models.shape import Shape, shape_of
from gristmill.train.objectives.layout import Laid, Read
from gristmill.train.objectives.prefix_rows import PrefixCut
from gristmill.train.objectives.span_rows import Corruption
from gristmill.train.parallel.world import World, single_process


def rows() -> Iterator[Row]:
    """Measure, both sides by turns here and now."""
    with single_process() as world, tempfile.TemporaryDirectory() as folder:
        packed, shape, how = packed_set(Path(folder)), shape_of(SECTION, VOCAB, LENGTH), PrefixCut(PrefixLm(), 0)
        numbers = np.arange(ROWS)
        read = Read(packed.tokens(numbers), np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)), numbers,
                    np.zeros(ROWS, dtype=np.int64))
        laid = how(read, 0)
        ours, peer = per_second(ROWS * LENGTH, world, our_step(shape, packed, how, world),
                                llama_step(shape, laid, world))
        yield row("prefix step, vs transformers Llama given the mask", ours, peer, "tokens/s")
        spans = Corruption(SpanCorruption().denoisers, (), 0, np.arange(VOCAB - 40, VOCAB), EOS, PAD)
        t5 = replace(shape, kv_heads=shape.heads, tied_embeddings=False, encoder_decoder=True)
        ours, peer = per_second(ROWS * LENGTH, world, our_step(t5, packed, spans, world),
                                t5_step(t5, spans(read, 0), world))
        yield row("span step, vs transformers T5, rows laid out for it", ours, peer, "tokens/s")
        further = replace(shape, multi_token=1)
        ours, peer = per_second(ROWS * LENGTH, world, our_step(further, packed, None, world),
                                our_step(shape, packed, None, world))
        yield row("step with a further token, vs without", ours, peer, "tokens/s",
                  f"arithmetic: {shape.flops_per_token(LENGTH) / further.flops_per_token(LENGTH):.2f}")


def llama_step(shape: Shape, laid: Laid, world: World) -> Action:
    """LlamaForCausalLM with a mask of (rows, 1, tokens, tokens) and its own loss, in the same precision."""
    from transformers import LlamaConfig, LlamaForCausalLM

    assert laid.prefix is not None
    here, ids, targets = torch.arange(LENGTH), *map(torch.from_numpy, (laid.inputs, laid.targets))
    mask = ((here[:, None] >= here) | torch.from_numpy(laid.prefix)[:, None, :])[:, None]
    asked = {"input_ids": ids, "attention_mask": mask, "labels": targets, "shift_labels": targets}
    placed = {name: part.to(world.device) for name, part in asked.items()}
    return step_of(LlamaForCausalLM(LlamaConfig(**hf_config(shape, "float32", [EOS], PAD))), world, lambda: placed)


def t5_step(shape: Shape, laid: Laid, world: World) -> Action:
    """T5ForConditionalGeneration with its own loss, in the same precision."""
    from transformers import T5Config, T5ForConditionalGeneration

    asked = {"input_ids": torch.from_numpy(laid.inputs), "labels": torch.from_numpy(laid.targets)}
    placed = {name: part.to(world.device) for name, part in asked.items()}
    return step_of(T5ForConditionalGeneration(T5Config(**hf_config(shape, "float32", [EOS], PAD))), world,
                   lambda: placed)
