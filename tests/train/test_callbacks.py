"""Callbacks of a training: their arguments, their effects, and errors of wrong ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.user_code import Own, OwnFunction, take_code
from gristmill.train import trainer
from gristmill.train.loop import step
from gristmill.train.loop.stopping import AgreedStop
from tests.jsonl import read_jsonl, write_jsonl
from tests.train.test_resume import finish, torchrun, train, write_stage
from tests.train.trained import assert_same_output

WATCH = """
import json
class Watch:
    def __init__(self, path, stop=None):
        self.path, self.stop = path, stop
    def record(self, event, metrics):
        plain = {k: v for k, v in metrics.items() if isinstance(v, (int, float, str, type(None)))}
        with open(self.path, "a") as sink:
            sink.write(json.dumps({"event": event, **plain}) + chr(10))
    def after_step(self, metrics):
        self.record("step", metrics)
        if metrics["step"] == self.stop:
            return "enough of it"
    def after_validation(self, metrics):
        self.record("validation", metrics)
    def on_checkpoint(self, metrics):
        self.record("checkpoint", metrics)
"""
COUNT = """
class Count:
    def __init__(self): self.seen = 0
    def after_step(self, metrics):
        self.seen += 1
        if self.seen == 9: return "seen nine"
    def state_dict(self): return {"seen": self.seen}
    def load_state_dict(self, state): self.seen = state["seen"]
"""


@pytest.fixture
def with_callback(
    stage_config: Any, pretrain_config: dict[str, Any], tmp_path: Path
) -> Any:
    """Settings of a pre-training with one callback from hooks.py: (source, name,
    options, ...) -> settings.
    """

    def configured(
        source: str,
        name: str,
        options: dict[str, Any] | None = None,
        **callback_keys: Any,
    ) -> dict[str, Any]:
        (tmp_path / "hooks.py").write_text(source)
        callback = {"use": f"./hooks.py:{name}", "with": options or {}, **callback_keys}
        config: dict[str, Any] = stage_config(
            "pretrain", pretrain={**pretrain_config, "callbacks": [callback]}
        )
        return config

    return configured


@pytest.mark.slow
def test_callback_sees_every_event_and_ends_the_training(
    run_stage: Any, with_callback: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = with_callback(WATCH, "Watch", {"path": str(tmp_path / "seen"), "stop": 7})
    shutil.rmtree(tmp_path / "manifest", ignore_errors=True)
    (tmp_path / "hooks.py").unlink()  # the stage has the code by value
    emitted: list[dict[str, Any]] = []
    summary = run_stage(
        "pretrain",
        inputs,
        config,
        tmp_path / "run",
        checkpoint_every=4,
        emit=emitted.append,
    )
    assert (summary["steps"], summary["stopped_early"]) == (7, True)
    assert summary["stopped_by"] == {
        "callback": "hooks:Watch",
        "step": 7,
        "reason": "enough of it",
    }
    calls = read_jsonl(tmp_path / "seen")
    assert [(call["event"], call["step"]) for call in calls] == [
        *(("step", step) for step in (1, 2, 3, 4)),
        ("checkpoint", 4),
        *(("step", step) for step in (5, 6)),
        ("validation", 6),
        ("step", 7),
        ("checkpoint", 7),
    ]
    assert [
        Path(call["path"]).name for call in calls if call["event"] == "checkpoint"
    ] == [
        "step-00000004",
        "step-00000007",
    ]
    logged = {
        call["step"]: call
        for call in read_jsonl(tmp_path / "run" / "data" / "metrics.jsonl")
        if "loss" in call
    }
    assert sorted(logged) == list(range(1, 8))
    for call in calls:
        if call["event"] == "step":  # the mean of one step, since every step is logged
            assert call["loss"] == pytest.approx(logged[call["step"]]["loss"], rel=1e-6)
            assert call["learning_rate"] == logged[call["step"]]["learning_rate"]
            assert call["grad_norm"] == pytest.approx(
                logged[call["step"]]["grad_norm"], rel=1e-6
            )
            assert call["tokens"] == logged[call["step"]]["tokens"]
    validation = summary["validation"]
    total = sum(call["tokens"] for call in validation.values())
    (validated,) = (call for call in calls if call["event"] == "validation")
    assert validated["validation_loss"] == pytest.approx(
        sum(call["loss"] * call["tokens"] for call in validation.values()) / total
    )
    (warning,) = (event["message"] for event in emitted if event["event"] == "warning")
    assert re.search("pretrain: hooks:Watch .* step 7 of 12: enough of it", warning)


@pytest.mark.slow
def test_observing_callback_changes_no_bit(
    run_stage: Any, with_callback: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = with_callback(WATCH, "Watch", {"path": str(tmp_path / "seen")})
    run_stage("pretrain", inputs, config, tmp_path / "watched")
    summary = run_stage(
        "pretrain", inputs, {**config, "callbacks": []}, tmp_path / "alone"
    )
    assert "stopped_by" not in summary
    assert_same_output(tmp_path / "watched", tmp_path / "alone")


@pytest.mark.slow
def test_stateful_callback_stops_a_resumed_training_at_the_same_step(
    run_stage: Any,
    with_callback: Any,
    inputs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = with_callback(COUNT, "Count")
    with monkeypatch.context() as patch:
        patch.setattr(step, "stop_requested", lambda: True)
        for _ in range(3):
            with pytest.raises(trainer.StoppedError):
                run_stage("pretrain", inputs, config, tmp_path / "run")
            torch.distributed.destroy_process_group()
    summary = run_stage("pretrain", inputs, config, tmp_path / "run")
    assert summary["stopped_by"] == {
        "callback": "hooks:Count",
        "step": 9,
        "reason": "seen nine",
    }
    # as if killed between the stop and the commit
    again = run_stage("pretrain", inputs, config, tmp_path / "run")
    assert (again["steps"], again["stopped_by"]) == (9, summary["stopped_by"])


@pytest.mark.slow
def test_stopped_training_continues_with_another_callback(
    run_stage: Any, with_callback: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    run_stage("pretrain", inputs, with_callback(COUNT, "Count"), tmp_path / "first")
    config = with_callback(COUNT.replace("9", "11"), "Count")
    config["continue_from"] = str(
        tmp_path / "first" / "work" / "checkpoints" / "step-00000009"
    )
    assert run_stage("pretrain", inputs, config, tmp_path / "second")["steps"] == 12


STOP = "def stop(metrics, at):\n    if metrics['step'] == at: return 'here'\n"


@pytest.mark.parallel
def test_two_ranks_stop_at_the_same_step(
    with_callback: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = with_callback(STOP, "stop", {"at": 5})
    write_stage(tmp_path / "two", "pretrain", inputs, config, 4)
    train(tmp_path / "two", 2)
    summary = json.loads((tmp_path / "two" / "work" / "result.json").read_text())
    assert (
        summary["steps"],
        summary["stopped_by"]["reason"],
        summary["world_size"],
    ) == (5, "here", 2)


@pytest.mark.parallel
def test_sigterm_of_one_rank_stops_both_with_a_checkpoint(
    with_callback: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    """Callbacks run on the first rank; the signal is part of the next step's sums."""
    source = (
        "import os, signal\n"
        "def interrupt(metrics, at):\n"
        "    if metrics['step'] == at: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    config = with_callback(source, "interrupt", {"at": 5})
    write_stage(tmp_path / "two", "pretrain", inputs, config, every=100)
    with torchrun(tmp_path / "two", 2) as process:
        assert finish(process) != 0
    log = (tmp_path / "two" / "log").read_text()
    assert log.count("asked to stop after step 6;") == 2, log
    (checkpoint,) = (tmp_path / "two" / "work" / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-00000006"
    assert (checkpoint / "complete.json").exists()


def test_request_to_stop_is_due_some_steps_later() -> None:
    stop = AgreedStop(lag=1)
    due = []
    for number_of_ranks in (0.0, 2.0, 2.0):
        stop.follow(torch.tensor(number_of_ranks))
        due.append(stop.is_due())
    assert due == [False, False, True]


@pytest.mark.parallel
def test_exception_in_a_callback_ends_both_ranks_with_its_message(
    with_callback: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = with_callback(
        "def stop(metrics):\n    if metrics['step'] == 6: metrics['nothing']\n", "stop"
    )
    write_stage(tmp_path / "two", "pretrain", inputs, config, every=4)
    with torchrun(tmp_path / "two", 2) as process:
        assert finish(process) != 0
    message = json.loads((tmp_path / "two" / "work" / "error.json").read_text())[
        "message"
    ]
    assert message == "hooks:stop failed: KeyError: 'nothing' (hooks.py, line 2)"
    assert (
        tmp_path / "two" / "work" / "checkpoints" / "step-00000004" / "complete.json"
    ).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            "def stop(metrics): ...",
            {"at": 3},
            r"hooks.py, line 1: stop\(metrics\) cannot be called with \(metrics\)",
        ),
        (
            "def stop(): ...",
            {},
            r"hooks.py, line 1: stop\(\) cannot be called with \(metrics\)",
        ),
        (
            "\nclass stop:\n    pass",
            {},
            r"hooks.py, line 2: stop .*after_step, after_validation",
        ),
        (
            "class stop:\n    def after_step(self): ...",
            {},
            r"stop.after_step\(\) cannot be called with \(metrics\)",
        ),
        (
            "class stop:\n    def __init__(self):\n        1 / 0\n    def "
            "after_step(self, m): ...",
            {},
            r"hooks:stop failed: ZeroDivisionError: division by zero \(hooks.py, line 3\)",
        ),
        ("raise RuntimeError('no')", {}, r"hooks.py defines no 'stop'"),
        (
            "def stop(metrics): return True",
            {},
            r"line 1: stop returned True after step",
        ),
        (
            "def stop(metrics): return {'scale': 2}",
            {},
            r"returned \{'scale': 2\} after step",
        ),
        (
            "def stop(metrics): metrics['loss'] = 0",
            {},
            r"TypeError: 'mappingproxy' object does not .* \(hooks.py, line 1",
        ),
        (
            "def stop(metrics): metrics['logged']['loss'] = 0",
            {},
            "TypeError: 'mappingproxy' object does not",
        ),
        (
            "def stop(metrics):\n    while True:\n        pass",
            {},
            r"hooks:stop failed: TimeLimitError: took longer than 0.5 s \(hooks.py, line [23]\)",
        ),
        (
            "import sys\ndef stop(metrics): sys.exit(3)",
            {},
            r"hooks:stop failed: SystemExit: 3 \(hooks.py, line 2\)",
        ),
        (
            "class stop:\n    def on_checkpoint(self, metrics): return 'enough'",
            {},
            r"stop returned 'enough' on a checkpoint",
        ),
        (
            "class stop:\n    def after_step(self, m): ...\n    def "
            "state_dict(self): return {1, 2}\n"
            "    def load_state_dict(self, s): ...",
            {},
            r"stop returned a state_dict that is not JSON: Object of type set",
        ),
    ],
)
def test_wrong_callback_ends_the_training_with_file_and_line(
    run_stage: Any,
    with_callback: Any,
    inputs: dict[str, Path],
    tmp_path: Path,
    source: str,
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises((ValueError, ManifestError), match=message):
        run_stage(
            "pretrain",
            inputs,
            with_callback(
                source,
                "stop",
                options,
                **({"time_limit_seconds": 0.5} if "while" in source else {}),
            ),
            tmp_path / "run",
        )


def test_recipe_includes_callbacks_and_the_intervals_that_they_see(
    with_callback: Any, stage_config: Any, pretrain_config: dict[str, Any]
) -> None:
    first = with_callback(STOP, "stop", {"at": 5})
    assert first["callbacks"] == [
        {
            "use": {
                "function": "hooks:stop",
                "files": {"hooks.py": STOP},
                "distribution": "",
            },
            "with": {"at": 5},
            "on": None,
            "time_limit_seconds": 600.0,
        }
    ]
    assert "callbacks" not in stage_config("pretrain", pretrain=pretrain_config)
    recipe = stage_config.recipe
    assert recipe("pretrain", pretrain={**pretrain_config, "log_every": 3}) == recipe(
        "pretrain", pretrain={**pretrain_config, "log_every": 4}
    )
    watched = {
        **pretrain_config,
        "callbacks": [{"use": "./hooks.py:stop", "with": {"at": 5}}],
    }
    assert recipe("pretrain", pretrain={**watched, "log_every": 3}) != recipe(
        "pretrain", pretrain={**watched, "log_every": 4}
    )
    assert recipe("pretrain", pretrain={**watched, "micro_batch_size": 3}) == recipe(
        "pretrain", pretrain={**watched, "micro_batch_size": 4}
    )


@pytest.mark.parametrize("stage", ["pretrain", "sft", "reward", "dpo", "rl"])
def test_every_training_stage_has_its_callbacks(
    stage_config: Any, tmp_path: Path, stage: str
) -> None:
    (tmp_path / "hooks.py").write_text(STOP)
    (tmp_path / "data.jsonl").write_text("{}\n")
    data = {} if stage == "pretrain" else {"data": [{"path": "data.jsonl"}]}
    rewards = {"rewards": [{"kind": "exact"}]} if stage == "rl" else {}
    callbacks = [
        {"use": "./hooks.py:stop", "with": {"at": 5}, "on": "after_validation"}
    ]
    config = stage_config(
        stage, **{stage: {"steps": 2, "callbacks": callbacks, **data, **rewards}}
    )
    (callback,) = config["callbacks"]
    assert (callback["use"]["function"], callback["with"], callback["on"]) == (
        "hooks:stop",
        {"at": 5},
        "after_validation",
    )


@pytest.mark.slow
def test_callback_ends_a_tuning(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    write_jsonl(
        tmp_path / "chats.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": f"Say {word}"},
                    {"role": "assistant", "content": word},
                ]
            }
            for word in ("json", "text", "file", "name")
        ],
    )
    (tmp_path / "hooks.py").write_text(STOP)
    run_stage("pretrain", inputs, {**pretrain_config, "steps": 1}, tmp_path / "start")
    stop = Own(
        **{
            "use": take_code(OwnFunction("./hooks.py:stop"), tmp_path),
            "with": {"at": 2},
        }
    )
    config = {
        "data": [{"path": str(tmp_path / "chats.jsonl")}],
        "steps": 4,
        "seed": 1,
        "global_batch_size": 2,
        "callbacks": [stop.model_dump(mode="json")],
    }
    summary = run_stage(
        "sft",
        {**inputs, "pretrain": tmp_path / "start" / "data"},
        config,
        tmp_path / "sft",
    )
    assert (summary["steps"], summary["stopped_by"]["reason"]) == (2, "here")
