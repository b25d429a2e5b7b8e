from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill.train.generation.language_model import TextStream
from gristmill.train.generation.sampling import (
    Sampling,
    SamplingError,
    draw,
    probabilities,
    random_numbers,
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
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    generator = random_numbers(0, [1])
    counts = Counter(
        draw(probabilities(logits, Sampling(1.0)), generator) for _ in range(4000)
    )
    assert np.allclose([counts[k] / 4000 for k in range(3)], [0.5, 0.3, 0.2], atol=0.03)
    cold = Counter(
        draw(probabilities(logits, Sampling(0.05)), generator) for _ in range(200)
    )
    assert cold[0] >= 199  # (3/5) ** 20 is one in 27,000


def test_top_p_keeps_the_smallest_set_of_likeliest_ids() -> None:
    logits = np.log(np.array([[0.2, 0.5, 0.3], [0.1, 0.8, 0.1]]))
    assert np.allclose(
        probabilities(logits, Sampling(1.0, top_p=0.6)),
        [[0.0, 0.625, 0.375], [0.0, 1.0, 0.0]],
    )
    assert np.allclose(probabilities(logits, Sampling(2.0)).sum(axis=-1), 1.0)
    assert np.allclose(
        probabilities(logits, Sampling(1.0, top_p=1e-9)), [[0, 1, 0], [0, 1, 0]]
    )


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


def test_requests_are_independent_of_each_other(model: Llama) -> None:
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
    assert complete(Scheduler(model, 2), requests) == alone
    late = Scheduler(model, 8)
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


def test_cancelling_a_request_leaves_the_others_unchanged(model: Llama) -> None:
    scheduler = Scheduler(model, 2)
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
