"""Trainings whose length is set in epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.mixtures.schema.posttraining import Dpo, Sft
from gristmill.mixtures.schema.rl import Rl
from tests.jsonl import read_metrics, write_jsonl

DATA = {"data": [{"path": "a.jsonl"}]}


def test_epochs_are_converted_to_steps() -> None:
    assert (
        Sft.model_validate({**DATA, "epochs": 2.5, "global_batch_size": 4})
        .in_steps(10)
        .steps
        == 7
    )
    assert (
        Dpo.model_validate({**DATA, "epochs": 1, "global_batch_size": 4})
        .in_steps(12)
        .steps
        == 3
    )
    assert Dpo.model_validate({**DATA, "steps": 9}).in_steps(12).steps == 9


def test_epochs_of_rl_count_one_prompt_per_group() -> None:
    section = {
        **DATA,
        "rewards": [{"kind": "exact"}],
        "group_size": 8,
        "global_batch_size": 64,
    }
    assert Rl.model_validate({**section, "epochs": 1}).in_steps(17).steps == 3
    assert (
        Rl.model_validate({**section, "epochs": 1, "epochs_per_batch": 2})
        .in_steps(17)
        .steps
        == 6
    )


def test_section_with_epochs_is_read_again_from_its_json() -> None:
    """As a stage receives it."""
    section = Sft.model_validate({**DATA, "epochs": 1})
    assert Sft.model_validate(section.model_dump(mode="json")) == section


@pytest.mark.parametrize("length", [{}, {"steps": 1, "epochs": 1}, {"steps": 0}])
def test_length_is_set_in_either_steps_or_epochs(length: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="steps"):
        Sft.model_validate({**DATA, **length})


@pytest.mark.slow
def test_sft_reads_its_rows_once_per_epoch(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: Any,
    tmp_path: Path,
) -> None:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage(
        "pretrain", inputs, {**pretrain_config, "steps": 1}, tmp_path / "pretrain"
    )
    inputs["pretrain"] = tmp_path / "pretrain" / "data"
    path = tmp_path / "sft.jsonl"
    write_jsonl(
        path, [{"prompt": f"q {n}", "completion": f"The {n}."} for n in range(6)]
    )
    config = {
        "data": [{"path": str(path)}],
        "epochs": 2,
        "global_batch_size": 4,
        "log_every": 1,
        "seed": 1,
    }
    summary = run_stage(
        "sft",
        inputs,
        {**config, "sequence_length": 64, "packing": "none"},
        tmp_path / "sft",
    )
    lines = read_metrics(tmp_path / "sft")
    assert (summary["rows"], max(line["step"] for line in lines)) == (6, 3)
