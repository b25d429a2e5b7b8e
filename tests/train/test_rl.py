"""Reinforcement learning of a tiny model: learning, recorded answers, and rejected
settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from gristmill.dataprep.llm.client import AskingError
from gristmill.dataprep.rewards.answer_checks import NoAnswerError
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.rl import Rl
from gristmill.tokenize.encoding.tokenizer import load as load_tokenizer
from gristmill.train.checkpoint import Checkpoints
from gristmill.train.data.conversation_tokens import Chat, NothingToTrainError
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request, Scheduler, generate
from gristmill.train.loop.metrics_log import TIMINGS
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.reward_model import (
    load_reward_model,
    save_reward_model,
    with_new_score,
)
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn, load_model, save_model
from gristmill.train.rl.rewards import RewardModelError
from gristmill.train.rl.rollout_phase import Actor
from gristmill.train.rl.rollout_tables import TOKEN_COLUMNS
from gristmill.train.rl.sampler import drawn_by, sampling_of
from gristmill.train.stages.teacher import TeacherError
from tests.chat_endpoint import Endpoint, Raw, Refuse
from tests.jsonl import read_metrics, write_jsonl
from tests.train.trained import assert_same_output

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
TINY = Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48)


def tensors_of(shape: Shape, seed: int = 3) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        sizes = {
            name: parameter.shape for name, parameter in Llama(shape).named_parameters()
        }
    return {name: drawn(shape, seed)(name, size) for name, size in sizes.items()}


@pytest.fixture(scope="module")
def shape(tokenizer_folder: Path) -> Shape:
    return shape_of(TINY, load_tokenizer(tokenizer_folder).vocab_size, 32)


@pytest.fixture(scope="module")
def start(
    tokenizer_folder: Path,
    mix_folder: Path,
    shape: Shape,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """Inputs of the stage, with an untrained model."""
    folder = tmp_path_factory.mktemp("start")
    save_model(folder / "model", shape, tensors_of(shape))
    return {"tokenizer": tokenizer_folder, "mix": mix_folder, "pretrain": folder}


@pytest.fixture
def rl_config(tmp_path: Path) -> dict[str, Any]:
    """Settings that reward short answers with an "e"."""
    path = tmp_path / "prompts.jsonl"
    write_jsonl(path, [{"prompt": word, "answer": word} for word in WORDS])
    return {
        "data": [{"path": str(path)}],
        "rewards": [{"kind": "contains", "text": "e"}],
        "group_size": 4,
        "global_batch_size": 16,
        "micro_batch_size": 16,
        "max_new_tokens": 4,
        "steps": 20,
        "log_every": 1,
        "seed": 5,
        "kl_weight": 0.01,
        "holdout": 0.2,
        "samples_every": 8,
        "optimizer": {"learning_rate": 0.02},
        "schedule": {"warmup_steps": 1, "kind": "constant"},
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder)
    return [
        {key: value for key, value in line.items() if key not in TIMINGS}
        for line in lines
    ]


@contextmanager
def killed_in(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupt a training at the start of a step, after complete checkpoints."""
    before_step, save = Actor.before_step, Checkpoints.save

    def written(checkpoints: Checkpoints, *arguments: Any) -> None:
        save(checkpoints, *arguments)
        checkpoints.join()

    def killed(actor: Actor, number: int) -> None:
        before_step(actor, number)
        if number == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Actor, "before_step", killed)
        patched.setattr(Checkpoints, "save", written)
        with pytest.raises(KeyboardInterrupt):
            yield
    torch.distributed.destroy_process_group()


def mean_reward(lines: Sequence[dict[str, Any]]) -> float:
    return sum(line["reward"] for line in lines) / len(lines)


@pytest.mark.slow
def test_policy_learns_the_reward_and_records_its_answers(
    run_stage: Any, start: dict[str, Path], rl_config: dict[str, Any], tmp_path: Path
) -> None:
    summary = run_stage("rl", start, rl_config, tmp_path / "rl")
    lines = metrics(tmp_path / "rl")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert mean_reward(lines[:4]) < 0.5
    assert mean_reward(lines[-4:]) > 0.8
    assert summary["held_out"]["reward_before"] == 0.0
    assert summary["held_out"]["reward"] == 1.0
    # Before the first update, policy, reference and sampler are equal.
    assert (lines[0]["kl"], lines[0]["clip_ratio"]) == (0.0, 0.0)
    assert lines[-1]["kl"] > 0.0
    assert lines[0]["entropy"] == pytest.approx(
        torch.log(torch.tensor(float(400))).item(), abs=0.1
    )
    assert (
        lines[0]["rewards/contains"]
        == lines[0]["reward"]
        == summary["first_rewards"]["reward"]
    )
    assert summary["training_prompts"] + summary["held_out_prompts"] == len(WORDS)
    rollouts = json.loads((tmp_path / "rl" / "data" / "rollouts.json").read_text())
    assert [batch["step"] for batch in rollouts["batches"]] == [1, 9, 17, 20]
    assert all(
        answer["reward"] == float("e" in answer["answer"])
        for batch in rollouts["batches"]
        for answer in batch["answers"]
    )
    batches = pq.ParquetFile(tmp_path / "rl" / "data" / "answers.parquet")
    for line in lines:
        answers = batches.read_row_group(line["step"] - 1).to_pylist()
        assert sum(answer_["reward"] for answer_ in answers) / len(
            answers
        ) == pytest.approx(line["reward"])
        advantages = [
            answer_["advantage"] for answer_ in answers if answer_["reward"] == 0.0
        ]
        assert all(advantage <= 0.0 for advantage in advantages)
    assert not {*TOKEN_COLUMNS} & set(rollouts["batches"][0]["answers"][0])
    model = load_model(start["pretrain"] / "model")
    for answer_ in batches.read_row_group(0).to_pylist():
        # The start model, which is the reference, drew them: everything that the loss
        # needs is recomputed.
        ids = torch.tensor([*answer_["prompt_ids"], *answer_["answer_ids"]])
        logps = torch.log_softmax(model(ids[None])[0, :-1], dim=-1)
        answer_logps = logps.gather(1, ids[1:, None])[
            len(answer_["prompt_ids"]) - 1 :, 0
        ].tolist()
        assert answer_["logps"] == pytest.approx(answer_logps, abs=1e-4)
        assert answer_["reference_logps"] == answer_["logps"]
        assert len(answer_["answer_ids"]) == answer_["tokens"]
        assert sum(answer_["advantages"]) / answer_["tokens"] == pytest.approx(
            answer_["advantage"], abs=1e-6
        )
    trained = (tmp_path / "rl" / "data" / "prompts.txt").read_text().split()
    assert not set(trained) & {answer_["id"] for answer_ in rollouts["before"]}
    assert [answer_["id"] for answer_ in rollouts["before"]] == [
        answer_["id"] for answer_ in rollouts["after"]
    ]
    after = generate(
        load_model(tmp_path / "rl" / "data" / "model"),
        [
            Chat(start["tokenizer"])
            .encode([{"role": "user", "content": answer_["prompt"]}], prompt=True)
            .ids
            for answer_ in rollouts["after"]
        ],
        4,
        Chat(start["tokenizer"]).stops,
    )
    assert [Chat(start["tokenizer"]).decode(answer_) for answer_ in after] == [
        answer_["answer"] for answer_ in rollouts["after"]
    ]
    exported = run_stage(
        "export",
        {"tokenizer": start["tokenizer"], "rl": tmp_path / "rl" / "data"},
        {},
        tmp_path / "export",
    )
    assert exported["model"] == "rl"
    evaluation = run_stage(
        "evaluate",
        {**start, "rl": tmp_path / "rl" / "data"},
        {"bootstrap_samples": 10},
        tmp_path / "eval",
    )
    assert list(evaluation["models"]) == ["pretrain", "rl"]


BATCHES = {
    "steps_per_batch": 2,
    "epochs_per_batch": 2,
    "steps": 24,
    "global_batch_size": 32,
    "micro_batch_size": 32,
}


@pytest.mark.slow
def test_training_learns_and_resumes_within_a_batch(
    run_stage: Any,
    start: dict[str, Path],
    rl_config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**rl_config, **BATCHES}
    run_stage("rl", start, config, tmp_path / "whole", checkpoint_every=100)
    lines = metrics(tmp_path / "whole")
    assert mean_reward(lines[-4:]) > mean_reward(lines[:4]) + 0.3
    # Updates within a batch leave the policy that drew it; both epochs have the same
    # answers.
    assert lines[0]["reward"] == lines[2]["reward"] != lines[4]["reward"]
    assert any(line["clip_ratio"] > 0.0 for line in lines)
    with killed_in(11, monkeypatch):
        run_stage("rl", start, config, tmp_path / "killed", checkpoint_every=5)
    steps = sorted(
        path.parent.name
        for path in (tmp_path / "killed" / "work" / "checkpoints").glob(
            "*/complete.json"
        )
    )
    # the second is between the epochs of a batch
    assert steps == ["step-00000005", "step-00000010"]
    run_stage("rl", start, config, tmp_path / "killed", checkpoint_every=5)
    assert metrics(tmp_path / "killed") == lines
    for name in ("model/model.safetensors", "rollouts.json", "answers.parquet"):
        assert (tmp_path / "killed" / "data" / name).read_bytes() == (
            tmp_path / "whole" / "data" / name
        ).read_bytes()


@pytest.mark.slow
def test_rl_is_extended_and_keeps_earlier_answers(
    run_stage: Any, start: dict[str, Path], rl_config: dict[str, Any], tmp_path: Path
) -> None:
    config = {**rl_config, "steps": 6, "steps_per_batch": 2, "global_batch_size": 8}
    run_stage("rl", start, config, tmp_path / "short", checkpoint_every=5)
    checkpoint = tmp_path / "short" / "work" / "checkpoints" / "step-00000005"
    run_stage("rl", start, {**config, "steps": 10}, tmp_path / "whole")
    run_stage(
        "rl",
        start,
        {**config, "steps": 10, "continue_from": str(checkpoint)},
        tmp_path / "longer",
    )
    assert [line["step"] for line in metrics(tmp_path / "longer")] == list(range(6, 11))
    assert_same_output(tmp_path / "longer", tmp_path / "whole", "answers.parquet")


@pytest.mark.slow
def test_reference_of_adapters_is_the_base_model(
    run_stage: Any, start: dict[str, Path], rl_config: dict[str, Any], tmp_path: Path
) -> None:
    config = {
        **rl_config,
        "steps": 4,
        "lora": {"rank": 4},
        "kl_weight": 0.1,
        "holdout": 0.0,
        "rewards": [
            {"kind": "contains", "text": "e", "weight": 2.0},
            {"kind": "length", "target_tokens": 2},
        ],
    }
    summary = run_stage("rl", start, config, tmp_path / "rl")
    lines = metrics(tmp_path / "rl")
    assert lines[0]["kl"] == 0.0 < lines[-1]["kl"]
    assert lines[0]["reward"] == pytest.approx(
        2.0 * lines[0]["rewards/contains"] + lines[0]["rewards/length"]
    )
    assert summary["held_out"] is None
    assert (tmp_path / "rl" / "data" / "adapter" / "adapter_model.safetensors").exists()
    before, after = (
        load_file(folder / "model" / "model.safetensors")
        for folder in (start["pretrain"], tmp_path / "rl" / "data")
    )
    assert before.keys() == after.keys()
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    assert not torch.equal(
        before["model.layers.0.self_attn.q_proj.weight"],
        after["model.layers.0.self_attn.q_proj.weight"],
    )


@pytest.mark.slow
def test_distillation_learns_from_the_teacher_and_nothing_from_rewards(
    run_stage: Any, start: dict[str, Path], rl_config: dict[str, Any], tmp_path: Path
) -> None:
    """The teacher has learned to answer with an "e"; its student is not rewarded."""
    run_stage("rl", start, rl_config, tmp_path / "teacher")
    config = {
        **rl_config,
        "algorithm": "distill",
        "teacher": str(tmp_path / "teacher" / "data" / "model"),
    }
    run_stage("rl", start, config, tmp_path / "rl")
    lines = metrics(tmp_path / "rl")
    assert mean_reward(lines[:4]) < 0.5
    assert mean_reward(lines[-4:]) > 0.8
    assert sum(line["kl"] for line in lines[-4:]) < sum(
        line["kl"] for line in lines[:4]
    )
    batches = pq.ParquetFile(tmp_path / "rl" / "data" / "answers.parquet")
    answers = batches.read_row_group(0).to_pylist()
    teacher = load_model(tmp_path / "teacher" / "data" / "model")
    divergences = []
    for answer_ in answers:
        ids = torch.tensor([*answer_["prompt_ids"], *answer_["answer_ids"]])
        logps = torch.log_softmax(teacher(ids[None])[0, :-1], dim=-1)
        theirs = logps.gather(1, ids[1:, None])[len(answer_["prompt_ids"]) - 1 :, 0]
        assert answer_["reference_logps"] == pytest.approx(theirs.tolist(), abs=1e-3)
        divergences.append(torch.tensor(answer_["logps"]) - theirs)
    mean = torch.cat(divergences).mean()
    for answer_, divergence in zip(answers, divergences, strict=True):
        assert answer_["advantages"] == pytest.approx(
            (mean - divergence).tolist(), abs=1e-3
        )
    other = {**config, "steps": 2, "rewards": [{"kind": "length", "target_tokens": 2}]}
    run_stage("rl", start, {**config, "steps": 2}, tmp_path / "short")
    run_stage("rl", start, other, tmp_path / "other")
    weights = "data/model/model.safetensors"
    assert (tmp_path / "short" / weights).read_bytes() == (
        tmp_path / "other" / weights
    ).read_bytes()


def dense_divergence(
    student: Llama, teacher: Llama, answers: Sequence[dict[str, Any]], beta: float
) -> float:
    """Mean over the tokens of answers of beta KL(q || m) + (1 - beta) KL(p || m)."""
    divergences = []
    for answer in answers:
        ids = torch.tensor([[*answer["prompt_ids"], *answer["answer_ids"]]])
        p, q = (
            model(ids)[0, len(answer["prompt_ids"]) - 1 : -1].softmax(dim=-1)
            for model in (student, teacher)
        )
        m = beta * q + (1 - beta) * p
        divergences.append(
            beta * (q * (q / m).log()).sum(dim=1)
            + (1 - beta) * (p * (p / m).log()).sum(dim=1)
        )
    return torch.cat(divergences).mean().item()


@pytest.mark.slow
def test_divergence_of_whole_distributions_falls_and_resumes_within_a_batch(
    run_stage: Any,
    start: dict[str, Path],
    rl_config: dict[str, Any],
    shape: Shape,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_model(tmp_path / "teacher", shape, tensors_of(shape, seed=4))
    config = {
        **rl_config,
        "algorithm": "distill",
        "teacher": str(tmp_path / "teacher"),
        "beta": 0.3,
        "steps_per_batch": 2,
        "epochs_per_batch": 2,
        "steps": 20,
    }
    run_stage("rl", start, config, tmp_path / "whole", checkpoint_every=100)
    lines = metrics(tmp_path / "whole")
    answers = pq.ParquetFile(tmp_path / "whole" / "data" / "answers.parquet")
    expected = dense_divergence(
        load_model(start["pretrain"] / "model"),
        load_model(tmp_path / "teacher"),
        answers.read_row_group(0).to_pylist()[:16],
        0.3,
    )
    assert lines[0]["loss"] == pytest.approx(expected, rel=1e-4)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    with killed_in(6, monkeypatch):
        run_stage("rl", start, config, tmp_path / "killed", checkpoint_every=6)
    run_stage("rl", start, config, tmp_path / "killed", checkpoint_every=6)
    assert metrics(tmp_path / "killed") == lines
    assert_same_output(tmp_path / "killed", tmp_path / "whole", "answers.parquet")


def scored(teacher: Llama, tokenizer: Tokenizer) -> Callable[[str, int], Raw]:
    """Behaviour of vLLM's completions: log-probabilities of a prompt's tokens."""

    @torch.no_grad()
    def behaviour(prompt: str, before: int) -> Raw:
        ids = torch.tensor(json.loads(prompt))
        logps = torch.log_softmax(teacher(ids[None])[0, :-1], dim=-1)
        tokens = [
            {
                str(token): {
                    "logprob": logp[token].item(),
                    "decoded_token": tokenizer.decode(
                        [token], skip_special_tokens=False
                    ),
                }
            }
            for token, logp in zip(ids[1:].tolist(), logps, strict=True)
        ]
        choice = {"index": 0, "text": "", "prompt_logprobs": [None, *tokens]}
        return Raw(json.dumps({"choices": [choice]}).encode())

    return behaviour


def test_teacher_behind_an_endpoint_equals_the_same_teacher_in_a_folder(
    run_stage: Any,
    start: dict[str, Path],
    rl_config: dict[str, Any],
    shape: Shape,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed training asks for no answer again."""
    save_model(tmp_path / "teacher", shape, tensors_of(shape, seed=4))
    tokenizer = Tokenizer.from_file(str(start["tokenizer"] / "tokenizer.json"))
    monkeypatch.setenv("TEACHER_KEY", "secret")
    config = {
        **rl_config,
        "algorithm": "distill",
        "steps_per_batch": 2,
        "epochs_per_batch": 2,
        "steps": 8,
    }
    local = {**config, "teacher": str(tmp_path / "teacher")}
    run_stage("rl", start, local, tmp_path / "local", checkpoint_every=100)
    with Endpoint(scored(load_model(tmp_path / "teacher"), tokenizer)) as server:
        endpoint = {
            "endpoint": server.url,
            "model": "teacher",
            "api_key_env": "TEACHER_KEY",
        }
        remote = {**config, "teacher_endpoint": endpoint}
        run_stage("rl", start, remote, tmp_path / "remote", checkpoint_every=100)
        assert server.headers["authorization"] == "Bearer secret"
        asked = server.asked.copy()
        with killed_in(6, monkeypatch):
            run_stage("rl", start, remote, tmp_path / "killed", checkpoint_every=6)
        run_stage("rl", start, remote, tmp_path / "killed", checkpoint_every=6)
        assert server.asked == asked + asked
    for line, expected in zip(
        metrics(tmp_path / "remote"), metrics(tmp_path / "local"), strict=True
    ):
        for name in ("loss", "kl", "reward", "entropy"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "remote")
    tables = [
        pq.read_table(tmp_path / name / "data" / "answers.parquet").to_pylist()
        for name in ("remote", "local")
    ]
    for answer_, expected in zip(*tables, strict=True):
        assert answer_["answer_ids"] == expected["answer_ids"]
        for name in ("reference_logps", "advantages"):
            assert answer_[name] == pytest.approx(expected[name], abs=1e-4)


@pytest.mark.parametrize(
    ("reply", "error", "problem"),
    [
        (None, TeacherError, "vocabulary"),
        (Refuse(400, "no such token"), TeacherError, "no such token"),
        (Raw(b"{}"), AskingError, "not a chat completion"),
    ],
)
def test_endpoint_of_another_vocabulary_is_rejected_before_the_first_step(
    run_stage: Any,
    start: dict[str, Path],
    rl_config: dict[str, Any],
    shape: Shape,
    tmp_path: Path,
    reply: Any,
    error: type[Exception],
    problem: str,
) -> None:
    other = Tokenizer.from_file(str(start["tokenizer"] / "tokenizer.json"))
    other.decoder = None
    teacher = Llama(shape).requires_grad_(False)
    with Endpoint(
        scored(teacher, other) if reply is None else lambda prompt, before: reply
    ) as server:
        endpoint = {"endpoint": server.url, "model": "t", "patience_seconds": 0.1}
        config = {**rl_config, "algorithm": "distill", "teacher_endpoint": endpoint}
        with pytest.raises(error, match=problem):
            run_stage("rl", start, config, tmp_path / "rl")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"teacher": "folder"}, "either"),
        ({"beta": 0.5}, "whole distributions"),
        ({"temperature": 0.7}, "temperature"),
        ({"algorithm": "grpo"}, "no effect on grpo"),
        ({"teacher_endpoint": {"top_p": 0.9}}, "top_p"),
    ],
)
def test_settings_that_an_endpoint_cannot_follow_are_rejected(
    rl_config: dict[str, Any], settings: dict[str, Any], problem: str
) -> None:
    endpoint = {"endpoint": "http://127.0.0.1:1/v1", "model": "teacher"}
    config = {**rl_config, "algorithm": "distill", **settings}
    config["teacher_endpoint"] = {**endpoint, **settings.get("teacher_endpoint", {})}
    with pytest.raises(ValidationError, match=problem):
        Rl.model_validate(config)


def test_teacher_of_another_vocabulary_is_rejected(
    run_stage: Any, start: dict[str, Path], rl_config: dict[str, Any], tmp_path: Path
) -> None:
    shape = shape_of(TINY, 300, 32)
    save_model(tmp_path / "teacher", shape, tensors_of(shape))
    config = {**rl_config, "algorithm": "distill", "teacher": str(tmp_path / "teacher")}
    with pytest.raises(TeacherError, match=r"rl\.teacher.*300"):
        run_stage("rl", start, config, tmp_path / "rl")
    with pytest.raises(TeacherError, match=r"rl\.teacher.*nowhere"):
        run_stage(
            "rl",
            start,
            {**config, "teacher": str(tmp_path / "nowhere")},
            tmp_path / "x",
        )


@pytest.mark.parametrize("settings", [{"algorithm": "distill"}, {"teacher": "model"}])
def test_distillation_alone_has_a_teacher(
    rl_config: dict[str, Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"rl\.teacher"):
        Rl.model_validate({**rl_config, **settings})


def test_answers_do_not_depend_on_the_batch(start: dict[str, Path]) -> None:
    model, chat = load_model(start["pretrain"] / "model"), Chat(start["tokenizer"])
    prompts = [
        tuple(
            chat.encode([{"role": "user", "content": word}], prompt=True).ids.tolist()
        )
        for word in WORDS
    ]
    requests = [
        Request(ids, 6, chat.stops, sampling_of(1.0, 5, 3, word, index))
        for index, (ids, word) in enumerate(zip(prompts, WORDS, strict=True))
    ]
    together = drawn_by(Scheduler(model, 64), requests)
    assert drawn_by(Scheduler(model, 3), requests) == together
    assert [
        drawn_by(Scheduler(model, 1), [request])[0] for request in requests
    ] == together
    seeds = {
        sampling_of(1.0, *key).seed
        for key in (
            (5, 3, "a", 0),
            (6, 3, "a", 0),
            (5, 4, "a", 0),
            (5, 3, "b", 0),
            (5, 3, "a", 1),
        )
    }
    assert len(seeds) == 5


def test_stop_token_is_part_of_the_answer(start: dict[str, Path]) -> None:
    model, chat = load_model(start["pretrain"] / "model"), Chat(start["tokenizer"])
    ids = tuple(
        chat.encode([{"role": "user", "content": "json"}], prompt=True).ids.tolist()
    )
    (unstopped,) = drawn_by(
        Scheduler(model, 1), [Request(ids, 5, frozenset(), Sampling(1.0, seed=4))]
    )
    assert (len(unstopped.tokens), unstopped.ended) == (5, False)
    stop = next(token for token in unstopped.tokens if token != unstopped.tokens[0])
    (ended,) = drawn_by(
        Scheduler(model, 1), [Request(ids, 5, frozenset({stop}), Sampling(1.0, seed=4))]
    )
    assert ended.tokens == unstopped.tokens[: unstopped.tokens.index(stop) + 1]
    assert ended.ended


@pytest.fixture
def reward_folder(start: dict[str, Path], shape: Shape, tmp_path: Path) -> Path:
    tensors = {
        **tensors_of(shape),
        "score.weight": with_new_score(drawn(shape, 3), 1)(
            "score.weight", torch.Size([1, shape.width])
        ),
    }
    tensors = {
        name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"
    }
    save_reward_model(
        tmp_path / "reward" / "model", shape, tensors, [0], Chat(start["tokenizer"]).pad
    )
    return tmp_path / "reward"


@pytest.mark.slow
def test_reward_model_reads_conversations_as_in_its_training(
    run_stage: Any,
    start: dict[str, Path],
    rl_config: dict[str, Any],
    reward_folder: Path,
    tmp_path: Path,
) -> None:
    config = {**rl_config, "steps": 1, "rewards": [{"kind": "model"}], "holdout": 0.5}
    run_stage("rl", {**start, "reward": reward_folder}, config, tmp_path / "rl")
    chat, model = Chat(start["tokenizer"]), load_reward_model(reward_folder / "model")
    rollouts = json.loads((tmp_path / "rl" / "data" / "rollouts.json").read_text())
    for sample in rollouts["before"]:
        prompt_ids = chat.encode(
            [{"role": "user", "content": sample["prompt"]}], prompt=True
        ).ids.tolist()
        (answer,) = drawn_by(
            Scheduler(load_model(start["pretrain"] / "model"), 1),
            [Request(tuple(prompt_ids), 4, chat.stops, Sampling())],
        )
        tail = chat.encode(
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        )
        closing = (
            tail.ids[int((tail.turns > 0).nonzero()[0][-1]) + 1 :].tolist()
            if answer.ended
            else []
        )
        ids = torch.tensor([[*prompt_ids, *answer.tokens, *closing]])
        hidden, _ = model(ids, lambda hidden, matrix: (hidden, matrix))
        assert sample["reward"] == pytest.approx(
            float(hidden[0, -1] @ model.score.weight[0]), abs=1e-5
        )


def test_unrewardable_or_untrainable_prompts_are_rejected(
    run_stage: Any,
    start: dict[str, Path],
    rl_config: dict[str, Any],
    shape: Shape,
    tmp_path: Path,
) -> None:
    path = tmp_path / "without.jsonl"
    path.write_text(
        json.dumps({"prompt": "a"})
        + "\n"
        + json.dumps({"prompt": "b", "answer": "c"})
        + "\n"
    )
    unanswered = {
        **rl_config,
        "data": [{"path": str(path)}],
        "rewards": [{"kind": "exact"}],
    }
    for config, error, message in (
        (unanswered, NoAnswerError, "1 of 2 prompts .*'answer'.* exact"),
        (
            {**rl_config, "sequence_length": 8},
            NothingToTrainError,
            "12 prompts .* 4 tokens",
        ),
        ({**rl_config, "max_new_tokens": 32}, ValueError, "max_new_tokens"),
        (
            {**rl_config, "rewards": [{"kind": "model"}]},
            RewardModelError,
            "no section `reward:`",
        ),
    ):
        with pytest.raises(error, match=message):
            run_stage("rl", start, config, tmp_path / "rl")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
