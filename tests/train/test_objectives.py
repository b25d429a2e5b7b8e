"""Properties of every objective: training learns, sources add up, and results do not
depend on stops or processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.mixtures.objectives.span_objectives import SENTINEL
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.batch_plan import RowPlan
from gristmill.train.loop.prefetch import read_batch
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.prefix_rows import PrefixCut, PrefixLm
from tests.train.test_masked_rows import ENCODER, make_inputs
from tests.train.test_parallel import assert_same, train_on
from tests.train.trained import assert_same_output, steps_of

SHORT_FIRST = [{"until_step": 2, "sequence_length": 16}]
SECTIONS: dict[str, dict[str, Any]] = {
    "prefix": {"prefix_lm": {}, "length_ramp": SHORT_FIRST},
    "goldfish": {"goldfish": {"k": 3, "context": 4}, "length_ramp": SHORT_FIRST},
    "spans": {"span_corruption": {}, "model": ENCODER, "length_ramp": SHORT_FIRST},
    "ul2": {"ul2": {}, "model": ENCODER},
    "ul2-decoder": {"ul2": {"shape": "decoder"}},
    "blanks": {
        "blank_infilling": {"document_share": 0.3, "sentence_share": 0.2},
        "length_ramp": SHORT_FIRST,
    },
    "bert": {
        "masked": {"shape": "bert", "rate": 0.4},
        "model": ENCODER,
        "length_ramp": SHORT_FIRST,
    },
}


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]
) -> dict[str, Path]:
    """Inputs whose tokenizer has sentinels, mode tokens and blanks."""
    return make_inputs(
        tmp_path_factory,
        texts,
        [
            *(SENTINEL.format(n) for n in range(8)),
            "[R]",
            "[S]",
            "[X]",
            "[MASK]",
            "[gMASK]",
            "[sMASK]",
            "<sop>",
            "<eop>",
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_objective_learns_and_resumes_to_the_same_bits(
    run_stage: Any,
    stop_pretraining: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
    name: str,
) -> None:
    config = {**pretrain_config, **SECTIONS[name], "steps": 8, "validate_every": 8}
    run_stage("pretrain", inputs, config, tmp_path / "whole")
    steps = steps_of(tmp_path / "whole")
    assert np.mean([line["loss"] for line in steps[-3:]]) < steps[0]["loss"] - 0.2
    for line in steps:
        sources = line["sources"].values()
        total = sum(by_source["loss"] * by_source["tokens"] for by_source in sources)
        assert line["loss"] == pytest.approx(
            total / sum(by_source["tokens"] for by_source in sources), rel=1e-9
        )
    stop_pretraining(inputs, config, tmp_path / "cut", times=1)
    run_stage("pretrain", inputs, {**config, "micro_batch_size": 4}, tmp_path / "cut")
    assert_same_output(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parallel
def test_sharded_objective_trains_alike(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    configs = {
        name: {
            **pretrain_config,
            **section,
            "steps": 3,
            "validate_every": 3,
            "global_batch_size": 7,
            "micro_batch_size": 2,
            "optimizer": {"learning_rate": 0.002},
        }
        for name, section in SECTIONS.items()
        if name != "ul2-decoder"
    }  # the model of ul2-decoder is that of `prefix`
    for name, config in configs.items():
        run_stage("pretrain", inputs, config, tmp_path / name)
    train_on(
        2,
        [
            {
                "parallel": {"shard": 2},
                "folder": str(tmp_path / "two" / name),
                "continue": None,
                "config": config,
                "inputs": {
                    input_name: str(path) for input_name, path in inputs.items()
                },
                "checkpoint_every": 9,
            }
            for name, config in configs.items()
        ],
        tmp_path / "job",
    )
    for name in configs:
        assert_same(tmp_path / "two" / name, tmp_path / name, 1)


@pytest.mark.parametrize("size", [1, 2])
def test_batch_is_laid_out_once_with_the_same_weight_on_every_rank(
    inputs: dict[str, Path], tiny_shape: Any, size: int
) -> None:
    packed, laid_out = PackedSet(inputs["mix"]), list[int]()

    class Counted(PrefixCut):
        def __call__(self, read: Any, step: int) -> Any:
            laid_out.extend(read.rows.tolist())
            return super().__call__(read, step)

    objective = NextToken(
        packed, 3, torch.ones(400), tiny_shape, layout=Counted(PrefixLm(), 3)
    )
    plan = RowPlan(((0, 0, 8),))
    rows = plan.rows(objective.order, 2)
    weights = [
        read_batch(objective, plan, 2, 2, rank, size).weight for rank in range(size)
    ]
    assert sorted(laid_out) == sorted(rows.tolist() * size)
    assert weights == [objective.weight(rows, step=2)] * size
