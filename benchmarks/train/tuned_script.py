"""A small decoder trained by a tuned script of plain PyTorch, the peer of
`defaults.py`, in a process of its own: `python -m benchmarks.train.tuned_script FOLDER
SETTINGS`.

What speed-runs of small decoders agree on: Muon for matrices (Jordan et al. 2024),
AdamW for the vocabulary, short rows, normalised queries and keys, squared ReLU (So et
al. 2021), an untied output layer, outputs that start at zero, and a rate that falls
over 60 % of the training (nanochat, scripts/base_train.py and nanochat/gpt.py).

The last line of its output has the tokens read, the process time and the bits per byte
as JSON. The process time includes the start of Python, as that of a stage does.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.train.held_out_bits import HELD_OUT, bits_per_byte

ROW_TOKENS = 128
STEP_TOKENS = 2048
WARMUP, DECAY = 0.02, 0.6
"""Shares of the time in which the rates rise and fall."""
MATRIX_RATE, EMBEDDING_RATE, HEAD_RATE = 0.02, 0.05, 0.008
"""Rates of Muon and of the two AdamW groups, tuned on the benchmark's text
(docs/size-and-laws.md).
"""
MOMENTUM = 0.95
BETAS = (0.8, 0.95)
"""AdamW's, as in nanochat."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
TRAIN = "train.npy"
"""File of the ids to train on, in the order of the packed set."""


@dataclass(frozen=True)
class Settings:
    """The training.

    Attributes:
        vocab, layers, width, heads: of the model.
        seed: of first weights and order.
        seconds: of process time, after which the training ends.
    """

    vocab: int
    layers: int
    width: int
    heads: int
    seed: int
    seconds: float


def norm(x: Tensor) -> Tensor:
    """Divide the last dimension by its root mean square."""
    return F.rms_norm(x, (x.shape[-1],))


class Block(nn.Module):
    """Attention and feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.attention_output.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """(n, t, width) -> (n, t, width)."""
        n, t, width = x.shape
        heads = self.qkv(norm(x)).view(n, t, 3, self.heads, -1)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            rotate(norm(queries), cosines, sines),
            rotate(norm(keys), cosines, sines),
            values,
            is_causal=True,
        )
        x = x + self.attention_output(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.relu(self.up(norm(x))).square())


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs of channels by their positions (Su et al. 2021)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat(
        (left * cosines - right * sines, right * cosines + left * sines), dim=-1
    )


class Decoder(nn.Module):
    """Decoder without biases and gains."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocab, settings.width)
        self.blocks = nn.ModuleList(
            Block(settings.width, settings.heads) for _ in range(settings.layers)
        )
        self.head = nn.Linear(settings.width, settings.vocab, bias=False)
        nn.init.zeros_(self.head.weight)
        self.pairs = settings.width // settings.heads // 2

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (n, t) -> logits (n, t, vocab)."""
        frequencies = 10_000.0 ** -(torch.arange(self.pairs) / self.pairs)
        angles = torch.arange(ids.shape[1])[:, None] * frequencies
        x = norm(self.embedding(ids))
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        logits: Tensor = self.head(norm(x))
        return logits


class Muon:
    """Orthogonalised momentum (Jordan et al. 2024)."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        self.matrices = matrices
        self.momenta = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the matrices, and drop their gradients."""
        for matrix, momentum in zip(self.matrices, self.momenta, strict=True):
            assert matrix.grad is not None
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            direction = orthogonalised(matrix.grad.lerp(momentum, MOMENTUM))
            scale = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
            matrix.add_(direction, alpha=-rate * scale)
            matrix.grad = None


def orthogonalised(gradient: Tensor) -> Tensor:
    """Set the singular values of a matrix to about 1."""
    a, b, c = NEWTON_SCHULZ
    x = gradient.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).float()


def rate_factor(progress: float) -> float:
    """Share of the peak rates after a share of the time: warm-up, stable, decay."""
    return max(0.0, min(1.0, progress / WARMUP, (1 - progress) / DECAY))


def train(
    settings: Settings, ids: np.ndarray, progress_at: Callable[[int], float]
) -> tuple[Decoder, int]:
    """Train to the end; returns the model and the tokens read.

    Args:
        settings: of model and order.
        ids: of the text.
        progress_at: share of the training that is over, of the tokens read.
    """
    torch.manual_seed(settings.seed)
    model = Decoder(settings)
    matrices = Muon(list(model.blocks.parameters()))
    vocabulary = torch.optim.AdamW(
        [
            {"params": [model.embedding.weight], "peak": EMBEDDING_RATE},
            {"params": [model.head.weight], "peak": HEAD_RATE},
        ],
        betas=BETAS,
        eps=1e-10,
        weight_decay=0.0,
        fused=True,
    )
    rows = torch.from_numpy(ids[: len(ids) // ROW_TOKENS * ROW_TOKENS].astype(np.int64))
    order = torch.randperm(len(rows) // ROW_TOKENS)
    tokens, rows_per_step = 0, STEP_TOKENS // ROW_TOKENS
    while (progress := progress_at(tokens)) < 1:
        numbers = order[
            torch.arange(rows_per_step).add(tokens // ROW_TOKENS) % len(order)
        ]
        batch = rows.view(-1, ROW_TOKENS)[numbers]
        logits = model(batch[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        factor = rate_factor(progress)
        matrices.step(MATRIX_RATE * factor)
        for group in vocabulary.param_groups:
            group["lr"] = group["peak"] * factor
        vocabulary.step()
        vocabulary.zero_grad(set_to_none=True)
        tokens += STEP_TOKENS
    return model, tokens


def main(folder: Path, settings: Settings) -> None:
    """Train until the process time is spent, and print the measurements."""
    start = time.process_time()

    def progress_at(tokens: int) -> float:
        return (time.process_time() - start) / (settings.seconds - start)

    model, tokens = train(settings, np.load(folder / TRAIN), progress_at)
    seconds = time.process_time()
    print(
        json.dumps(
            {
                "tokens": tokens,
                "seconds": seconds,
                "bits_per_byte": bits_per_byte(model, folder / HELD_OUT),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Settings(**json.loads(sys.argv[2])))
