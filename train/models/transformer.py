"""Decoder: Llama's (Touvron et al. 2023) with RMSNorm, rotary positions, grouped-query
attention and SwiGLU.

Options add features of Qwen2 (biases of queries, keys and values), GLM-4 (also rotates
only half of the channels), Qwen3 (normalised queries and keys) and Mixtral (experts).
Parameter names and the rotate-half layout of the rotary embedding are Hugging Face's,
so that exports copy tensors without permutation, except for GLM-4. Shapes: n rows, t
tokens, d width, h heads, k key/value heads, c channels per head, v ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from gristmill.mixtures.schema.engine import Compute
from gristmill.train.distributed.context_parallel import RowSplit, RowSplitError
from gristmill.train.models.attention import Visible, attend, see_documents
from gristmill.train.models.model_config import Shape
from gristmill.train.models.moe import MixtureOfExperts
from gristmill.train.models.rope import Rotary, rotary_table, rotate
from gristmill.train.objectives.losses import Output, Softcapped

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Head = Callable[[Tensor, Output], Any]
"""Function of hidden states (n, t, d), or logits (n, t, v), and output matrix that
computes the model's result.
"""
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
)
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
)
"""Attention kernels, whose recomputation is quadratic in the row length."""


def logits_head(hidden: Tensor, matrix: Output) -> Tensor:
    """Logits (n, t, v) in float32."""
    if isinstance(matrix, Softcapped):
        return matrix.bound(F.linear(hidden, matrix.matrix).float())
    return (hidden if matrix is None else F.linear(hidden, matrix)).float()


@dataclass
class LayerCache:
    """Keys and values of one layer for later tokens; both (n, k, capacity, c)."""

    keys: Tensor
    values: Tensor


@dataclass
class Cache:
    """Keys and values of all layers, for generation.

    Attributes:
        layers: one entry per layer.
        length: number of filled positions, equal for all rows.
        starts: (n,) int64, first position of each row after left padding.
    """

    layers: list[LayerCache]
    length: int
    starts: Tensor


def empty_cache(
    shape: Shape, starts: Tensor, capacity: int, dtype: torch.dtype
) -> Cache:
    """Empty cache for as many rows as `starts` has, with a capacity in positions."""
    size = (len(starts), shape.kv_heads, capacity, shape.head_width)
    layers = [
        LayerCache(
            torch.zeros(size, dtype=dtype, device=starts.device),
            torch.zeros(size, dtype=dtype, device=starts.device),
        )
        for _ in range(shape.layers)
    ]
    return Cache(layers, 0, starts)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values (Ainslie et al. 2023)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        query_width = shape.attention_width
        kv_width = shape.kv_heads * shape.head_width
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, query_width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(query_width, shape.width, bias=False)
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(shape.head_width, shape.norm_eps)
            self.k_norm = nn.RMSNorm(shape.head_width, shape.norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        visible: Visible,
        cache: LayerCache | None,
        filled: int,
    ) -> Tensor:
        """Attend (n, t, d) -> (n, t, d).

        Args:
            x: normalised input.
            rotary: cosines and sines that broadcast to (n, h, t, c).
            visible: mask (see attention.attend); None for causal attention.
            cache: keys and values of earlier positions, to which the new ones are
                added.
            filled: number of positions in the cache.
        """
        t = x.shape[1]
        channels = self.shape.head_width
        queries, keys, values = (
            project(x).unflatten(2, (-1, channels)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.shape.qk_norm:
            queries = self.q_norm(queries)
            keys = self.k_norm(keys)
        queries = rotate(queries, *rotary)
        keys = rotate(keys, *rotary)
        if cache is not None:
            cache.keys[:, :, filled : filled + t] = keys
            cache.values[:, :, filled : filled + t] = values
            keys = cache.keys[:, :, : filled + t]
            values = cache.values[:, :, : filled + t]
        mixed = attend(queries, keys, values, visible)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.down_proj = nn.Linear(shape.ffn_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, d) -> (n, t, d)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OutputLayer(nn.Linear):
    """Matrix of a head, which FSDP gathers while the head runs."""

    def forward(self, hidden: Tensor, head: Head) -> Any:  # type: ignore[override]
        """Apply a head to hidden states (n, t, d)."""
        return head(hidden, self.weight)


class Block(nn.Module):
    """Layer of attention and feed-forward (or experts), each with a pre-norm, x / rms(x)
    * weight (Zhang & Sennrich 2019), and a residual connection.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.mlp = MixtureOfExperts(shape) if shape.experts else FeedForward(shape)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        visible: Visible = None,
        trained: Tensor | None = None,
        cache: LayerCache | None = None,
        filled: int = 0,
    ) -> Tensor:
        """(n, t, d) -> (n, t, d); see Attention.forward for the arguments, and
        Llama.forward for `trained`.
        """
        cosines, sines = rotary
        rotary = (cosines.to(x.dtype), sines.to(x.dtype))
        x = x + self.self_attn(self.input_layernorm(x), rotary, visible, cache, filled)
        normal = self.post_attention_layernorm(x)
        return x + (
            self.mlp(normal, trained)
            if isinstance(self.mlp, MixtureOfExperts)
            else self.mlp(normal)
        )


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.padded_vocab_size, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.norm_eps)

    def forward(
        self,
        ids: Tensor,
        rotary: Rotary,
        visible: Visible,
        trained: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Ids (n, t) -> normalised hidden states (n, t, d)."""
        hidden = self.embed_tokens(ids)
        filled = 0 if cache is None else cache.length
        for number, layer in enumerate(self.layers):
            hidden = layer(
                hidden,
                rotary,
                visible,
                trained,
                None if cache is None else cache.layers[number],
                filled,
            )
        return self.norm(hidden)


class Llama(nn.Module):
    """Decoder language model. Padding rows of the vocabulary take no part: their logits
    are not computed.

    Attributes:
        shape: its sizes.
        is_compiled: true if layers are compiled (see `configure`).
        tensor_mesh: processes that split its matrices, if any (see parallel.tensor).
        row_split: processes that each compute a share of every row's tokens, if
            several; cached tokens are not split.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.is_compiled = False
        self.model: Any = Decoder(shape)
        self.tensor_mesh: DeviceMesh | None = None
        self.row_split: RowSplit | None = None
        if not shape.tied_embeddings:
            self.lm_head = OutputLayer(shape.width, shape.padded_vocab_size, bias=False)

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> Any:
        """Run the model and apply a head to its last hidden states.

        The head runs within the forward pass, where FSDP has gathered the output
        matrix.

        Args:
            ids: (n, t) int64, each below `vocab_size`.
            head: computes the result; by default logits (n, t, v) in float32.
            cache: for generation: attended to, and extended by these tokens.
            positions: (n, t) of each token in its document, to which attention is
                restricted; negative for padding. Without them tokens attend to their
                whole row up to themselves. Incompatible with a cache.
            trained: (n,) weight of each row's load-balancing loss, which is added to
                the minimised loss; without it, or in a dense model, there is none.
            prefix: (n, t) bool, tokens visible to earlier tokens of their document or
                row too. Incompatible with a cache, where a model with `prefix_lm`
                treats all tokens that fill an empty cache as the prefix.
        """
        t = ids.shape[1]
        ids, rotary, visible = self._laid_out(ids, cache, positions, prefix)
        hidden = self.model(ids, rotary, visible, trained, cache)
        if cache is not None:
            cache.length += t

        def apply(hidden: Tensor, matrix: Any) -> Any:
            if self.tensor_mesh is not None:
                hidden = whole(hidden)
                matrix = whole(matrix)
            matrix = matrix[: self.shape.vocab_size]
            if self.row_split is not None and cache is None:
                return self.row_split.answered(head, hidden, matrix, t)
            return head(hidden[:, :t], matrix)

        return self.predict(hidden, apply)

    def _laid_out(
        self,
        ids: Tensor,
        cache: Cache | None,
        positions: Tensor | None,
        prefix: Tensor | None,
    ) -> tuple[Tensor, Rotary, Visible]:
        """Local ids (padded to be divisible among processes), their rotary table, and
        their mask.
        """
        split = self.row_split if cache is None else None
        multiple = 1 if split is None else split.multiple
        if self.tensor_mesh is not None:
            multiple *= self.tensor_mesh.size()
        if multiple > 1:
            missing = -ids.shape[1] % multiple
            if missing and self.shape.experts and torch.is_grad_enabled():
                raise RowSplitError(
                    f"engine.parallel.context: rows of {ids.shape[1]} tokens do not "
                    f"divide by {multiple}, and experts are not to be kept busy by "
                    "what is added; use lengths that do (mix.sequence_length)"
                )
            # Earlier tokens do not attend to padding at the end.
            ids = F.pad(ids, (0, missing))
            if positions is not None:
                positions = F.pad(positions, (0, missing), value=-1)
            if prefix is not None:
                prefix = F.pad(prefix, (0, missing))
        filled = 0 if cache is None else cache.length
        places = torch.arange(filled, filled + ids.shape[1], device=ids.device)
        visible: Visible = None
        if cache is not None:
            visible = visible_positions(
                cache.starts, filled, len(places), self.shape.prefix_lm and not filled
            )
            places = (places - cache.starts[:, None]).clamp(min=0).unsqueeze(1)
        elif split is not None:
            ids, places, visible = split.see(ids, positions, self.is_compiled, prefix)
        elif positions is not None or prefix is not None:
            positions = places.expand_as(ids) if positions is None else positions
            visible = see_documents(positions, dense=self.is_compiled, prefix=prefix)
            places = positions.clamp(min=0).unsqueeze(1)
        shape = self.shape
        return (
            ids,
            rotary_table(
                places,
                shape.head_width,
                shape.rope_theta,
                shape.rope_scaling,
                shape.rotary_share,
            ),
            visible,
        )

    @property
    def blocks(self) -> list[Any]:
        """Layers that are sharded, compiled and recomputed one by one."""
        return list(self.model.layers.children())

    def predict(self, hidden: Tensor, head: Head) -> Any:
        """Apply a head to hidden states (n, t, d) and the output matrix (padded v, d)."""
        if self.shape.tied_embeddings:
            return head(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden, head)


def configure(model: Any, compute: Compute) -> None:
    """Configure compilation and activation checkpointing; after matrices are split,
    before sharding.

    Only the methods `forward` change: FSDP hooks around a layer are not compiled.
    """
    layers: list[Any] = model.blocks
    if compute.activation_checkpointing in ("full", "selective"):
        is_full = compute.activation_checkpointing == "full"
        contexts = noop_context_fn if is_full else _keep_selected
        for layer in layers[
            compute.checkpoint_every_block - 1 :: compute.checkpoint_every_block
        ]:
            layer.forward = partial(recomputed, layer.forward, contexts)
    if not compute.compiles:
        return
    if compute.activation_checkpointing == "budget":
        import torch._functorch.config as compiler

        compiler.activation_memory_budget = compute.memory_budget
    model.is_compiled = True
    parts = [model.model] if compute.compile == "model" else layers
    for part in parts:
        # Routing stores the load of experts, a side effect that breaks the graph.
        part.forward = torch.compile(part.forward, fullgraph=not model.shape.experts)


def visible_positions(starts: Tensor, first: int, t: int, both_ways: bool) -> Tensor:
    """Mask of cached positions for each of t new tokens: (n, 1, t, first + t) bool.

    Left padding is hidden, and so are later tokens unless `both_ways`; padding attends
    to itself, so that no row of the attention is empty.
    """
    columns = torch.arange(first + t, device=starts.device)
    positions = columns[first:]
    causal = (columns[None, :] <= positions[:, None]) | both_ways
    real = columns[None, None, :] >= starts[:, None, None]
    itself = columns[None, :] == positions[:, None]
    return ((causal[None] & real) | itself[None]).unsqueeze(1)


def whole(tensor: Tensor) -> Tensor:
    """Gather a split tensor; all processes compute the same with it, so its gradient
    counts once.
    """
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=[Replicate()]).to_local(
        grad_placements=[Replicate()]
    )


def recomputed(
    function: Callable[..., Any],
    contexts: Callable[[], Any],
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Call a function with activation checkpointing while gradients are computed;
    values and gradients are bit-equal. `contexts` are those of both passes.
    """
    if not torch.is_grad_enabled():
        return function(*arguments, **keywords)
    # Layers use no random numbers, so there is no generator state to restore.
    return checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=contexts,
        **keywords,
    )


def _keep_selected() -> Any:
    """Contexts of both passes that keep activations which are expensive to recompute; a
    module-level function, as compiled code requires.
    """
    products = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> Any:
        is_recompute = context.is_recompute
        keep = operation in ATTENTION
        if operation in PRODUCTS:
            products[is_recompute] += 1
            keep = products[is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
