"""User-defined rewards of `rl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.schema.rl import Rl
from tests.jsonl import write_jsonl
from tests.train.test_resume import train, write_stage

WORDS = (
    "json",
    "text",
    "file",
    "name",
    "list",
    "code",
    "line",
    "type",
    "value",
    "error",
    "module",
    "class",
)


@pytest.fixture
def start(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    tmp_path: Path,
    pretrain_config: Any,
) -> Any:
    """Inputs of the stage, with a model trained for one step."""
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage("pretrain", inputs, {**pretrain_config, "steps": 1}, tmp_path / "start")
    return {**inputs, "pretrain": tmp_path / "start" / "data"}


@pytest.fixture
def with_rewards(stage_config: Any, tmp_path: Path) -> Any:
    """Settings of `rl` with some rewards of rewards.py: (source, rewards) ->
    settings.
    """

    def configured(source: str, *rewards: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "rewards.py").write_text(source)
        write_jsonl(
            tmp_path / "prompts.jsonl",
            [
                {"prompt": f"Say {word}", "answer": word, "size": len(word)}
                for word in WORDS
            ],
        )
        config: dict[str, Any] = stage_config(
            "rl",
            rl={
                "data": [{"path": "prompts.jsonl"}],
                "rewards": list(rewards),
                "group_size": 4,
                "global_batch_size": 8,
                "micro_batch_size": 4,
                "max_new_tokens": 4,
                "steps": 3,
                "log_every": 1,
                "seed": 5,
                "holdout": 0.2,
                "optimizer": {"learning_rate": 0.02},
                "schedule": {"warmup_steps": 1, "kind": "constant"},
            },
        )
        return config

    return configured


def answers(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(
        folder / "data" / "answers.parquet"
    ).to_pylist()
    return rows


REWARDS = """
def count(completions, letter): return [c.count(letter) for c in completions]
def sizes(prompts, completions, answer, size, messages, factor, **others):
    assert len(set(map(len, (prompts, completions, answer, size, messages)))) == 1 and not others
    assert all(p == m[-1]["content"] == "Say " + a for p, m, a in zip(prompts, messages, answer))
    return [factor * s for s in size]
"""
COUNT = {"use": "./rewards.py:count", "with": {"letter": "e"}}
SIZES = {
    "use": "./rewards.py:sizes",
    "with": {"factor": 10},
    "columns": ["answer", "size", "messages"],
    "weight": 0.5,
    "name": "sizes",
}


@pytest.mark.slow
def test_answers_get_the_rewards_of_the_function(
    run_stage: Any, start: Any, with_rewards: Any, tmp_path: Path
) -> None:
    config = with_rewards(REWARDS, COUNT, SIZES, {"kind": "contains", "text": "a"})
    (tmp_path / "rewards.py").unlink()
    summary = run_stage("rl", start, config, tmp_path / "rl")
    rows = answers(tmp_path / "rl")
    assert len(rows) == 3 * 8
    for row in rows:
        letters, size = row["answer"].count("e"), 10.0 * len(row["right"])
        assert row["rewards"] == {
            "count": letters,
            "sizes": size,
            "contains": float("a" in row["answer"]),
        }
        assert row["reward"] == pytest.approx(
            letters + 0.5 * size + float("a" in row["answer"])
        )
    assert summary["first_rewards"]["rewards/sizes"] == pytest.approx(
        sum(row["rewards"]["sizes"] for row in rows[:8]) / 8
    )


@pytest.mark.parallel
def test_reward_that_compares_answers_is_the_same_on_two_ranks(
    run_stage: Any, start: Any, with_rewards: Any, tmp_path: Path
) -> None:
    source = (
        "def rare(completions): return [float(completions.index(c)) for c in "
        "completions]\n"
    )
    config = {**with_rewards(source, {"use": "./rewards.py:rare"}), "steps": 1}
    run_stage("rl", start, config, tmp_path / "one")
    write_stage(tmp_path / "two", "rl", start, config, 100)
    train(tmp_path / "two", 2)
    one_rank, two_ranks = answers(tmp_path / "one"), answers(tmp_path / "two")
    assert [row["rewards"] for row in one_rank] == [row["rewards"] for row in two_ranks]
    assert max(row["reward"] for row in one_rank) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "reward", "message"),
    [
        (
            "def f(completions): return [1.0]",
            {},
            "rewards.py, line 1: f returned 1 rewards for 8 completions",
        ),
        ("def f(completions): return 1.0", {}, r"f returned float for \d+ completions"),
        (
            "def f(completions): return [float('nan')] * len(completions)",
            {},
            "f returned nan for the completion '",
        ),
        (
            "def f(completions): return [None] * len(completions)",
            {},
            "f returned None for the completion '",
        ),
        (
            "\n\ndef f(completions):\n    return [int(c) for c in completions]",
            {},
            r"rewards:f failed: ValueError: invalid literal for int\(\) .* \(rewards.py, line 4\)",
        ),
        (
            "def f(completions):\n    while True: pass",
            {"time_limit_seconds": 0.5},
            r"rewards:f failed: TimeLimitError: took longer than 0.5 s \(rewards.py, line 2\)",
        ),
        (
            "def f(completions, colour): ...",
            {},
            "'colour', .*rl.rewards .* prompt, answer, size",
        ),
        (
            "def f(completions): ...",
            {"columns": ["size"]},
            "got an unexpected keyword argument 'size'",
        ),
        (
            "def f(completions, colour): ...",
            {"columns": ["colour"]},
            "'colour', .*rl.rewards .* prompt, answer, size",
        ),
        ("def f(completions): ...", {"kind": "exact"}, "unknown key"),
    ],
)
def test_wrong_reward_is_rejected_with_file_and_line(
    run_stage: Any,
    start: Any,
    with_rewards: Any,
    tmp_path: Path,
    source: str,
    reward: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises((ValueError, ManifestError), match=message):
        run_stage(
            "rl",
            start,
            with_rewards(source, {"use": "./rewards.py:f", **reward}),
            tmp_path / "rl",
        )


def test_rewards_need_distinct_names() -> None:
    data = {"data": [{"path": "a.jsonl"}], "steps": 1}
    same_name = [{"use": "./a.py:f"}, {"use": "./b.py:f"}]
    with pytest.raises(ValueError, match=r"\bf; .*`name`"):
        Rl(**data, rewards=same_name)
    assert [
        reward.kind
        for reward in Rl(
            **data, rewards=[same_name[0], {**same_name[1], "name": "g"}]
        ).rewards
    ] == [
        "own",
        "own",
    ]
