"""Arithmetic and kept activations of a forward and backward pass, as counted by
torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.train.models.model_config import DECODED, ENCODED
from gristmill.train.objectives.losses import next_tokens, weighted_nll


def count_step(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Operations of a forward and backward pass by torch's counter, and bytes kept by
    the layers for it.
    """
    from torch.utils.flop_counter import FlopCounterMode

    bytes_by_storage: dict[int, int] = {}
    inside = [0]

    def pack(tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if inside[0] and not isinstance(owner, nn.Parameter):
            storage = tensor.untyped_storage()
            bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    def enter(*_: Any) -> None:
        inside[0] += 1

    def leave(*_: Any) -> None:
        inside[0] -= 1

    handles = []
    for layer in model.blocks:
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave))
    counter = FlopCounterMode(display=False, custom_mapping=_uncounted())
    with counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = _forward(model, ids)
        for hook in handles:
            hook.remove()
        loss.backward()
    return float(counter.get_total_flops()), float(sum(bytes_by_storage.values()))


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    beside = {}
    targets = next_tokens(ids)
    shape = model.shape
    if shape.kind == "encoder_decoder":  # type: ignore[union-attr]
        targets = ids[:, : max(1, round(ids.shape[1] * DECODED))]
        ids = ids[:, : max(1, round(ids.shape[1] * ENCODED))]
        beside = {"decoder_ids": targets}
    weights = torch.full(targets.shape, 1.0 / targets.numel(), device=ids.device)
    head = partial(weighted_nll, targets=targets, weights=weights)
    loss: Tensor = model(ids, head, **beside)[0]
    return loss


def _uncounted() -> dict[Any, Any]:
    """Formulas for operations missing in torch's counter: attention on CPUs, and
    in-place sums of products.
    """

    def attention(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        # Products of queries and keys, and of their weights and values, for each head
        # of the queries, of which several may share the keys: the formula of torch 2.11
        # takes no such shapes.
        batch, heads, length, width = query
        return 2 * int(batch * heads * length * key[2]) * int(width + value[3])

    def attention_backward(
        gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any
    ) -> int:
        # Gradients of queries, keys, values and of the weights: twice the forward pass.
        # What a kernel computes again (torch counts that for CUDA) is not arithmetic of
        # the model.
        return 2 * attention(query, key, value)

    def addmm(into: Any, left: Any, right: Any, *rest: Any, **named: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    ops = torch.ops.aten
    return {
        ops._scaled_dot_product_flash_attention_for_cpu: attention,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        ops.addmm_: addmm,
    }
