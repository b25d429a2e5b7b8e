"""Span corruption and UL2: hidden spans, targets, and encoder-decoder export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5ForConditionalGeneration

from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.objectives.span_objectives import (
    SENTINEL,
    Denoiser,
    SpanCorruption,
    Ul2,
    spans_of,
)
from gristmill.mixtures.schema.engine import Compute
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.mixtures.schema.tokenizer import Tokenizer
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.objective import UNTRAINED
from gristmill.train.models.encoder import model_of, new_encoder
from gristmill.train.models.transformer import configure, logits_head
from gristmill.train.models.transformers_decoder import initial_tensors
from gristmill.train.models.weights import (
    WeightsError,
    fill_from,
    load_model,
    read_shape,
)
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.prediction_targets import Read, draws
from gristmill.train.objectives.span_rows import (
    Corruption,
    NoSentinelsError,
    corruption_of,
)
from tests.train.test_masked_rows import (
    ENCODER,
    compare_sharded,
    make_inputs,
    read,
)
from tests.train.test_next_token import padded_set

EOS, PAD, SENTINELS = 0, 1, np.arange(50, 90)
MODES = ["[R]", "[S]", "[X]"]


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]
) -> dict[str, Path]:
    return make_inputs(
        tmp_path_factory, texts, [*(SENTINEL.format(n) for n in range(8)), *MODES]
    )


@pytest.fixture
def config(pretrain_config: dict[str, Any]) -> dict[str, Any]:
    return {**pretrain_config, "model": ENCODER, "span_corruption": {}}


def spans(
    *denoisers: Denoiser, modes: tuple[int, ...] = (), joined: bool = False
) -> Corruption:
    return Corruption(
        denoisers or SpanCorruption().denoisers, modes, 5, SENTINELS, EOS, PAD, joined
    )


def random_spans_noise_mask(
    length: int,
    noise_density: float,
    mean_noise_span_length: float,
    numbers: dict[str, np.ndarray],
) -> np.ndarray:
    """Copy of the function in run_t5_mlm_flax.py; its shuffle sets the places of the
    smallest numbers.
    """
    num_noise_tokens = int(np.round(length * noise_density))
    num_nonnoise_tokens = length - num_noise_tokens
    num_noise_tokens = min(max(num_noise_tokens, 1), length - 1)
    num_noise_spans = int(
        np.round(min(num_noise_tokens, num_nonnoise_tokens) / mean_noise_span_length)
    )
    num_noise_spans = max(num_noise_spans, 1)
    num_nonnoise_tokens = length - num_noise_tokens

    def random_segmentation(name: str, num_items: int, num_segments: int) -> list[int]:
        mask_indices = [False] * (num_items - 1)
        for place in sorted(
            range(num_items - 1), key=lambda place: numbers[name][place]
        )[: num_segments - 1]:
            mask_indices[place] = True
        lengths, size = [], 1
        for begins in mask_indices:
            if begins:
                lengths.append(size)
                size = 0
            size += 1
        return [*lengths, size]

    noise = random_segmentation("hidden", num_noise_tokens, num_noise_spans)
    nonnoise = random_segmentation("left", num_nonnoise_tokens, num_noise_spans)
    return np.array(
        [
            is_noise
            for unmasked, masked in zip(nonnoise, noise, strict=True)
            for is_noise in [False] * unmasked + [True] * masked
        ]
    )


def collate(tokens: list[int], mask: np.ndarray) -> tuple[list[int], list[int]]:
    """Inputs and targets of FlaxDataCollatorForT5MLM for a row, token by token."""
    inputs, targets, spans = list[int](), list[int](), -1
    for place, (token, is_noise) in enumerate(zip(tokens, mask, strict=True)):
        if is_noise and not mask[place - 1]:
            spans += 1
            inputs.append(int(SENTINELS[spans]))
            targets.append(int(SENTINELS[spans]))
        (targets if is_noise else inputs).append(token)
    return [*inputs, EOS], [*targets, EOS]


@pytest.mark.parametrize("denoiser", [*SpanCorruption().denoisers, *Ul2().denoisers])
def test_rows_equal_those_of_the_t5_collator(denoiser: Denoiser) -> None:
    """Full rows of 40 tokens and rows padded after 23."""
    corruption, rows = (
        spans(denoiser),
        np.random.default_rng(3).integers(2, 50, (6, 40)),
    )
    for size in (40, 23):
        rows_read = read(rows, size, numbers=np.arange(6) * 3)
        corrupted = corruption(rows_read, 4)
        assert corrupted.decoder_ids is not None
        assert corrupted.places is not None
        for number, row in enumerate(rows):
            numbers = {
                name: draws(
                    corruption.key(name, 4), np.full(40, number * 3), np.arange(40)
                )
                for name in ("left", "hidden")
            }
            hidden = spans_of(size, denoiser)[0]
            mask = (
                np.arange(size) >= size - hidden
                if denoiser.mean_length is None
                else random_spans_noise_mask(
                    size, denoiser.density, denoiser.mean_length, numbers
                )
            )
            inputs, targets = collate(row[:size].tolist(), mask)
            visible = (
                corrupted.inputs[number]
                if corrupted.positions is None
                else corrupted.inputs[number][corrupted.positions[number] >= 0]
            )
            assert visible.tolist() == inputs
            row_targets = corrupted.targets[number]
            assert row_targets[row_targets != IGNORED].tolist() == targets
            assert corrupted.decoder_ids[number, : len(targets)].tolist() == [
                PAD,
                *targets[:-1],
            ]
            places = corrupted.places[number]
            assert (row[places[places >= 0]] == row_targets[places >= 0]).all()
            assert places[places >= 0].tolist() == np.flatnonzero(mask).tolist()


def test_corruption_of_the_example_in_the_paper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Figure 2 of Raffel et al. 2020, with an end of text as the last sentinel, as in
    the paper's code.
    """
    words = "Thank you for inviting me to your party last week .".split()
    hidden = np.isin(words, ["for", "inviting", "last"])
    monkeypatch.setattr(Corruption, "_mask", lambda *_: hidden[None].copy())
    corrupted = spans(Denoiser(mode="R", density=0.27, mean_length=1.5))(
        read(np.arange(2, 13)[None]), 0
    )
    names = {EOS: "</s>", 50: "<X>", 51: "<Y>", **dict(enumerate(words, start=2))}
    inputs = " ".join(
        names[token] for token in corrupted.inputs[0][: 11 - 3 + 2 + 1].tolist()
    )
    assert inputs == "Thank you <X> me to your party <Y> week . </s>"
    assert (
        " ".join(names[token] for token in corrupted.targets[0][:6].tolist())
        == "<X> for inviting <Y> last </s>"
    )


def test_corruption_depends_on_seed_step_row_and_place_alone() -> None:
    rows = np.tile(np.arange(2, 34), (30, 1))
    corruption = spans(*Ul2().denoisers, modes=(91, 91, 92, 93, 93, 93, 93))
    corrupted = corruption(read(rows), 3)
    repeated = corruption(read(rows[:2], numbers=np.array([7, 2])), 3)
    assert (repeated.targets == corrupted.targets[[7, 2]]).all()
    assert (repeated.inputs == corrupted.inputs[[7, 2]]).all()
    assert {*corrupted.inputs[:, 0].tolist()} == {91, 92, 93}
    assert (corruption(read(rows), 4).targets != corrupted.targets).any(
        axis=1
    ).mean() > 0.7


def test_decoder_reads_visible_tokens_as_a_prefix() -> None:
    rows = np.random.default_rng(3).integers(2, 50, (40, 32))
    apart, joined = (
        spans(*Ul2().denoisers, modes=(91,) * 7),
        spans(*Ul2().denoisers, modes=(91,) * 7, joined=True),
    )
    corrupted = joined(read(rows), 2)
    assert corrupted.prefix is not None
    assert corrupted.inputs.shape == corrupted.targets.shape == (40, 32)
    for number in range(40):
        targets = corrupted.targets[number]
        places = np.flatnonzero(targets != IGNORED)
        prefix_length = int(corrupted.prefix[number].sum())
        assert places.tolist() == [
            *range(prefix_length - 1, prefix_length - 1 + len(places))
        ]
        assert (corrupted.inputs[number, places[:-1] + 1] == targets[places[:-1]]).all()
        assert targets[places[-1]] == EOS
        # Prefix and targets together hold the first tokens of the row that fit.
        size = (
            prefix_length
            - 1
            + len(places)
            - 1
            - 2 * int(np.isin(targets, SENTINELS).sum())
        )
        kept_tokens = sorted(
            token
            for token in [
                *corrupted.inputs[number, 1:prefix_length],
                *targets[places[:-1]],
            ]
            if token < 50
        )
        assert kept_tokens == sorted(rows[number, :size])
        assert size + 2 * int(np.isin(targets, SENTINELS).sum()) + 2 <= 32
    assert not (apart(read(rows), 2).inputs == EOS).all()


@pytest.mark.parallel
def test_sharded_encoder_decoder_trains_alike(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    compare_sharded(run_stage, inputs, {"t5": config}, tmp_path)


@pytest.mark.slow
def test_exported_t5_has_equal_logits_in_transformers(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    run_stage(
        "pretrain",
        inputs,
        {**config, "steps": 3, "optimizer": {"learning_rate": 0.05}},
        tmp_path / "run",
    )
    run_stage(
        "export",
        {"tokenizer": inputs["tokenizer"], "pretrain": tmp_path / "run" / "data"},
        {},
        tmp_path / "out",
    )
    folder = tmp_path / "out" / "data"
    theirs, loading_info = AutoModelForSeq2SeqLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert isinstance(theirs, T5ForConditionalGeneration)
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    rows = PackedSet(inputs["mix"]).read(np.arange(4))
    corrupted = corruption_of(SpanCorruption(), load(inputs["tokenizer"]), 1, 32)(
        read(rows, 27), 0
    )
    assert corrupted.positions is not None
    ids, positions, targets = map(
        torch.from_numpy, (corrupted.inputs, corrupted.positions, corrupted.targets)
    )
    with torch.no_grad():
        expected = theirs.eval()(
            input_ids=ids, attention_mask=(positions >= 0).long(), labels=targets
        )
        for ours in (
            load_model(tmp_path / "run" / "data" / "model", kind="encoder_decoder"),
            load_model(folder, kind="encoder_decoder"),
        ):
            our_logits = ours(
                ids,
                logits_head,
                positions=positions,
                decoder_ids=torch.from_numpy(corrupted.decoder_ids),
            )
            torch.testing.assert_close(
                our_logits, expected.logits, atol=1e-5, rtol=1e-5
            )
    assert "AutoModelForSeq2SeqLM" in (folder / "README.md").read_text()
    assert read_shape(folder).parameters == sum(
        parameter.numel() for parameter in load_model(folder, kind=None).parameters()
    )
    with pytest.raises(WeightsError, match="encoder-decoder"):
        load_model(folder)
    # Measure held-out rows one by one with transformers.
    evaluation = run_stage(
        "evaluate",
        {**inputs, "pretrain": tmp_path / "run" / "data"},
        {"seed": 2},
        tmp_path / "eval",
    )
    corruption = corruption_of(SpanCorruption(), load(inputs["tokenizer"]), 2, 32)
    for source, measures in evaluation["models"]["pretrain"]["sources"].items():
        held_out = corruption(read(PackedSet(inputs["mix"]).validation(source)), -1)
        with torch.no_grad():
            logits = theirs(
                input_ids=torch.from_numpy(held_out.inputs),
                labels=torch.from_numpy(held_out.targets),
            ).logits
        counted = torch.from_numpy(held_out.places >= 0)
        nll = torch.nn.functional.cross_entropy(
            logits[counted], torch.from_numpy(held_out.targets)[counted]
        )
        assert measures["hidden_loss"] == pytest.approx(nll.item(), rel=1e-5)
        correct = (
            logits.argmax(dim=-1)[counted]
            == torch.from_numpy(held_out.targets)[counted]
        )
        assert measures["hidden_accuracy"]["value"] == pytest.approx(
            correct.float().mean().item()
        )


def test_hidden_tokens_are_attributed_to_documents_and_checkpointing_keeps_gradients(
    tmp_path: Path,
) -> None:
    """Row 1 holds pieces of 4 and 6 tokens, then padding; row 2 a piece of 24."""
    section = Pretrain.model_validate(
        {"steps": 1, "span_corruption": {}, "model": ENCODER}
    )
    packed, shape, rows = (
        padded_set(tmp_path, PAD),
        new_encoder(section, 100, 24),
        np.array([2, 1]),
    )
    corruption = spans(Denoiser(mode="X", density=0.5, mean_length=3.0))
    objective = NextToken(packed, 3, torch.ones(100), shape, layout=corruption)
    with torch.device("meta"):
        model: Any = model_of(shape)
    gradients = []
    fill_from(model, initial_tensors(shape, 3), "cpu")
    model.requires_grad_()
    for checkpointing in ("off", "full"):
        configure(
            model, Compute.model_validate({"activation_checkpointing": checkpointing})
        )
        model.zero_grad()
        measures = objective.loss(model, objective.prepare(rows, step=4), 1.0)
        measures.loss.backward()
        gradients.append(
            torch.cat(
                [
                    entry.grad.flatten()
                    for entry in model.parameters()
                    if entry.grad is not None
                ]
            )
        )
    assert torch.equal(*gradients)
    losses = measures.row_losses.numpy()
    positions = np.stack(
        [np.arange(24), np.where(np.arange(24) < 10, np.arange(24), -1)]
    ).astype(np.int32)
    corrupted = corruption(
        Read(packed.read(rows), positions, rows, np.zeros(2, dtype=np.int64)), 4
    )
    assert corrupted.places is not None
    hidden = [
        [place for place in entry if place >= 0] for entry in corrupted.places.tolist()
    ]
    assert [np.flatnonzero(entry != UNTRAINED).tolist() for entry in losses] == hidden
    assert (len(hidden[0]), len(hidden[1])) == (12, 5)
    blamed = {
        (entry["row"], entry["start"]): entry["loss"]
        for entry in objective.blame(rows, losses)
    }
    for (row, start), (number, end) in {
        (1, 0): (1, 4),
        (1, 4): (1, 10),
        (2, 0): (0, 24),
    }.items():
        piece = losses[number, start:end]
        trained = piece[piece != UNTRAINED]
        assert blamed[row, start] == pytest.approx(
            trained.mean() if len(trained) else 0.0, rel=1e-5
        )
    # Sentinels and the end of text are trained on too, but belong to no document.
    assert float(measures.sums[0]) > losses[losses != UNTRAINED].sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sft": {"data": [{"path": "a.jsonl"}], "steps": 1}},
            r"pretrain\.span_corruption.* encoder-decoder",
        ),
        ({"export": {"gguf": ["f16"]}}, r"pretrain\.span_corruption.* encoder-decoder"),
        (
            {
                "pretrain": {
                    "steps": 2,
                    "span_corruption": {},
                    "model": {"document_mask": True},
                }
            },
            "document_mask",
        ),
        (
            {
                "pretrain": {
                    "steps": 2,
                    "ul2": {"shape": "decoder"},
                    "model": {"document_mask": True},
                }
            },
            "document_mask",
        ),
        (
            {
                "pretrain": {
                    "steps": 2,
                    "ul2": {
                        "denoisers": [{"mode": "S", "density": 0.2, "mean_length": 3}]
                    },
                }
            },
            "mode S",
        ),
        (
            {
                "pretrain": {"steps": 2, "ul2": {"shape": "decoder"}},
                "engine": {"parallel": {"tensor": 2}},
            },
            r"pretrain\.ul2",
        ),
    ],
)
def test_settings_incompatible_with_span_corruption_are_rejected(
    stage_config: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain",
            **{
                "pretrain": {"steps": 2, "span_corruption": {}},
                "tokenizer": {
                    "vocab_size": 400,
                    "sentinels": 20,
                    "special_tokens": MODES,
                },
                **changes,
            },
        )


def test_sentinels_are_special_tokens_and_missing_ones_are_named(
    stage_config: Any, inputs: dict[str, Path]
) -> None:
    tokenizer = {"vocab_size": 300, "sentinels": 2, "special_tokens": ["[R]"]}
    assert Tokenizer.model_validate(tokenizer).special_tokens == (
        "[R]",
        "<extra_id_0>",
        "<extra_id_1>",
    )
    for objective, message in (
        ({"span_corruption": {"density": 0.4}}, "4 sentinels"),
        ({"ul2": {"denoisers": [{"mode": "S", "density": 0.25}]}}, r"\[R\], \[S\]"),
    ):
        with pytest.raises(ManifestError, match=message):
            stage_config(
                "pretrain", tokenizer=tokenizer, pretrain={"steps": 2, **objective}
            )
    with pytest.raises(NoSentinelsError, match="26 sentinels"):
        corruption_of(SpanCorruption(), load(inputs["tokenizer"]), 0, 512)
