"""The examples of docs/stream.md and docs/parts.md run, one after the other, and give what the pages say."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gristmill

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
pytest.importorskip("torchdata")
DOCS = Path(__file__).resolve().parents[2] / "docs"


def stand_in_for_torchtitan() -> ModuleType:
    """The interface of torchtitan 0.3's `components/dataloader.py`, as far as a loader of one's own needs it."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    class ParallelAwareDataloader(StatefulDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config:
            dataset: str = ""
            dataset_path: str | None = None
            num_workers: int = 0

        def __init__(self, dataset: Any, dp_rank: int, dp_world_size: int, **settings: Any) -> None:
            self.ranks = (dp_rank, dp_world_size)
            super().__init__(dataset, **settings)

    module = ModuleType("torchtitan.components.dataloader")
    module.ParallelAwareDataloader = ParallelAwareDataloader  # type: ignore[attr-defined]
    return module


def after_all_examples(page: str, folder: Path, mix_folder: Path) -> dict[str, Any]:
    """What the names of a page stand for after all its examples, with a packed set in the folder `packed`."""
    text, names = (DOCS / page).read_text(), {"__name__": "page"}
    shutil.copytree(mix_folder, folder / "packed")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("torchtitan", "torchtitan.components"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, "torchtitan.components.dataloader", stand_in_for_torchtitan())
        patch.setitem(sys.modules, "page", ModuleType("page"))
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}, example {number + 1}", "exec"), names)
    assert len(blocks) == text.count("```python") >= 6
    return {**names, "folder": folder}


@pytest.fixture(scope="module")
def shown(mix_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """After docs/stream.md."""
    return after_all_examples("stream.md", tmp_path_factory.mktemp("page"), mix_folder)


def batches(shown: dict[str, Any], **settings: Any) -> list[Any]:
    """The first ten batches of the page's set."""
    return list(gristmill.stream(shown["folder"] / "packed", batch_size=8, seed=1, epochs=1, **settings))


def test_a_stream_resumed_on_more_ranks_reads_the_rest_of_the_order(shown: dict[str, Any]) -> None:
    whole = batches(shown)
    assert torch.equal(shown["second"]["input_ids"], whole[1]["input_ids"][1::2])
    assert torch.equal(shown["third"]["input_ids"], whole[2]["input_ids"][3::4])


def test_a_loader_with_workers_is_resumed_behind_what_it_has_given(shown: dict[str, Any]) -> None:
    whole = batches(shown)
    assert [torch.equal(one["labels"], two["labels"]) for one, two in zip(shown["seen"], whole, strict=False)] == [
        True
    ] * 3
    assert torch.equal(shown["fourth"]["input_ids"], whole[3]["input_ids"])


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_the_trainer_of_transformers_resumes_in_the_middle_with_the_losses_of_one_that_ran_through(
    shown: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = losses(shown["whole"]), losses(shown["resumed"])
    assert len(whole) == len(resumed) == 6
    assert resumed == whole
    assert whole[-1] < whole[0]
    assert all(
        torch.equal(one, two)
        for one, two in zip(shown["whole"].model.parameters(), shown["resumed"].model.parameters(), strict=True)
    )
    # Without `seek` the Trainer reads again what it has read, and drops it.
    monkeypatch.chdir(shown["folder"])
    slow = shown["make_trainer"]("whole")
    slow.args.ignore_data_skip = False
    slow.train(resume_from_checkpoint="whole/checkpoint-3")
    assert losses(slow) == whole


def test_the_trainer_reads_the_rows_of_our_order(shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shown["folder"])
    trainer = shown["make_trainer"]("untrained")
    expected = torch.cat([batch["input_ids"] for batch in batches(shown)])
    read = [batch["input_ids"] for batch, _ in zip(trainer.get_train_dataloader(), range(20), strict=False)]
    assert torch.equal(torch.cat(read)[: len(expected)], expected)


def rows_of_a_process(rank: int, folder: Path, port: int) -> None:
    """What the Trainer gives one of two processes to compute on."""
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
        str(folder / "trained"), max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to="none"
    )
    trainer = Trainer(model, arguments, train_dataset=gristmill.stream(folder / "packed", seed=1))
    read = [batch["input_ids"] for batch, _ in zip(trainer.get_train_dataloader(), range(3), strict=False)]
    torch.save(read, folder / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_the_trainer_deals_the_whole_stream_out_to_its_processes(shown: dict[str, Any]) -> None:
    folder, whole = shown["folder"], batches(shown)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(rows_of_a_process, (folder, port), nprocs=2)  # type: ignore[no-untyped-call]
    read = [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]
    for step in range(3):
        assert torch.equal(torch.cat([read[0][step], read[1][step]]), whole[step]["input_ids"])


def test_the_loader_for_torchtitan_gives_input_positions_and_shifted_labels(shown: dict[str, Any]) -> None:
    inputs, labels, whole = shown["inputs"], shown["labels"], batches(shown)
    assert sorted(inputs) == ["input", "positions"]
    assert torch.equal(inputs["input"], whole[0]["input_ids"][0::2])
    assert torch.equal(labels[:, :-1], whole[0]["labels"][0::2][:, 1:])
    assert shown["loader"].ranks == (0, 2)


def test_the_parts_alone_do_what_their_page_says(mix_folder: Path, tmp_path: Path) -> None:
    shown = after_all_examples("parts.md", tmp_path, mix_folder)
    targets = gristmill.losses.next_tokens(shown["ids"])
    torch.manual_seed(0)
    assert shown["loss"].item() == pytest.approx(6.24, abs=0.2)  # ln 512, before anything is learned
    assert targets.shape == shown["ids"].shape
    assert shown["pair_losses"].tolist() == pytest.approx([0.6931472] * 2)  # the policy is the reference still: ln 2
    assert shown["packed"].tokens.tolist() == [[5, 6, 7, 8], [9, 5, 6, 7]]
    assert shown["packed"].fill == 1.0
    assert shown["schedulers"][0].get_last_lr()[0] == pytest.approx(0.02 * 2 / 5)
    losses = [line["loss"] for line in shown["found"]["metrics"]]
    assert (len(losses), shown["found"]["steps"]) == (3, 3)
    trained = [json.loads(line) for line in (tmp_path / "trained" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    assert trained[-1]["loss"] < trained[0]["loss"]
    page = (DOCS / "parts.md").read_text()
    named = {name for name in gristmill.losses.__all__ if not re.search(rf"\b{name}\b", page)}
    assert named == {"IGNORED"}
