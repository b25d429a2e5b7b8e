"""The part of `engine` that says how a training is spread over its processes."""

from __future__ import annotations

from gristmill.mixtures.section import Positive, Section


class Parallel(Section):
    """How a training is spread over its `ranks`: their product is `ranks`.

    Changes no result but by rounding: sums are taken in another order. A checkpoint of any form continues in any
    other one.
    """

    replicate: Positive = 1
    """Groups that each hold the whole model, and exchange gradients only (HSDP; of machines whose links are slow)."""
    shard: Positive | None = None
    """Processes over which a group's weights, gradients and optimizer state are split (FSDP); all that the other keys
    leave if absent."""
    tensor: Positive = 1
    """Processes that split every matrix, and the activations between them along the sequence (Korthikanti et al. 2022);
    of one machine. A training with `lora` uses these processes to shard: adapters are not split."""
    pipeline: Positive = 1
    """Processes that each hold some of the layers, and pass activations on (1F1B, Narayanan et al. 2019); only
    `pretrain` has this form, without tied embeddings or experts; the other trainings use these processes to shard."""

    def sizes(self, ranks: int, pipelined: bool = True, split: bool = True) -> tuple[int, int, int, int]:
        """Processes along pipeline, replicate, shard and tensor.

        Args:
            ranks: all processes.
            pipelined: whether the training may be; otherwise those processes shard.
            split: whether its matrices may be; otherwise those processes shard.

        Raises:
            ValueError: the product is not `ranks`.
        """
        fixed = self.pipeline * self.replicate * self.tensor
        shard = self.shard or max(ranks // fixed, 1)
        if fixed * shard != ranks:
            raise ValueError(
                f"parallel: pipeline {self.pipeline} x replicate {self.replicate} x shard {shard} x tensor "
                f"{self.tensor} are {fixed * shard} processes, but ranks is {ranks}")
        pipeline, tensor = self.pipeline if pipelined else 1, self.tensor if split else 1
        return pipeline, self.replicate, ranks // (pipeline * self.replicate * tensor), tensor

    def share_of(self, rank: int, ranks: int, pipelined: bool = True, split: bool = True) -> tuple[int, int]:
        """Which share of a batch a process computes, from 0, and how many there are: processes of one pipeline, and
        those that split the same matrices, compute the same rows."""
        _, replicate, shard, tensor = self.sizes(ranks, pipelined, split)
        return rank // tensor % (replicate * shard), replicate * shard
