"""Modules of transformers, for families that this package does not compute: their own
classes, called like `transformer.Llama`; decoders here, others in encoder.py.

Each document of a packed row has positions from 0, by which transformers restricts
attention of decoders to documents (masking_utils.find_packed_sequence_indices).
`check_module` tests this on the module itself. Modules stay in evaluation mode, as
trainings use no random numbers: nothing is dropped out. transformers is imported when a
module is built.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gristmill.core.files import is_local, write_json
from gristmill.train.models.attention import document_numbers
from gristmill.train.models.causality import (
    LARGEST_LEAK,
    PROBED_TOKENS,
    logit_changes,
)
from gristmill.train.models.model_config import (
    DECODED,
    ENCODED,
    ConfigJson,
    Kind,
    TransformersShape,
    UnknownArchitectureError,
    WeightsError,
)
from gristmill.train.models.tensor_files import ModelTensors, TensorOf, Tensors
from gristmill.train.models.transformer import Head, logits_head
from gristmill.train.objectives.losses import Output, Softcapped, softcap

GENERATION_FILE = "generation_config.json"
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of models that read images, which are exported as they are."""


class AutoClass(NamedTuple):
    """Automatic class of transformers.

    Attributes:
        kind: of the models that it loads.
        name: of the class.
        mapping: name of the classes of its families.
        task: of the models in the Hub.
    """

    kind: Kind
    name: str
    mapping: str
    task: str


CAUSAL_LM = AutoClass(
    "decoder",
    "AutoModelForCausalLM",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "text-generation",
)
AUTO_CLASSES = (
    AutoClass(
        "encoder_decoder",
        "AutoModelForSeq2SeqLM",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "text2text-generation",
    ),
    AutoClass(
        "encoder", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", "fill-mask"
    ),
    AutoClass(
        "decoder",
        "AutoModelForImageTextToText",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "image-text-to-text",
    ),
    CAUSAL_LM,
    AutoClass(
        "classifier",
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        "text-classification",
    ),
)
"""In order: BART's class is of the first two. Of models that read images, the part for
text is trained, and all is kept.
"""
UNLIMITED_CONTEXT = 8192
"""Row length of a module without a limit, such as Mamba 2, before it is trained on
longer rows.
"""

ONE_BY_ONE = (
    "this class of transformers does not separate the documents of a row; each is "
    "computed as a row of its own, padded to the longest of its batch, which takes more "
    "time and memory if lengths differ: lower micro_batch_size if memory ends"
)
"""Warning about a decoder whose `separates_documents` is false."""


class NotCausalError(ValueError):
    """A module of transformers that cannot be trained to predict the next token."""


class Documents(NamedTuple):
    """Documents of packed rows as rows of their own, padded to the longest.

    Attributes:
        ids: (m, s) int64.
        mask: (m, s) int64, 0 for padding.
        rows, places: (n, t) int64, index into `ids` of each token; 0 for padding.
    """

    ids: Tensor
    mask: Tensor
    rows: Tensor
    places: Tensor


def documents_as_rows(ids: Tensor, positions: Tensor) -> Documents:
    """Documents of rows of ids (n, t) with positions (n, t), negative for padding."""
    real = positions >= 0
    keys = document_numbers(positions) + ids.shape[1] * torch.arange(
        len(ids), device=ids.device
    ).unsqueeze(1)
    _, lengths = keys[real].unique_consecutive(return_counts=True)
    documents = pad_sequence(ids[real].split(lengths.tolist()), batch_first=True)
    columns = torch.arange(documents.shape[1], device=ids.device)
    mask = (columns < lengths[:, None]).long()
    rows, places = torch.zeros_like(ids), torch.zeros_like(ids)
    rows[real], places[real] = mask.nonzero(as_tuple=True)
    return Documents(documents, mask, rows, places)


@dataclass(frozen=True)
class LogitMap:
    """Step of a class from the results of its output layer to its logits.

    Attributes:
        factor: of results (Cohere, Granite).
        cap: of their absolute values by a hyperbolic tangent (Gemma 2); None: none.
    """

    factor: float
    cap: float | None

    def __call__(self, results: Tensor) -> Tensor:
        """Logits of results, of any shape."""
        logits = results * self.factor
        return logits if self.cap is None else softcap(logits, self.cap)


class TransformersModule(nn.Module):
    """Module of transformers, called like `transformer.Llama`; the base, beside a class
    of transformers, of what `build_module` returns.

    Attributes:
        shape: its sizes.
        reads_positions: true if its class takes positions.
        cache_name: of its argument and its result with keys and values, or states.
        separates_documents: false if a document changes the logits of another in its
            row (see `check_module`); each is then computed as a row of its own, padded
            to the longest.
        logit_map: with it heads get hidden states and the output matrix, without it
            logits (see `measure_logit_map`).
    """

    shape: TransformersShape
    reads_positions: bool
    cache_name: str
    separates_documents: bool = True
    logit_map: LogitMap | None = None
    is_compiled: bool = False

    def output(self, **inputs: Any) -> Any:
        """Output of the class of transformers."""
        whole: Any = super().forward
        return whole(**inputs)

    def states(self, **inputs: Any) -> tuple[Tensor, Output, Any]:
        """Hidden states (n, t, d) and the output matrix, or logits (n, t, v), and the
        output of the class.
        """
        if self.logit_map is None:
            output = self.output(**inputs)
            return output.logits, None, output
        module: Any = self
        layer: nn.Linear = module.get_output_embeddings()
        layer_inputs: list[Tensor] = []

        def skip(layer: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            layer_inputs.append(arguments[0])
            return (arguments[0][:, :0],)

        with layer.register_forward_pre_hook(skip):
            output = self.output(**inputs)
        (hidden,) = layer_inputs
        matrix = layer.weight
        if layer.bias is not None:
            # Heads take no bias, which becomes a column of the matrix.
            matrix = torch.cat((matrix, layer.bias[:, None]), dim=1)
            hidden = F.pad(hidden, (0, 1), value=1.0)
        if self.logit_map.factor != 1.0:
            hidden = hidden * self.logit_map.factor
        cap = self.logit_map.cap
        return hidden, matrix if cap is None else Softcapped(matrix, cap), output

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)

    @property
    def text_parts(self) -> list[nn.Module]:
        """Parts that compute logits of text: all but those that read images."""
        module: Any = self
        if module.config.get_text_config() is module.config:
            return [self]
        return [module.get_decoder(), module.get_output_embeddings()]

    @property
    def blocks(self) -> list[nn.Module]:
        """Layers that are sharded and recomputed one by one."""
        module: Any = self
        names = set(module._no_split_modules or ())
        embedding = module.get_input_embeddings()
        return [
            part
            for text_part in self.text_parts
            for part in text_part.modules()
            # fully_shard adds the prefix
            if type(part).__name__.removeprefix("FSDP") in names
            # The output layer may share the weights of the embedding.
            and embedding not in part.modules()
        ]


class TransformersDecoder(TransformersModule):
    """Decoder of transformers."""

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
    ) -> Any:
        """Run the module and apply a head; see `Llama.forward`. Experts are not
        balanced.
        """
        if positions is not None and not self.separates_documents:
            documents = documents_as_rows(ids, positions)
            hidden, matrix, _ = self.states(input_ids=documents.ids, use_cache=False)
            return head(hidden[documents.rows, documents.places], matrix)
        beside = {}
        if positions is not None:
            # Each padding token is a document.
            beside["position_ids"] = positions.clamp(min=0)
        hidden, matrix, _ = self.states(input_ids=ids, use_cache=False, **beside)
        return head(hidden, matrix)

    def extend(
        self, ids: Tensor, cache: tuple[Any, int] | None = None
    ) -> tuple[Tensor, tuple[Any, int]]:
        """Logits (n, v) after the last of ids (n, t) that follow those of a cache, and
        the cache with them: that of transformers, and its number of ids, which a first
        layer of linear attention does not count.
        """
        past, start = (None, 0) if cache is None else cache
        end = start + ids.shape[1]
        inputs = {"input_ids": ids, self.cache_name: past}
        if self.reads_positions:
            inputs["position_ids"] = torch.arange(start, end, device=ids.device)[None]
        hidden, matrix, output = self.states(use_cache=True, **inputs)
        return logits_head(hidden[:, -1], matrix), (
            getattr(output, self.cache_name),
            end,
        )


def auto_class_of(config: ConfigJson) -> AutoClass:
    """Automatic class for a config.json; code of its folder (`auto_map`) is never run.

    Raises:
        UnknownArchitectureError: the installed transformers lacks its model.
    """
    from transformers.models.auto import modeling_auto

    family = config.get("model_type", "")
    pretraining = modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES.get(family)
    for auto_class in AUTO_CLASSES:
        name = getattr(modeling_auto, f"{auto_class.mapping}_NAMES").get(family)
        if name and {name, pretraining} & {*(config.get("architectures") or [name])}:
            return auto_class
    raise UnknownArchitectureError(
        f"config.json: the installed transformers has no language model of model_type "
        f"{family!r} and architectures {config.get('architectures')}; code of the folder "
        "(auto_map) is never run"
    )


def module_shape(config: ConfigJson, files: ConfigJson) -> TransformersShape:
    """Shape of a config.json that transformers can load, and of other JSON files."""
    kind = auto_class_of(config).kind
    model = _without_weights(json.dumps(config))
    text = model.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    heads = getattr(text, "num_attention_heads", None) or 0
    # Gemma 4 refuses to name a head_dim that differs between layers.
    width = text.to_dict().get("head_dim") or text.hidden_size // max(heads, 1)
    output = getattr(model.get_output_embeddings(), "weight", None)
    looked_up = {
        module.weight for module in model.modules() if isinstance(module, nn.Embedding)
    } - {output}

    def multiplied(module: nn.Module) -> int:
        parameters = set(module.parameters()) - looked_up
        return sum(parameter.numel() for parameter in parameters)

    matrix_parameters = multiplied(model)
    if kind == "encoder_decoder":
        of_encoder = multiplied(model.get_encoder())
        of_decoder = matrix_parameters - of_encoder
        matrix_parameters = round(ENCODED * of_encoder + DECODED * of_decoder)
    return TransformersShape(
        config=dict(config),
        files=dict(files),
        kind=kind,
        vocab_size=text.vocab_size,
        sequence_length=context or UNLIMITED_CONTEXT,
        context=context,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        multiplied=matrix_parameters,
        layers=text.num_hidden_layers,
        attention_width=heads * width,
    )


def _parsed(config: ConfigJson) -> Any:
    """Configuration of transformers of a config.json."""
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with TemporaryDirectory(prefix="gristmill-config-") as folder:
        write_json(Path(folder) / "config.json", config)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def module_of(config: ConfigJson) -> Any:
    """Model of transformers of a config.json, with random weights in float32; kernels
    are chosen by its class.
    """
    import transformers

    parsed = _parsed(config)
    auto_class = auto_class_of(config)
    model_class = getattr(transformers, auto_class.mapping)[type(parsed)]
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    model = getattr(transformers, auto_class.name).from_config(
        parsed, dtype=torch.float32, attn_implementation=attention
    )
    if not getattr(parsed, "scale_decoder_outputs", True):
        # The class ties the matrices of a T5 1.1 until it reads a file with both. New
        # ones are drawn as in T5X (network.py, logits_dense).
        weight = torch.empty_like(model.lm_head.weight)
        model.lm_head.weight = nn.Parameter(
            weight.normal_(0.0, weight.shape[1] ** -0.5)
        )
        del model.all_tied_weights_keys["lm_head.weight"]
    return model.eval()


@lru_cache(maxsize=1)
def _without_weights(config: str) -> Any:
    """Model of transformers of the text of a config.json, with its parameters on the
    meta device, and with its buffers, which files do not have, on the CPU. It is built
    once while a model is opened; callers do not change it.
    """

    def without_memory(
        module: nn.Module, name: str, parameter: nn.Parameter
    ) -> nn.Parameter | None:
        return None if parameter.is_meta else nn.Parameter(parameter.to("meta"))

    hook = nn.modules.module.register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        with torch.device("cpu"):
            return module_of(json.loads(config))
    finally:
        hook.remove()


def build_module(
    shape: TransformersShape, base: type[TransformersModule]
) -> TransformersModule:
    """Build a module with parameters on the meta device, and with its buffers, which
    files do not have, on the CPU.

    Args:
        shape: of the module.
        base: its calling convention.
    """
    model = deepcopy(_without_weights(json.dumps(shape.config)))
    kind = type(model)
    takes = inspect.signature(kind.forward).parameters
    model.__class__ = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
    model.shape = shape
    model.reads_positions = "position_ids" in takes
    model.cache_name = "cache_params" if "cache_params" in takes else "past_key_values"
    built: TransformersModule = model
    of_text = {weight for part in built.text_parts for weight in part.parameters()}
    for parameter in built.parameters():
        parameter.requires_grad_(parameter in of_text)
    return built


def initial_tensors(shape: TransformersShape, seed: int) -> TensorOf:
    """Source of the tensors of a new module, which its class in transformers
    initialises; drawn at the first call.
    """

    @cache
    def tensors() -> Tensors:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            state: Tensors = module_of(shape.config).state_dict()
        return state

    return lambda name, size: tensors()[name]


def published_tensors(folder: Path, shape: TransformersShape) -> TensorOf:
    """Source of the tensors of a folder that transformers loads, under the names of its
    module.

    They are read from the files one at a time, except those that transformers makes of
    others, such as experts: at the first of these, it loads the whole model.

    Raises:
        WeightsError: when called: the folder lacks tensors, or is remote and
            transformers has to load it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    model = _without_weights(json.dumps(shape.config))
    rules = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    conversions = [rule for rule in rules if rule not in renamings]
    tensors, stored_names = ModelTensors(folder), dict[str, str]()
    for stored_name in tensors:
        name = stored_name
        for rule in renamings:
            name, _ = rule.rename_source_key(name)
        stored_names[name] = stored_name

    @cache
    def loaded() -> Tensors:
        import transformers

        if not is_local(folder):
            raise WeightsError(
                f"{folder} is not on this machine, where transformers converts the "
                f"tensors of {shape.family}; copy it to a local folder"
            )
        auto_class = getattr(transformers, auto_class_of(shape.config).name)
        model, report = auto_class.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        missing = sorted(
            map(str, {*report["missing_keys"], *report["mismatched_keys"]})
        )
        if missing:
            raise WeightsError(
                f"{folder} lacks {len(missing)} tensors of {type(model).__name__}: "
                f"{', '.join(missing[:3])} ..."
            )
        return model.state_dict()

    def tensor_of(name: str, size: torch.Size) -> Tensor:
        is_converted = any(rule.compiled_sources.search(name) for rule in conversions)
        stored_name = stored_names.get(name)
        if stored_name is not None and not is_converted:
            tensor = tensors.read(stored_name)
            if tensor.shape == size:
                return tensor.float()
        return loaded()[name].detach().float()

    return tensor_of


def check_module(model: TransformersModule, dtype: torch.dtype) -> None:
    """Check that a decoder with its weights is causal, and measure the `logit_map` of a
    language model, and if a decoder or encoder separates the documents of a row; a
    collective call if it is sharded.

    Raises:
        NotCausalError: logits of a decoder depend on later tokens, or are not finite.
    """
    if model.shape.kind == "classifier":
        return
    if model.shape.kind != "encoder_decoder":
        model.separates_documents = model.reads_positions
        on_later, on_neighbours = logit_changes(model, packs=True)
        if model.shape.kind == "decoder" and not on_later <= LARGEST_LEAK[dtype]:
            raise NotCausalError(
                f"{type(model).__name__} of transformers with these weights is not a "
                "causal decoder: its logits depend on later tokens, or are not finite"
            )
        model.separates_documents &= on_neighbours <= LARGEST_LEAK[dtype]
    model.logit_map = measure_logit_map(model, dtype)


@torch.no_grad()
def measure_logit_map(model: TransformersModule, dtype: torch.dtype) -> LogitMap | None:
    """Step from a module's output layer to its logits, measured on made-up results of
    the layer, and verified on logits of tokens; None for a class whose logits are
    computed in another way. A collective call if the model is sharded.
    """
    model.logit_map = None
    module: Any = model
    layer = module.get_output_embeddings()
    if type(layer) is not nn.Linear:  # An adapted layer is more than its matrix.
        return None
    device = layer.weight.device
    ids = torch.arange(PROBED_TOKENS, device=device)[None] % model.shape.vocab_size
    beside = {"decoder_ids": ids} if model.shape.kind == "encoder_decoder" else {}
    logits: Tensor = model(ids, **beside)
    results = torch.linspace(-100.0, 100.0, logits.numel(), device=device)
    # Powers of two, so that products with a factor are exact.
    small, large = 2.0**-16, 2.0**20
    results[:2] = torch.tensor([small, large])
    with layer.register_forward_hook(lambda *_: results.view_as(logits)):
        scaled = model(ids, **beside).flatten()
    factor, limit = float(scaled[0]) / small, float(scaled[1])
    is_capped = abs(limit) < abs(factor) * large / 2
    logit_map = LogitMap(factor, limit if is_capped else None)
    if not torch.allclose(logit_map(results), scaled, rtol=1e-5, atol=1e-6):
        return None
    model.logit_map = logit_map
    change = (model(ids, **beside) - logits).abs().max() / logits.abs().max()
    return logit_map if change <= LARGEST_LEAK[dtype] else None


def write_module(
    model: Any,
    dtype: torch.dtype,
    stops: frozenset[int],
    special_ids: Mapping[str, int],
    most_bytes: int,
    folder: Path,
) -> int:
    """Write a whole module as `save_pretrained` does, with the configuration that it was
    loaded with and under the names of its published files.

    Args:
        model: a `TransformersModule`; its parameters are cast.
        dtype: of its parameters; buffers keep theirs.
        stops: ids that end an answer, added to those of its generation_config.json.
        special_ids: for keys of its config.json that are null, if it is not a decoder.
        most_bytes: of a file.
        folder: destination.

    Returns:
        bytes of all files of weights.
    """
    from transformers import GenerationConfig

    shape: TransformersShape = model.shape
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    config = shape.config
    if shape.kind != "decoder":
        nulls = {name for name, value in config.items() if value is None}
        config = config | {
            name: special_ids[name] for name in nulls & special_ids.keys()
        }
    model.config = _parsed(config)
    generation = {
        "eos_token_id": config.get("eos_token_id"),
        **shape.files.get(GENERATION_FILE, {}),
    }
    if shape.kind == "encoder_decoder":
        generation = {name: config.get(name) for name in special_ids} | generation
    ends = generation["eos_token_id"]
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if added := stops.difference(known):
        generation["eos_token_id"] = [*known, *sorted(added)]
    model.generation_config = GenerationConfig.from_dict(generation)
    model.save_pretrained(folder, max_shard_size=most_bytes)
    for name in shape.files.keys() - {GENERATION_FILE}:
        write_json(folder / name, shape.files[name])
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
