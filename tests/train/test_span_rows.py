"""Span corruption and UL2's denoisers: what is hidden, what is predicted, and where an encoder-decoder can go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5ForConditionalGeneration

from gristmill.mixtures.engine import Compute
from gristmill.mixtures.load import ManifestError
from gristmill.mixtures.objectives.span_objectives import SENTINEL, Denoiser, SpanCorruption, Ul2, spans_of
from gristmill.mixtures.tokenizer import Tokenizer
from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.objective import UNTRAINED
from gristmill.train.models.decoder import configure, logits_head
from gristmill.train.models.encoder_decoder import EncoderDecoder, bucket_of
from gristmill.train.models.model_config import shape_to_train
from gristmill.train.models.weights import WeightsError, load_model, read_shape
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.prediction_targets import Read, draws
from gristmill.train.objectives.span_rows import Corruption, NoSentinelsError, corruption_of
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.planning.measured_step import _count
from tests.train.test_masked_rows import ENCODER, made_inputs, read
from tests.train.test_next_token import padded_set

EOS, PAD, SENTINELS = 0, 1, np.arange(50, 90)
MODES = ["[R]", "[S]", "[X]"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> dict[str, Path]:
    return made_inputs(tmp_path_factory, texts, [*(SENTINEL.format(n) for n in range(8)), *MODES])


@pytest.fixture
def config(pretrain_config: dict[str, Any]) -> dict[str, Any]:
    return {**pretrain_config, "model": ENCODER, "span_corruption": {}}


def spans(*denoisers: Denoiser, modes: tuple[int, ...] = (), joined: bool = False) -> Corruption:
    return Corruption(denoisers or SpanCorruption().denoisers, modes, 5, SENTINELS, EOS, PAD, joined)


def random_spans_noise_mask(
    length: int, noise_density: float, mean_noise_span_length: float, numbers: dict[str, np.ndarray]
) -> np.ndarray:
    """run_t5_mlm_flax.py's, as it is written there; a shuffle puts what is set where the least numbers are."""
    num_noise_tokens = int(np.round(length * noise_density))
    num_nonnoise_tokens = length - num_noise_tokens
    num_noise_tokens = min(max(num_noise_tokens, 1), length - 1)
    num_noise_spans = int(np.round(min(num_noise_tokens, num_nonnoise_tokens) / mean_noise_span_length))
    num_noise_spans = max(num_noise_spans, 1)
    num_nonnoise_tokens = length - num_noise_tokens

    def random_segmentation(name: str, num_items: int, num_segments: int) -> list[int]:
        mask_indices = [False] * (num_items - 1)
        for place in sorted(range(num_items - 1), key=lambda place: numbers[name][place])[: num_segments - 1]:
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
        [is_noise for one, other in zip(nonnoise, noise, strict=True) for is_noise in [False] * one + [True] * other]
    )


def collated(tokens: list[int], mask: np.ndarray) -> tuple[list[int], list[int]]:
    """What FlaxDataCollatorForT5MLM makes of a row, token by token."""
    inputs, targets, spans = list[int](), list[int](), -1
    for place, (token, is_noise) in enumerate(zip(tokens, mask, strict=True)):
        if is_noise and not mask[place - 1]:
            spans += 1
            inputs.append(int(SENTINELS[spans]))
            targets.append(int(SENTINELS[spans]))
        (targets if is_noise else inputs).append(token)
    return [*inputs, EOS], [*targets, EOS]


@pytest.mark.parametrize("one", [*SpanCorruption().denoisers, *Ul2().denoisers])
def test_rows_are_those_of_t5_s_collator_at_the_same_draws(one: Denoiser) -> None:
    """Whole rows of 40 tokens and rows whose padding begins behind 23."""
    how, rows = spans(one), np.random.default_rng(3).integers(2, 50, (6, 40))
    for size in (40, 23):
        whole = read(rows, size, numbers=np.arange(6) * 3)
        laid = how(whole, 4)
        assert laid.decoder_ids is not None
        assert laid.places is not None
        for number, row in enumerate(rows):
            numbers = {
                name: draws(how.key(name, 4), np.full(40, number * 3), np.arange(40)) for name in ("left", "hidden")
            }
            hidden = spans_of(size, one)[0]
            mask = (
                np.arange(size) >= size - hidden
                if one.mean_length is None
                else random_spans_noise_mask(size, one.density, one.mean_length, numbers)
            )
            inputs, targets = collated(row[:size].tolist(), mask)
            seen = laid.inputs[number] if laid.positions is None else laid.inputs[number][laid.positions[number] >= 0]
            assert seen.tolist() == inputs
            found = laid.targets[number]
            assert found[found != IGNORED].tolist() == targets
            assert laid.decoder_ids[number, : len(targets)].tolist() == [PAD, *targets[:-1]]
            places = laid.places[number]
            assert (row[places[places >= 0]] == found[places >= 0]).all()
            assert places[places >= 0].tolist() == np.flatnonzero(mask).tolist()


def test_the_paper_s_example_is_hidden_as_in_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raffel et al. 2020, figure 2; an end of text stands for the last sentinel, as in the paper's code."""
    words = "Thank you for inviting me to your party last week .".split()
    hidden = np.isin(words, ["for", "inviting", "last"])
    monkeypatch.setattr(Corruption, "_mask", lambda *_: hidden[None].copy())
    laid = spans(Denoiser(mode="R", density=0.27, mean_length=1.5))(read(np.arange(2, 13)[None]), 0)
    names = {EOS: "</s>", 50: "<X>", 51: "<Y>", **dict(enumerate(words, start=2))}
    left = " ".join(names[token] for token in laid.inputs[0][: 11 - 3 + 2 + 1].tolist())
    assert left == "Thank you <X> me to your party <Y> week . </s>"
    assert " ".join(names[token] for token in laid.targets[0][:6].tolist()) == "<X> for inviting <Y> last </s>"


def test_what_is_hidden_depends_on_seed_step_row_and_place_alone() -> None:
    rows = np.tile(np.arange(2, 34), (30, 1))
    how = spans(*Ul2().denoisers, modes=(91, 91, 92, 93, 93, 93, 93))
    laid = how(read(rows), 3)
    again = how(read(rows[:2], numbers=np.array([7, 2])), 3)
    assert (again.targets == laid.targets[[7, 2]]).all()
    assert (again.inputs == laid.inputs[[7, 2]]).all()
    assert {*laid.inputs[:, 0].tolist()} == {91, 92, 93}
    assert (how(read(rows), 4).targets != laid.targets).any(axis=1).mean() > 0.7


def test_a_decoder_reads_what_is_left_as_a_prefix_of_what_is_hidden() -> None:
    rows = np.random.default_rng(3).integers(2, 50, (40, 32))
    apart, joined = spans(*Ul2().denoisers, modes=(91,) * 7), spans(*Ul2().denoisers, modes=(91,) * 7, joined=True)
    laid = joined(read(rows), 2)
    assert laid.prefix is not None
    assert laid.inputs.shape == laid.targets.shape == (40, 32)
    for number in range(40):
        targets = laid.targets[number]
        at = np.flatnonzero(targets != IGNORED)
        seen = int(laid.prefix[number].sum())
        assert at.tolist() == [*range(seen - 1, seen - 1 + len(at))]
        assert (laid.inputs[number, at[:-1] + 1] == targets[at[:-1]]).all()
        assert targets[at[-1]] == EOS
        # What both sides hold together are the first tokens of the row, as many as fit in.
        size = seen - 1 + len(at) - 1 - 2 * int(np.isin(targets, SENTINELS).sum())
        both = sorted(token for token in [*laid.inputs[number, 1:seen], *targets[at[:-1]]] if token < 50)
        assert both == sorted(rows[number, :size])
        assert size + 2 * int(np.isin(targets, SENTINELS).sum()) + 2 <= 32
    assert not (apart(read(rows), 2).inputs == EOS).all()


def test_distances_share_the_buckets_of_t5() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-600, 600)
    for both_ways in (True, False):
        expected = T5Attention._relative_position_bucket(distance, both_ways, 32, 128)
        assert torch.equal(bucket_of(distance, both_ways), expected)


def test_an_export_is_a_t5_of_transformers_with_equal_logits(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    run_stage("pretrain", inputs, {**config, "steps": 3, "optimizer": {"learning_rate": 0.05}}, tmp_path / "run")
    run_stage("export", {"tokenizer": inputs["tokenizer"], "pretrain": tmp_path / "run" / "data"}, {}, tmp_path / "out")
    folder = tmp_path / "out" / "data"
    theirs, told = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(theirs, T5ForConditionalGeneration)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    rows = PackedSet(inputs["mix"]).read(np.arange(4))
    laid = corruption_of(SpanCorruption(), load(inputs["tokenizer"]), 1, 32)(read(rows, 27), 0)
    assert laid.positions is not None
    ids, positions, targets = map(torch.from_numpy, (laid.inputs, laid.positions, laid.targets))
    with torch.no_grad():
        expected = theirs.eval()(input_ids=ids, attention_mask=(positions >= 0).long(), labels=targets)
        for ours in (
            load_model(tmp_path / "run" / "data" / "model", kind="encoder_decoder"),
            load_model(folder, kind="encoder_decoder"),
        ):
            found = ours(ids, logits_head, positions=positions, decoder_ids=torch.from_numpy(laid.decoder_ids))
            torch.testing.assert_close(found, expected.logits, atol=1e-5, rtol=1e-5)
    assert "AutoModelForSeq2SeqLM" in (folder / "README.md").read_text()
    assert read_shape(folder).parameters == sum(one.numel() for one in load_model(folder, kind=None).parameters())
    with pytest.raises(WeightsError, match="is an encoder-decoder, which fills in hidden spans and cannot continue"):
        load_model(folder)
    # Held-out rows, measured one by one with transformers' model.
    found = run_stage("evaluate", {**inputs, "pretrain": tmp_path / "run" / "data"}, {"seed": 2}, tmp_path / "eval")
    how = corruption_of(SpanCorruption(), load(inputs["tokenizer"]), 2, 32)
    for source, measured in found["models"]["pretrain"]["sources"].items():
        held = how(read(PackedSet(inputs["mix"]).validation(source)), -1)
        with torch.no_grad():
            logits = theirs(input_ids=torch.from_numpy(held.inputs), labels=torch.from_numpy(held.targets)).logits
        counted = torch.from_numpy(held.places >= 0)
        nll = torch.nn.functional.cross_entropy(logits[counted], torch.from_numpy(held.targets)[counted])
        assert measured["span_loss"] == pytest.approx(nll.item(), rel=1e-5)
        right = logits.argmax(dim=-1)[counted] == torch.from_numpy(held.targets)[counted]
        assert measured["span_accuracy"] == pytest.approx(right.float().mean().item())


def test_each_document_is_blamed_for_its_hidden_tokens_and_forgotten_activations_change_nothing(tmp_path: Path) -> None:
    """Row 1 holds a piece of 4 tokens and one of 6, then padding; row 2 one of 24."""
    section = Pretrain.model_validate({"steps": 1, "span_corruption": {}, "model": ENCODER})
    packed, shape, rows = padded_set(tmp_path, PAD), shape_to_train(section, 100, 24), np.array([2, 1])
    how = spans(Denoiser(mode="X", density=0.5, mean_length=3.0))
    objective = NextToken(packed, 3, torch.ones(100), shape, layout=how)
    model, found = EncoderDecoder(shape), []
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for forgotten in ("off", "full"):
        configure(model, Compute.model_validate({"activation_checkpointing": forgotten}))
        model.zero_grad()
        measured = objective.loss(model, objective.prepare(rows, step=4), 1.0)
        measured.loss.backward()
        found.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    assert torch.equal(*found)
    losses = measured.row_losses.numpy()
    positions = np.stack([np.arange(24), np.where(np.arange(24) < 10, np.arange(24), -1)]).astype(np.int32)
    laid = how(Read(packed.read(rows), positions, rows, np.zeros(2, dtype=np.int64)), 4)
    assert laid.places is not None
    hidden = [[place for place in one if place >= 0] for one in laid.places.tolist()]
    assert [np.flatnonzero(one != UNTRAINED).tolist() for one in losses] == hidden
    assert (len(hidden[0]), len(hidden[1])) == (12, 5)
    blamed = {(one["row"], one["start"]): one["loss"] for one in objective.blame(rows, losses)}
    for (row, start), (number, end) in {(1, 0): (1, 4), (1, 4): (1, 10), (2, 0): (0, 24)}.items():
        piece = losses[number, start:end]
        trained = piece[piece != UNTRAINED]
        assert blamed[row, start] == pytest.approx(trained.mean() if len(trained) else 0.0, rel=1e-5)
    # Sentinels and the end of text are trained on too, and stand in no document.
    assert float(measured.sums[0]) > losses[losses != UNTRAINED].sum()


def test_plan_counts_both_sides() -> None:
    section = Pretrain.model_validate({"steps": 1, "span_corruption": {}, "model": ENCODER})
    shape = shape_to_train(section, 256, 400)
    model = EncoderDecoder(shape)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    counted, _ = _count(model, torch.randint(0, 256, (1, 400)))
    assert flops_per_token(shape, 400).whole * 400 == pytest.approx(counted, rel=0.15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sft": {"data": [{"path": "a.jsonl"}], "steps": 1}}, r"pretrain\.span_corruption trains an encoder-decoder"),
        ({"export": {"gguf": ["f16"]}}, r"pretrain\.span_corruption trains an encoder-decoder"),
        (
            {"pretrain": {"steps": 2, "span_corruption": {}, "model": {"document_mask": True}}},
            "document_mask has no effect",
        ),
        (
            {"pretrain": {"steps": 2, "ul2": {"shape": "decoder"}, "model": {"document_mask": True}}},
            "hides spans of who",
        ),
        (
            {"pretrain": {"steps": 2, "ul2": {"denoisers": [{"mode": "S", "density": 0.2, "mean_length": 3}]}}},
            "mode S hi",
        ),
        (
            {"pretrain": {"steps": 2, "ul2": {"shape": "decoder"}}, "engine": {"parallel": {"tensor": 2}}},
            r"pretrain\.ul2 reads prefixes",
        ),
    ],
)
def test_what_hidden_spans_do_not_go_with_is_refused_before_any_work(
    stage_config: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain",
            **{
                "pretrain": {"steps": 2, "span_corruption": {}},
                "tokenizer": {"vocab_size": 400, "sentinels": 20, "special_tokens": MODES},
                **changes,
            },
        )


def test_sentinels_are_special_tokens_and_their_lack_is_told(stage_config: Any, inputs: dict[str, Path]) -> None:
    asked = {"vocab_size": 300, "sentinels": 2, "special_tokens": ["[R]"]}
    assert Tokenizer.model_validate(asked).special_tokens == ("[R]", "<extra_id_0>", "<extra_id_1>")
    for objective, message in (
        ({"span_corruption": {"density": 0.4}}, "needs 4 sentinels, one for each hidden span"),
        ({"ul2": {"denoisers": [{"mode": "S", "density": 0.25}]}}, r"mode tokens \[R\], \[S\]"),
    ):
        with pytest.raises(ManifestError, match=message):
            stage_config("pretrain", tokenizer=asked, pretrain={"steps": 2, **objective})
    with pytest.raises(NoSentinelsError, match="lacks special tokens: pretrain needs 26 sentinels"):
        corruption_of(SpanCorruption(), load(inputs["tokenizer"]), 0, 512)
