"""Decoders of transformers, for families that this package does not compute: their own
classes, called like `transformer.Llama`.

Each document of a packed row has positions from 0, by which transformers restricts
attention to documents (masking_utils.find_packed_sequence_indices). `check_decoder`
tests this on the module itself. Modules stay in evaluation mode, as trainings use no
random numbers: nothing is dropped out. transformers is imported when a decoder is
built.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor, nn

from gristmill.core.files import is_local, read_json, write_json
from gristmill.train.models.attention import document_numbers
from gristmill.train.models.causality import LARGEST_LEAK, logit_changes
from gristmill.train.models.model_config import (
    ConfigJson,
    TransformersShape,
    WeightsError,
)
from gristmill.train.models.tensor_files import INDEX_FILE, WEIGHTS_FILE, TensorOf
from gristmill.train.models.transformer import Head, logits_head

GENERATION_FILE = "generation_config.json"
UNLIMITED_CONTEXT = 8192
"""Row length of a decoder without a limit, such as Mamba 2, before it is trained on
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


class TransformersDecoder(nn.Module):
    """Decoder of transformers with the calling convention of `transformer.Llama`; the
    base, beside a class of transformers, of what `build_decoder` returns.

    Attributes:
        shape: its sizes.
        reads_positions: true if its class takes positions.
        cache_name: of its argument and its result with keys and values, or states.
        separates_documents: false if a document changes the logits of another in its
            row (see `check_decoder`); each is then computed as a row of its own, padded
            to the longest.
    """

    shape: TransformersShape
    reads_positions: bool
    cache_name: str
    separates_documents: bool = True
    is_compiled: bool = False

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        cache: None = None,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
    ) -> Any:
        """Apply a head to the logits (n, t, v), which replace hidden states, without a
        matrix; see `Llama.forward`. Experts are not balanced.
        """
        whole: Any = super().forward
        if positions is None:
            return head(whole(input_ids=ids, use_cache=False).logits, None)
        if self.separates_documents:
            # Each padding token is a document.
            beside = {"position_ids": positions.clamp(min=0)}
            return head(whole(input_ids=ids, use_cache=False, **beside).logits, None)
        real = positions >= 0
        keys = document_numbers(positions) + ids.shape[1] * torch.arange(
            len(ids), device=ids.device
        ).unsqueeze(1)
        starts = keys.diff(dim=1, prepend=keys[:, :1] - 1) != 0
        columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        places = columns - columns.masked_fill(~starts, 0).cummax(dim=1).values
        documents = torch.zeros_like(ids)
        documents[real] = keys[real].unique(return_inverse=True)[1]
        places = places.masked_fill(~real, 0)
        rows = ids.new_zeros(int(documents.max()) + 1, int(places.max()) + 1)
        rows[documents[real], places[real]] = ids[real]
        logits = whole(input_ids=rows, use_cache=False).logits
        return head(logits[documents, places], None)

    def extend(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Logits (n, v) after the last of ids (n, t) that follow those of a cache, and
        the cache with them.
        """
        output: Any = super().forward(
            input_ids=ids, use_cache=True, **{self.cache_name: cache}
        )
        return output.logits[:, -1].float(), getattr(output, self.cache_name)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)

    @property
    def blocks(self) -> list[nn.Module]:
        """Layers that are sharded and recomputed one by one."""
        module: Any = self
        names = set(module._no_split_modules or ())
        return [
            part
            for part in self.modules()
            # fully_shard adds the prefix
            if type(part).__name__.removeprefix("FSDP") in names
        ]


def is_decoder(config: ConfigJson) -> bool:
    """Return True if the installed transformers has the causal decoder of a
    config.json; code of the folder (`auto_map`) is never run.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES,
    )

    name = CLASSES.get(config.get("model_type", ""))
    return name is not None and name in (config.get("architectures") or [name])


def decoder_shape(folder: Path, config: ConfigJson) -> TransformersShape:
    """Shape of a folder that transformers can load.

    Raises:
        WeightsError: its weights are quantised.
    """
    if "quantization_config" in config:
        raise WeightsError(
            f"{folder} holds quantised weights (`quantization_config`), which are not "
            "trained; save it dequantised with transformers first"
        )
    generation = folder / GENERATION_FILE
    with torch.device("meta"):
        model = _from_config(config)
    text = model.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    heads = getattr(text, "num_attention_heads", None) or 0
    width = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
    embedding: nn.Module = model.get_input_embeddings()
    is_tied = embedding.weight is getattr(model.get_output_embeddings(), "weight", None)
    return TransformersShape(
        config=dict(config),
        generation=read_json(generation) if generation.exists() else {},
        vocab_size=text.vocab_size,
        sequence_length=context or UNLIMITED_CONTEXT,
        context=context,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedded=0 if is_tied else embedding.weight.numel(),  # type: ignore[operator, union-attr]
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


def _from_config(config: ConfigJson) -> Any:
    """Model of transformers in float32; kernels are chosen by its class."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers import AutoModelForCausalLM as Auto

    parsed = _parsed(config)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
    attention = "sdpa" if kind._supports_sdpa else "eager"
    return Auto.from_config(
        parsed, dtype=torch.float32, attn_implementation=attention
    ).eval()


def build_decoder(shape: TransformersShape) -> TransformersDecoder:
    """Build a decoder with parameters on the meta device, and with its buffers, which
    files do not have, on the CPU.
    """

    def without_memory(
        module: nn.Module, name: str, parameter: nn.Parameter
    ) -> nn.Parameter | None:
        return None if parameter.is_meta else nn.Parameter(parameter.to("meta"))

    hook = nn.modules.module.register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        with torch.device("cpu"):
            model = _from_config(shape.config)
    finally:
        hook.remove()
    kind = type(model)
    takes = inspect.signature(kind.forward).parameters
    model.__class__ = type(
        kind.__name__, (TransformersDecoder, kind), {"__module__": kind.__module__}
    )
    model.shape = shape
    model.reads_positions = "position_ids" in takes
    model.cache_name = "cache_params" if "cache_params" in takes else "past_key_values"
    built: TransformersDecoder = model
    return built


def check_published(folder: Path) -> None:
    """Check that a folder has weights that transformers reads without running code.

    Raises:
        WeightsError: it has no safetensors file.
    """
    if not any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)):
        raise WeightsError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; save the model "
            "with transformers' save_pretrained"
        )


def published_tensors(folder: Path) -> TensorOf:
    """Source of the tensors of a folder that transformers loads, under the names of its
    module; read at the first call.

    Raises:
        WeightsError: when called: the folder is remote, or lacks tensors.
    """
    if not is_local(folder):
        raise WeightsError(
            f"{folder} is not on this machine, where transformers reads models; copy "
            "it to a local folder"
        )

    @cache
    def tensors() -> dict[str, Tensor]:
        from transformers import AutoModelForCausalLM

        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        missing = sorted({*report["missing_keys"], *report["mismatched_keys"]})
        if missing:
            raise WeightsError(
                f"{folder} lacks {len(missing)} tensors of {type(model).__name__}: "
                f"{', '.join(map(str, missing[:3]))} ..."
            )
        state: dict[str, Tensor] = model.state_dict()
        return state

    return lambda name, size: tensors()[name].detach().float()


def check_decoder(model: TransformersDecoder, dtype: torch.dtype) -> None:
    """Check that a decoder with its weights is causal, and measure if it separates the
    documents of a row; a collective call if it is sharded.

    Raises:
        NotCausalError: logits depend on later tokens, or are not finite.
    """
    model.separates_documents = model.reads_positions
    on_later, on_neighbours = logit_changes(model, packs=True)
    if not on_later <= LARGEST_LEAK[dtype]:
        raise NotCausalError(
            f"{type(model).__name__} of transformers with these weights is not a causal "
            "decoder: its logits depend on later tokens, or are not finite"
        )
    model.separates_documents &= on_neighbours <= LARGEST_LEAK[dtype]


def write_decoder(
    model: Any,
    dtype: torch.dtype,
    stops: frozenset[int],
    most_bytes: int,
    folder: Path,
) -> int:
    """Write a whole decoder as `save_pretrained` does, with the configuration that it
    was loaded with and under the names of its published files.

    Args:
        model: a `TransformersDecoder`; its parameters are cast.
        dtype: of its parameters; buffers keep theirs.
        stops: ids that end an answer, added to those of its generation_config.json.
        most_bytes: of a file.
        folder: destination.

    Returns:
        bytes of all files of weights.
    """
    from transformers import GenerationConfig

    shape: TransformersShape = model.shape
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config = _parsed(shape.config)
    generation = {"eos_token_id": shape.config.get("eos_token_id"), **shape.generation}
    ends = generation["eos_token_id"]
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if added := stops.difference(known):
        generation["eos_token_id"] = [*known, *sorted(added)]
    model.generation_config = GenerationConfig.from_dict(generation)
    model.save_pretrained(folder, max_shard_size=most_bytes)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
