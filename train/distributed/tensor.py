"""Tensor parallelism with sequence parallelism (Korthikanti et al. 2022), as plans for
PyTorch's DTensor.

Within a block, matrices are split by heads and by channels of the feed-forward; between
blocks, activations are split along the sequence, so that norms and residual connections
hold only a share of the tokens. The embedding is split by ids. At the end of the model
the sequence and the output matrix are gathered, as heads are arbitrary functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gristmill.train.models.transformer import Llama

SEQUENCE, HEADS = 1, 1
"""Dimension of tokens in (n, t, d), and of heads in (n, h, t, c)."""


class UnevenSplitError(ValueError):
    """A model cannot be split over this number of processes."""


def split_matrices(model: Llama, mesh: DeviceMesh) -> None:
    """Split a model's matrices over the processes of a mesh, before it is sharded.

    Raises:
        UnevenSplitError: heads or channels are not divisible by the number of
            processes, or the model has experts.
    """
    shape, size = model.shape, mesh.size()
    if shape.experts:
        raise UnevenSplitError(
            f"engine.parallel.tensor is {size}, but a mixture of experts is not "
            "split so; use shard"
        )
    for name in ("heads", "kv_heads", "ffn_width"):
        if getattr(shape, name) % size:
            raise UnevenSplitError(
                f"engine.parallel.tensor is {size}, but the model's {name} "
                f"({getattr(shape, name)}) "
                "does not divide by it; use a divisor, or shard instead"
            )
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(SEQUENCE)
        ),
        "model.norm": SequenceParallel(use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    # The single output row of a reward model is split along its inputs.
    for name, dim in (("lm_head", 0), ("score", 1)):
        layer = getattr(model, name, None)
        if layer is not None:
            weight = distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)])
            layer.weight = nn.Parameter(weight, layer.weight.requires_grad)
    other_layouts = (None,) * 4  # rotary, visible, cache, filled
    norm_of_heads = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    norms = {"self_attn.q_norm": norm_of_heads, "self_attn.k_norm": norm_of_heads}
    plan_of_block = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_layouts=(Shard(SEQUENCE), *other_layouts),
            desired_input_layouts=(Replicate(), *other_layouts),
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **(norms if shape.qk_norm else {}),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(SEQUENCE),), desired_input_layouts=(Replicate(),)
        ),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
    }
    for layer in model.model.layers.children():
        parallelize_module(layer, mesh, dict(plan_of_block))
    model.tensor_mesh = mesh
