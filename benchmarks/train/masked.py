"""`gristmill bench masked`: masking rows, and a step of the encoder, against
transformers' collator and model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import Row, row
from benchmarks.train.small_models import (
    hf_step,
    our_step,
    per_second,
    random_packed_set,
)
from benchmarks.train.step import LENGTH, ROWS, SECTION, VOCAB
from gristmill.mixtures.objectives.token_objectives import Masked
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.distributed.process_groups import single_process
from gristmill.train.models.encoder import new_encoder
from gristmill.train.models.model_config import TransformersShape
from gristmill.train.models.transformers_decoder import module_of
from gristmill.train.objectives.masked_rows import Masking
from gristmill.train.objectives.prediction_targets import Read

MASK = 2


def rows() -> Iterator[Row]:
    """Measure masking, and a step of ModernBERT."""
    shape = encoder_shape(masked={})
    with single_process() as world, tempfile.TemporaryDirectory() as folder:
        packed, layout = ordinary_rows(Path(folder)), masking()
        read = first_rows(packed)
        collator = peer_collator()
        examples = [torch.from_numpy(ids) for ids in packed.read(read.rows)]
        ours, peer = per_second(
            ROWS * LENGTH, world, lambda: layout(read, 0), lambda: collator(examples)
        )
        yield row("masking, vs transformers' collator", ours, peer, "tokens/s")
        peer_step = hf_step(module_of(shape.config), world, lambda: collator(examples))
        ours, peer = per_second(
            ROWS * LENGTH,
            world,
            our_step(shape, packed, layout, world, ROWS),
            peer_step,
        )
        yield row("masked step, vs transformers ModernBert", ours, peer, "tokens/s")


def ordinary_rows(folder: Path) -> PackedSet:
    """Write rows of random tokens, without special ones."""
    return random_packed_set(folder, VOCAB, ROWS * 4, LENGTH, least=MASK + 1)


def first_rows(packed: PackedSet) -> Read:
    """Read the first batch, as an objective lays it out."""
    numbers = np.arange(ROWS)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    return Read(
        packed.tokens(numbers), positions, numbers, np.zeros(ROWS, dtype=np.int64)
    )


def masking() -> Masking:
    """Return masking at ModernBERT's rate with BERT's shares."""
    return Masking(Masked(), 0, MASK, VOCAB, np.arange(VOCAB) <= MASK, None)


def peer_collator() -> Any:
    """Return transformers' collator with the same rate and special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    names = ["<eos>", "<pad>", "<mask>", *map(str, range(MASK + 1, VOCAB))]
    tokenizer = Tokenizer(
        models.WordLevel(
            {name: number for number, name in enumerate(names)}, unk_token="<eos>"
        )
    )
    return DataCollatorForLanguageModeling(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<eos>",
            pad_token="<pad>",
            mask_token="<mask>",
        ),
        mlm_probability=Masked().rate,
    )


def encoder_shape(**objective: Any) -> TransformersShape:
    """Return the shape of a model of the sizes of `SECTION` for an objective."""
    section = Pretrain(steps=1, model=SECTION, **objective)
    return new_encoder(section, VOCAB, LENGTH)
