"""A tiny tokenizer, a tiny packed set, and stages run on them: in this process, or
under torchrun.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import socket
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.mixtures.base import Section
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.posttraining import DpoData, Reference, SftData
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.data.pairs import Pair
from gristmill.train.data.preference_rows import PairRows, write_pair_rows
from gristmill.train.loop.rows_read import READS
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn
from tests.train.decoder_families import save_tiny_decoder

SOURCES = ("prose", "code")
SEQUENCE_LENGTH = 32
DATA_OF: dict[str, tuple[str, type[Section]]] = {
    "sft": ("sft_data", SftData),
    "reference": ("dpo_data", DpoData),
    "dpo": ("dpo_data", DpoData),
}
"""Stage that writes the rows of a training, and the section whose keys it reads."""
TINY_MODEL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48}


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """Prose and code of the standard library."""
    return {
        "prose": " ".join(
            str(inspect.getdoc(module))
            for module in (json, contextlib, textwrap, socket, inspect)
        ),
        "code": inspect.getsource(textwrap) + inspect.getsource(contextlib),
    }


@pytest.fixture(scope="session")
def tokenizer_folder(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]
) -> Path:
    from gristmill.tokenize.encoding.bpe import train
    from gristmill.tokenize.encoding.tokenizer import write_tokenizer
    from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(
        train(TokenizerSample({name: [text] for name, text in texts.items()}, {}), 400),
        folder,
    )
    return folder


@pytest.fixture(scope="session")
def mix_folder(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_folder: Path,
    texts: dict[str, str],
) -> Path:
    from gristmill.tokenize.encoding.tokenizer import load
    from tests.packed_sets import write_packed_set

    tokenizer = load(tokenizer_folder)
    streams = {
        name: np.array(tokenizer.encode([text])[0].ids) for name, text in texts.items()
    }
    rows = {
        name: stream[: len(stream) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].reshape(
            -1, SEQUENCE_LENGTH
        )
        for name, stream in streams.items()
    }
    folder = tmp_path_factory.mktemp("mix")
    training = np.concatenate([rows["prose"][:40], rows["code"][:40]])
    # Two equal sources alternate in the merged order.
    write_packed_set(
        folder,
        training.reshape(2, 40, -1).transpose(1, 0, 2).reshape(80, -1),
        {"prose": 40, "code": 40},
        {
            "vocab_size": tokenizer.vocab_size,
            "eos": tokenizer.eos,
            "pad": tokenizer.pad,
            "sha256": tokenizer.sha256,
        },
        {name: part[40:44] for name, part in rows.items()},
    )
    return folder


@pytest.fixture(scope="session")
def tiny_shape() -> Shape:
    section = Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48)
    return shape_of(section, vocab_size=100, sequence_length=24)


@pytest.fixture(scope="session")
def make_model() -> Callable[[Shape], Llama]:
    """Make a model with weights larger than the initial ones, so that a mistake shows
    in the logits.
    """

    def make(shape: Shape) -> Llama:
        model = Llama(shape)
        tensor_of = drawn(shape, 3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(
                    tensor_of(name, parameter.shape)
                    * (8.0 if parameter.ndim > 1 else 1.0)
                )
        return model

    return make


@pytest.fixture
def pretrain_config() -> dict[str, Any]:
    return {
        "model": TINY_MODEL,
        "steps": 12,
        "global_batch_size": 6,
        "micro_batch_size": 4,
        "seed": 11,
        "log_every": 1,
        "validate_every": 6,
        "schedule": {"warmup_steps": 2},
        "optimizer": {"learning_rate": 0.01},
    }


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Environment of a single rank under torchrun, with one thread, since tensors are
    tiny.
    """
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():  # a failed stage leaves its process group
        torch.distributed.destroy_process_group()


@pytest.fixture
def make_pair_rows(tokenizer_folder: Path, tmp_path: Path) -> Callable[..., PairRows]:
    """Write rows of encoded pairs: (set -> pairs, tokens per row)."""

    def make(sets: dict[str, list[Pair]], length: int) -> PairRows:
        chat = Chat(tokenizer_folder)
        write_pair_rows(
            tmp_path / "pairs",
            sets,
            length,
            {"vocab_size": 400, "eos": 0, "pad": chat.pad},
            chat,
        )
        return PairRows(PackedSet(tmp_path / "pairs"))

    return make


RunStage = Callable[..., dict[str, Any]]


@pytest.fixture
def stop_pretraining(
    run_stage: RunStage, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Pre-train in this process, and stop as on SIGTERM after one step, `times`
    times.
    """
    from gristmill.train import trainer
    from gristmill.train.loop import step

    def stop(
        inputs: dict[str, Path], config: dict[str, Any], folder: Path, times: int = 2
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(step, "stop_requested", lambda: True)
            for _ in range(times):
                with pytest.raises(trainer.StoppedError):
                    run_stage("pretrain", inputs, config, folder)
                torch.distributed.destroy_process_group()

    return stop


@pytest.fixture
def run_stage(one_process: None) -> RunStage:
    """Run a stage in this process, and return its summary; further keywords are those
    of `Context`.

    `sft` with the keys of its data runs `sft_data` first, and `reference` and `dpo` run
    `dpo_data`; summaries are merged. A stage of the section `dpo` accepts the whole
    section.
    """

    def run(
        stage: str,
        inputs: dict[str, Path],
        config: dict[str, Any],
        folder: Path,
        checkpoint_every: int = 4,
        start_models: Mapping[str, str] | None = None,
        emit: Callable[[dict[str, Any]], None] = lambda event: None,
        **engine: Any,
    ) -> dict[str, Any]:
        import importlib

        from gristmill.core.stage_context import Context, Lineage
        from gristmill.mixtures.schema.engine import TrainingEngine

        data_summary: dict[str, Any] = {}
        if stage in DATA_OF and "data" in config:
            name, section = DATA_OF[stage]
            data_config = {
                key: config[key]
                for key in (*section.model_fields, READS)
                if key in config
            }
            data_summary = run(name, inputs, data_config, folder / "prepared")
            inputs = {**inputs, name: folder / "prepared" / "data"}
        if stage == "sft":
            config = {
                key: value
                for key, value in config.items()
                if key == "seed" or key not in data_config
            }
        if stage == "reference":
            config = {
                key: value
                for key, value in config.items()
                if key in Reference.model_fields
            }
        (folder / "work").mkdir(parents=True, exist_ok=True)
        context = Context(
            folder / "work",
            stage,
            training=TrainingEngine(checkpoint_every=checkpoint_every, **engine),
            lineage=Lineage(start_models=start_models or {}),
            emit=emit,
        )
        summary: dict[str, Any] = importlib.import_module(
            f"gristmill.train.stages.{stage}"
        ).run(inputs, config, folder / "data", context)
        json.dumps(summary, allow_nan=False)
        return {**data_summary, **summary}

    return run


class StageConfig:
    """Settings that a manifest of given sections passes to a stage; its files are in
    one folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, stage: str, **sections: Any) -> dict[str, Any]:
        """Return the settings as JSON gives them to a process."""
        config: dict[str, Any] = json.loads(
            json.dumps(dict(self._node(stage, sections).config))
        )
        return config

    def recipe(self, stage: str, **sections: Any) -> dict[str, Any]:
        """Return the settings that enter the fingerprint."""
        return dict(self._node(stage, sections).recipe)

    def _node(self, stage: str, sections: dict[str, Any]) -> Any:
        import yaml

        from gristmill.flows.stages.plan import make_plan
        from gristmill.mixtures.loader import load_manifest

        (self._folder / "a.txt").write_text("Some prose.")
        manifest = self._folder / "own.yaml"
        manifest.write_text(
            yaml.safe_dump(
                {
                    "name": "own",
                    "sources": {"a": {"path": "a.txt"}},
                    "tokenizer": {"vocab_size": 300},
                    "mix": {"tokens": 2000, "sequence_length": 32},
                    "pretrain": {"steps": 2},
                    **sections,
                }
            )
        )
        return make_plan(load_manifest(manifest))[stage]


@pytest.fixture
def stage_config(tmp_path: Path) -> StageConfig:
    """Settings of stages from a manifest in the folder of the test."""
    return StageConfig(tmp_path)


@pytest.fixture
def inputs(tokenizer_folder: Path, mix_folder: Path) -> dict[str, Path]:
    return {"tokenizer": tokenizer_folder, "mix": mix_folder}


@pytest.fixture
def given_model(run_stage: Any, inputs: dict[str, Path], tmp_path: Path) -> Any:
    """Inputs of a stage after the stage `model` took a tiny decoder of a family."""

    def given(family: str) -> dict[str, Path]:
        save_tiny_decoder(family, tmp_path / family)
        config = {"path": str(tmp_path / family), "implementation": "transformers"}
        run_stage("model", inputs, config, tmp_path / "given")
        return {**inputs, "model": tmp_path / "given" / "data"}

    return given
