from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from gristmill.train.models.llama import Llama, empty_cache
from gristmill.train.models.sample import PromptTooLongError, choose, generate, random_numbers
from gristmill.train.models.shape import Shape

PROMPTS = [[7], [3, 1, 4, 1, 5], [9, 2, 6]]


@pytest.fixture(scope="module")
def model(tiny_shape: Shape, make_model: Callable[[Shape], Llama]) -> Llama:
    return make_model(tiny_shape)


def without_cache(model: Llama, prompt: list[int], most: int) -> list[int]:
    ids = list(prompt)
    for _ in range(most):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_cached_logits_are_those_of_the_whole_pass(model: Llama) -> None:
    ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = empty_cache(model.shape, torch.zeros(2, dtype=torch.int64), 12, torch.float32)
    parts = [model(ids[:, start:end], cache=cache) for start, end in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), atol=1e-5, rtol=1e-5)


def test_a_batch_of_uneven_prompts_continues_each_as_it_would_alone_without_a_cache(model: Llama) -> None:
    found = generate(model, PROMPTS, 10, stops=())
    assert found == [without_cache(model, prompt, 10) for prompt in PROMPTS]
    assert len({tuple(row) for row in found}) == 3


def test_sampling_depends_on_seed_and_prompt_not_on_the_batch(model: Llama) -> None:
    together = generate(model, PROMPTS, 8, stops=(), temperature=1.0, seed=5)
    assert together == [generate(model, [prompt], 8, (), 1.0, seed=5)[0] for prompt in PROMPTS]
    assert together != generate(model, PROMPTS, 8, stops=(), temperature=1.0, seed=6)


def test_a_stop_ends_a_continuation_and_is_not_part_of_it(model: Llama) -> None:
    whole = generate(model, [PROMPTS[0]], 10, stops=())[0]
    stop = whole[4]
    assert generate(model, [PROMPTS[0]], 10, stops={stop})[0] == whole[: whole.index(stop)]


def test_generation_ends_where_the_models_context_does(model: Llama) -> None:
    assert len(generate(model, [[1] * 20], 100, stops=())[0]) == 4
    with pytest.raises(PromptTooLongError, match="fewer than the model's 24"):
        generate(model, [[1] * 24], 1, stops=())
    with pytest.raises(PromptTooLongError, match="at least one"):
        generate(model, [[1], []], 1, stops=())


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    generator = random_numbers(0, [1])
    counts = Counter(choose(logits, 1.0, [generator])[0] for _ in range(4000))
    assert np.allclose([counts[k] / 4000 for k in range(3)], [0.5, 0.3, 0.2], atol=0.03)
    cold = Counter(choose(logits, 0.05, [generator])[0] for _ in range(200))
    assert cold[0] >= 199  # (3/5) ** 20 is one in 27,000
