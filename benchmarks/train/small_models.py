"""Models with drawn weights, rows of random tokens and steps of training that several
benchmarks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measuring import fastest
from gristmill.mixtures.schema.optimizer import Optimizer
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.distributed.fsdp import compute_dtype, sharded_model
from gristmill.train.distributed.process_groups import World
from gristmill.train.loop.step import accumulate_gradients
from gristmill.train.models.model_config import Shape, TransformersShape
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.prediction_targets import Layout
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import make_optimizers, update
from tests.packed_sets import write_packed_set

EOS, PAD = 0, 1
WARMUPS, REPEATS = 2, 8
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that `single_process` sets, and that accelerate would take for a launch of
its own.
"""
Action = Callable[[], Any]


def random_packed_set(
    folder: Path, vocab: int, rows: int, length: int, least: int = 0
) -> PackedSet:
    """Write rows of random ids, from `least` on."""
    ids = np.random.default_rng(0).integers(least, vocab, (rows, length))
    write_packed_set(
        folder,
        ids,
        {"all": rows},
        {"vocab_size": vocab, "eos": EOS, "pad": PAD, "sha256": ""},
    )
    return PackedSet(folder)


def next_token(
    packed: PackedSet,
    shape: Shape | TransformersShape,
    device: torch.device,
    layout: Layout | None = None,
) -> NextToken:
    """Return the objective of pre-training, with tokens of four bytes each."""
    token_bytes = torch.full((shape.vocab_size,), 4.0, device=device)
    return NextToken(packed, 0, token_bytes, shape, layout=layout)


def drawn_decoder(shape: Shape, seed: int = 0) -> Llama:
    """Return a decoder whose first weights follow from a seed."""
    model, tensor_of = Llama(shape), drawn(shape, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensor_of(name, parameter.shape))
    return model


def hf_llama(shape: Shape, length: int, use_cache: bool = False) -> Any:
    """Return transformers' Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.padded_vocab_size,
            hidden_size=shape.width,
            intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=length,
            tie_word_embeddings=shape.tied_embeddings,
            use_cache=use_cache,
        )
    )


def pretrain_section(
    steps: int, batch: int, micro_batch: int, log_every: int, learning_rate: float
) -> Pretrain:
    """Return settings of a pre-training with a constant learning rate."""
    return Pretrain.model_validate(
        {
            "steps": steps,
            "global_batch_size": batch,
            "micro_batch_size": micro_batch,
            "log_every": log_every,
            "schedule": {"kind": "constant", "warmup_steps": 0},
            "optimizer": {"learning_rate": learning_rate},
        }
    )


def our_step(
    shape: Shape | TransformersShape,
    packed: PackedSet,
    layout: Layout | None,
    world: World,
    rows: int,
) -> Action:
    """Return our step: read and lay out rows, forward, backward, clip, fused AdamW,
    losses by source; sharded.
    """
    model = sharded_model(
        shape, drawn(shape, 0), world, compute_dtype("auto", world.device)
    )
    objective = next_token(packed, shape, world.device, layout)
    section, batch = Optimizer(), np.arange(rows)
    optimizers, is_spike = (
        make_optimizers(model, section),
        torch.tensor(False, device=world.device),
    )

    def step() -> None:
        accumulate_gradients(
            model, objective, [objective.prepare(batch)], objective.weight(batch), world
        )
        clip_gradients(model, section.clip_norm)
        update(optimizers, 1e-3, is_spike)

    return step


def hf_step(
    model: Any, world: World, batch: Callable[[], Mapping[str, Tensor]]
) -> Action:
    """Return a step of a transformers model: forward with its own loss, backward, clip,
    fused AdamW.
    """
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    dtype = compute_dtype("auto", world.device)

    def step() -> None:
        inputs = {name: tensor.to(world.device) for name, tensor in batch().items()}
        with torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def per_second(
    amount: float, world: World, ours: Action, peer: Action
) -> tuple[float, float]:
    """Return how much each side does per second in its best run; sides take turns."""

    def synchronised(action: Action) -> Action:
        def run() -> None:
            action()
            if world.device.type == "cuda":
                torch.cuda.synchronize()

        return run

    our_seconds, peer_seconds = fastest(
        REPEATS, synchronised(ours), synchronised(peer), warmups=WARMUPS
    )
    return amount / our_seconds, amount / peer_seconds


@contextmanager
def saved_tensors(model: nn.Module) -> Iterator[dict[int, int]]:
    """Record the bytes of each storage that autograd saves for the backward pass,
    except weights, by address.
    """
    weights = {
        parameter.untyped_storage().data_ptr() for parameter in model.parameters()
    }
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            saved[address] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
