from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gristmill.train.generation import sampling as sampling_module
from gristmill.train.generation.language_model import TextStream
from gristmill.train.generation.sampling import (
    BLOCK,
    Sampling,
    SamplingError,
    by_rejection,
    by_sorting,
    random_numbers,
    sampled_ids,
)
from gristmill.train.generation.scheduler import (
    PromptTooLongError,
    Request,
    Scheduler,
    complete,
    generate,
)
from gristmill.train.models.model_config import Shape
from gristmill.train.models.transformer import Llama, empty_cache

PROMPTS = [[7], [3, 1, 4, 1, 5], [9, 2, 6]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread for tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tiny_shape: Shape, make_model: Callable[[Shape], Llama]) -> Llama:
    return make_model(tiny_shape)


def without_cache(model: Llama, prompt: list[int], max_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_cached_logits_equal_those_of_a_full_pass(model: Llama) -> None:
    ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = empty_cache(
        model.shape, torch.zeros(2, dtype=torch.int64), 12, torch.float32
    )
    parts = [
        model(ids[:, start:end], cache=cache)
        for start, end in ((0, 5), (5, 6), (6, 12))
    ]
    torch.testing.assert_close(
        torch.cat(parts, dim=1), model(ids), atol=1e-5, rtol=1e-5
    )


def test_batched_prompts_continue_as_alone_without_a_cache(model: Llama) -> None:
    continuations = generate(model, PROMPTS, 10, stops=())
    assert continuations == [without_cache(model, prompt, 10) for prompt in PROMPTS]
    assert len({tuple(row) for row in continuations}) == 3


def test_sampling_depends_on_seed_and_prompt_only(model: Llama) -> None:
    together = generate(model, PROMPTS, 8, stops=(), temperature=1.0, seed=5)
    assert together == [
        generate(model, [prompt], 8, (), 1.0, seed=5)[0] for prompt in PROMPTS
    ]
    assert together != generate(model, PROMPTS, 8, stops=(), temperature=1.0, seed=6)


def test_continuation_ends_before_a_stop_id(model: Llama) -> None:
    unstopped = generate(model, [PROMPTS[0]], 10, stops=())[0]
    stop = unstopped[4]
    assert (
        generate(model, [PROMPTS[0]], 10, stops={stop})[0]
        == unstopped[: unstopped.index(stop)]
    )


def test_generation_ends_with_the_context(model: Llama) -> None:
    assert len(generate(model, [[1] * 20], 100, stops=())[0]) == 4
    with pytest.raises(PromptTooLongError, match="fewer than the model's 24"):
        generate(model, [[1] * 24], 1, stops=())
    with pytest.raises(PromptTooLongError, match="at least one"):
        generate(model, [[1], []], 1, stops=())


def test_draws_follow_the_distribution_and_temperature() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(4000, -1)
    generators = [random_numbers(0, [1])] * 4000
    counts = sampled_ids(logits, [Sampling(1.0)] * 4000, generators).bincount()
    assert np.allclose(counts / 4000, [0.5, 0.3, 0.2], atol=0.03)
    cold = sampled_ids(logits[:200], [Sampling(0.05)] * 200, generators[:200])
    assert int((cold == 0).sum()) >= 199  # (3/5) ** 20 is one in 27,000
    coldest = sampled_ids(logits[:200], [Sampling(5e-324)] * 200, generators[:200])
    assert int((coldest == 0).sum()) == 200


@pytest.mark.parametrize("sample", [by_rejection, by_sorting])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.999])
def test_samples_follow_the_distribution_over_the_nucleus(
    sample: Callable[[Tensor, Tensor, Tensor], Tensor], top_p: float
) -> None:
    """With equally likely ids the nucleus has the first of them. The bound of the
    frequencies is five standard deviations.
    """
    draws = 20_000
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0, -1.0, 1.5, 1.0, -4.0])
    weights = logits.softmax(dim=-1)
    order = np.argsort(-weights.double().numpy(), kind="stable")
    ranked = weights.double().numpy()[order]
    expected = np.zeros(len(weights))
    nucleus = order[ranked.cumsum() - ranked < top_p]
    expected[nucleus] = weights[nucleus]
    expected /= expected.sum()
    numbers = torch.from_numpy(np.random.default_rng(0).random(draws))
    ids = sample(
        weights.expand(draws, -1).contiguous(),
        torch.full((draws, 1), top_p, dtype=torch.float64),
        numbers,
    )
    counts = ids.bincount(minlength=len(weights)).numpy()
    assert (counts[expected == 0.0] == 0).all()
    deviations = np.sqrt(draws * expected * (1 - expected))
    assert (np.abs(counts - draws * expected) <= 5 * deviations).all()


@pytest.mark.parametrize("vocab", [3, BLOCK, 1000])
@pytest.mark.parametrize("deviation", [0.1, 2.0, 6.0])
def test_samples_are_in_the_nucleus_and_the_same_in_any_batch(
    vocab: int, deviation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_module, "CHUNK_LOGITS", 7 * vocab)
    samplings = [
        Sampling(temperature, top_p, seed)
        for seed in range(20)
        for temperature in (0.0, 0.7, 1.0)
        for top_p in (0.05, 0.9, 0.999999, 1.0)
    ]
    logits = deviation * torch.randn(
        len(samplings), vocab, generator=torch.Generator().manual_seed(vocab)
    )

    def streams() -> list[np.random.Generator]:
        return [random_numbers(sampling.seed, [1]) for sampling in samplings]

    together = sampled_ids(logits, samplings, streams()).tolist()
    for row, (sampling, generator) in enumerate(zip(samplings, streams(), strict=True)):
        alone = sampled_ids(logits[row : row + 1], [sampling], [generator])
        assert alone.tolist() == together[row : row + 1]
        number = random_numbers(sampling.seed, [1]).random()
        if sampling.temperature == 0.0:
            allowed = {int(logits[row].argmax())}
        else:
            weights = (logits[row] / sampling.temperature).softmax(dim=-1)
            order = weights.double().sort(descending=True)
            if sampling.top_p < 1.0:
                before = order.values.cumsum(dim=0) - order.values
                allowed = set(order.indices[before < sampling.top_p].tolist())
            else:
                # Rounding may move the number to a neighbour.
                ends = weights.double().cumsum(dim=0).numpy()
                first, last = ends.searchsorted([number - 1e-6, number + 1e-6])
                allowed = set(range(first, last + 1))
        assert together[row] in allowed, (row, sampling)


def test_top_p_keeps_the_smallest_set_of_likeliest_ids() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.8, 0.1]]).log()

    def nucleus(top_p: float) -> list[set[int]]:
        generators = [random_numbers(seed, [1]) for seed in range(2)]
        draws = [
            sampled_ids(logits, [Sampling(1.0, top_p)] * 2, generators)
            for _ in range(100)
        ]
        return [set(ids) for ids in torch.stack(draws).T.tolist()]

    assert nucleus(0.6) == [{1, 2}, {1}]
    assert nucleus(1e-9) == [{1}, {1}]
    assert nucleus(1.0) == [{0, 1, 2}] * 2


def test_impossible_ids_are_never_sampled() -> None:
    """The largest random number leaves no id above it but the last one of weight 0."""
    logits = torch.full((1, 300), -math.inf)
    logits[0, 130:140] = torch.linspace(-3.0, 0.0, 10)

    class Largest:
        def random(self) -> float:
            return 1.0

    largest: Any = Largest()
    for top_p in (0.9, 1.0):
        (token,) = sampled_ids(logits, [Sampling(1.0, top_p)], [largest]).tolist()
        assert 130 <= token < 140
    broken = sampled_ids(torch.full((1, 300), math.nan), [Sampling(1.0)], [largest])
    assert 0 <= int(broken) < 300


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_sampling_settings_out_of_range_are_rejected(
    values: dict[str, float], message: str
) -> None:
    with pytest.raises(SamplingError, match=message):
        Sampling(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds_ahead", [0, 1, 3])
def test_requests_are_independent_of_each_other(
    rounds_ahead: int, model: Llama
) -> None:
    """Nor do they depend on the number of rounds that reports lag behind, as on a GPU."""
    settings_ = (
        ([7], 3, 0.0),
        ([3, 1, 4, 1, 5, 9, 2, 6], 9, 1.0),
        ([9, 2], 16, 0.0),
        ([1] * 20, 4, 0.5),
        ([8], 1, 1.0),
    )
    requests = [
        Request(tuple(prompt), max_tokens, frozenset(), Sampling(temperature, seed=2))
        for prompt, max_tokens, temperature in settings_
    ]
    alone = [complete(Scheduler(model, 1), [request])[0] for request in requests]
    stop = alone[1][5]
    requests[1] = replace(requests[1], stops=frozenset({stop}))
    alone[1] = alone[1][: alone[1].index(stop)]
    two_rows = Scheduler(model, 2)
    two_rows.rounds_ahead = rounds_ahead
    assert complete(two_rows, requests) == alone
    late = Scheduler(model, 8)
    late.rounds_ahead = rounds_ahead
    ids_by_request: dict[int, list[int]] = {
        late.add(request): [] for request in requests[:2]
    }
    rounds = 0
    while not late.is_idle:
        for piece in late.step():
            ids_by_request[piece.number] += piece.tokens
        rounds += 1
        if rounds <= 3:
            ids_by_request[late.add(requests[rounds + 1])] = []
    assert list(ids_by_request.values()) == alone


@pytest.mark.parametrize("rounds_ahead", [0, 1])
def test_cancelling_a_request_leaves_the_others_unchanged(
    rounds_ahead: int, model: Llama
) -> None:
    scheduler = Scheduler(model, 2)
    scheduler.rounds_ahead = rounds_ahead
    cancelled, kept, waiting = (
        scheduler.add(Request(tuple(prompt), 6, frozenset())) for prompt in PROMPTS
    )
    pieces = [piece for piece in scheduler.step() if piece.number == kept]
    scheduler.cancel(cancelled)
    scheduler.cancel(waiting)
    while not scheduler.is_idle:
        pieces += scheduler.step()
    assert {piece.number for piece in pieces} == {kept}
    assert [token for piece in pieces for token in piece.tokens] == without_cache(
        model, PROMPTS[1], 6
    )
    assert [piece.finish for piece in pieces] == [None] * 5 + ["length"]


def as_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=12), st.lists(st.integers(1, 3), min_size=1))
def test_streamed_pieces_join_to_the_text_without_partial_characters(
    text: str, sizes: list[int]
) -> None:
    data, stream, pieces = text.encode(errors="replace"), TextStream(as_bytes), []
    place = 0
    while place < len(data):
        size = sizes[place % len(sizes)]
        pieces.append(stream.push(list(data[place : place + size])))
        place += size
    pieces.append(stream.finish())
    assert "".join(pieces) == as_bytes(data)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in as_bytes(data)


def test_unfinished_character_is_replaced_only_at_the_end() -> None:
    stream = TextStream(as_bytes)
    assert [stream.push([byte]) for byte in "é€".encode()[:4]] == ["", "é", "", ""]
    assert stream.finish() == "\ufffd"


def test_stop_text_is_never_streamed() -> None:
    stream = TextStream(as_bytes, ["</end>", "\n\n"])
    assert [
        stream.push(list(piece.encode()))
        for piece in ("a <", "/", "b </e", "nd> c", "d")
    ] == [
        "a ",
        "",
        "</b ",
        "",
        "",
    ]
    assert stream.is_stopped
    assert stream.finish() == ""
    partial = TextStream(as_bytes, ["stop"])
    assert partial.push(list(b"a sto")) + partial.finish() == "a sto"
