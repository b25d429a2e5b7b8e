"""Generation: a batch of prompts is continued token by token, with keys and values cached.

What is drawn for a row depends on its own random numbers and its own prompt, never on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request, Scheduler
from gristmill.train.models.llama import Llama


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stops: Collection[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Continue prompts, all at the same time.

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
        gristmill.train.generation.scheduler.PromptTooLongError: a prompt is empty or fills the model's sequence length.
    """
    sampling = Sampling(temperature, seed=seed)
    return complete(Scheduler(model, most_rows=len(prompts)), [
        Request(tuple(int(token) for token in prompt), max_new_tokens, frozenset(stops), sampling)
        for prompt in prompts])


def complete(scheduler: Scheduler, requests: Sequence[Request]) -> list[list[int]]:
    """The new ids of each request, in order; the scheduler must be idle."""
    found: dict[int, list[int]] = {scheduler.add(request): [] for request in requests}
    while not scheduler.is_idle:
        for one in scheduler.step():
            found[one.number] += one.tokens
    return list(found.values())
