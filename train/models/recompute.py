"""Activation checkpointing: what a layer forgets in the forward pass, and computes again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

Kept = Literal["nothing", "selected"]
"""What is not forgotten: nothing, or what is dear to compute again."""
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default)
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
)
"""Kernels that attention may end in; what is computed from scores is quadratic in the row's length."""


def recomputed(function: Callable[..., Any], kept: Kept, *arguments: Any) -> Any:
    """Call a function whose activations are forgotten, but those kept; values and gradients are bit by bit the same."""
    from torch.utils.checkpoint import checkpoint, noop_context_fn

    contexts = noop_context_fn if kept == "nothing" else _keep_selected
    # Nothing in a layer is random, so no generator's state has to be kept for the second time.
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _keep_selected() -> Any:
    """The contexts of both passes; a function of the module, since compiled code takes no other."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_policy())


def _policy() -> Callable[..., Any]:
    """Keep attention and every second matrix product (torchtitan, distributed/activation_checkpoint.py)."""
    from torch.utils.checkpoint import CheckpointPolicy

    products = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> Any:
        again = context.is_recompute
        keep = operation in ATTENTION
        if operation in PRODUCTS:
            products[again] += 1
            keep = products[again] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
