"""Memory of one rank, by component, for a model and a parallel form.

The estimate models this trainer's memory (FSDP2 with float32 master weights), and is
checked against measurements by the tests. Framework, fragmentation and
communication buffers are an added margin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gristmill.mixtures.schema.optimizer import OPTIMIZERS
from gristmill.train.models.model_config import Shape

MASTER_BYTES = 4
COMPUTE_BYTES = 2
"""Bytes of a number in matrix products: bfloat16."""
FRAMEWORK_BYTES = 1.5e9
"""CUDA context, NCCL and cuBLAS workspaces: GPU memory of an idle process."""
FRAGMENTATION = 0.05
"""Share of the memory lost to fragmentation."""


@dataclass(frozen=True)
class Form:
    """Distribution of a training: the product is the number of GPUs.

    Attributes:
        replicate: copies of the sharded model (HSDP).
        shard: ranks that share master weights, gradients and moments (FSDP).
        tensor: ranks that share every matrix product, and by sequence parallelism the
            activations.
        context: ranks that each compute a share of every row's tokens, and shard
            weights like those of `shard`.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        """Number of GPUs."""
        return self.replicate * self.weights * self.tensor

    @property
    def weights(self) -> int:
        """Number of ranks that shard the weights of a replica."""
        return self.shard * self.context

    @property
    def data(self) -> int:
        """Number of ranks that read different rows."""
        return self.replicate * self.shard

    def label(self) -> str:
        """Label for people: `shard 8`, `replicate 2 x shard 4`."""
        parts = [f"{name} {size}" for name, size in vars(self).items() if size > 1]
        return " x ".join(parts) or "one GPU"


@dataclass(frozen=True)
class Load:
    """Load of a step on every rank.

    Attributes:
        micro_rows: rows per forward pass.
        length: tokens per row.
        micro_batches: forward passes per step.
        optimizer: kind of optimizer.
        checkpointing: True for activation checkpointing.
    """

    micro_rows: int
    length: int
    micro_batches: int
    optimizer: str = "adamw"
    checkpointing: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank."""

    parameters: float
    gradients: float
    """Float32 sums over the micro-batches so far, reduced in each micro-batch to a
    rank's share of the weights (`step.accumulate_gradients`).
    """
    optimizer: float
    gathered: float
    """Full weights and gradients of the blocks being computed, in the compute dtype,
    and a block's float32 gradients for the reduction.
    """
    activations: float
    loss: float
    """A chunk of logits, and the gradients of the output matrix and of the last hidden
    states.
    """
    overhead: float

    @property
    def total(self) -> float:
        """Sum of all components."""
        return sum(vars(self).values())


def block_parameters(shape: Shape) -> float:
    """Weights of one layer."""
    return (shape.parameters - shape.width - _embeddings(shape)) / shape.layers


def _embeddings(shape: Shape) -> float:
    return shape.padded_vocab_size * shape.width * (1 if shape.tied_embeddings else 2)


def block_activation_bytes(shape: Shape) -> float:
    """Bytes that one layer keeps for the backward pass, per token.

    In widths: its input, both normed inputs, queries, the attention's output (with its
    log-sum-exp per head in float32) and the residual after it; keys and values; gate,
    up, silu(gate) and their product. Attention itself keeps no square of positions
    (FlashAttention, Dao et al. 2022). Korthikanti et al. 2022 count 34 bytes per width
    for a GPT with dropout in the same way.
    """
    narrow = shape.kv_heads * shape.head_width
    wide = shape.heads * shape.head_width
    numbers = 4 * shape.width + 2 * wide + 2 * narrow + 4 * shape.ffn_width
    return numbers * COMPUTE_BYTES + 4 * shape.heads


def rank_memory(shape: Shape, form: Form, load: Load) -> Memory:
    """Estimate the fullest rank's memory; see `Memory`."""
    # Imports torch, which reading the tables does not need.
    from gristmill.train.objectives.losses import GPU_CHUNK_LOGITS

    block = block_parameters(shape) / form.tensor
    # parameters outside the blocks
    root = (_embeddings(shape) + shape.width) / form.tensor
    rank_parameters = shape.layers * block + root
    of_layers = OPTIMIZERS[load.optimizer]
    of_root = OPTIMIZERS["adamw"] if of_layers.on_matrices else of_layers
    state = of_layers.state_bytes * shape.layers * block + of_root.state_bytes * root
    tokens = load.micro_rows * load.length / form.context
    in_block = block_activation_bytes(shape)
    # keys and values of the other ranks' tokens of the same rows
    narrow = 2 * shape.kv_heads * shape.head_width
    in_block += narrow * COMPUTE_BYTES * (form.context - 1)
    # With checkpointing, a layer keeps its input, and one at a time is recomputed.
    of_layer = shape.width * COMPUTE_BYTES if load.checkpointing else in_block
    kept = of_layer * tokens * shape.layers / form.tensor
    if load.checkpointing:
        kept += in_block * tokens / form.tensor
    # The current block and the prefetched one; outside blocks the root's weights, or an
    # embedding and an output layer, which are gathered one by one.
    outside = root if shape.tied_embeddings else root / 2
    gathered = (4 * block + outside) * COMPUTE_BYTES
    if form.weights > 1:
        gathered += MASTER_BYTES * block
    loss = (
        4 * shape.padded_vocab_size * shape.width / form.tensor
        + tokens * shape.width * COMPUTE_BYTES
    ) + 3 * 4 * min(GPU_CHUNK_LOGITS, tokens * shape.vocab_size)
    counted = Memory(
        parameters=MASTER_BYTES * rank_parameters / form.weights,
        gradients=MASTER_BYTES * rank_parameters / form.weights,
        optimizer=state / form.weights,
        gathered=gathered,
        activations=kept,
        loss=loss,
        overhead=FRAMEWORK_BYTES,
    )
    return replace(
        counted,
        overhead=FRAMEWORK_BYTES + FRAGMENTATION * (counted.total - FRAMEWORK_BYTES),
    )
