"""Pipeline parallelism: every process holds some layers, and micro-batches pass through under 1F1B.

The schedule is torch.distributed.pipelining's (Narayanan et al. 2019). All processes of a pipeline read the same
micro-batches, so that only hidden states travel. An objective calls its model in the middle of `loss`: every stage asks
it once what it would call the model with, and the last stage continues it with the hidden states that arrived.
Parameters keep the names that they have in the whole model, so that checkpoints are those of any other form.
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

from gristmill.train.models.llama import Cache, Head, Llama, logits_head, padded_length
from gristmill.train.models.shape import Shape

if TYPE_CHECKING:
    from gristmill.train.loop.objective import Measured, Objective


class PipelineError(ValueError):
    """A model or a training cannot be pipelined."""


@dataclass(frozen=True)
class Call:
    """What an objective calls its model with, for one micro-batch.

    Attributes:
        part: the micro-batch.
        ids, positions: (n, t), see Llama.forward; the number of rows is the same for all micro-batches of a step.
        rows: how many of them are the micro-batch's own; the others fill it up.
    """

    part: Any
    ids: Tensor
    positions: Tensor | None
    rows: int


class PipelineStage(Llama):
    """Some layers of a model; the first stage has the embedding too, the last one the norm and the output matrix.

    Called like the whole model it computes without gradients, all stages together, and all of them get the result.

    Args:
        shape: of the whole model.
        index: of this stage.
        group: the processes of the pipeline, one per stage.
        dtype: of hidden states.
        device: where this process computes.
        shards_weights: whether several processes share the weights of this stage.

    Raises:
        PipelineError: there are fewer layers than stages, or the first and the last stage would share weights.
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
                f"engine.parallel.pipeline is {count}, but the model has {shape.layers} layers; use less"
            )
        if shape.tied_embeddings:
            raise PipelineError(
                "engine.parallel.pipeline: the first stage embeds and the last one predicts, so they "
                "cannot share one matrix; say pretrain.model.tied_embeddings: false, or use shard"
            )
        if shape.experts:
            raise PipelineError("engine.parallel.pipeline: a mixture of experts is not pipelined; use shard")
        self.index, self.count, self.group, self.dtype, self.device = index, count, group, dtype, device
        self.shards_weights = shards_weights
        kept = range(shape.layers * index // count, shape.layers * (index + 1) // count)
        layers = nn.ModuleDict({str(number): self.model.layers[number] for number in kept})
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
        """Whether this stage embeds."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage predicts."""
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
        """In a schedule: this stage's part of a micro-batch; else see the class, and Llama.forward."""
        if prefix is not None:
            raise PipelineError("a prefix that is read in both directions is not pipelined; use shard")
        if self._queue:
            return self._scheduled(ids)
        if torch.is_grad_enabled():
            raise PipelineError("a pipelined model is trained through `accumulate`, micro-batches of a step together")
        return self._evaluated(ids, head, positions)

    def accumulate(
        self, objective: Objective, parts: Sequence[Any], scale: float | Tensor, draw: int | None
    ) -> list[Measured]:
        """Gradients of all micro-batches of a step; on the last stage what was measured of each, else nothing.

        Args: see loop.gradients.accumulate_gradients and Objective.loss.
        """
        parts = list(parts)
        nothing = np.empty(0, dtype=np.int64)
        while len(parts) < self.count:  # 1F1B wants one micro-batch per stage at the least
            parts.append(objective.prepare(nothing, getattr(parts[0], "cuts", 1)))
        calls = _of_equal_size([_ask(objective, part, scale, draw) for part in parts])
        self._queue, self._measured, self._asked = deque(calls), [], (objective, scale, draw)
        schedule = self._schedule(len(calls), *calls[0].ids.shape)
        schedule.step(
            *([torch.cat([call.ids for call in calls])] if self.is_first else []),
            return_outputs=False,
            target=torch.arange(len(calls)) if self.is_last else None,
        )
        return self._measured

    def _scheduled(self, x: Tensor) -> Tensor:
        call = self._queue.popleft()
        hidden = self._layers(x if not self.is_first else None, call.ids, call.positions)
        if not self.is_last:
            return hidden
        hidden, matrix = self.gathered(hidden)
        objective, scale, draw = self._asked
        measured = objective.loss(_Answering(self, hidden[: call.rows], matrix), call.part, scale, draw)
        self._measured.append(measured)
        loss: Tensor = measured.loss
        return loss

    def _layers(self, x: Tensor | None, ids: Tensor, positions: Tensor | None) -> Tensor:
        """This stage's layers, of hidden states that came from the stage before, or of ids."""
        ids, rotary, visible = self.laid_out(ids, None, positions)
        hidden: Tensor = self.model(ids if x is None else x, rotary, visible, None, None)
        return hidden

    def _evaluated(self, ids: Tensor, head: Head, positions: Tensor | None) -> Any:
        x = None
        if not self.is_first:
            x = self._hidden_states(*ids.shape)
            dist.recv(x, group=self.group, group_src=self.index - 1)
        hidden = self._layers(x, ids, positions)
        result = [None]
        if self.is_last:
            result = [_moved(self.answered(head, *self.gathered(hidden), ids.shape[1]), torch.device("cpu"))]
        else:
            dist.send(hidden.contiguous(), group=self.group, group_dst=self.index + 1)
        dist.broadcast_object_list(result, group=self.group, group_src=self.count - 1)
        return _moved(result[0], self.device)

    def _hidden_states(self, rows: int, length: int, device: torch.device | None = None) -> Tensor:
        """What travels between stages for so many ids: of a process that shares them with others, its share."""
        shares = (1 if self.tensor_mesh is None else self.tensor_mesh.size()) * (
            1 if self.row_split is None else self.row_split.size
        )
        return torch.empty(
            rows,
            padded_length(length, self.length_multiple()) // shares,
            self.shape.width,
            dtype=self.dtype,
            device=device or self.device,
        )

    def _schedule(self, number: int, rows: int, length: int) -> Any:
        """1F1B for so many micro-batches of one size, made once."""
        from torch.distributed.pipelining import Schedule1F1B

        key = (number, rows, length)
        if key not in self._schedules:
            meta = torch.device("meta")
            hidden = self._hidden_states(rows, length, meta).requires_grad_()
            ids = torch.empty(rows, length, dtype=torch.int64, device=meta)
            stage = self._scheduled_stage(
                self.index,
                self.count,
                self.device,
                group=self.group,
                input_args=ids if self.is_first else hidden,
                output_args=torch.empty((), device=meta, requires_grad=True) if self.is_last else hidden,
            )
            # The last stage's output is the loss already, divided by what the whole batch weighs.
            self._schedules[key] = Schedule1F1B(stage, number, loss_fn=lambda loss, target: loss, scale_grads=False)
        return self._schedules[key]

    def _scheduled_stage(self, *arguments: Any, **settings: Any) -> Any:
        """This stage as the schedule calls it.

        Of a module that it knows as FSDP's, torch's stage reduces gradients, and drops gathered weights, after the last
        micro-batch alone. Ranks that share weights do both after each one, so they show it a plain module.
        """
        from torch.distributed.pipelining import PipelineStage

        if not self.shards_weights:
            return PipelineStage(self, *arguments, **settings)

        class ReducingStage(PipelineStage):
            def backward_one_chunk(
                stage, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
            ) -> None:
                self.set_requires_all_reduce(last_backward)  # type: ignore[operator]
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

        return ReducingStage(_Plain(self), *arguments, **settings)


class _Plain(nn.Module):
    """A module that calls another one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class _AskedError(Exception):
    """Carries what an objective called its model with."""

    def __init__(self, ids: Tensor, positions: Tensor | None) -> None:
        super().__init__()
        self.ids, self.positions = ids, positions


class _Asking(nn.Module):
    """In place of a model: does not answer, but says what it was asked."""

    def forward(self, ids: Tensor, head: Head, positions: Tensor | None = None, trained: Tensor | None = None) -> Any:
        raise _AskedError(ids, positions)


class _Answering(nn.Module):
    """In place of a model: has the hidden states already."""

    def __init__(self, stage: PipelineStage, hidden: Tensor, matrix: Tensor) -> None:
        super().__init__()
        self._answered, self._hidden, self._matrix = stage.answered, hidden, matrix

    def forward(self, ids: Tensor, head: Head, positions: Tensor | None = None, trained: Tensor | None = None) -> Any:
        return self._answered(head, self._hidden, self._matrix, ids.shape[1])


def _ask(objective: Objective, part: Any, scale: float | Tensor, draw: int | None) -> Call:
    try:
        objective.loss(_Asking(), part, scale, draw)
    except _AskedError as asked:
        return Call(part, asked.ids, asked.positions, len(asked.ids))
    raise PipelineError(f"{type(objective).__name__} computes a loss without calling its model, and is not pipelined")


def _of_equal_size(calls: Sequence[Call]) -> list[Call]:
    """Micro-batches filled up to as many rows as the largest has, by its last row; what comes of them is cut off."""
    most = max(call.rows for call in calls)
    filled = []
    for call in calls:
        chosen = torch.arange(most, device=call.ids.device).clamp(max=call.rows - 1)
        positions = None if call.positions is None else call.positions[chosen]
        filled.append(Call(call.part, call.ids[chosen], positions, call.rows))
    return filled


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else tuple(_moved(one, device) for one in value)


def over_stages(model: nn.Module, value: Tensor) -> Tensor:
    """The sum over all stages of what is a sum over one stage's parameters; the value itself without a pipeline."""
    if isinstance(model, PipelineStage):
        value = value.clone()
        dist.all_reduce(value, group=model.group)
    return value


def is_beside_first(model: nn.Module) -> bool:
    """Whether this process is the first one, or holds a stage of the same pipeline."""
    return 0 in (dist.get_process_group_ranks(model.group) if isinstance(model, PipelineStage) else [dist.get_rank()])


def of_all_stages(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors (on the CPU) of all stages of the first process's pipeline, on that process; nothing on the others.

    Every process for which `is_beside_first` holds calls this together.
    """
    if not isinstance(model, PipelineStage):
        return tensors
    found: list[Any] | None = [None] * model.count if dist.get_rank() == 0 else None
    dist.gather_object(tensors, found, dst=0, group=model.group)
    return {name: tensor for stage in found or () for name, tensor in stage.items()}
