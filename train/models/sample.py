"""Generation: a batch of prompts is continued token by token, with keys and values cached.

What is drawn for a row depends on its own random numbers and its own prompt, never on the rest of the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from gristmill.dataprep.files import canonical_json
from gristmill.train.models.llama import Llama, empty_cache


class PromptTooLongError(ValueError):
    """A prompt is empty, or leaves no room for a single new token."""


@torch.no_grad()
def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stops: Collection[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Continue prompts.

    Args:
        model: in one process, not sharded.
        prompts: ids of each prompt, at least one.
        max_new_tokens: most ids to generate; less where the model's sequence length ends.
        stops: ids that end a continuation; they are not part of what is returned.
        temperature: 0 takes the likeliest id, 1 samples from the model's distribution.
        seed: with the prompt, decides every draw.

    Returns:
        the new ids of each prompt.

    Raises:
        PromptTooLongError: a prompt is empty or fills the model's sequence length.
    """
    longest = max(len(prompt) for prompt in prompts)
    most = min(max_new_tokens, model.shape.sequence_length - longest)
    if most < 1 or not all(len(prompt) for prompt in prompts):
        raise PromptTooLongError(f"prompts have {min(map(len, prompts))} to {longest} tokens; they need at least one, "
                                 f"and fewer than the model's {model.shape.sequence_length}")
    embedding = model.model.embed_tokens.weight
    device = embedding.device
    # Padding lies on the left, so that all rows continue at the same position.
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
    starts = torch.tensor([longest - len(prompt) for prompt in prompts])
    cache = empty_cache(model.shape, starts.to(device), longest + most, embedding.dtype)
    generators = [random_numbers(seed, prompt) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    step = ids.to(device)
    for _ in range(most):
        chosen = choose(model(step, cache=cache)[:, -1], temperature, generators)
        for row in sorted(open_rows):
            if chosen[row] in stops:
                open_rows.remove(row)
            else:
                found[row].append(chosen[row])
        if not open_rows:
            break
        step = torch.tensor(chosen, device=device)[:, None]
    return found


def random_numbers(seed: int, prompt: Sequence[int]) -> np.random.Generator:
    """A row's own stream of random numbers, keyed by seed and prompt."""
    key = hashlib.blake2b(canonical_json([seed, [int(token) for token in prompt]]), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def choose(logits: Tensor, temperature: float, generators: Sequence[np.random.Generator]) -> list[int]:
    """One id per row from logits (n, v): the likeliest, or drawn by inverting the cumulative distribution."""
    if temperature == 0.0:
        likeliest: list[int] = logits.argmax(dim=-1).tolist()
        return likeliest
    scaled = logits.double().cpu() / temperature
    cumulative = torch.softmax(scaled, dim=-1).cumsum(dim=-1).numpy()
    chosen = []
    for row, generator in zip(cumulative, generators, strict=True):
        place = int(np.searchsorted(row, generator.random() * row[-1], side="right"))
        chosen.append(min(place, len(row) - 1))
    return chosen
