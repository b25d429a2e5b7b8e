"""Pipeline parallelism: each process holds some layers, and micro-batches follow the
1F1B schedule.

The schedule is torch.distributed.pipelining's (Narayanan et al. 2019). All processes of
a pipeline read the same micro-batches, so only hidden states are exchanged. An
objective calls its model within `loss`: every stage first runs it to capture the
model's arguments, and the last stage runs it again with the hidden states that it
received. Parameters keep their names in the whole model, so checkpoints do not depend
on the parallelism.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gristmill.train.loop.prefetch import map_tensors
from gristmill.train.models.decoder import (
    Cache,
    Head,
    Llama,
    logits_head,
    padded_length,
)
from gristmill.train.models.model_config import Shape

if TYPE_CHECKING:
    from gristmill.train.loop.objective import Measured, Objective


class PipelineError(ValueError):
    """A model or a training does not support pipelining."""


@dataclass(frozen=True)
class Call:
    """Arguments of an objective's call of its model, for one micro-batch.

    Attributes:
        part: the micro-batch.
        ids, positions: (n, t), see Llama.forward; n is equal for all micro-batches of a
            step.
        rows: number of rows of the micro-batch; further rows are padding.
    """

    part: Any
    ids: Tensor
    positions: Tensor | None
    rows: int


class PipelineStage(Llama):
    """Some layers of a model; the first stage also has the embedding, the last one the
    norm and the output matrix.

    Without gradients it is called like the whole model, by all stages together, and all
    of them get the result.

    Args:
        shape: of the whole model.
        index: of this stage.
        group: the processes of the pipeline, one per stage.
        dtype: of hidden states.
        device: where this process computes.
        shards_weights: true if several processes share the weights of this stage.

    Raises:
        PipelineError: there are fewer layers than stages, the embeddings are tied, or
            the model has experts.
    """

    def __init__(
        self,
        shape: Shape,
        index: int,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        shards_weights: bool = False,
    ) -> None:
        super().__init__(shape)
        count = group.size()
        if shape.layers < count:
            raise PipelineError(
                f"engine.parallel.pipeline is {count}, but the model has "
                f"{shape.layers} layers; use less"
            )
        if shape.tied_embeddings:
            raise PipelineError(
                "engine.parallel.pipeline: the first stage embeds and the last one "
                "predicts, so they cannot share one matrix; say "
                "pretrain.model.tied_embeddings: false, or use shard"
            )
        if shape.experts:
            raise PipelineError(
                "engine.parallel.pipeline: a mixture of experts is not pipelined; "
                "use shard"
            )
        self.index, self.count, self.group, self.dtype, self.device = (
            index,
            count,
            group,
            dtype,
            device,
        )
        self.shards_weights = shards_weights
        layer_numbers = range(
            shape.layers * index // count, shape.layers * (index + 1) // count
        )
        layers = nn.ModuleDict(
            {str(number): self.model.layers[number] for number in layer_numbers}
        )
        self.model.layers = layers  # type: ignore[assignment]
        if not self.is_first:
            self.model.embed_tokens = None  # type: ignore[assignment]
        if not self.is_last:
            self.model.norm, self.lm_head = None, None  # type: ignore[assignment]
        self._queue: deque[Call] = deque()
        self._measured: list[Measured] = []
        self._asked: tuple[Any, Any, Any] = (None, None, None)
        self._schedules: dict[tuple[int, int, int], Any] = {}

    @property
    def is_first(self) -> bool:
        """True if this stage has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if this stage has the output matrix."""
        return self.index == self.count - 1

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> Any:
        """Run this stage on a micro-batch within a schedule; otherwise see the class,
        and Llama.forward.
        """
        if prefix is not None:
            raise PipelineError(
                "a prefix that is read in both directions is not pipelined; use shard"
            )
        if self._queue:
            call = self._queue.popleft()
            # After the first stage, `ids` are the hidden states of the previous one.
            hidden = self._layers(
                None if self.is_first else ids, call.ids, call.positions
            )
            if not self.is_last:
                return hidden
            hidden, matrix = self.gathered(hidden)
            objective, scale, draw = self._asked
            answering = _Answering(self, hidden[: call.rows], matrix)
            measured = objective.loss(answering, call.part, scale, draw)
            self._measured.append(measured)
            return measured.loss
        if torch.is_grad_enabled():
            raise PipelineError(
                "a pipelined model is trained through `accumulate`, micro-batches of "
                "a step together"
            )
        x = None
        if not self.is_first:
            x = self._hidden_states(*ids.shape)
            dist.recv(x, group=self.group, group_src=self.index - 1)
        hidden = self._layers(x, ids, positions)
        result = [None]
        if self.is_last:
            result = [
                map_tensors(
                    Tensor.cpu,
                    self.answered(head, *self.gathered(hidden), ids.shape[1]),
                )
            ]
        else:
            dist.send(hidden.contiguous(), group=self.group, group_dst=self.index + 1)
        dist.broadcast_object_list(result, group=self.group, group_src=self.count - 1)
        return map_tensors(lambda part: part.to(self.device), result[0])

    def accumulate(
        self,
        objective: Objective,
        parts: Sequence[Any],
        scale: float | Tensor,
        draw: int | None,
    ) -> list[Measured]:
        """Accumulate gradients of a step's micro-batches; returns their metrics on the
        last stage, else an empty list.

        Args: see loop.step.accumulate_gradients and Objective.loss.
        """
        parts = list(parts)
        nothing = np.empty(0, dtype=np.int64)
        while len(parts) < self.count:  # 1F1B needs at least one micro-batch per stage
            parts.append(objective.prepare(nothing, getattr(parts[0], "cuts", 1)))
        inputs = []
        for part in parts:
            try:
                objective.loss(_Asking(), part, scale, draw)
            except _AskedError as asked:
                inputs.append(Call(part, asked.ids, asked.positions, len(asked.ids)))
            else:
                raise PipelineError(
                    f"{type(objective).__name__} computes a loss without calling its "
                    "model, and is not pipelined"
                )
        # Of equal size: the last row is repeated, and results of padding are cut off.
        row_count = max(call.rows for call in inputs)
        calls = []
        for call in inputs:
            row_indices = torch.arange(row_count, device=call.ids.device).clamp(
                max=call.rows - 1
            )
            positions = None if call.positions is None else call.positions[row_indices]
            calls.append(Call(call.part, call.ids[row_indices], positions, call.rows))
        self._queue, self._measured, self._asked = (
            deque(calls),
            [],
            (objective, scale, draw),
        )
        schedule = self._schedule(len(calls), *calls[0].ids.shape)
        schedule.step(
            *([torch.cat([call.ids for call in calls])] if self.is_first else []),
            return_outputs=False,
            target=torch.arange(len(calls)) if self.is_last else None,
        )
        return self._measured

    def _layers(
        self, x: Tensor | None, ids: Tensor, positions: Tensor | None
    ) -> Tensor:
        """Run the layers of this stage on hidden states of the previous stage, or on
        ids.
        """
        ids, rotary, visible = self.laid_out(ids, None, positions)
        hidden: Tensor = self.model(
            ids if x is None else x, rotary, visible, None, None
        )
        return hidden

    def _hidden_states(
        self, rows: int, length: int, device: torch.device | None = None
    ) -> Tensor:
        """Buffer for hidden states between stages; a shard of the sequence if several
        processes split it.
        """
        shards = (1 if self.tensor_mesh is None else self.tensor_mesh.size()) * (
            1 if self.row_split is None else self.row_split.size
        )
        return torch.empty(
            rows,
            padded_length(length, self.length_multiple()) // shards,
            self.shape.width,
            dtype=self.dtype,
            device=device or self.device,
        )

    def _schedule(self, number: int, rows: int, length: int) -> Any:
        """1F1B schedule of a number of micro-batches of one size, cached."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        key = (number, rows, length)
        if key in self._schedules:
            return self._schedules[key]

        class ReducingStage(PipelineStage):
            def backward_one_chunk(
                stage,
                bwd_chunk_id: int,
                loss: Any = None,
                full_backward: bool = True,
                last_backward: bool = False,
            ) -> None:
                self.set_requires_all_reduce(last_backward)  # type: ignore[operator]
                super().backward_one_chunk(
                    bwd_chunk_id, loss, full_backward, last_backward
                )

        meta = torch.device("meta")
        hidden = self._hidden_states(rows, length, meta).requires_grad_()
        ids = torch.empty(rows, length, dtype=torch.int64, device=meta)
        loss = torch.empty((), device=meta, requires_grad=True)
        # For an FSDP module, torch's stage reduces gradients and frees gathered weights
        # only after the last micro-batch. Ranks that share weights do both after each
        # micro-batch, so the schedule gets a plain wrapper.
        stage_class = ReducingStage if self.shards_weights else PipelineStage
        stage = stage_class(
            _Plain(self) if self.shards_weights else self,
            self.index,
            self.count,
            self.device,
            group=self.group,
            input_args=ids if self.is_first else hidden,
            output_args=loss if self.is_last else hidden,
        )
        # The last stage outputs the loss, already divided by the weight of the whole
        # batch.
        self._schedules[key] = Schedule1F1B(
            stage, number, loss_fn=lambda loss, target: loss, scale_grads=False
        )
        return self._schedules[key]


class _Plain(nn.Module):
    """Wrapper that hides a module's class."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class _AskedError(Exception):
    """Carrier of the arguments of a model call."""

    def __init__(self, ids: Tensor, positions: Tensor | None) -> None:
        super().__init__()
        self.ids, self.positions = ids, positions


class _Asking(nn.Module):
    """Stand-in for a model that captures its arguments."""

    def forward(
        self,
        ids: Tensor,
        head: Head,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
    ) -> Any:
        raise _AskedError(ids, positions)


class _Answering(nn.Module):
    """Stand-in for a model with precomputed hidden states."""

    def __init__(self, stage: PipelineStage, hidden: Tensor, matrix: Tensor) -> None:
        super().__init__()
        self._answered, self._hidden, self._matrix = stage.answered, hidden, matrix

    def forward(
        self,
        ids: Tensor,
        head: Head,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
    ) -> Any:
        return self._answered(head, self._hidden, self._matrix, ids.shape[1])


def over_stages(model: nn.Module, value: Tensor) -> Tensor:
    """Sum over all stages of a sum over one stage's parameters; the value itself
    without a pipeline.
    """
    if isinstance(model, PipelineStage):
        value = value.clone()
        dist.all_reduce(value, group=model.group)
    return value


def is_beside_first(model: nn.Module) -> bool:
    """Return True on the first process and on the stages of its pipeline."""
    return 0 in (
        dist.get_process_group_ranks(model.group)
        if isinstance(model, PipelineStage)
        else [dist.get_rank()]
    )


def of_all_stages(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors (on the CPU) of all stages of the first process's pipeline, on that
    process; empty on the others.

    All processes for which `is_beside_first` is true must call it.
    """
    if not isinstance(model, PipelineStage):
        return tensors
    stages: list[Any] | None = [None] * model.count if dist.get_rank() == 0 else None
    dist.gather_object(tensors, stages, dst=0, group=model.group)
    return {name: tensor for stage in stages or () for name, tensor in stage.items()}
