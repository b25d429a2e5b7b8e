"""Blank infilling: what is hidden and how it is laid out, and where a GLM can go."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GlmForCausalLM

from gristmill.mixtures.load import ManifestError
from gristmill.mixtures.objectives.span_objectives import BlankInfilling
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.models.decoder import Llama
from gristmill.train.models.gguf_model import GgufError, check_gguf
from gristmill.train.models.model_config import Shape
from gristmill.train.models.rotary import rotary_table
from gristmill.train.models.weights import load_model, read_shape
from gristmill.train.objectives.glm import Blanks, Marks, blanks_of
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.prediction_targets import Laid, Read, draws
from gristmill.train.objectives.span_rows import NoSentinelsError
from tests.train.test_masked_rows import made_inputs, read

SPECIAL = ["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
MARKS = Marks(blank=90, long_blank=91, sentence_blank=92, begin=93, end=94, pad=1)
EOS, VOCAB = 0, 100
ENDS = np.arange(VOCAB) % 10 == 7


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> dict[str, Path]:
    return made_inputs(tmp_path_factory, texts, SPECIAL)


def blanks(**section: Any) -> Blanks:
    return Blanks(BlankInfilling.model_validate(section), MARKS, 5, ENDS, EOS)


def drawn_rows(count: int, length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(2, 90, (count, length))


def undone(laid: Laid, number: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of a row and its hidden spans, from what is read and predicted alone."""
    assert laid.prefix is not None
    inputs, targets = laid.inputs[number].tolist(), laid.targets[number].tolist()
    seen = int(laid.prefix[number].sum())
    assert laid.prefix[number, :seen].all()
    assert {*targets[:seen]} <= {IGNORED}
    filled, at = list[list[int]](), seen
    while at < len(inputs) and inputs[at] == MARKS.begin:
        end = targets.index(MARKS.end, at)
        assert inputs[at + 1 : end + 1] == targets[at:end]
        filled.append(targets[at:end])
        at = end + 1
    assert {*inputs[at:]} <= {MARKS.pad}
    assert {*targets[at:]} <= {IGNORED}
    # A span's tokens say where they stand, so that their order may be any.
    assert laid.places is not None
    starts = [
        int(laid.places[number, targets.index(MARKS.end, seen + before) - len(span)])
        for before, span in zip(np.cumsum([0, *(len(span) + 1 for span in filled[:-1])]), filled, strict=True)
    ]
    tokens, spans = list[int](), list[tuple[int, int]]()
    for token in inputs[:seen]:
        if token < MARKS.blank:
            tokens.append(token)
            continue
        span = filled[starts.index(len(tokens))]
        spans.append((len(tokens), len(tokens) + len(span)))
        tokens += span
    assert len(spans) == len(filled)
    return tokens, spans


def test_the_paper_s_example_is_laid_out_as_in_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Du et al. 2022, figure 2: of x1 to x6 are hidden x3, and x5 with x6, which are filled in first."""
    monkeypatch.setattr(Blanks, "_spans", lambda *_: [(2, 3), (4, 6)])
    how = blanks()
    step = next(step for step in range(20) if np.diff(draws(how.key("order", step), np.zeros(2), np.arange(2))) < 0)
    laid = how(read(np.arange(11, 21)[None], 6), step)
    names = {90: "[M]", 93: "[S]", 94: "[E]", 1: ".", IGNORED: ".", **{10 + n: f"x{n}" for n in range(1, 7)}}
    assert " ".join(names[token] for token in laid.inputs[0]) == "x1 x2 [M] x4 [M] [S] x5 x6 [S] x3"
    assert " ".join(names[token] for token in laid.targets[0]) == ". . . . . x5 x6 [E] x3 [E]"
    assert laid.prefix is not None
    assert laid.places is not None
    assert laid.prefix[0].tolist() == [True] * 5 + [False] * 5
    assert laid.places[0].tolist() == [-1] * 5 + [4, 5, -1, 2, -1]


def test_spans_are_those_of_the_authors_procedure_at_the_same_draws() -> None:
    """generate_blank_data and sample_spans of their code, in plain words: lengths until enough is hidden, places among
    what is left, and a token between spans."""
    how, rows = blanks(), drawn_rows(30, 64)
    laid = how(read(rows, numbers=np.arange(30) * 3), 4)
    pmf = [3.0**k / math.factorial(k) for k in range(1, 40)]
    for number, row in enumerate(rows):

        def numbers(name: str, count: int, row: int = number * 3) -> np.ndarray:
            return draws(how.key(name, 4), np.full(count, row), np.arange(count))

        tokens, spans = undone(laid, number)
        assert tokens == row[: len(tokens)].tolist()
        lengths, chances = list[int](), iter(numbers("length", 20))
        while sum(lengths) < int(0.15 * len(tokens)):
            left, length = next(chances) * sum(pmf), 1
            while left >= pmf[length - 1]:
                left -= pmf[length - 1]
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
@pytest.mark.parametrize("section", [{}, {"density": 0.45, "mean_length": 0.5}, {"mean_length": 20}])
def test_a_row_of_any_length_is_hidden_and_found_again(size: int, section: dict[str, Any]) -> None:
    rows = drawn_rows(60, 48)
    laid = blanks(**section)(read(rows, size), 2)
    for number, row in enumerate(rows):
        tokens, spans = undone(laid, number)
        assert tokens == row[: len(tokens)].tolist()
        assert len(tokens) == size or len(tokens) + 2 * len(spans) > 40  # all that fit in are read
        assert sum(end - start for start, end in spans) >= max(int(blanks(**section).section.density * len(tokens)), 1)
        assert all(later > end for (_, end), (later, _) in pairwise(spans))


def test_lengths_are_poisson_s_and_the_order_is_any() -> None:
    laid = blanks()(read(drawn_rows(800, 128)), 1)
    lengths, first_is_first = list[int](), list[bool]()
    for number in range(800):
        spans = undone(laid, number)[1]
        lengths += [end - start for start, end in spans]
        places = laid.places[number]  # type: ignore[index]
        first_is_first.append(int(places[places >= 0][0]) == spans[0][0])
    mean = 3 / (1 - math.exp(-3))
    # The last span of a row is the one that makes it enough, so that long ones are seen a little more often.
    assert mean - 0.1 < np.mean(lengths) < mean + 0.45
    assert 1 / 8 < np.mean(first_is_first) < 1 / 3  # one of three to seven


def test_a_long_blank_is_the_end_of_the_row_and_a_sentence_is_whole() -> None:
    rows = drawn_rows(600, 62)
    rows[:, 30] = EOS
    long = blanks(document_share=1.0)(read(rows), 0)
    shares = list[float]()
    for number in range(600):
        tokens, ((start, end),) = undone(long, number)
        assert end == len(tokens) == 60
        shares.append((end - start) / 60)
    assert (min(shares), max(shares)) == (0.5, 59 / 60)
    assert np.mean(shares) == pytest.approx(0.745, abs=0.02)
    assert MARKS.long_blank in long.inputs
    whole = blanks(sentence_share=1.0)(read(rows), 0)
    for number in range(600):
        tokens, spans = undone(whole, number)
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


def test_what_is_hidden_depends_on_seed_step_row_and_place_alone() -> None:
    rows = np.tile(np.arange(2, 66), (30, 1))
    how = blanks(document_share=0.3, sentence_share=0.2)
    laid, again = how(read(rows), 3), how(read(rows[:2], numbers=np.array([7, 2])), 3)
    assert (again.inputs == laid.inputs[[7, 2]]).all()
    assert (again.targets == laid.targets[[7, 2]]).all()
    assert (how(read(rows), 4).inputs != laid.inputs).any(axis=1).mean() > 0.9
    # A row that is cut has draws of its own in each part.
    one = Read(rows[:1], read(rows[:1]).positions, np.zeros(1, dtype=np.int64), np.array([64]))
    assert (how(one, 3).inputs != laid.inputs[:1]).any()


def test_sentences_end_as_in_the_authors_code(inputs: dict[str, Path]) -> None:
    tokenizer = load(inputs["tokenizer"])
    ends = blanks_of(BlankInfilling(sentence_share=0.5), tokenizer, 0, 32).ends_sentence
    for text, is_end in {".": True, ";": True, "\n": True, ",": False, "a": False, " ": False}.items():
        (number,) = tokenizer.encode([text])[0].ids
        assert ends[number] == is_end, text
    assert not ends[[*tokenizer.special_ids.values()]].any()


def test_half_of_the_channels_are_turned_as_a_head_of_half_the_width() -> None:
    places = torch.arange(9)
    cosines, sines = rotary_table(places, 16, 500.0, share=0.5)
    narrow = rotary_table(places, 8, 500.0)
    for table, of_narrow, still in ((cosines, narrow[0], 1.0), (sines, narrow[1], 0.0)):
        assert torch.equal(table[:, [0, 1, 2, 3, 8, 9, 10, 11]], of_narrow)
        assert (table[:, [4, 5, 6, 7, 12, 13, 14, 15]] == still).all()


def test_an_export_is_a_glm_of_transformers_with_equal_logits(
    run_stage: Any, inputs: dict[str, Path], pretrain_config: dict[str, Any], tmp_path: Path
) -> None:
    config = {**pretrain_config, "steps": 3, "blank_infilling": {"document_share": 0.5}}
    run_stage("pretrain", inputs, config, tmp_path / "run")
    run_stage("export", {"tokenizer": inputs["tokenizer"], "pretrain": tmp_path / "run" / "data"}, {}, tmp_path / "out")
    folder = tmp_path / "out" / "data"
    theirs, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(theirs, GlmForCausalLM)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    laid = blanks_of(BlankInfilling(), load(inputs["tokenizer"]), 1, 32)(
        read(PackedSet(inputs["mix"]).read(np.arange(4))), 0
    )
    assert laid.prefix is not None
    ids, prefix, here = torch.from_numpy(laid.inputs), torch.from_numpy(laid.prefix), torch.arange(32)
    mask = ((here[:, None] >= here) | prefix[:, None, :])[:, None]
    with torch.no_grad():
        expected = theirs.eval()(ids, attention_mask=mask).logits
        plain = theirs(ids).logits
        for ours in (load_model(tmp_path / "run" / "data" / "model"), load_model(folder)):
            torch.testing.assert_close(ours(ids, prefix=prefix), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours(ids), plain, atol=1e-5, rtol=1e-5)
    shape = read_shape(folder)
    assert (shape.prefix_lm, shape.rotary_share, shape.qkv_bias) == (True, 0.5, True)
    assert shape.parameters == sum(one.numel() for one in load_model(folder).parameters())
    for changed in (shape, replace(shape, prefix_lm=False)):
        with pytest.raises(GgufError, match=r"this one is glm; remove it"):
            check_gguf(changed)
    # The biases are trained: not all of them are still the zeros that they began with.
    assert load_model(folder).model.layers[0].self_attn.v_proj.bias.abs().max() > 0
    # What was trained is trained on.
    again = {**config, "model": {"init_from": str(folder)}, "optimizer": {"learning_rate": 1e-9}, "steps": 1}
    run_stage("pretrain", inputs, again, tmp_path / "again")
    before, after = (load_model(one / "data" / "model").state_dict() for one in (tmp_path / "run", tmp_path / "again"))
    assert all(torch.allclose(tensor, before[name][: len(tensor)], atol=1e-6) for name, tensor in after.items())


def test_its_matrices_in_8_bits_are_those_of_transformers_names(
    run_stage: Any, inputs: dict[str, Path], pretrain_config: dict[str, Any], tmp_path: Path
) -> None:
    run_stage("pretrain", inputs, {**pretrain_config, "steps": 2, "blank_infilling": {}}, tmp_path / "run")
    run_stage(
        "export",
        {"tokenizer": inputs["tokenizer"], "pretrain": tmp_path / "run" / "data"},
        {"int8": True},
        tmp_path / "out",
    )
    whole, rounded = load_model(tmp_path / "run" / "data" / "model"), load_model(tmp_path / "out" / "data")
    for name, tensor in whole.state_dict().items():
        found = rounded.state_dict()[name][: len(tensor)]
        assert torch.allclose(found, tensor[: len(found)], atol=float(tensor.abs().max()) / 100), name
    gate = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(rounded.state_dict()[gate], whole.state_dict()[gate])


def test_a_glm_has_no_adapters_for_peft(tiny_shape: Shape) -> None:
    from gristmill.mixtures.posttraining import Lora
    from gristmill.train.adapters.lora import LoraError, tuned_model

    glm: Any = replace(tiny_shape, rotary_share=0.5, qkv_bias=True)
    assert sum(one.numel() for one in Llama(glm).parameters()) == glm.parameters
    with pytest.raises(LoraError, match="a GLM's matrices are joined or reordered in transformers"):
        tuned_model(glm, lambda name, size: torch.zeros(size), Lora(), 0, None, torch.float32, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"export": {"gguf": ["f16"]}}, r"pretrain\.blank_infilling reads prefixes"),
        ({"engine": {"parallel": {"tensor": 2}}}, r"pretrain\.blank_infilling reads prefixes"),
        (
            {"tokenizer": {"vocab_size": 400, "special_tokens": ["[MASK]"]}},
            "needs the special tokens <sop>, <eop>: name",
        ),
        (
            {"pretrain": {"steps": 2, "blank_infilling": {"document_share": 0.7, "sentence_share": 0.4}}},
            "add up to more than 1",
        ),
        (
            {
                "pretrain": {"steps": 2, "blank_infilling": {"sentence_share": 0.4}},
                "tokenizer": {"vocab_size": 400, "special_tokens": ["[MASK]", "<sop>", "<eop>"]},
            },
            r"needs the special tokens \[sMASK\]: na",
        ),
        ({"pretrain": {"steps": 2, "blank_infilling": {}, "model": {"document_mask": True}}}, "blank_infilling hides"),
        (
            {"pretrain": {"steps": 2, "blank_infilling": {}, "model": {"qk_norm": True}}},
            "qk_norm has no effect on the GLM",
        ),
        ({"pretrain": {"steps": 2, "blank_infilling": {}, "model": {"head_width": 6}}}, "6 must be a multiple of 4"),
        (
            {"pretrain": {"steps": 2, "blank_infilling": {}, "masked": {}}},
            "masked and blank_infilling are different objectives",
        ),
    ],
)
def test_what_blanks_do_not_go_with_is_refused_before_any_work(
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


def test_a_given_tokenizer_without_its_tokens_is_told(tokenizer_folder: Path) -> None:
    with pytest.raises(NoSentinelsError, match=r"pretrain\.blank_infilling needs the special tokens \[MASK\], <sop>"):
        blanks_of(BlankInfilling(), load(tokenizer_folder), 0, 32)
