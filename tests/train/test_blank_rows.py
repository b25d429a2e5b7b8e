"""Blank infilling: hidden spans, their layout, and restrictions of a GLM."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GlmForCausalLM

from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.objectives.span_objectives import BlankInfilling
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.models.gguf_model import GgufError, check_gguf
from gristmill.train.models.model_config import Shape
from gristmill.train.models.rope import rotary_table
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import load_model, read_shape
from gristmill.train.objectives.glm import Blanks, blanks_of
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.prediction_targets import Laid, Read, draws
from gristmill.train.objectives.span_rows import NoSentinelsError
from tests.train.test_masked_rows import make_inputs, read

SPECIAL = ["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
MARKS = SimpleNamespace(
    blank=90, long_blank=91, sentence_blank=92, begin=93, end=94, pad=1
)
EOS, VOCAB = 0, 100
ENDS = np.arange(VOCAB) % 10 == 7


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]
) -> dict[str, Path]:
    return make_inputs(tmp_path_factory, texts, SPECIAL)


def blanks(**section: Any) -> Blanks:
    return Blanks(
        BlankInfilling.model_validate(section), 5, ENDS, eos=EOS, **vars(MARKS)
    )


def draw_rows(count: int, length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(2, 90, (count, length))


def reconstruct(laid: Laid, number: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Reconstruct the tokens of a row and its hidden spans from inputs and targets."""
    assert laid.prefix is not None
    inputs, targets = laid.inputs[number].tolist(), laid.targets[number].tolist()
    num_visible = int(laid.prefix[number].sum())
    assert laid.prefix[number, :num_visible].all()
    assert {*targets[:num_visible]} <= {IGNORED}
    filled, position = list[list[int]](), num_visible
    while position < len(inputs) and inputs[position] == MARKS.begin:
        end = targets.index(MARKS.end, position)
        assert inputs[position + 1 : end + 1] == targets[position:end]
        filled.append(targets[position:end])
        position = end + 1
    assert {*inputs[position:]} <= {MARKS.pad}
    assert {*targets[position:]} <= {IGNORED}
    # Tokens of a span have their places, so that spans may come in any order.
    assert laid.places is not None
    starts = [
        int(
            laid.places[
                number, targets.index(MARKS.end, num_visible + before) - len(span)
            ]
        )
        for before, span in zip(
            np.cumsum([0, *(len(span) + 1 for span in filled[:-1])]),
            filled,
            strict=True,
        )
    ]
    tokens, spans = list[int](), list[tuple[int, int]]()
    for token in inputs[:num_visible]:
        if token < MARKS.blank:
            tokens.append(token)
            continue
        span = filled[starts.index(len(tokens))]
        spans.append((len(tokens), len(tokens) + len(span)))
        tokens += span
    assert len(spans) == len(filled)
    return tokens, spans


def test_example_of_the_paper_is_laid_out_as_in_its_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Du et al. 2022, figure 2: x3, and x5 with x6, are hidden in x1 to x6, and the
    latter are filled in first.
    """
    monkeypatch.setattr(Blanks, "_spans", lambda *_: [(2, 3), (4, 6)])
    blanks_ = blanks()
    step = next(
        step
        for step in range(20)
        if np.diff(draws(blanks_.key("order", step), np.zeros(2), np.arange(2))) < 0
    )
    laid = blanks_(read(np.arange(11, 21)[None], 6), step)
    names = {
        90: "[M]",
        93: "[S]",
        94: "[E]",
        1: ".",
        IGNORED: ".",
        **{10 + n: f"x{n}" for n in range(1, 7)},
    }
    assert (
        " ".join(names[token] for token in laid.inputs[0])
        == "x1 x2 [M] x4 [M] [S] x5 x6 [S] x3"
    )
    assert (
        " ".join(names[token] for token in laid.targets[0])
        == ". . . . . x5 x6 [E] x3 [E]"
    )
    assert laid.prefix is not None
    assert laid.places is not None
    assert laid.prefix[0].tolist() == [True] * 5 + [False] * 5
    assert laid.places[0].tolist() == [-1] * 5 + [4, 5, -1, 2, -1]


def test_spans_equal_those_of_the_published_procedure() -> None:
    """`generate_blank_data` and `sample_spans` of the authors' code: lengths until
    enough is hidden, random places in the remainder, and a token between spans.
    """
    blanks_, rows = blanks(), draw_rows(30, 64)
    laid = blanks_(read(rows, numbers=np.arange(30) * 3), 4)
    pmf = [3.0**k / math.factorial(k) for k in range(1, 40)]
    for number, row in enumerate(rows):

        def numbers(name: str, count: int, row: int = number * 3) -> np.ndarray:
            return draws(blanks_.key(name, 4), np.full(count, row), np.arange(count))

        tokens, spans = reconstruct(laid, number)
        assert tokens == row[: len(tokens)].tolist()
        lengths, chances = list[int](), iter(numbers("length", 20))
        while sum(lengths) < int(0.15 * len(tokens)):
            remainder, length = next(chances) * sum(pmf), 1
            while remainder >= pmf[length - 1]:
                remainder -= pmf[length - 1]
                length += 1
            lengths.append(length)
        free = len(tokens) - sum(lengths) - len(lengths) + 1
        places = sorted(int(u * (free + 1)) for u in numbers("place", len(lengths)))
        offset, expected = 0, list[tuple[int, int]]()
        for place, length in zip(places, lengths, strict=True):
            expected.append((offset + place, offset + place + length))
            offset += length + 1
        assert spans == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
@pytest.mark.parametrize(
    "section", [{}, {"density": 0.45, "mean_length": 0.5}, {"mean_length": 20}]
)
def test_rows_of_any_length_are_reconstructed(
    size: int, section: dict[str, Any]
) -> None:
    rows = draw_rows(60, 48)
    laid = blanks(**section)(read(rows, size), 2)
    for number, row in enumerate(rows):
        tokens, spans = reconstruct(laid, number)
        assert tokens == row[: len(tokens)].tolist()
        # as many tokens as fit
        assert len(tokens) == size or len(tokens) + 2 * len(spans) > 40
        assert sum(end - start for start, end in spans) >= max(
            int(blanks(**section).section.density * len(tokens)), 1
        )
        assert all(later > end for (_, end), (later, _) in pairwise(spans))


def test_span_lengths_are_poisson_and_spans_are_shuffled() -> None:
    laid = blanks()(read(draw_rows(800, 128)), 1)
    lengths, first_is_first = list[int](), list[bool]()
    for number in range(800):
        spans = reconstruct(laid, number)[1]
        lengths += [end - start for start, end in spans]
        places = laid.places[number]  # type: ignore[index]
        first_is_first.append(int(places[places >= 0][0]) == spans[0][0])
    mean = 3 / (1 - math.exp(-3))
    # The last span of a row reaches the density, which favours long spans a little.
    assert mean - 0.1 < np.mean(lengths) < mean + 0.45
    assert 1 / 8 < np.mean(first_is_first) < 1 / 3  # one of three to seven


def test_document_blank_ends_the_row_and_sentence_blank_is_a_whole_sentence() -> None:
    rows = draw_rows(600, 62)
    rows[:, 30] = EOS
    by_document = blanks(document_share=1.0)(read(rows), 0)
    shares = list[float]()
    for number in range(600):
        tokens, ((start, end),) = reconstruct(by_document, number)
        assert end == len(tokens) == 60
        shares.append((end - start) / 60)
    assert (min(shares), max(shares)) == (0.5, 59 / 60)
    assert np.mean(shares) == pytest.approx(0.745, abs=0.02)
    assert MARKS.long_blank in by_document.inputs
    by_sentence = blanks(sentence_share=1.0)(read(rows), 0)
    for number in range(600):
        tokens, spans = reconstruct(by_sentence, number)
        for start, end in spans:
            assert start == 0 or ENDS[tokens[start - 1]] or tokens[start - 1] == EOS
            assert end == len(tokens) or ENDS[tokens[end - 1]] or tokens[end] == EOS
            assert EOS not in tokens[start:end]
            assert not ENDS[tokens[start : end - 1]].any()
        hidden = [end - start for start, end in spans]
        assert sum(hidden) - max(hidden) < int(0.15 * len(tokens)) or len(spans) == 1
    mixed = blanks(document_share=0.3, sentence_share=0.2)(read(rows), 0)
    marks = [MARKS.long_blank, MARKS.sentence_blank, MARKS.blank]
    shares = [float((mixed.inputs == mark).any(axis=1).mean()) for mark in marks]
    assert shares == pytest.approx([0.3, 0.2, 0.5], abs=0.06)


def test_hidden_spans_depend_on_seed_step_row_and_place_only() -> None:
    rows = np.tile(np.arange(2, 66), (30, 1))
    blanks_ = blanks(document_share=0.3, sentence_share=0.2)
    laid, again = (
        blanks_(read(rows), 3),
        blanks_(read(rows[:2], numbers=np.array([7, 2])), 3),
    )
    assert (again.inputs == laid.inputs[[7, 2]]).all()
    assert (again.targets == laid.targets[[7, 2]]).all()
    assert (blanks_(read(rows), 4).inputs != laid.inputs).any(axis=1).mean() > 0.9
    # Each part of a cut row has its own draws.
    part_of_row = Read(
        rows[:1], read(rows[:1]).positions, np.zeros(1, dtype=np.int64), np.array([64])
    )
    assert (blanks_(part_of_row, 3).inputs != laid.inputs[:1]).any()


def test_sentences_end_as_in_the_published_code(inputs: dict[str, Path]) -> None:
    tokenizer = load(inputs["tokenizer"])
    ends = blanks_of(BlankInfilling(sentence_share=0.5), tokenizer, 0, 32).ends_sentence
    for text, is_end in {
        ".": True,
        ";": True,
        "\n": True,
        ",": False,
        "a": False,
        " ": False,
    }.items():
        (number,) = tokenizer.encode([text])[0].ids
        assert ends[number] == is_end, text
    assert not ends[[*tokenizer.special_ids.values()]].any()


def test_partial_rotary_table_equals_that_of_half_the_width() -> None:
    places = torch.arange(9)
    cosines, sines = rotary_table(places, 16, 500.0, share=0.5)
    narrow = rotary_table(places, 8, 500.0)
    for table, narrow_table, constant in (
        (cosines, narrow[0], 1.0),
        (sines, narrow[1], 0.0),
    ):
        assert torch.equal(table[:, [0, 1, 2, 3, 8, 9, 10, 11]], narrow_table)
        assert (table[:, [4, 5, 6, 7, 12, 13, 14, 15]] == constant).all()


@pytest.mark.slow
def test_exported_glm_has_equal_logits_in_transformers(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {**pretrain_config, "steps": 3, "blank_infilling": {"document_share": 0.5}}
    run_stage("pretrain", inputs, config, tmp_path / "run")
    run_stage(
        "export",
        {"tokenizer": inputs["tokenizer"], "pretrain": tmp_path / "run" / "data"},
        {},
        tmp_path / "out",
    )
    folder = tmp_path / "out" / "data"
    theirs, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert isinstance(theirs, GlmForCausalLM)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    laid = blanks_of(BlankInfilling(), load(inputs["tokenizer"]), 1, 32)(
        read(PackedSet(inputs["mix"]).read(np.arange(4))), 0
    )
    assert laid.prefix is not None
    ids, prefix, places = (
        torch.from_numpy(laid.inputs),
        torch.from_numpy(laid.prefix),
        torch.arange(32),
    )
    mask = ((places[:, None] >= places) | prefix[:, None, :])[:, None]
    with torch.no_grad():
        expected = theirs.eval()(ids, attention_mask=mask).logits
        plain = theirs(ids).logits
        for ours in (
            load_model(tmp_path / "run" / "data" / "model"),
            load_model(folder),
        ):
            torch.testing.assert_close(
                ours(ids, prefix=prefix), expected, atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(ours(ids), plain, atol=1e-5, rtol=1e-5)
    shape = read_shape(folder)
    assert (shape.prefix_lm, shape.rotary_share, shape.qkv_bias) == (True, 0.5, True)
    assert shape.parameters == sum(
        tensor_.numel() for tensor_ in load_model(folder).parameters()
    )
    for changed_shape in (shape, replace(shape, prefix_lm=False)):
        with pytest.raises(GgufError, match="glm"):
            check_gguf(changed_shape)
    # Biases start at zero, and are trained.
    assert load_model(folder).model.layers[0].self_attn.v_proj.bias.abs().max() > 0
    # A trained model is trained further.
    again = {
        **config,
        "model": {"init_from": str(folder)},
        "optimizer": {"learning_rate": 1e-9},
        "steps": 1,
    }
    run_stage("pretrain", inputs, again, tmp_path / "again")
    before, after = (
        load_model(run / "data" / "model").state_dict()
        for run in (tmp_path / "run", tmp_path / "again")
    )
    assert all(
        torch.allclose(tensor, before[name][: len(tensor)], atol=1e-6)
        for name, tensor in after.items()
    )


def test_lora_rejects_a_glm(tiny_shape: Shape) -> None:
    from gristmill.mixtures.schema.posttraining import Lora
    from gristmill.train.adapters.lora import LoraError, tuned_model

    glm: Any = replace(tiny_shape, rotary_share=0.5, qkv_bias=True)
    assert (
        sum(parameter.numel() for parameter in Llama(glm).parameters())
        == glm.parameters
    )
    with pytest.raises(LoraError, match="GLM"):
        tuned_model(
            glm,
            lambda name, size: torch.zeros(size),
            Lora(),
            0,
            None,
            torch.float32,
            None,
        )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"export": {"gguf": ["f16"]}}, r"pretrain\.blank_infilling reads prefixes"),
        (
            {"engine": {"parallel": {"tensor": 2}}},
            r"pretrain\.blank_infilling reads prefixes",
        ),
        (
            {"tokenizer": {"vocab_size": 400, "special_tokens": ["[MASK]"]}},
            "special tokens <sop>, <eop>",
        ),
        (
            {
                "pretrain": {
                    "steps": 2,
                    "blank_infilling": {"document_share": 0.7, "sentence_share": 0.4},
                }
            },
            "document_share.*sentence_share",
        ),
        (
            {
                "pretrain": {"steps": 2, "blank_infilling": {"sentence_share": 0.4}},
                "tokenizer": {
                    "vocab_size": 400,
                    "special_tokens": ["[MASK]", "<sop>", "<eop>"],
                },
            },
            r"special tokens \[sMASK\]",
        ),
        (
            {
                "pretrain": {
                    "steps": 2,
                    "blank_infilling": {},
                    "model": {"document_mask": True},
                }
            },
            "blank_infilling hides",
        ),
        (
            {
                "pretrain": {
                    "steps": 2,
                    "blank_infilling": {},
                    "model": {"qk_norm": True},
                }
            },
            "qk_norm",
        ),
        (
            {
                "pretrain": {
                    "steps": 2,
                    "blank_infilling": {},
                    "model": {"head_width": 6},
                }
            },
            r"\b6\b.* multiple of 4",
        ),
        (
            {"pretrain": {"steps": 2, "blank_infilling": {}, "masked": {}}},
            "masked and blank_infilling",
        ),
    ],
)
def test_settings_that_exclude_blank_infilling_are_rejected_before_any_work(
    stage_config: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain",
            **{
                "pretrain": {"steps": 2, "blank_infilling": {}},
                "tokenizer": {"vocab_size": 400, "special_tokens": SPECIAL},
                **changes,
            },
        )


def test_tokenizer_without_blank_tokens_is_rejected(tokenizer_folder: Path) -> None:
    with pytest.raises(
        NoSentinelsError, match=r"pretrain\.blank_infilling .*\[MASK\], <sop>"
    ):
        blanks_of(BlankInfilling(), load(tokenizer_folder), 0, 32)
