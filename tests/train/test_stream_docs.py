"""Runnable examples of docs/stream.md and docs/parts.md, in page order, and their
promised results.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gristmill
from tests.jsonl import read_jsonl

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
pytest.importorskip("torchdata")
DOCS = Path(__file__).resolve().parents[2] / "docs"


def run_examples(page: str, folder: Path, mix_folder: Path) -> dict[str, Any]:
    """Run all examples of a page beside a packed set in `packed`, and return their
    names.
    """
    text, names = (DOCS / page).read_text(), {"__name__": "page"}
    shutil.copytree(mix_folder, folder / "packed")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "page", ModuleType("page"))
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}, example {number + 1}", "exec"), names)
    assert len(blocks) == text.count("```python") >= 5
    return {**names, "folder": folder}


@pytest.fixture(scope="module")
def names(mix_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Names after the examples of docs/stream.md."""
    return run_examples("stream.md", tmp_path_factory.mktemp("page"), mix_folder)


def batches(names: dict[str, Any], **settings: Any) -> list[Any]:
    """Batches of the first epoch of the page's set."""
    return list(
        gristmill.stream(
            names["folder"] / "packed", batch_size=8, seed=1, epochs=1, **settings
        )
    )


def test_stream_resumes_on_more_ranks(names: dict[str, Any]) -> None:
    expected = batches(names)
    assert torch.equal(names["second"]["input_ids"], expected[1]["input_ids"][1::2])
    assert torch.equal(names["third"]["input_ids"], expected[2]["input_ids"][3::4])


def test_loader_with_workers_resumes(names: dict[str, Any]) -> None:
    expected = batches(names)
    assert len(names["seen"]) == 3
    for batch, full_batch in zip(names["seen"], expected, strict=False):
        assert torch.equal(batch["labels"], full_batch["labels"])
    assert torch.equal(names["fourth"]["input_ids"], expected[3]["input_ids"])


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_transformers_trainer_resumes_with_the_losses_of_an_uninterrupted_one(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_losses, resumed_losses = losses(names["whole"]), losses(names["resumed"])
    assert len(full_losses) == len(resumed_losses) == 6
    assert resumed_losses == full_losses
    assert full_losses[-1] < full_losses[0]
    assert all(
        torch.equal(parameter, resumed_parameter)
        for parameter, resumed_parameter in zip(
            names["whole"].model.parameters(),
            names["resumed"].model.parameters(),
            strict=True,
        )
    )
    # Without `seek` the Trainer rereads and drops the rows of earlier steps.
    monkeypatch.chdir(names["folder"])
    slow = names["make_trainer"]("whole")
    slow.args.ignore_data_skip = False
    slow.train(resume_from_checkpoint="whole/checkpoint-3")
    assert losses(slow) == full_losses


def test_transformers_trainer_reads_rows_in_our_order(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(names["folder"])
    trainer = names["make_trainer"]("untrained")
    expected = torch.cat([batch["input_ids"] for batch in batches(names)])
    read = [
        batch["input_ids"]
        for batch, _ in zip(trainer.get_train_dataloader(), range(20), strict=False)
    ]
    assert torch.equal(torch.cat(read)[: len(expected)], expected)


def save_batches_of_rank(rank: int, folder: Path, port: int) -> None:
    """Save the batches that the Trainer gives one of two processes."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    arguments = TrainingArguments(
        str(folder / "trained"),
        max_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
    )
    trainer = Trainer(
        model, arguments, train_dataset=gristmill.stream(folder / "packed", seed=1)
    )
    read = [
        batch["input_ids"]
        for batch, _ in zip(trainer.get_train_dataloader(), range(3), strict=False)
    ]
    torch.save(read, folder / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_transformers_trainer_distributes_the_stream_over_processes(
    names: dict[str, Any],
) -> None:
    folder, expected = names["folder"], batches(names)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(save_batches_of_rank, (folder, port), nprocs=2)  # type: ignore[no-untyped-call]
    read = [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]
    for step in range(3):
        assert torch.equal(
            torch.cat([read[0][step], read[1][step]]), expected[step]["input_ids"]
        )


def test_examples_of_parts_give_the_promised_results(
    mix_folder: Path, tmp_path: Path
) -> None:
    names = run_examples("parts.md", tmp_path, mix_folder)
    targets = gristmill.losses.next_tokens(names["ids"])
    torch.manual_seed(0)
    # ln 512, before training
    assert names["loss"].item() == pytest.approx(6.24, abs=0.2)
    assert targets.shape == names["ids"].shape
    assert names["pair_losses"].tolist() == pytest.approx(
        [0.6931472] * 2
    )  # ln 2: the policy still equals the reference
    assert names["packed"].tokens.tolist() == [[5, 6, 7, 8], [9, 5, 6, 7]]
    assert names["packed"].fill == 1.0
    assert names["schedulers"][0].get_last_lr()[0] == pytest.approx(0.02 * 2 / 5)
    losses = [line["loss"] for line in names["result"]["metrics"]]
    assert (len(losses), names["result"]["steps"]) == (3, 3)
    trained = read_jsonl(tmp_path / "trained" / "metrics.jsonl")
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    assert trained[-1]["loss"] < trained[0]["loss"]
    page = (DOCS / "parts.md").read_text()
    undocumented = {
        name for name in gristmill.losses.__all__ if not re.search(rf"\b{name}\b", page)
    }
    assert undocumented == {"IGNORED"}
