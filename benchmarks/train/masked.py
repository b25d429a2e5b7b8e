"""`gristmill bench masked`: masking rows, and a step of the encoder, against transformers' collator and model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import Row, row
from benchmarks.train.step import LENGTH, ROWS, SECTION, VOCAB, Action, per_second
from gristmill.mixtures.objectives.token_objectives import Masked
from gristmill.mixtures.training import Optimizer
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_writing import write_packed_set
from gristmill.train.loop.step import accumulate_gradients
from gristmill.train.models.hf_configs import hf_config
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.masked_rows import Masking
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.prediction_targets import Layout, Read
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.parallel.process_groups import World, single_process
from gristmill.train.parallel.sharding import compute_dtype, sharded_model

EOS, PAD, MASK = 0, 1, 2


def rows() -> Iterator[Row]:
    """Measure, both sides by turns here and now."""
    shape = shape_of(SECTION, VOCAB, LENGTH, encoder=True)
    with single_process() as world, tempfile.TemporaryDirectory() as folder:
        packed, how = packed_set(Path(folder)), masking()
        numbers, none = np.arange(ROWS), np.zeros(ROWS, dtype=np.int64)
        read = Read(packed.tokens(numbers), np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)), numbers, none)
        collator, examples = peer_collator(), [torch.from_numpy(one) for one in packed.read(numbers)]
        ours, peer = per_second(ROWS * LENGTH, world, lambda: how(read, 0), lambda: collator(examples))
        yield row("masking, vs transformers' collator", ours, peer, "tokens/s")
        ours, peer = per_second(
            ROWS * LENGTH, world, our_step(shape, packed, how, world), peer_step(shape, collator, examples, world)
        )
        yield row("masked step, vs transformers ModernBert", ours, peer, "tokens/s")


def packed_set(folder: Path) -> PackedSet:
    """Rows of random tokens, without special ones."""
    ids = np.random.default_rng(0).integers(MASK + 1, VOCAB, (ROWS * 4, LENGTH))
    write_packed_set(folder, ids, {"all": len(ids)}, {"vocab_size": VOCAB, "eos": EOS, "pad": PAD, "sha256": ""})
    return PackedSet(folder)


def masking() -> Masking:
    """ModernBERT's rate, BERT's shares."""
    return Masking(Masked(), 0, MASK, VOCAB, np.arange(VOCAB) <= MASK, None)


def peer_collator() -> Any:
    """transformers' collator with the same rate and special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    names = ["<eos>", "<pad>", "<mask>", *map(str, range(MASK + 1, VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<eos>"))
    return DataCollatorForLanguageModeling(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", mask_token="<mask>"),
        mlm_probability=Masked().rate,
    )


def our_step(shape: Shape, packed: PackedSet, how: Layout | None, world: World) -> Action:
    """Our step: read and lay out rows, forward, backward, clip, fused AdamW, losses by source."""
    model = sharded_model(shape, drawn(shape, 0), world, compute_dtype("auto", world.device))
    objective = NextToken(
        packed, 0, torch.full((VOCAB,), 4.0, device=world.device), shape, layout=how, further_weight=0.3
    )
    section, batch = Optimizer(), np.arange(ROWS)
    optimizers, never = make_optimizers(model, section), torch.tensor(False, device=world.device)

    def step() -> None:
        accumulate_gradients(model, objective, [objective.prepare(batch)], objective.weight(batch), world)
        clip_gradients(model, section)
        update(optimizers, 1e-3, never)

    return step


def peer_step(shape: Shape, collator: Any, examples: list[torch.Tensor], world: World) -> Action:
    """The same with the collator, ModernBertForMaskedLM and its own loss, in the same precision."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    model = ModernBertForMaskedLM(ModernBertConfig(**hf_config(shape, "float32", [EOS], PAD)))
    return step_of(model, world, lambda: collator(examples))


def step_of(model: Any, world: World, batch: Callable[[], Mapping[str, torch.Tensor]]) -> Action:
    """Forward, backward, clip and fused AdamW of a model of transformers, on what it is called with."""
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    dtype = compute_dtype("auto", world.device)

    def step() -> None:
        placed = {name: part.to(world.device) for name, part in batch().items()}
        with torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(**placed).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
