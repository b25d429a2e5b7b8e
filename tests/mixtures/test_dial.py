"""Keys of `pretrain` derived from `size` or `depth`, against the published laws
computed here once more.
"""

from __future__ import annotations

import math

import pytest

from gristmill.flows.planning.derived_settings import (
    derived_keys,
    in_a_sentence,
)
from gristmill.flows.stages.pretrain import STAGE
from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.scaling.size_rules import depth_of
from gristmill.mixtures.schema.model import Model, Moe
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.train.models.model_config import shape_of

MANIFEST = """
name: small
sources: {prose: {path: "*.txt"}}
tokenizer: {}
mix: {tokens: 1_000_000, sequence_length: 2048}
pretrain: {%s}
"""


def read(keys: str) -> Manifest:
    return parse_manifest(MANIFEST % keys, "/m/small.yaml")


def section_of(keys: str) -> Pretrain:
    section = read(keys).pretrain
    assert section is not None
    return section


def test_depth_gives_the_values_of_the_published_laws() -> None:
    section = section_of("depth: 12")
    assert (section.model.layers, section.model.width, section.model.heads) == (
        12,
        768,
        12,
    )
    # 12 layers of 4 * 768^2 in attention and 3 * 768 * 2048 in the feed-forward layer
    weights = 12 * (4 * 768**2 + 3 * 768 * 2048)
    tokens = 20 * weights
    flops = (6 * weights + 12 * 12 * 768 * 2048) * tokens
    rows = 0.2920 * flops**0.3271 / 2048
    assert section.global_batch_size == 2 ** round(math.log2(rows)) == 128
    assert section.optimizer.learning_rate == pytest.approx(
        0.3118 * flops**-0.1250, rel=0.005
    )
    assert section.steps == math.ceil(tokens / (128 * 2048)) == 6480
    decay = 1 / (section.optimizer.learning_rate * 1.084 * 20**-0.527 * section.steps)
    assert section.optimizer.weight_decay == pytest.approx(decay, rel=0.005)


@pytest.mark.parametrize(
    ("size", "depth"), [("50k", 1), ("1m", 3), ("30m", 8), ("0.125b", 14), ("125m", 14)]
)
def test_size_is_rounded_to_the_nearest_depth(size: str, depth: int) -> None:
    assert depth_of(size) == depth
    assert section_of(f"size: {size}").model == section_of(f"depth: {depth}").model


def test_explicit_keys_win_and_derived_keys_follow_from_them() -> None:
    free = section_of("depth: 4")
    section = section_of(
        "depth: 4, steps: 7, model: {width: 512}, optimizer: {kind: muon, "
        "weight_decay: 0.0}"
    )
    assert (section.steps, section.optimizer.weight_decay) == (7, 0.0)
    assert (section.model.width, section.model.heads) == (512, 8)
    assert section.optimizer.kind == "muon"
    assert section.optimizer.learning_rate < free.optimizer.learning_rate
    assert section.global_batch_size > free.global_batch_size
    assert section_of("depth: 4, global_batch_size: 8").steps == pytest.approx(
        free.steps * free.global_batch_size / 8, rel=0.01
    )


def test_decoder_defaults_to_muon_with_a_long_decay() -> None:
    section = section_of("depth: 3")
    assert (section.optimizer.kind, section.schedule.decay_fraction) == ("muon", 0.6)
    explicit = section_of(
        "depth: 3, optimizer: {kind: adamw}, schedule: {decay_fraction: 0.2}"
    )
    assert (explicit.optimizer.kind, explicit.schedule.decay_fraction) == ("adamw", 0.2)
    assert (
        section_of("depth: 3, schedule: {kind: cosine}").schedule.decay_fraction == 0.3
    )
    assert section_of("depth: 3, prefix_lm: {}").optimizer.kind == "adamw"
    assert section_of("steps: 3").optimizer.kind == "adamw"


@pytest.mark.parametrize(
    ("keys", "tied", "init", "scale"),
    [
        ("", False, "llama", 12.0),
        ("model: {tied_embeddings: true}", True, "llama", 1.0),
        ("model: {init: neox}", False, "neox", 12.0),
        ("model: {mup_base_width: 64}", True, "gpt2", 1.0),
        ("optimizer: {kind: adamw}", False, "llama", 1.0),
        ("optimizer: {embedding_rate_scale: 2}", False, "llama", 2.0),
        ("prefix_lm: {}", True, "gpt2", 1.0),
    ],
)
def test_embeddings_are_untied_and_learn_faster_unless_the_manifest_differs(
    keys: str, tied: bool, init: str, scale: float
) -> None:
    section = section_of(f"depth: 3, {keys}")
    assert (section.model.tied_embeddings, section.model.init) == (tied, init)
    assert section.optimizer.embedding_rate_scale == scale


def test_batch_below_the_range_of_the_laws_is_halved() -> None:
    """1.33 M weights in the layers, 20 tokens each, rows of 2,048: 0.2920 C^0.3271
    tokens are 16,100.
    """
    flops = (6 * 1_327_104 + 12 * 3 * 192 * 2048) * 20 * 1_327_104
    assert flops < 1e17
    law = 0.2920 * flops**0.3271 / 2048
    assert section_of("depth: 3").global_batch_size == 2 ** round(math.log2(law / 2))


def test_fewer_tokens_mean_fewer_steps_a_smaller_batch_and_a_higher_rate() -> None:
    many, few = section_of("depth: 6"), section_of("depth: 6, tokens_per_parameter: 1")
    assert few.steps < many.steps
    assert few.global_batch_size < many.global_batch_size
    assert few.optimizer.learning_rate > many.optimizer.learning_rate


def test_fingerprint_depends_on_derived_values_only() -> None:
    from_depth = read("depth: 2")
    section = section_of("depth: 2")
    spelt_out = read(
        f"steps: {section.steps}, global_batch_size: {section.global_batch_size}, model: {{layers: 2, width: "
        f"128, heads: 2, tied_embeddings: false, init: llama}}, "
        f"optimizer: {{kind: muon, embedding_rate_scale: 12, learning_rate: {section.optimizer.learning_rate}, weight_decay: "
        f"{section.optimizer.weight_decay}}}, schedule: {{decay_fraction: 0.6}}"
    )
    assert STAGE.configure(from_depth, False) == STAGE.configure(spelt_out, False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("size: 1m, depth: 2", "size and depth"),
        ("steps: 3, tokens_per_parameter: 2", "tokens_per_parameter"),
        ("size: 1x", "pretrain.size"),
        ("depth: 0", "pretrain.depth: input should be greater than 0"),
        ("size: 1m, model: {preset: llama-1m}", "model.preset"),
        ("size: 1m, optimizer: {kind: lion}", "set optimizer.learning_rate"),
        ("size: 1m, model: {head_width: 0}", "head_width"),
        ("size: 1m, steps: 0", "pretrain.steps: input should be greater than 0"),
    ],
)
def test_setting_that_contradicts_size_or_depth_is_rejected(
    keys: str, message: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        read(keys)
    (problem,) = caught.value.problems
    assert message in str(problem)


@pytest.mark.parametrize(
    "model",
    [
        Model(),
        Model(width=192, heads=6, kv_heads=2, head_width=64),
        Model(ffn_width=100, moe=Moe(experts=4)),
    ],
)
def test_layer_weights_match_the_shape_of_the_model(model: Model) -> None:
    shape = shape_of(model, 1000, 64)
    assert (
        model.layer_weights
        == shape.matrix_parameters - shape.padded_vocab_size * shape.width
    )


def test_plan_shows_derived_values() -> None:
    derived = derived_keys(read("size: 1m, optimizer: {learning_rate: 0.001}"))
    assert derived is not None
    assert derived.keys["model.width"] == 192
    assert derived.keys["optimizer.learning_rate"] == 0.001
    sentence = in_a_sentence(derived)
    assert sentence.startswith(
        "size 1m: model.layers 3, model.width 192, model.heads 3, "
        "model.tied_embeddings false, model.init llama, global_batch_size 4, "
    )
    assert "optimizer.kind muon" in sentence
    assert "optimizer.learning_rate 0.001, " in sentence
    assert sentence.endswith(
        "1,327,104 weights in the layers, 26,542,080 tokens, 20 per weight"
    )
    assert derived_keys(read("steps: 3")) is None
