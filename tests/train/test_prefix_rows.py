"""Prefix language modelling: ends of prefixes, attention within them, and unsupported
uses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.objectives.token_objectives import PrefixLm
from gristmill.train.data.batch import filled_positions
from gristmill.train.eval.likelihood import Request, score_requests
from gristmill.train.generation.scheduler import generate
from gristmill.train.models.attention import block_mask, document_numbers
from gristmill.train.models.gguf_model import GgufError, check_gguf
from gristmill.train.models.weights import load_model, read_shape
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.prediction_targets import Read
from gristmill.train.objectives.prefix_rows import PrefixCut

LENGTH = 24
POSITIONS = np.array(
    [[*range(9), *range(10), *[-1] * 5], [*range(1), *range(23)]], dtype=np.int32
)
GOLDEN = {(0, 0): 7, (0, 9): 4, (1, 0): 0, (1, 1): 16}
"""(row, start) of each document -> tokens of its prefix, at seed 5 in step 2."""


def read(positions: np.ndarray, numbers: Any = None) -> Read:
    rows = np.arange(len(positions)) if numbers is None else np.asarray(numbers)
    tokens = np.arange(positions.size).reshape(positions.shape).astype(np.uint16)
    return Read(tokens, positions, rows, np.zeros(len(rows), dtype=np.int64))


def test_each_document_has_a_prefix_and_its_remainder_is_predicted() -> None:
    laid = PrefixCut(PrefixLm(), 5)(read(POSITIONS), 2)
    assert laid.prefix is not None
    prefix_sizes = {
        (row, place): int(laid.prefix[row, place : place + size].sum())
        for (row, place), size in {(0, 0): 9, (0, 9): 10, (1, 0): 1, (1, 1): 23}.items()
    }
    assert prefix_sizes == GOLDEN
    for (row, place), size in {(0, 0): 9, (0, 9): 10, (1, 0): 1, (1, 1): 23}.items():
        prefix = GOLDEN[row, place]
        assert laid.prefix[row, place : place + prefix].all()
        predicted = [
            target - row * LENGTH
            for target in laid.targets[row, max(place - 1, 0) : place + size - 1]
            if target != IGNORED
        ]
        assert predicted == [*range(place + max(prefix, 1), place + size)]
    assert (laid.inputs == read(POSITIONS).tokens).all()
    assert (laid.targets[0, 18:] == IGNORED).all()


def test_prefixes_depend_on_seed_step_row_and_place_only() -> None:
    positions, cutter = (
        filled_positions(np.full(2000, 40), 40),
        PrefixCut(PrefixLm(least=0.25, most=0.75), 5),
    )
    laid = cutter(read(positions), 3)
    again = cutter(read(positions[:2], numbers=[7, 2]), 3)
    assert (again.prefix == laid.prefix[[7, 2]]).all()  # type: ignore[index]
    lengths = laid.prefix.sum(axis=1)  # type: ignore[union-attr]
    assert (lengths.min(), lengths.max()) == (10, 29)
    assert abs(lengths.mean() - 19.5) < 5 * np.sqrt(400 / 12 / 2000)
    for other_draws in (
        cutter(read(positions), 4),
        PrefixCut(cutter.section, 6)(read(positions), 3),
    ):
        assert (other_draws.prefix.sum(axis=1) != lengths).mean() > 0.9
    # UL2's S-denoiser: the last quarter of each row
    fixed = PrefixCut(PrefixLm(least=0.75, most=0.75), 5)(read(positions), 0)
    assert (fixed.prefix.sum(axis=1) == 30).all()  # type: ignore[union-attr]


def test_only_prefixes_are_attended_in_both_directions(
    tiny_shape: Any, make_model: Any
) -> None:
    model = make_model(replace(tiny_shape, document_mask=True, prefix_lm=True))
    ids = torch.randint(0, 100, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.from_numpy(POSITIONS[:1])
    prefix = torch.zeros(1, LENGTH, dtype=torch.bool)
    prefix[0, :4] = prefix[0, 9:15] = True
    before = model(ids, positions=positions, prefix=prefix)
    for place, affected in (
        (2, range(9)),
        (5, range(5, 9)),
        (14, range(9, 19)),
        (16, range(16, 19)),
    ):
        changed_ids = ids.clone()
        changed_ids[0, place] = (changed_ids[0, place] + 1) % 100
        differs = (
            model(changed_ids, positions=positions, prefix=prefix) - before
        ).abs().amax(dim=-1)[0] > 1e-7
        assert differs.nonzero().squeeze(1).tolist() == [*affected]
    # FlexAttention's mask, used on GPUs, equals the plain one.
    numbers = document_numbers(positions)
    mask_mod = block_mask(numbers, prefix).mask_mod
    pairs = torch.tensor(
        [
            [
                mask_mod(torch.tensor(0), None, torch.tensor(q), torch.tensor(k))
                for k in range(LENGTH)
            ]
            for q in range(LENGTH)
        ]
    )
    places = torch.arange(LENGTH)
    assert torch.equal(
        pairs,
        (numbers[0][:, None] == numbers[0]) & ((places[:, None] >= places) | prefix[0]),
    )


def test_prompts_are_prefixes_in_generation_and_tasks(
    tiny_shape: Any, make_model: Any
) -> None:
    model, prompt = (
        make_model(replace(tiny_shape, prefix_lm=True)),
        [5, 9, 40, 3, 77, 8],
    )
    (continuation, short), ids = (
        generate(model, [prompt, [9, 7]], 4, set()),
        list(prompt),
    )
    for _ in range(4):
        prefix = torch.arange(len(ids))[None] < len(prompt) - 1
        ids.append(int(model(torch.tensor([ids]), prefix=prefix)[0, -1].argmax()))
    assert continuation == ids[len(prompt) :]
    assert short == generate(model, [[9, 7]], 4, set())[0]
    (score,) = score_requests(model, [Request(tuple(prompt), (3, 1))])
    logits = model(torch.tensor([[*prompt, 3]]), prefix=torch.arange(7)[None] < 6)[
        0
    ].log_softmax(dim=-1)
    assert score.logp == pytest.approx((logits[5, 3] + logits[6, 1]).item(), abs=1e-5)


@pytest.mark.slow
def test_exported_model_has_equal_logits_in_transformers_given_the_mask(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage(
        "pretrain",
        {"tokenizer": tokenizer_folder, "mix": mix_folder},
        {**pretrain_config, "steps": 2, "prefix_lm": {}},
        tmp_path / "run",
    )
    run_stage(
        "export",
        {"tokenizer": tokenizer_folder, "pretrain": tmp_path / "run" / "data"},
        {},
        tmp_path / "out",
    )
    folder = tmp_path / "out" / "data"
    ours, theirs = (
        load_model(folder),
        AutoModelForCausalLM.from_pretrained(folder).eval(),
    )
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert ours.shape.prefix_lm
    ids = torch.randint(0, 400, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    prefix, places = (
        torch.arange(LENGTH)[None] < torch.tensor([[7], [15]]),
        torch.arange(LENGTH),
    )
    mask = ((places[:, None] >= places) | prefix[:, None, :])[:, None]
    with torch.no_grad():
        torch.testing.assert_close(
            ours(ids, prefix=prefix),
            theirs(ids, attention_mask=mask).logits,
            atol=1e-5,
            rtol=1e-5,
        )
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
        assert (ours(ids) - ours(ids, prefix=prefix)).abs().max() > 1e-4
    assert "prefix" in (folder / "README.md").read_text()
    with pytest.raises(GgufError, match=r"llama\.cpp"):
        check_gguf(read_shape(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"parallel": {"tensor": 2}}}, "prefix_lm"),
        ({"export": {"gguf": ["f16"]}}, "prefix_lm"),
        (
            {"pretrain": {"steps": 2, "prefix_lm": {}, "masked": {}}},
            "masked and prefix_lm",
        ),
        (
            {"pretrain": {"steps": 2, "prefix_lm": {"least": 0.5, "most": 0.2}}},
            r"least 0\.5 .*most 0\.2",
        ),
    ],
)
def test_setting_that_excludes_prefix_lm_is_rejected_before_any_work(
    stage_config: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain", **{"pretrain": {"steps": 2, "prefix_lm": {}}, **changes}
        )
