"""Reinforcement learning with tools: masked tool responses, recorded calls, and exact
resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from gristmill.mixtures.schema.rl import Rl
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.generation.scheduler import Request
from gristmill.train.models.model_config import Shape
from gristmill.train.models.weights import load_model, save_model
from gristmill.train.rl.policy import opinion_of
from gristmill.train.rl.rollout import Generated, Rollouts
from gristmill.train.rl.sampler import Sampler
from gristmill.train.rl.tools.tool_call import Used
from tests.jsonl import write_jsonl
from tests.needs_sandbox import skip_without_sandbox
from tests.train.test_resume import train, write_stage
from tests.train.test_rl import WORDS, killed_in, metrics, shape, tensors_of  # noqa: F401 - a fixture
from tests.train.test_tools import own_tool, spoken, total
from tests.train.trained import assert_same_output

LENGTH = 1200
COUNTING = '''
from pathlib import Path

def tool(path: str):
    """Counts all of its calls."""
    calls = Path(path).read_text() if Path(path).exists() else ""
    Path(path).write_text(calls + ".")
    if len(calls) % 5 == 4:
        raise ValueError("every fifth")
    return f"call {len(calls)}"
'''


@pytest.fixture
def start(
    tokenizer_folder: Path,
    mix_folder: Path,
    shape: Shape,  # noqa: F811
    tmp_path: Path,
) -> dict[str, Path]:
    """Inputs of the stage, with an untrained model that has room for a prompt with
    tools.
    """
    save_model(
        tmp_path / "start" / "model",
        replace(shape, sequence_length=LENGTH),
        tensors_of(shape),
    )
    return {
        "tokenizer": tokenizer_folder,
        "mix": mix_folder,
        "pretrain": tmp_path / "start",
    }


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, Any]:
    """Settings of a training with a tool."""
    path = tmp_path / "prompts.jsonl"
    write_jsonl(path, [{"prompt": word, "answer": word} for word in WORDS])
    return {
        "data": [{"path": str(path)}],
        "rewards": [{"kind": "contains", "text": "e"}],
        "group_size": 4,
        "global_batch_size": 8,
        "micro_batch_size": 8,
        "max_new_tokens": 200,
        "steps": 6,
        "log_every": 1,
        "seed": 5,
        "kl_weight": 0.1,
        "holdout": 0.0,
        "steps_per_batch": 2,
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"warmup_steps": 1, "kind": "constant"},
        "tools": [own_tool(tmp_path, COUNTING)],
        "turns": 3,
    }


@pytest.fixture
def config(
    plain: dict[str, Any],
    tmp_path: Path,
    start: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """The same settings, with a patched model that ends its turns with a call."""
    chat, draw = Chat(start["tokenizer"]), Sampler.draw

    def calling(sampler: Sampler, requests: Sequence[Request]) -> list[Generated]:
        call = spoken(
            chat,
            '<tool_call>{"name": "tool", "arguments": {"path": "'
            + str(tmp_path / "calls.txt")
            + '"}}</tool_call>',
        )
        drawn = draw(
            sampler, [replace(generated, max_new_tokens=4) for generated in requests]
        )
        return [
            Generated(
                [*generated.tokens[: -1 if generated.ended else None], *call], True
            )
            if request.max_new_tokens > len(call) + 4 and sum(request.prompt) % 3
            else generated
            for generated, request in zip(drawn, requests, strict=True)
        ]

    monkeypatch.setattr(Sampler, "draw", calling)
    return plain


@pytest.mark.slow
def test_tool_responses_are_recorded_and_not_trained_on(
    run_stage: Any,
    start: dict[str, Path],
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage("rl", start, config, tmp_path / "rl")
    chat, model = Chat(start["tokenizer"]), load_model(start["pretrain"] / "model")
    answers = (
        pq.ParquetFile(tmp_path / "rl" / "data" / "answers.parquet")
        .read_row_group(0)
        .to_pylist()
    )
    assert any(answer["used"] for answer in answers)
    for answer in answers:
        drawn = torch.tensor(answer["drawn"])
        assert int(drawn.sum()) == answer["tokens"]
        assert answer["turns"] == len({used["turn"] for used in answer["used"]}) + (
            0 if not answer["ended"] and bool(drawn.all()) and answer["used"] else 1
        )
        text = chat.decode(answer["answer_ids"], special=True)
        for used in answer["used"]:
            assert used["failed"] == used["answer"].startswith("error: ")
            if not drawn.all():
                assert f"<tool_response>\n{used['answer']}\n</tool_response>" in text
        ids = torch.tensor([*answer["prompt_ids"], *answer["answer_ids"]])
        logps = torch.log_softmax(model(ids[None])[0, :-1], -1).gather(
            1, ids[1:, None]
        )[len(answer["prompt_ids"]) - 1 :, 0]
        torch.testing.assert_close(
            torch.tensor(answer["logps"]), logps * drawn, atol=1e-4, rtol=0
        )
        for column in ("logps", "reference_logps", "advantages"):
            assert not torch.tensor(answer[column])[~drawn].any()
    first = metrics(tmp_path / "rl")[0]
    learned = answers[: config["global_batch_size"]]
    assert first["completions/mean_length"] == sum(
        answer["tokens"] for answer in learned
    ) / len(learned)
    assert first["completions/mean_turns"] == sum(
        answer["turns"] for answer in learned
    ) / len(learned)
    assert first["tools/call_frequency"] == sum(
        len(answer["used"]) for answer in learned
    ) / len(learned)
    failed = sum(used["failed"] for answer in learned for used in answer["used"])
    assert first["tools/failure_frequency"] == pytest.approx(
        failed / sum(len(answer["used"]) for answer in learned)
    )
    assert first["kl"] == 0.0
    assert first["clip_ratio"] == 0.0


def test_only_drawn_tokens_are_scored(start: dict[str, Path]) -> None:
    """Ids of a tool response affect later tokens only, and are not scored."""
    section = Rl.model_validate(
        {
            "data": [{"path": "a"}],
            "rewards": [{"kind": "exact"}],
            "steps": 1,
            "group_size": 2,
            "global_batch_size": 2,
            "max_new_tokens": 6,
            "tools": ["python"],
        }
    )
    rollouts = Rollouts(section, 12, 0)
    drawn = (True, True, False, False, True, True)
    used = (Used(1, "python", "{}", "error: x", True),)
    rollouts.put(
        torch.arange(2).numpy(),
        [[5, 6, 7]] * 2,
        [
            Generated([8, 9, tool_token, 11, 12, 13], True, drawn, used)
            for tool_token in (10, 20)
        ],
    )
    assert rollouts.used is not None
    assert rollouts.used.tolist() == [[2, 1, 1]] * 2
    assert rollouts.mask.tolist() == [list(drawn)] * 2
    opinion = opinion_of(
        load_model(start["pretrain"] / "model"),
        rollouts.part(torch.arange(2).numpy()),
        1.0,
    )
    assert (
        opinion.logps[:, 2:4].tolist()
        == opinion.entropies[:, 2:4].tolist()
        == [[0.0, 0.0]] * 2
    )
    assert opinion.logps[0, :2].tolist() == pytest.approx(opinion.logps[1, :2].tolist())
    assert abs(float(opinion.logps[0, 5] - opinion.logps[1, 5])) > 1e-7


@pytest.mark.slow
def test_killed_training_resumes_with_recorded_tool_responses(
    run_stage: Any,
    start: dict[str, Path],
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tool responds differently to each call; batches after the last checkpoint are
    reused.
    """
    run_stage("rl", start, config, tmp_path / "whole", checkpoint_every=100)
    (tmp_path / "calls.txt").unlink()
    with killed_in(4, monkeypatch):
        run_stage("rl", start, config, tmp_path / "killed", checkpoint_every=1000)
    calls = (tmp_path / "calls.txt").read_text()
    run_stage("rl", start, config, tmp_path / "killed", checkpoint_every=1000)
    assert (tmp_path / "calls.txt").read_text() == calls  # no tool was called again
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert_same_output(tmp_path / "killed", tmp_path / "whole", "answers.parquet")


@pytest.mark.slow
def test_prompt_offers_the_tools_of_its_record(
    run_stage: Any, start: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "described.jsonl"
    tools = [
        {"type": "function", "function": {"name": name}} for name in ("total", "quern")
    ]
    write_jsonl(
        path,
        (
            {"prompt": "a", "tools": tools[:1]},
            {"prompt": "b"},
            {"prompt": "c", "tools": tools},
        ),
    )
    summary = run_stage(
        "rl",
        start,
        {
            **config,
            "data": [{"path": str(path)}],
            "steps": 1,
            "tools": [*config["tools"], total()],
        },
        tmp_path / "rl",
    )
    (counts,) = summary["sets"]
    assert (counts["used"], counts["unrenderable"]) == (2, 1)
    assert "'quern'" in next(iter(counts["unrenderable_reasons"]))
    prompts = {
        answer["prompt"]: Chat(start["tokenizer"]).decode(answer["prompt_ids"])
        for answer in pq.read_table(
            tmp_path / "rl" / "data" / "answers.parquet"
        ).to_pylist()
    }
    assert ("Counts all" in prompts["a"], "Counts all" in prompts["b"]) == (False, True)


@pytest.mark.parallel
def test_two_ranks_answer_like_one(
    run_stage: Any, start: dict[str, Path], plain: dict[str, Any], tmp_path: Path
) -> None:
    skip_without_sandbox()
    config = {
        **plain,
        "steps": 2,
        "tools": [total(), {"python": {"seconds": 1}}],
        "curriculum": {},
    }
    run_stage("rl", start, config, tmp_path / "one")
    write_stage(tmp_path / "two", "rl", start, config, 100)
    train(tmp_path / "two", 2)
    one_rank, two_ranks = (
        pq.read_table(tmp_path / name / "data" / "answers.parquet").to_pylist()
        for name in ("one", "two")
    )
    assert [
        (row["id"], row["answer_ids"], row["drawn"], row["reward"]) for row in one_rank
    ] == [
        (row["id"], row["answer_ids"], row["drawn"], row["reward"]) for row in two_ranks
    ]
    assert {
        len(row["drawn"]) == len(row["answer_ids"]) == row["tokens"] for row in one_rank
    } == {True}
