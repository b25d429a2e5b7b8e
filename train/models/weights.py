"""Initial weights of a model: initialised by name, or read from files; independent of
the world size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from gristmill.core.files import read_json, write_json
from gristmill.mixtures.schema.model import Implementation, Initialisation
from gristmill.train.models.hf_configs import (
    UnknownArchitectureError,
    is_scorer,
    part_of_hf,
    shape_from_hf,
    tensors_behind,
)
from gristmill.train.models.initialisation import initial_tensor
from gristmill.train.models.model_config import (
    OWN,
    TRANSFORMERS,
    AnyShape,
    ConfigJson,
    Kind,
    OwnShape,
    Shape,
    ShapeError,
    StoredShape,
    TransformersShape,
    shape_from_json,
    shape_to_json,
)
from gristmill.train.models.model_config import WeightsError as WeightsError
from gristmill.train.models.tensor_files import INDEX_FILE as INDEX_FILE
from gristmill.train.models.tensor_files import WEIGHTS_FILE as WEIGHTS_FILE
from gristmill.train.models.tensor_files import (
    ModelTensors,
    Tensors,
    ready,
    write_tensors,
)
from gristmill.train.models.tensor_files import TensorOf as TensorOf
from gristmill.train.models.transformers_decoder import (
    GENERATION_FILE,
    PROCESSOR_FILES,
    TransformersModule,
    check_module,
    initial_tensors,
    module_shape,
    published_tensors,
)

if TYPE_CHECKING:
    from gristmill.train.models.transformer import Llama

SHAPE_FILE = "config.json"


def drawn(
    shape: StoredShape,
    seed: int,
    init: Initialisation = "gpt2",
    mup_base_width: int | None = None,
) -> TensorOf:
    """Source of the tensors of a new model; one of transformers is initialised by its
    class.
    """
    if isinstance(shape, TransformersShape):
        return initial_tensors(shape, seed)
    return lambda name, size: initial_tensor(
        name, size, shape, init, seed, mup_base_width
    )


def stored(folder: Path, implementation: Implementation = "auto") -> TensorOf:
    """Source of the tensors of a saved model, ours or of transformers, in one file or
    several; for `implementation` see `read_shape`.

    Raises:
        WeightsError: when called: a tensor is missing or has the wrong shape.
    """
    config = _read_config(folder)
    shape = read_shape(folder, implementation)
    family = config.get("model_type", "gristmill")
    if isinstance(shape, TransformersShape) and family == shape.family:
        return published_tensors(folder, shape)
    # Of other shapes, files have the names of the module.
    shape = cast("Shape", shape)
    find = ModelTensors(folder).read

    def tensor_of(name: str, size: torch.Size) -> Tensor:
        parts = [
            torch.cat([find(inner) for inner in names])
            if len(names) > 1
            else find(names[0])
            for names in tensors_behind(name, shape, family)
        ]
        # Matrices of experts are stacked, even of one expert.
        tensor = torch.stack(parts) if parts[0].dim() < len(size) else parts[0]
        tensor = part_of_hf(name, tensor, shape, family)
        if tensor.shape != size:
            raise WeightsError(
                f"{folder}: {name} is {tuple(tensor.shape)}, the model wants "
                f"{tuple(size)}: weights and {SHAPE_FILE} do not belong together"
            )
        return tensor.float()

    return tensor_of


def with_new_head(folder: Path, classifier: TransformersShape, seed: int) -> TensorOf:
    """Source of the tensors of a new classifier: those of the encoder that a stage
    wrote into a folder, and random ones that the encoder lacks.
    """
    of_encoder, new = stored(folder), initial_tensors(classifier, seed)
    names = ModelTensors(folder)
    return lambda name, size: (of_encoder if name in names else new)(name, size)


def read_shape(folder: Path, implementation: Implementation = "auto") -> StoredShape:
    """Shape of a model that a training stage saved, or that transformers can load.

    Args:
        folder: of the model.
        implementation: see `mixtures.schema.model.GivenModel`.

    Raises:
        WeightsError: the model is user code, or its weights are quantised.
        gristmill.train.models.hf_configs.UnknownArchitectureError: neither the decoder
            nor transformers supports it.
        gristmill.train.models.model_config.ShapeError: the model was saved by another
            version.
    """
    config = _read_config(folder)
    if OWN in config:
        raise WeightsError(
            f"{folder} is a model of code of its own, "
            f"{config[OWN]['use']['function']}, which is not run here: the run that "
            "names it in pretrain.model.use trains and evaluates it; all else needs "
            "the built-in decoder"
        )
    try:
        if TRANSFORMERS in config:
            return TransformersShape(**config[TRANSFORMERS])
        if "model_type" not in config:
            return shape_from_json(config)
        if implementation != "transformers":
            try:
                return shape_from_hf(config)
            except UnknownArchitectureError:
                if implementation == "own":
                    raise
        if "quantization_config" in config:
            raise WeightsError(
                f"{folder} holds quantised weights (`quantization_config`), which are "
                "not trained; save it dequantised with transformers first"
            )
        files = {
            name: read_json(folder / name)
            for name in (GENERATION_FILE, *PROCESSOR_FILES)
            if (folder / name).exists()
        }
        return module_shape(config, files)
    except (UnknownArchitectureError, WeightsError):
        raise
    except ShapeError as error:
        raise ShapeError(f"{folder}: {error}") from error
    except (
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
    ) as error:
        raise ShapeError(
            f"{folder / SHAPE_FILE} holds a value of the wrong kind: {error}"
        ) from error


def _read_config(folder: Path) -> ConfigJson:
    """Read the config.json of a model's folder.

    Raises:
        WeightsError: the file is missing, or not a JSON object.
    """
    path = folder / SHAPE_FILE
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise WeightsError(
            f"{path} does not exist; a model is a folder with {SHAPE_FILE} and "
            f"{WEIGHTS_FILE}"
        ) from None
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path} holds no JSON object")
    return config


def check_model(
    folder: Path,
    kind: Kind | None = "decoder",
    implementation: Implementation = "auto",
) -> StoredShape:
    """Check from the headers of a model's files that all tensors exist, without reading
    weights; returns its shape.

    Args:
        folder: of the model.
        kind: required kind of prediction; None accepts any.
        implementation: see `read_shape`.

    Raises:
        WeightsError: a file is missing or damaged, a tensor of the model is missing, or
            the model is of another kind.
        ShapeError, gristmill.train.models.hf_configs.UnknownArchitectureError: as
            `read_shape`.
    """
    from gristmill.train.models.encoder import model_of

    config = _read_config(folder)
    if is_scorer(config):
        raise WeightsError(
            f"{folder} is a reward model, which scores texts and cannot write any"
        )
    shape = read_shape(folder, implementation)
    if kind is not None:
        check_kind(folder, shape, kind)
    tensors = ModelTensors(folder)
    if isinstance(shape, TransformersShape) and TRANSFORMERS not in config:
        return shape
    for name, _ in model_of(shape).named_parameters():
        for names in tensors_behind(
            name, cast("Shape", shape), config.get("model_type", "gristmill")
        ):
            for inner in names:
                tensors[inner]
    return shape


IS = {
    "decoder": "predicts the next token",
    "encoder": "is an encoder, which fills in masked tokens and cannot write text",
    "encoder_decoder": "is an encoder-decoder, which fills in hidden spans and "
    "cannot continue a text",
    "classifier": "is a classifier, which cannot write text",
}
WANTED = {
    "decoder": "a model that predicts the next token",
    "encoder": "an encoder, which fills in masked tokens, such as `pretrain.masked` "
    "trains",
    "encoder_decoder": "an encoder-decoder, such as `pretrain.span_corruption` trains",
}


def check_kind(folder: Path, shape: AnyShape, kind: Kind) -> None:
    """Raise WeightsError for a model of another kind."""
    if shape.kind != kind:
        raise WeightsError(f"{folder} {IS[shape.kind]}; name {WANTED[kind]}")


def save_model(folder: Path, shape: AnyShape, tensors: Tensors) -> None:
    """Write a model: `config.json`, and `model.safetensors` with full float32 tensors
    on the CPU.
    """
    from gristmill.train.models.own_model import INNER

    is_own = isinstance(shape, OwnShape)
    write_json(folder / SHAPE_FILE, shape_to_json(shape))
    write_tensors(
        folder / WEIGHTS_FILE,
        {
            name.removeprefix(INNER) if is_own else name: ready(tensor)
            for name, tensor in tensors.items()
        },
    )


def load_model(
    folder: Path,
    device: str = "cpu",
    runs_own_code: bool = False,
    kind: Kind | None = "decoder",
) -> Llama:
    """Load a saved model in float32 for evaluation in one process.

    Args:
        folder: of the model.
        device: of the model.
        runs_own_code: true to run the code of a user's model in its config.json; it has
            the decoder's interface.
        kind: required kind of prediction; None accepts any.

    Raises:
        WeightsError: the model scores texts instead of writing them, is of another
            kind, or is user code.
    """
    from gristmill.train.models.encoder import model_of
    from gristmill.train.models.own_model import INNER, build_own

    config = _read_config(folder)
    if runs_own_code and OWN in config:
        tensors = ModelTensors(folder)
        own_model = build_own(TypeAdapter(OwnShape).validate_python(config))
        fill_from(
            own_model, lambda name, size: tensors.read(name.removeprefix(INNER)), device
        )
        return cast("Llama", own_model)
    if is_scorer(config):
        raise WeightsError(
            f"{folder} is a reward model, which scores texts and cannot write any; "
            "name a model that `pretrain`, `sft` or `dpo` made"
        )
    shape = read_shape(folder)
    if kind is not None:
        check_kind(folder, shape, kind)
    model = model_of(shape)
    fill_from(model, stored(folder), device)
    if isinstance(model, TransformersModule):
        check_module(model, torch.float32)
    return cast("Llama", model)


@torch.no_grad()
def fill_from(model: nn.Module, tensor_of: TensorOf, device: str) -> None:
    """Set the parameters of a model, and its buffers that files have, to the values of
    `tensor_of`, frozen, in evaluation mode.
    """
    allocate(model, device)
    for name, tensor in stored_tensors(model).items():
        tensor.copy_(tensor_of(name, tensor.shape))
    model.requires_grad_(False).eval()


def stored_tensors(model: nn.Module) -> Tensors:
    """Parameters of a model, and its buffers that files have, by name."""
    return {**dict(model.named_parameters()), **stored_buffers(model)}


def stored_buffers(model: nn.Module) -> Tensors:
    """Buffers that belong to a model's weights, by name."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def allocate(model: Any, device: torch.device | str) -> None:
    """Give the parameters of a model memory on a device, where its buffers keep their
    values.
    """
    buffers = dict(model.named_buffers())
    first_names = dict[nn.Parameter, str]()
    shared = {
        name: first_names.setdefault(parameter, name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    model.to_empty(device=device)
    for name, first in shared.items():
        owner, _, attribute = name.rpartition(".")
        if name != first:
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
