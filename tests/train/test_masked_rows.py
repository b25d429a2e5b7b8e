"""Masked language modelling: masked tokens, encoder training, and restrictions of
encoders.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.objectives.token_objectives import Masked
from gristmill.tokenize.encoding.tokenizer import load, write_tokenizer
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.batch import filled_positions
from gristmill.train.eval.masked_tokens import MEASURED
from gristmill.train.models.weights import WeightsError, load_model
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.masked_rows import Masking, NoMaskTokenError, masking_of
from gristmill.train.objectives.prediction_targets import Read, draws
from tests.packed_sets import write_packed_set
from tests.train.test_parallel import assert_same, train_on
from tests.train.trained import assert_same_output, steps_of, weights_of

MASK, LENGTH = "<|mask|>", 32
GOLDEN_PLACES = [2, 3, 4, 5, 10, 12]
ENCODER = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48}


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]
) -> dict[str, Path]:
    """Inputs whose tokenizer has a mask token."""
    return make_inputs(tmp_path_factory, texts, [MASK])


def make_inputs(
    tmp_path_factory: pytest.TempPathFactory,
    texts: dict[str, str],
    special_tokens: list[str],
) -> dict[str, Path]:
    """Make a tokenizer of 400 ids with some special tokens, and a packed set of its
    tokens.
    """
    from gristmill.tokenize.encoding.bpe import train
    from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

    folder, mix = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("mix")
    sample = TokenizerSample({name: [text] for name, text in texts.items()}, {})
    write_tokenizer(train(sample, 400, special_tokens=special_tokens), folder)
    tokenizer = load(folder)
    rows = {
        name: np.array(tokenizer.encode([text])[0].ids)[: 44 * LENGTH].reshape(
            44, LENGTH
        )
        for name, text in texts.items()
    }
    training = np.stack([part[:40] for part in rows.values()], axis=1).reshape(
        80, LENGTH
    )
    write_packed_set(
        mix,
        training,
        {"prose": 40, "code": 40},
        tokenizer.described(),
        {name: part[40:] for name, part in rows.items()},
    )
    return {"tokenizer": folder, "mix": mix}


@pytest.fixture
def config(pretrain_config: dict[str, Any]) -> dict[str, Any]:
    return {**pretrain_config, "model": ENCODER, "masked": {}}


@pytest.fixture
def rows(inputs: dict[str, Path]) -> np.ndarray:
    return PackedSet(inputs["mix"]).read(np.arange(80))


def masking(inputs: dict[str, Path], seed: int = 5, **section: Any) -> Masking:
    return masking_of(Masked.model_validate(section), load(inputs["tokenizer"]), seed)


def mask_rows(
    masking_: Masking, rows: np.ndarray, step: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    return masking_(read(rows), step)[:2]


def read(
    rows: np.ndarray, filled: int | None = None, numbers: np.ndarray | None = None
) -> Read:
    """Make rows whose padding starts after `filled` tokens."""
    positions = filled_positions(
        np.full(len(rows), rows.shape[1] if filled is None else filled), rows.shape[1]
    )
    numbers = np.arange(len(rows)) if numbers is None else numbers
    return Read(rows, positions, numbers, np.zeros(len(rows), dtype=np.int64))


@pytest.mark.slow
def test_encoder_learns_and_its_sources_add_up(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    run_stage("pretrain", inputs, {**config, "steps": 30}, tmp_path)
    steps = steps_of(tmp_path)
    assert abs(steps[0]["loss"] - math.log(400)) < 0.2
    assert np.mean([line["loss"] for line in steps[-5:]]) < steps[0]["loss"] - 0.3
    for line in steps:
        sources = line["sources"].values()
        tokens = sum(source["tokens"] for source in sources)
        assert 0.15 * 6 * LENGTH < tokens < 0.45 * 6 * LENGTH
        assert line["loss"] == pytest.approx(
            sum(by_source["loss"] * by_source["tokens"] for by_source in sources)
            / tokens,
            rel=1e-12,
        )


def test_masking_keeps_the_shares_of_bert(
    inputs: dict[str, Path], rows: np.ndarray
) -> None:
    """15 % of 64,000 tokens, of which 80 % become the mask token and 10 % others,
    within five deviations.
    """
    tokens = np.tile(rows, (25, 1))
    masking_ = masking(inputs, rate=0.15)
    ids, targets = mask_rows(masking_, tokens)
    chosen = targets != IGNORED
    assert (ids[~chosen] == tokens[~chosen]).all()
    assert (targets[chosen] == tokens[chosen]).all()
    count = int(chosen.sum())
    assert abs(chosen.mean() - 0.15) < 5 * math.sqrt(0.15 * 0.85 / chosen.size)
    masked = (ids[chosen] == masking_.mask).mean()
    assert abs(masked - 0.8) < 5 * math.sqrt(0.8 * 0.2 / count)
    assert abs((ids[chosen] == tokens[chosen]).mean() - 0.1) < 0.01 + 5 * math.sqrt(
        0.1 * 0.9 / count
    )


def test_masking_depends_on_seed_step_row_and_place_only(
    inputs: dict[str, Path], rows: np.ndarray
) -> None:
    masking_ = masking(inputs)
    ids, targets = mask_rows(masking_, rows, step=3)
    numbers = np.array([7, 2])
    again = masking_(read(rows[numbers], numbers=numbers), 3)
    assert (again.inputs == ids[numbers]).all()
    assert (again.targets == targets[numbers]).all()
    for masked_rows_ in (
        mask_rows(masking_, rows, step=4),
        mask_rows(masking(inputs, seed=6), rows, step=3),
    ):
        assert 0.2 < (masked_rows_[1] != targets).mean() < 0.7


def test_masks_are_golden(inputs: dict[str, Path]) -> None:
    """Other draws would change a resumed training."""
    _, targets = mask_rows(masking(inputs), np.arange(100, 132)[None], step=2)
    assert np.flatnonzero(targets[0] != IGNORED).tolist()[:6] == GOLDEN_PLACES


def test_special_tokens_and_padding_are_never_masked(
    inputs: dict[str, Path], rows: np.ndarray
) -> None:
    masking_, tokens = masking(inputs, rate=0.9), rows.copy()
    tokens[:, ::4] = load(inputs["tokenizer"]).eos
    masked_ = masking_(read(tokens, 20), 0)
    assert (masked_.targets[:, ::4] == IGNORED).all()
    assert (masked_.targets[:, 20:] == IGNORED).all()
    assert (masked_.targets[:, 1:20:4] != IGNORED).mean() > 0.7


@pytest.mark.parametrize("whole_words", [False, True])
def test_masking_equals_that_of_transformers_at_the_same_draws(
    inputs: dict[str, Path],
    texts: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    whole_words: bool,
) -> None:
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    text, tokenizer = " ".join(texts["prose"].split()), load(inputs["tokenizer"])
    encoded = tokenizer.tokenizer.encode(text)
    ids, offsets = (
        np.array(encoded.ids)[None, :600],
        np.array(encoded.offsets)[None, :600],
    )
    # transformers recognises words by gaps between tokens, so that blanks belong to no
    # token.
    offsets[..., 0] += np.array([text[start] == " " for start in offsets[0, :, 0]])
    shares = {"mask_share": 1.0, "random_share": 0.0} if whole_words else {}
    masking_ = masking(inputs, rate=0.3, whole_words=whole_words, **shares)
    collator = DataCollatorForLanguageModeling(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.tokenizer,
            mask_token=MASK,
            eos_token="<|endoftext|>",
        ),
        whole_word_mask=whole_words,
        mlm_probability=0.3,
        mask_replace_prob=1.0 if whole_words else 0.8,
        random_replace_prob=0.0 if whole_words else 0.1,
    )
    places = np.arange(ids.shape[1])[None]
    chosen, kind, drawn = (
        draws(masking_.key(name, 7), np.zeros_like(places), places)
        for name in ("chosen", "kind", "drawn")
    )
    numbers = iter((chosen, kind, (kind - 0.8) / 0.2))
    monkeypatch.setattr(
        torch,
        "bernoulli",
        lambda share, generator=None: torch.from_numpy(next(numbers)) < share,
    )
    monkeypatch.setattr(
        torch,
        "randint",
        lambda most, *_, **__: torch.from_numpy((drawn * most).astype(np.int64)),
    )
    their_inputs, labels = collator.torch_mask_tokens(
        torch.from_numpy(ids.copy()),
        special_tokens_mask=torch.zeros(ids.shape),
        offset_mapping=offsets,
    )
    ours = masking_(read(ids), 7)
    assert (ours.targets == labels.numpy()).all()
    assert (ours.inputs == their_inputs.numpy()).all()
    words = "".join("x" if chosen else " " for chosen in ours.targets[0] != IGNORED)
    assert 0.1 < words.count("x") / len(words) < 0.5


def test_tokenizer_without_a_mask_token_is_rejected(tokenizer_folder: Path) -> None:
    with pytest.raises(NoMaskTokenError, match=r"<\|mask\|>"):
        masking_of(Masked(), load(tokenizer_folder), 0)


@pytest.mark.slow
def test_encoder_training_resumes_exactly_and_ignores_micro_batches(
    run_stage: Any,
    stop_pretraining: Any,
    inputs: dict[str, Path],
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {**config, "steps": 5, "masked": {"whole_words": True}}
    run_stage("pretrain", inputs, config, tmp_path / "whole")
    stop_pretraining(inputs, config, tmp_path / "cut")
    run_stage("pretrain", inputs, config, tmp_path / "cut")
    run_stage("pretrain", inputs, {**config, "micro_batch_size": 1}, tmp_path / "small")
    assert_same_output(tmp_path / "cut", tmp_path / "whole")
    whole, small = weights_of(tmp_path / "whole"), weights_of(tmp_path / "small")
    torch.testing.assert_close(small, whole, atol=2e-5, rtol=0)


@pytest.mark.parallel
def test_sharded_encoders_train_alike(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    compare_sharded(
        run_stage,
        inputs,
        {"modernbert": config, "bert": {**config, "masked": {"shape": "bert"}}},
        tmp_path,
    )


def compare_sharded(
    run_stage: Any,
    inputs: dict[str, Path],
    configs: dict[str, dict[str, Any]],
    folder: Path,
) -> None:
    """Check that trainings on two processes, which share the weights and recompute
    activations, equal those of one process.
    """
    jobs = []
    for name, config in configs.items():
        job_config = {
            **config,
            "steps": 3,
            "validate_every": 3,
            "global_batch_size": 7,
            "micro_batch_size": 2,
            "optimizer": {"learning_rate": 0.002},
        }
        run_stage("pretrain", inputs, job_config, folder / "alone" / name)
        jobs.append(
            {
                "parallel": {"shard": 2},
                "compute": {"activation_checkpointing": "full"},
                "folder": str(folder / "two" / name),
                "continue": None,
                "config": job_config,
                "inputs": {stage: str(path) for stage, path in inputs.items()},
                "checkpoint_every": 9,
            }
        )
    train_on(2, jobs, folder / "job")
    for name in configs:
        assert_same(folder / "two" / name, folder / "alone" / name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_exported_modernbert_has_equal_logits_in_transformers(
    run_stage: Any,
    inputs: dict[str, Path],
    config: dict[str, Any],
    tmp_path: Path,
    tied: bool,
) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer, ModernBertForMaskedLM

    model = {**ENCODER, "tied_embeddings": tied}
    run_stage(
        "pretrain", inputs, {**config, "steps": 2, "model": model}, tmp_path / "run"
    )
    run_stage(
        "export",
        {"tokenizer": inputs["tokenizer"], "pretrain": tmp_path / "run" / "data"},
        {},
        tmp_path / "out",
    )
    folder = tmp_path / "out" / "data"
    theirs, report = AutoModelForMaskedLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert isinstance(theirs, ModernBertForMaskedLM)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder).mask_token == MASK
    rows = torch.from_numpy(PackedSet(inputs["mix"]).read(np.arange(4)))
    for ours in (
        load_model(tmp_path / "run" / "data" / "model", kind="encoder"),
        load_model(folder, kind="encoder"),
    ):
        with torch.no_grad():
            torch.testing.assert_close(
                ours(rows), theirs.eval()(rows).logits, atol=1e-5, rtol=1e-5
            )
    assert "AutoModelForMaskedLM" in (folder / "README.md").read_text()
    with pytest.raises(WeightsError, match="is an encoder"):
        load_model(folder)


@pytest.mark.slow
def test_masked_loss_and_accuracy_equal_their_definitions(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    run_stage("pretrain", inputs, {**config, "steps": 20}, tmp_path / "run")
    evaluation = run_stage(
        "evaluate",
        {**inputs, "pretrain": tmp_path / "run" / "data"},
        {"seed": 2},
        tmp_path / "out",
    )
    model = load_model(tmp_path / "run" / "data" / "model", kind="encoder")
    masking_ = masking(inputs, seed=2, **dict(MEASURED))
    for source, measures in evaluation["models"]["pretrain"]["sources"].items():
        rows = torch.from_numpy(
            PackedSet(inputs["mix"]).validation(source).astype(np.int64)
        )
        with torch.no_grad():
            ids, targets = (
                torch.from_numpy(part) for part in mask_rows(masking_, rows.numpy(), -1)
            )
            logits = model(ids)[targets != IGNORED]
            answers = targets[targets != IGNORED]
            is_correct = logits.argmax(dim=-1) == answers
        assert measures["hidden_loss"] == pytest.approx(
            torch.nn.functional.cross_entropy(logits, answers).item(), rel=1e-5
        )
        assert measures["hidden_accuracy"]["value"] == pytest.approx(
            is_correct.float().mean().item()
        )
        assert measures["hidden_tokens"] == len(is_correct)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sft": {"data": [{"path": "a.jsonl"}], "steps": 1}}, "next token"),
        ({"evaluate": {"prompts": ["The"]}}, "next token"),
        ({"export": {"gguf": ["f16"]}}, "next token"),
        ({"tokenizer": {"vocab_size": 300}}, "tokenizer.special_tokens"),
        (
            {"pretrain": {"steps": 2, "masked": {}, "model": {"qk_norm": True}}},
            "model.qk_norm",
        ),
        (
            {
                "pretrain": {
                    "steps": 2,
                    "masked": {"mask_share": 0.8, "random_share": 0.3},
                }
            },
            "mask_share.*random_share",
        ),
    ],
)
def test_stage_that_an_encoder_cannot_run_is_rejected_before_any_work(
    stage_config: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain",
            **{
                "tokenizer": {"vocab_size": 300, "special_tokens": [MASK]},
                "pretrain": {"steps": 2, "masked": {}},
                **changes,
            },
        )
