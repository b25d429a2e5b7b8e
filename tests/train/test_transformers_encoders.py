"""Encoders and encoder-decoders of transformers: loaded, trained, evaluated and exported
with its own classes, next to the same modules in plain PyTorch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from gristmill.core.files import read_json, write_json
from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.objectives.span_objectives import SENTINEL
from gristmill.mixtures.schema.engine import Compute
from gristmill.mixtures.schema.evaluation import Export
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.distributed.context_parallel import TokenHead
from gristmill.train.models.encoder import model_of, new_encoder
from gristmill.train.models.model_config import (
    ShapeError,
    TransformersShape,
    shape_to_json,
)
from gristmill.train.models.transformer import configure
from gristmill.train.models.transformers_decoder import (
    auto_class_of,
    initial_tensors,
)
from gristmill.train.models.weights import (
    WeightsError,
    check_model,
    fill_from,
    load_model,
    read_shape,
    save_model,
)
from gristmill.train.objectives.losses import IGNORED, score_tokens
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.optim.optimizer import optimizers_by_name
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.stages.export import write_folder
from gristmill.train.stages.pretrain import read_layout
from tests.train.counted_step import count_step
from tests.train.encoder_families import (
    ENCODERS,
    FAMILIES,
    LENGTH,
    VOCAB,
    save_tiny_encoder,
)
from tests.train.test_masked_rows import ENCODER, MASK, make_inputs
from tests.train.trained import losses_of


def random_ids(rows: int, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, VOCAB, (rows, length), generator=generator)


def logits_of(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :7]
    logits: torch.Tensor = model(input_ids=ids, **inputs).logits
    return logits


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]
) -> dict[str, Path]:
    names = [MASK, *(SENTINEL.format(number) for number in range(8))]
    return make_inputs(tmp_path_factory, texts, names)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_and_exported_files_are_those_of_transformers(
    family: str, inputs: dict[str, Path], tmp_path: Path
) -> None:
    theirs = save_tiny_encoder(family, tmp_path / "published")
    kind = "encoder_decoder" if family == "t5" else "encoder"
    assert check_model(tmp_path / "published", kind).kind == kind
    with pytest.raises(WeightsError):
        load_model(tmp_path / "published")
    ids = random_ids(3)
    expected = logits_of(theirs, ids)
    beside = {"decoder_ids": ids[:, :7]} if family == "t5" else {}
    ours = load_model(tmp_path / "published", kind=kind)
    save_model(tmp_path / "ours", ours.shape, dict(ours.named_parameters()))
    assert read_shape(tmp_path / "ours") == ours.shape
    for model in (ours, load_model(tmp_path / "ours", kind=kind)):
        logits = model(ids, **beside)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    exported = tmp_path / "exported"
    write_folder(tmp_path / "ours", inputs["tokenizer"], Export(dtype="fp32"), exported)
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "published", exported)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    config = read_json(exported / "config.json")
    for name, value in read_json(tmp_path / "published" / "config.json").items():
        assert value in (None, config[name]), name
    auto_class = getattr(transformers, auto_class_of(config).name)
    reloaded = auto_class.from_pretrained(exported).eval()
    assert torch.equal(logits_of(reloaded, ids), expected)


@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_documents_of_a_row_are_computed_as_if_alone(
    family: str, tmp_path: Path
) -> None:
    theirs = save_tiny_encoder(family, tmp_path)
    model: Any = load_model(tmp_path, kind="encoder")
    assert model.separates_documents == (family != "roberta")
    ids = random_ids(2)
    parts = [slice(0, 3), slice(3, 18), slice(18, 27)]
    lengths = [part.stop - part.start for part in parts]
    positions = torch.cat([torch.arange(length) for length in lengths])
    positions = torch.cat((positions, torch.full((LENGTH - 27,), -1))).repeat(2, 1)
    packed = model(ids, positions=positions)
    for part in parts:
        alone = theirs(ids[:, part]).logits
        torch.testing.assert_close(packed[:, part], alone, atol=1e-5, rtol=0)
    targets = ids.masked_fill(positions % 3 != 1, IGNORED)
    head = TokenHead(score_tokens, {"targets": targets})
    nll, _ = model(ids, head, positions=positions)
    expected = torch.nn.functional.cross_entropy(
        packed.flatten(0, 1), targets.flatten(), reduction="none"
    )
    torch.testing.assert_close(nll.flatten(), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_padding_of_an_encoder_decoder_is_not_attended_to(tmp_path: Path) -> None:
    save_tiny_encoder("t5", tmp_path)
    model: Any = load_model(tmp_path, kind="encoder_decoder")
    ids = random_ids(1)
    positions = torch.arange(LENGTH).masked_fill(torch.arange(LENGTH) > 20, -1)[None]
    padded = model(ids, positions=positions, decoder_ids=ids[:, :5])
    alone = model(ids[:, :21], decoder_ids=ids[:, :5])
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "modernbert", "t5"])
def test_training_equals_a_plain_loop_over_the_module(
    family: str,
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    theirs = save_tiny_encoder(family, tmp_path / "published")
    is_encoder = family != "t5"
    config = {
        **pretrain_config,
        **({"masked": {}} if is_encoder else {"span_corruption": {}}),
        "model": {
            "init_from": str(tmp_path / "published"),
            **({"document_mask": True} if is_encoder else {}),
        },
        "steps": 5,
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "optimizer": {"learning_rate": 0.001, "weight_decay": 0.0},
    }
    run_stage("pretrain", inputs, config, tmp_path / "run")
    packed, section = PackedSet(inputs["mix"]), Pretrain.model_validate(config)
    layout = read_layout(section, inputs["tokenizer"], 11, LENGTH)
    shape = read_shape(tmp_path / "run" / "data" / "model")
    objective = NextToken(packed, 11, torch.ones(VOCAB), shape, layout=layout)
    optimizer = torch.optim.AdamW(
        theirs.parameters(), lr=0.001, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for step in range(5):
        rows = objective.order.rows(np.arange(6 * step, 6 * step + 6, dtype=np.int64))
        batch = objective.prepare(rows, step=step)
        assert batch.targets is not None
        nll = torch.zeros(())
        for row, targets in enumerate(batch.targets):
            ids = batch.tokens[row].long()
            beside = {
                f"decoder_input_{name.removeprefix('decoder_')}": part[row][None]
                for name, part in batch.beside.items()
            }
            places = None if batch.positions is None else batch.positions[row]
            starts = (
                [0]
                if places is None or not is_encoder
                else (places == 0).nonzero().flatten().tolist()
            )
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                kept = slice(start, end)
                real = None if places is None else places[kept][None] >= 0
                logits = theirs(
                    input_ids=ids[kept][None], attention_mask=real, **beside
                ).logits[0]
                nll = nll + torch.nn.functional.cross_entropy(
                    logits,
                    targets[kept] if is_encoder else targets,
                    ignore_index=IGNORED,
                    reduction="sum",
                )
        loss = nll / objective.weight(rows, step=step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_trained_bert_is_exported_evaluated_and_trained_further(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {
        **pretrain_config,
        "model": {**ENCODER, "norm_eps": 1e-12},
        "masked": {"shape": "bert", "rate": 0.15},
    }
    run_stage("pretrain", inputs, {**config, "steps": 3}, tmp_path / "run")
    trained = {**inputs, "pretrain": tmp_path / "run" / "data"}
    run_stage("export", trained, {}, tmp_path / "out")
    folder = tmp_path / "out" / "data"
    theirs, report = transformers.AutoModelForMaskedLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert isinstance(theirs, transformers.BertForMaskedLM)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.config.layer_norm_eps == 1e-12
    assert theirs.config.pad_token_id == 1
    rows = torch.from_numpy(
        PackedSet(inputs["mix"]).read(np.arange(4)).astype(np.int64)
    )
    ours: Any = None
    for source in (tmp_path / "run" / "data" / "model", folder):
        ours = load_model(source, kind="encoder")
        with torch.no_grad():
            torch.testing.assert_close(
                ours(rows), theirs.eval()(rows).logits, atol=1e-5, rtol=1e-5
            )
    assert theirs.cls.predictions.bias.shape == (ours.shape.vocab_size,)
    assert "A bert encoder" in (folder / "README.md").read_text()
    evaluation = run_stage("evaluate", trained, {"seed": 2}, tmp_path / "eval")
    for measures in evaluation["models"]["pretrain"]["sources"].values():
        assert 0 < measures["hidden_loss"] < math.log(10 * ours.shape.vocab_size)
    again = {
        **config,
        "model": {"init_from": str(folder)},
        "masked": {},
        "optimizer": {"learning_rate": 1e-9},
    }
    run_stage("pretrain", inputs, {**again, "steps": 1}, tmp_path / "again")
    after = load_model(tmp_path / "again" / "data" / "model", kind="encoder")
    for name, tensor in ours.state_dict().items():
        assert torch.allclose(after.state_dict()[name], tensor, atol=1e-6), name


def test_rows_longer_than_the_positions_are_rejected(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    save_tiny_encoder("bert", tmp_path / "published")
    config = read_json(tmp_path / "published" / "config.json")
    write_json(
        tmp_path / "published" / "config.json",
        {**config, "max_position_embeddings": 24},
    )
    model = {"init_from": str(tmp_path / "published")}
    with pytest.raises(ShapeError, match=r"32 tokens.* 24 positions"):
        run_stage(
            "pretrain",
            inputs,
            {**pretrain_config, "masked": {}, "model": model},
            tmp_path / "run",
        )


SECTIONS: dict[str, dict[str, Any]] = {
    "modernbert": {"masked": {}},
    "bert": {"masked": {"shape": "bert"}},
    "t5": {"span_corruption": {}},
}


def new_model(section: dict[str, Any], length: int = 128) -> Any:
    """Model of a manifest's section, to be trained."""
    sizes = {"layers": 2, "width": 64, "heads": 4}
    pretrain = Pretrain.model_validate({"steps": 1, "model": sizes, **section})
    shape = new_encoder(pretrain, 256, length)
    with torch.device("meta"):
        model = model_of(shape)
    fill_from(model, initial_tensors(shape, 3), "cpu")
    return model.requires_grad_()


@pytest.mark.parametrize("family", SECTIONS)
def test_checkpointing_keeps_gradients_and_flops_match_the_count(family: str) -> None:
    model = new_model(SECTIONS[family])
    shape: TransformersShape = model.shape
    assert shape.family == family
    assert TransformersShape(**shape_to_json(shape)["transformers"]) == shape  # type: ignore[arg-type]
    assert shape.parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )
    ids, gradients = torch.randint(0, 256, (2, 128)), []
    beside = {"decoder_ids": ids[:, :9]} if family == "t5" else {}
    for checkpointing in ("off", "full"):
        configure(
            model, Compute.model_validate({"activation_checkpointing": checkpointing})
        )
        model.zero_grad()
        model(ids, **beside).square().mean().backward()
        gradients.append(
            torch.cat(
                [
                    parameter.grad.flatten()
                    for parameter in model.parameters()
                    if parameter.grad is not None
                ]
            )
        )
    assert torch.equal(*gradients)
    assert (gradients[0] != 0).float().mean() > 0.9
    num_flops, _ = count_step(new_model(SECTIONS[family]), ids)
    assert flops_per_token(shape, 128).whole * ids.numel() == pytest.approx(
        num_flops, rel=0.15 if family == "t5" else 0.05
    )


@pytest.mark.parametrize("family", SECTIONS)
def test_initial_weights_depend_on_the_seed_alone(family: str) -> None:
    model = new_model(SECTIONS[family])
    torch.manual_seed(9)
    again, other = (initial_tensors(model.shape, seed) for seed in (3, 4))
    state = torch.random.get_rng_state()
    matrices = 0
    for name, parameter in model.named_parameters():
        assert torch.equal(again(name, parameter.shape), parameter)
        if parameter.std() > 0:
            assert not torch.equal(other(name, parameter.shape), parameter)
            matrices += 1
    assert matrices >= 10
    assert torch.equal(torch.random.get_rng_state(), state)
    ids = torch.randint(0, 256, (4, 128))
    logits = model(ids, **({"decoder_ids": ids} if family == "t5" else {}))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    assert loss.item() < 1.3 * math.log(256)


@pytest.mark.parametrize("family", SECTIONS)
def test_muon_updates_the_matrices_of_layers(family: str) -> None:
    model = new_model(SECTIONS[family])
    matrices, others = optimizers_by_name(model, "muon")
    kinds = {
        id(parameter): kind
        for kind, optimizer in (("muon", matrices), ("adamw", others))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    in_layers = {
        id(module.weight)
        for block in model.blocks
        for module in block.modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert {key for key, kind in kinds.items() if kind == "muon"} == in_layers


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"rope_theta": 500.0}, "rope_theta"),
        ({"tied_embeddings": False}, "tied_embeddings"),
        ({"qk_norm": True}, "qk_norm"),
        ({"init": "llama"}, "init"),
        ({"mup_base_width": 64}, "mup_base_width"),
        ({"init_from": "folder"}, "masked.shape"),
    ],
)
def test_model_key_that_bert_lacks_is_rejected_before_any_work(
    stage_config: Any, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        stage_config(
            "pretrain",
            tokenizer={"vocab_size": 300, "special_tokens": [MASK]},
            pretrain={"steps": 2, "masked": {"shape": "bert"}, "model": model},
        )
