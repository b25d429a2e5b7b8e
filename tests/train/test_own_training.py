"""Examples of docs/own-training.md: each block of Python is the file that it names,
each of YAML a manifest.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from gristmill.flows.models.evaluate_model import EvaluationError, read_task_file
from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.schema.evaluation import OwnMetric, Task
from gristmill.mixtures.schema.posttraining import LossSettings, OwnLoss
from gristmill.mixtures.user_code import OwnCodeError, OwnFunction, take_code
from gristmill.train.eval.harness import own_metric
from gristmill.train.objectives.preference_losses import PairLogps, preference_loss
from tests.jsonl import read_metrics, write_jsonl

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "own-training.md"
BLOCK = re.compile(r"^```(python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(heading: str) -> dict[str, Any]:
    """Read the files and the manifest of one section of the guide."""
    (section,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", GUIDE.read_text(), re.MULTILINE | re.DOTALL
    )
    blocks = BLOCK.findall(section)
    files = {
        re.match(r"# (\S+\.py)\n", text)[1]: text
        for kind, text in blocks
        if kind == "python"
    }  # type: ignore[index]
    (manifest,) = (yaml.safe_load(text) for kind, text in blocks if kind == "yaml")
    return {"files": files, "manifest": manifest}


@pytest.fixture
def configured(stage_config: Any, tmp_path: Path) -> Any:
    """Settings of a stage from an example: (heading, stage, further settings) ->
    settings.
    """

    def settings(
        heading: str, stage: str, section: str | None = None, **changes: Any
    ) -> dict[str, Any]:
        example = examples(heading)
        for name, text in example["files"].items():
            (tmp_path / name).write_text(text)
        section = section or stage
        example["manifest"][section] = {**example["manifest"][section], **changes}
        config: dict[str, Any] = stage_config(stage, **example["manifest"])
        return config

    return settings


@pytest.mark.slow
def test_callbacks_of_the_guide_end_a_training(
    run_stage: Any,
    configured: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
) -> None:
    # At a rate of nearly zero, the validation loss does not improve measurably.
    small = {
        **pretrain_config,
        "steps": 30,
        "validate_every": 2,
        "optimizer": {"learning_rate": 1e-12},
    }
    summary = run_stage(
        "pretrain",
        inputs,
        configured("Callbacks", "pretrain", **small),
        tmp_path / "flat",
    )
    assert summary["stopped_by"]["callback"] == "hooks:StopOnPlateau"
    assert summary["stopped_by"]["reason"].startswith("the held-out loss is ")
    assert summary["steps"] < 30


@pytest.mark.slow
def test_rewards_of_the_guide_reward_answers(
    run_stage: Any,
    configured: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
) -> None:
    write_jsonl(
        tmp_path / "prompts.jsonl",
        [
            {"prompt": f"Name a {word}", "tests": ["e", word[0]]}
            for word in ("module", "class", "file", "list", "text", "type")
        ],
    )
    run_stage("pretrain", inputs, {**pretrain_config, "steps": 1}, tmp_path / "start")
    config = configured(
        "Rewards", "rl", steps=1, group_size=2, global_batch_size=4, max_new_tokens=4
    )
    summary = run_stage(
        "rl",
        {**inputs, "pretrain": tmp_path / "start" / "data"},
        config,
        tmp_path / "rl",
    )
    answers = pq.read_table(tmp_path / "rl" / "data" / "answers.parquet").to_pylist()
    assert list(summary["first_rewards"]) == [
        "reward",
        "rewards/ends_politely",
        "rewards/passes",
        "rewards/length",
    ]
    for row in answers:
        first = row["prompt"].removeprefix("Name a ")[0]
        assert (
            row["rewards"]["passes"]
            == (("e" in row["answer"]) + (first in row["answer"])) / 2
        )


@pytest.mark.slow
def test_optimizer_of_the_guide_learns(
    run_stage: Any,
    configured: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
) -> None:
    settings = {
        key: value for key, value in pretrain_config.items() if key != "optimizer"
    }
    summary = run_stage(
        "pretrain",
        inputs,
        configured("Optimizers", "pretrain", **settings),
        tmp_path / "run",
    )
    assert summary["last_loss"] < summary["first_loss"] - 0.01


@pytest.mark.slow
def test_schedule_of_the_guide_sets_the_rate(
    run_stage: Any,
    configured: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
) -> None:
    settings = {
        key: value for key, value in pretrain_config.items() if key != "schedule"
    }
    run_stage(
        "pretrain",
        inputs,
        configured("Schedules", "pretrain", **{**settings, "steps": 10}),
        tmp_path / "run",
    )
    lines = read_metrics(tmp_path / "run")
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert rates == pytest.approx([0.01, 0.005] * 5)


@pytest.mark.slow
def test_loss_of_the_guide_learns_preferences(
    run_stage: Any,
    configured: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
) -> None:
    write_jsonl(
        tmp_path / "pairs.jsonl",
        [
            {"prompt": f"Name a {word}", "chosen": f"The {word}", "rejected": "No"}
            for word in (
                "module",
                "class",
                "file",
                "list",
                "text",
                "type",
                "name",
                "value",
            )
        ],
    )
    run_stage("pretrain", inputs, {**pretrain_config, "steps": 1}, tmp_path / "start")
    config = configured(
        "Losses over pairs",
        "dpo",
        steps=4,
        global_batch_size=4,
        log_every=1,
        optimizer={"learning_rate": 0.003},
    )
    inputs = {**inputs, "pretrain": tmp_path / "start" / "data"}
    shared = {
        key: config[key]
        for key in ("data", "precision", "micro_batch_size")
        if key in config
    }
    run_stage("reference", inputs, shared, tmp_path / "reference")
    summary = run_stage(
        "dpo",
        {**inputs, "reference": tmp_path / "reference" / "data"},
        config,
        tmp_path / "dpo",
    )
    # softplus(0.5) while the model equals its reference
    assert summary["step_0"]["loss"] == pytest.approx(0.974077, abs=1e-5)
    assert summary["objective"] == "hinged_dpo"
    assert summary["last_loss"] < summary["first_loss"]


@pytest.mark.slow
def test_metrics_of_the_guide_measure_models(
    run_stage: Any,
    configured: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
) -> None:
    write_jsonl(
        tmp_path / "words.jsonl",
        [
            {"prompt": f"Return the {word}", "answer": word}
            for word in ("module", "name", "object")
        ],
    )
    run_stage("pretrain", inputs, pretrain_config, tmp_path / "start")
    config = configured(
        "Metrics of evaluation tasks", "evaluate", prompts=[], bootstrap_samples=20
    )
    evaluation = run_stage(
        "evaluate",
        {**inputs, "pretrain": tmp_path / "start" / "data"},
        config,
        tmp_path / "evaluate",
    )
    task = evaluation["models"]["pretrain"]["tasks"]["words"]
    assert set(task["same_first_letter"]) == {"value", "low", "high"}
    assert set(task["variety"]) == {"value"}
    assert task["variety"]["value"] in (1 / 3, 2 / 3, 1.0)


@pytest.mark.slow
def test_model_of_the_guide_learns_and_is_evaluated(
    run_stage: Any,
    configured: Any,
    pretrain_config: dict[str, Any],
    inputs: dict[str, Path],
    tmp_path: Path,
) -> None:
    settings = {key: value for key, value in pretrain_config.items() if key != "model"}
    summary = run_stage(
        "pretrain",
        inputs,
        configured("Models", "pretrain", **settings),
        tmp_path / "run",
    )
    assert summary["last_loss"] < summary["first_loss"] - 0.1
    config = configured("Models", "evaluate", max_new_tokens=4, bootstrap_samples=10)
    evaluation = run_stage(
        "evaluate",
        {**inputs, "pretrain": tmp_path / "run" / "data"},
        config,
        tmp_path / "evaluate",
    )
    assert set(evaluation["models"]["pretrain"]["sources"]) == {"prose", "code"}


# Wrong losses and metrics


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def f(a, b): ...",
            r"own.py, line 1: f\(a, b\) cannot be called with \(chosen_logps, rejected_logps, ref_chosen",
        ),
        (
            "def f(c, r, c0, r0): return c.sum()",
            r"f returned a tensor of shape \(\); .* 3 losses",
        ),
        (
            "def f(c, r, c0, r0): return [1.0]",
            "own.py, line 1: f returned list; .* 3 losses",
        ),
        (
            "def f(c, r, c0, r0): return (c - r).detach()",
            "own.py, line 1: .*no gradient",
        ),
        (
            "def f(c, r, c0, r0):\n    return c[5]",
            r"own:f failed: IndexError: .* \(own.py, line 2\)",
        ),
    ],
)
def test_wrong_loss_is_rejected_with_file_and_line(
    tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    section = OwnLoss(use=take_code(OwnFunction("./own.py:f"), tmp_path))
    chosen, rejected = (
        torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        torch.tensor([-2.0, -2.0, -2.0]),
    )
    logps = PairLogps(
        chosen, rejected, chosen.detach(), rejected, torch.ones(3), torch.ones(3)
    )
    with pytest.raises(OwnCodeError, match=message):
        preference_loss(logps, LossSettings(loss=section, beta=0.1))


def test_reimplemented_sigmoid_equals_the_built_in_loss(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch.nn.functional as F\ndef f(c, r, c0, r0, beta):\n"
        "    return -F.logsigmoid(beta * ((c - c0) - (r - r0)))\n"
    )
    section = OwnLoss(
        **{"use": take_code(OwnFunction("./own.py:f"), tmp_path), "with": {"beta": 0.3}}
    )
    chosen, rejected, first, second = torch.randn(4, 5).unbind()
    logps = PairLogps(chosen, rejected, first, second, torch.ones(5), torch.ones(5))
    for ours, theirs in zip(
        preference_loss(logps, LossSettings(loss=section, beta=0.3)),
        preference_loss(logps, LossSettings(beta=0.3)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def samples(*answers: str) -> list[dict[str, Any]]:
    """Answered items, as lm-evaluation-harness returns them."""
    return [
        {"filtered_resps": [answer], "doc": {"target": target}}
        for answer, target in zip(answers, (["yes", "yep"], ["no"]), strict=True)
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def f(predictions): ...",
            r"own.py, line 1: f\(predictions\) cannot be called with \(predictions, references\)",
        ),
        (
            "def f(p, r): return [1.0]",
            r"own.py, line 1: f returned values of shape \(1,\) for 2 items",
        ),
        ("def f(p, r): return [1.0, float('nan')]", "f returned nan for item 2"),
        ("def f(p, r): return float('inf')", "f returned inf"),
        ("def f(p, r): return None", "f returned nan"),
        (
            "def f(p, r):\n    while True: pass",
            r"own:f failed: TimeLimitError: took longer than 0.5 s \(own.py, line 2\)",
        ),
        (
            "def f(p, r): return 'good'",
            r"own:f failed: ValueError: could not convert string to float: 'good'",
        ),
        (
            "def f(p, r):\n    return [{}[x] for x in p]",
            r"own:f failed: KeyError: 'yes' \(own.py, line 2\)",
        ),
    ],
)
def test_wrong_metric_is_rejected_with_file_and_line(
    tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(OwnCodeError, match=message):
        own_metric(
            OwnMetric(
                use=take_code(OwnFunction("./own.py:f"), tmp_path),
                time_limit_seconds=0.5,
            ),
            samples("yes", "maybe"),
        )


def test_metric_gets_all_references_and_returns_values_or_a_number(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(
        "def each(p, r): return [float(x in y) for x, y in zip(p, r)]\n"
        "def whole(p, r, add): return sum(map(len, r)) + add\n"
    )
    functions = {
        name: take_code(OwnFunction(f"./own.py:{name}"), tmp_path)
        for name in ("each", "whole")
    }
    assert own_metric(
        OwnMetric(use=functions["each"]), samples("yep", "yep")
    ).tolist() == [1.0, 0.0]
    assert (
        own_metric(
            OwnMetric(**{"use": functions["whole"], "with": {"add": 4}}),
            samples("", ""),
        )
        == 7.0
    )


def test_metric_needs_a_generative_task_and_a_distinct_name() -> None:
    task = {"name": "a", "path": "a.jsonl", "metrics": [{"use": "./own.py:f"}]}
    with pytest.raises(ValueError, match=r"\bf .*kind cloze"):
        Task(**task, kind="cloze")
    for uses in (["exact_match"], ["f", "f"]):
        metrics = [{"use": f"./own.py:{use}"} for use in uses]
        with pytest.raises(ValueError, match=rf"{uses[0]}; .*`name`"):
            Task(**{**task, "kind": "generate", "metrics": metrics})


def test_unknown_loss_is_rejected_with_the_known_ones(stage_config: Any) -> None:
    with pytest.raises(
        ManifestError, match=r"dpo.loss: .*'sigmoid', 'cdpo'.* \(got 'sigmod'\)"
    ):
        stage_config(
            "dpo", dpo={"data": [{"path": "a.jsonl"}], "steps": 1, "loss": "sigmod"}
        )


def test_task_file_may_name_metrics_beside_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(p, r): ...\n")
    (tmp_path / "tasks.yaml").write_text(
        "tasks: [{name: a, path: a.jsonl, kind: generate, metrics: [{use: "
        "'./own.py:f'}]}]\n"
    )
    (task,) = read_task_file(tmp_path / "tasks.yaml").tasks
    assert (task.path, task.metrics[0].use.taken) == (
        str(tmp_path / "a.jsonl"),
        True,
    )
    (tmp_path / "own.py").write_text("def g(p, r): ...\n")
    with pytest.raises(EvaluationError, match=r"tasks.yaml: own.py defines no 'f'"):
        read_task_file(tmp_path / "tasks.yaml")


@pytest.mark.parametrize(
    ("source", "sections", "message"),
    [
        (
            "def f(step): ...",
            {"pretrain": {"steps": 2, "schedule": {"use": "./own.py:f"}}},
            r"own.yaml:\d+: pretrain.schedule.use: own.py, line 1: f\(step\) cannot be called with \(step, steps\)",
        ),
        (
            "import no_such_thing\ndef f(metrics, *, limit: int, least=1): ...",
            {"pretrain": {"steps": 2, "callbacks": [{"use": "./own.py:f"}]}},
            r"f\(metrics, \*, limit, least=None\) cannot be called with \(metrics\): missing a required .*argument: 'limit'",
        ),
        (
            "class f:\n    def __init__(self, patience): ...",
            {
                "pretrain": {
                    "steps": 2,
                    "callbacks": [{"use": "./own.py:f", "with": {"patiense": 3}}],
                }
            },
            r"f\(patience\) cannot be called with: patiense: ",
        ),
        (
            "class f:\n    def __init__(self, parameters, lr): ...\n",
            {
                "pretrain": {
                    "steps": 2,
                    "optimizer": {"use": "./own.py:f", "with": {"beta": 3}},
                }
            },
            r"f\(parameters, lr\) cannot be called with \(params\) and w",
        ),
        (
            "def f(): ...",
            {"pretrain": {"steps": 2, "model": {"use": "./own.py:f"}}},
            r"f\(\) cannot be .* \(vocab_size\)",
        ),
        (
            "def f(c, r): ...",
            {
                "dpo": {
                    "steps": 2,
                    "data": [{"path": "a.jsonl"}],
                    "loss": {"use": "./own.py:f"},
                }
            },
            r"dpo.loss.use: own.py, line 1: f\(c, r\) cannot be called with \(chosen_logps, rejected_logps, ref_",
        ),
        (
            "def f(completions): ...",
            {
                "rl": {
                    "steps": 2,
                    "data": [{"path": "a.jsonl"}],
                    "rewards": [{"use": "./own.py:f", "columns": ["tests"]}],
                }
            },
            r"f\(completions\) cannot be called with: completions, tests",
        ),
    ],
)
def test_uncallable_function_is_rejected_without_executing_its_module(
    stage_config: Any,
    tmp_path: Path,
    source: str,
    sections: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / "own.py").write_text(
        f"{source}\nraise SystemExit('the module was executed')\n"
    )
    with pytest.raises(ManifestError, match=message):
        stage_config("pretrain", **sections)


@pytest.mark.parametrize(
    "source",
    [
        "import functools\n@functools.cache\ndef f(step): ...",
        "class Base:\n    def __init__(self, step, steps): ...\nclass f(Base): ...",
        "f = lambda: 3",
        "def f(*arguments, **options): ...",
    ],
)
def test_signature_unknown_from_the_source_is_left_to_the_stage(
    stage_config: Any, tmp_path: Path, source: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    schedule = {"use": "./own.py:f", "with": {"low": 0.1}}
    assert stage_config("pretrain", pretrain={"steps": 2, "schedule": schedule})[
        "schedule"
    ]["with"] == {"low": 0.1}
