"""Fine-tuning stages on two processes give the results of one.

Trainings whose rows cannot be split shard instead, and so do matrices with adapters;
other splits are set per job. Reward models, with a layer on top of the model, are both
sharded and split.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.checkout import ROOT
from gristmill.mixtures.schema.posttraining import Dpo, Reference, Tuning
from gristmill.train.loop.rows_read import READS
from tests.jsonl import read_metrics, write_jsonl
from tests.train.trained import weights_of

DATA_OF = {"sft": "sft_data", "reference": "dpo_data", "dpo": "dpo_data"}
READ = {
    "sft": {*Tuning.model_fields, READS},
    "reference": Reference.model_fields,
    "dpo": Dpo.model_fields,
}
WORKER = "tests.train.tuning_worker"
TRAINING = {
    "steps": 3,
    "global_batch_size": 5,
    "micro_batch_size": 2,
    "seed": 11,
    "log_every": 1,
    "sequence_length": 64,
    "schedule": {"warmup_steps": 1},
}


def training_jobs(
    folder: Path, inputs: dict[str, str], data: Path, prepared: Path
) -> list[dict[str, Any]]:
    """Jobs with adapters, whole models, references, preferences, a reward model, a
    teacher and rewarded answers.
    """
    chats, pairs = (
        {"data": [{"path": str(data / "sft.jsonl")}]},
        {"data": [{"path": str(data / "dpo.jsonl")}]},
    )
    rate = {"optimizer": {"learning_rate": 0.002}}
    tuned = {**inputs, "sft": str(folder / "adapters" / "data")}
    taught = {"teacher": "pretrain", "top_k": 7, "temperature": 2.0}
    answers = {
        **TRAINING,
        **chats,
        **rate,
        "global_batch_size": 6,
        "group_size": 2,
        "max_new_tokens": 5,
        "sequence_length": 32,
        "epochs_per_batch": 2,
        "holdout": 0.3,
        "rewards": [
            {"kind": "contains", "text": "e"},
            {"kind": "length", "target_tokens": 3},
        ],
    }
    return [
        {
            "stage": "sft",
            "folder": str(folder / "adapters"),
            "inputs": inputs,
            "parallel": {"context": 2},
            "config": {**TRAINING, **chats, **rate, "lora": {"rank": 3, "dora": True}},
        },
        {
            "stage": "sft",
            "folder": str(folder / "whole"),
            "inputs": inputs,
            "parallel": {"tensor": 2},
            "config": {
                **TRAINING,
                **chats,
                **rate,
            },
        },
        {
            "stage": "reference",
            "folder": str(folder / "reference"),
            "inputs": tuned,
            "config": {**pairs, "sequence_length": 64, "micro_batch_size": 2},
        },
        {
            "stage": "dpo",
            "folder": str(folder / "dpo"),
            "parallel": {"tensor": 2},
            "inputs": {**tuned, "reference": str(folder / "reference" / "data")},
            "config": {**TRAINING, **pairs, **rate, "lora": {"rank": 2}},
        },
        {
            "stage": "dpo",
            "folder": str(folder / "dpo whole"),
            "parallel": {"tensor": 2},
            "inputs": {**tuned, "reference": str(folder / "reference" / "data")},
            "config": {**TRAINING, **pairs, **rate},
        },
        {
            "stage": "reward",
            "folder": str(folder / "reward"),
            "inputs": tuned,
            "config": {
                **TRAINING,
                **pairs,
                **rate,
                "center_weight": 0.1,
                "holdout": 0.3,
            },
        },
        {
            "stage": "teacher",
            "folder": str(folder / "teacher"),
            "config": {**taught, "micro_batch_size": 1},
            "inputs": {
                **inputs,
                "sft_data": str(prepared / "adapters" / "prepared" / "data"),
            },
        },
        {
            "stage": "sft",
            "folder": str(folder / "taught"),
            "inputs": {**inputs, "teacher": str(folder / "teacher" / "data")},
            "config": {
                **TRAINING,
                **chats,
                **rate,
                "distill": {**taught, "kind": "jsd"},
            },
        },
        {
            "stage": "rl",
            "folder": str(folder / "rl"),
            "inputs": inputs,
            "config": answers,
        },
        {
            "stage": "rl",
            "folder": str(folder / "rl taught"),
            "inputs": inputs,
            "config": {
                **answers,
                "algorithm": "distill",
                "teacher": str(prepared / "whole" / "data" / "model"),
                "beta": 0.3,
            },
        },
    ]


def quantised_jobs(
    folder: Path, inputs: dict[str, str], data: Path, base: str
) -> list[dict[str, Any]]:
    """Jobs on a quantised model: adapters, a reference with micro-batches of one row,
    and rewarded answers.
    """
    chats, pairs = (
        {"data": [{"path": str(data / "sft.jsonl")}]},
        {"data": [{"path": str(data / "dpo.jsonl")}]},
    )
    tuning = {
        **TRAINING,
        "optimizer": {"learning_rate": 0.002},
        "lora": {"rank": 3, "base": base},
    }
    return [
        {
            "stage": "sft",
            "folder": str(folder / "adapters"),
            "inputs": inputs,
            "config": {**tuning, **chats},
            "parallel": {"shard": 2},
        },
        {
            "stage": "reference",
            "folder": str(folder / "reference"),
            "inputs": inputs,
            "config": {
                **pairs,
                "sequence_length": 64,
                "micro_batch_size": 1,
                "rounded": {"base": base},
            },
        },
        {
            "stage": "rl",
            "folder": str(folder / "rl"),
            "inputs": inputs,
            "parallel": {"replicate": 2},
            "config": {
                **tuning,
                **chats,
                "global_batch_size": 6,
                "group_size": 2,
                "max_new_tokens": 5,
                "holdout": 0.3,
                "sequence_length": 32,
                "kl_weight": 0.1,
                "rewards": [{"kind": "contains", "text": "e"}],
            },
        },
    ]


def tensor_parallel_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tensor-parallel copies of the jobs with a layer on top of the model."""
    return [
        {**job, "folder": f"{job['folder']} split", "parallel": {"tensor": 2}}
        for job in jobs
        if job["stage"] in ("reward", "rl")
    ]


def with_prepared_rows(job: dict[str, Any], prepared: Path) -> dict[str, Any]:
    """Let a job read the rows that one process has prepared for it."""
    if job["stage"] not in DATA_OF:
        return job
    name, rows = (
        DATA_OF[job["stage"]],
        prepared / Path(job["folder"]).name / "prepared" / "data",
    )
    config = {
        key: value for key, value in job["config"].items() if key in READ[job["stage"]]
    }
    return {**job, "config": config, "inputs": {**job["inputs"], name: str(rows)}}


def write_inputs(
    tokenizer_folder: Path, mix_folder: Path, folder: Path
) -> dict[str, Path]:
    """Write conversations and pairs, and return inputs of the pre-training."""
    words = ("json", "text", "file", "name", "list", "code", "line")
    write_jsonl(
        folder / "sft.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": word},
                    {"role": "assistant", "content": f"A {word}, {'so ' * number}."},
                ]
            }
            for number, word in enumerate(words)
        ],
    )
    write_jsonl(
        folder / "dpo.jsonl",
        [
            {
                "prompt": [{"role": "user", "content": word}],
                "chosen": [{"role": "assistant", "content": "yes " * number}],
                "rejected": [{"role": "assistant", "content": "no"}],
            }
            for number, word in enumerate(words, 1)
        ],
    )
    return {"tokenizer": tokenizer_folder, "mix": mix_folder}


def run_on_two(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Run stages in sequence on two processes."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    process = subprocess.run(
        [sys.executable, "-m", WORKER, "2", str(folder / "jobs.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stderr[-6000:]


@pytest.mark.slow
def test_two_processes_tune_like_one(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    inputs = write_inputs(tokenizer_folder, mix_folder, tmp_path)
    run_stage(
        "pretrain", inputs, {**pretrain_config, "steps": 2}, tmp_path / "pretrain"
    )
    stage_inputs = {
        **{name: str(path) for name, path in inputs.items()},
        "pretrain": str(tmp_path / "pretrain" / "data"),
    }
    for job in training_jobs(
        tmp_path / "one", stage_inputs, tmp_path, tmp_path / "one"
    ):
        run_stage(
            job["stage"],
            {name: Path(path) for name, path in job["inputs"].items()},
            job["config"],
            Path(job["folder"]),
        )
    jobs = training_jobs(tmp_path / "two", stage_inputs, tmp_path, tmp_path / "one")
    jobs_of_two = [
        with_prepared_rows(job, tmp_path / "one")
        for job in (*jobs, *tensor_parallel_jobs(jobs))
    ]
    run_on_two(jobs_of_two, tmp_path)
    for name in (
        "adapters",
        "whole",
        "dpo",
        "dpo whole",
        "reward",
        "reward split",
        "taught",
        "rl",
        "rl split",
        "rl taught",
        "rl taught split",
    ):
        ours, theirs = map(
            read_metrics,
            (tmp_path / "two" / name, tmp_path / "one" / name.removesuffix(" split")),
        )
        assert len(ours) == len(theirs) == 3
        if name.startswith("rl"):  # both draw the same answers
            assert [line["reward"] for line in ours] == [
                line["reward"] for line in theirs
            ]
        for line, expected in zip(ours, theirs, strict=True):
            compared = expected.keys() & {
                "loss",
                "grad_norm",
                "log_ratio/chosen",
                "divergence",
                "kl",
            }
            distinctive_keys = {
                "dpo": "log_ratio/chosen",
                "dpo whole": "log_ratio/chosen",
                "taught": "divergence",
                "rl": "kl",
                "rl split": "kl",
            }
            assert distinctive_keys.get(name, "loss") in compared
            for key in compared:
                assert line[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), (
                    name,
                    key,
                )
    tables = [
        pq.read_table(tmp_path / run / "reference" / "data" / "reference.parquet")
        for run in ("two", "one")
    ]
    assert tables[0]["id"].equals(tables[1]["id"])
    for column in ("chosen", "rejected", "chosen_tokens"):
        np.testing.assert_allclose(
            tables[0][column].to_numpy(), tables[1][column].to_numpy(), atol=2e-3
        )


@pytest.mark.parametrize("base", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_two_processes_share_a_quantised_model_with_equal_results(
    base: str,
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Log-probabilities of single rows are equal, and sums over processes equal up to
    rounding.
    """
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    inputs = write_inputs(tokenizer_folder, mix_folder, tmp_path)
    run_stage(
        "pretrain", inputs, {**pretrain_config, "steps": 2}, tmp_path / "pretrain"
    )
    stage_inputs = {
        **{name: str(path) for name, path in inputs.items()},
        "pretrain": str(tmp_path / "pretrain" / "data"),
    }
    summaries = {}
    for job in quantised_jobs(tmp_path / "one", stage_inputs, tmp_path, base):
        summaries[job["stage"]] = run_stage(
            job["stage"],
            {name: Path(path) for name, path in job["inputs"].items()},
            job["config"],
            Path(job["folder"]),
        )
    jobs = quantised_jobs(tmp_path / "two", stage_inputs, tmp_path, base)
    run_on_two([with_prepared_rows(job, tmp_path / "one") for job in jobs], tmp_path)
    tables = [
        pq.read_table(tmp_path / run / "reference" / "data" / "reference.parquet")
        for run in ("two", "one")
    ]
    assert tables[0].equals(tables[1])
    for name, stage in (("adapters", "sft"), ("rl", "rl")):
        ours, theirs = map(
            read_metrics, (tmp_path / "two" / name, tmp_path / "one" / name)
        )
        for line, expected in zip(ours, theirs, strict=True):
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)
            assert line["grad_norm"] == pytest.approx(
                expected["grad_norm"], rel=1e-3, abs=1e-5
            )
        summary = json.loads(
            (tmp_path / "two" / name / "data" / "summary.json").read_text()
        )
        share, full = summary["lora_base"], summaries[stage]["lora_base"]
        assert share["float32_bytes"] == full["float32_bytes"]
        # Processes of a replica divide the integers, a quarter or an eighth of float32,
        # and hold all scales.
        packed = (
            full["float32_bytes"] / (4 if base == "int8" else 8)
            if name == "adapters"
            else 0
        )
        assert share["bytes"] == full["bytes"] - packed / 2
    ours, theirs = (weights_of(tmp_path / run / "adapters") for run in ("two", "one"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
