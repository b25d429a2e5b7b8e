"""`pretrain`: trains a model from random weights, or from a checkpoint's, on the
mixture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gristmill.core.files import as_path
from gristmill.flows.stages.stage import (
    MeasuredColumns,
    Problems,
    only,
)
from gristmill.flows.stages.trainings import torchrun_stage, whole
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.objectives.span_objectives import lacking
from gristmill.mixtures.objectives.token_objectives import MASK_TOKENS, Kind
from gristmill.mixtures.schema.model import Implementation
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.mixtures.schema.tokenizer import Tokenizer


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield a model that cannot be trained further, or a tokenizer without the special
    tokens of the objective.
    """
    assert manifest.pretrain is not None
    model = manifest.pretrain.model
    masked = manifest.pretrain.masked
    length = None if manifest.mix is None else manifest.mix.sequence_length
    message = (
        None
        if model.init_from is None
        else why_no_model(
            model.init_from,
            manifest.tokenizer,
            manifest.pretrain.kind,
            length,
            model.implementation,
        )
    )
    if message is not None:
        yield ("pretrain", "model", "init_from"), message
    tokenizer = _given_tokenizer(manifest.tokenizer)
    spans = manifest.pretrain.spans
    if spans is not None and tokenizer is not None and manifest.mix is not None:
        problem = lacking(
            spans[1],
            manifest.mix.sequence_length,
            lambda name: tokenizer.token_to_id(name) is not None,
        )
        if problem is not None:
            yield ("pretrain", spans[0]), problem
    if (
        masked is not None
        and tokenizer is not None
        and all(tokenizer.token_to_id(name) is None for name in MASK_TOKENS)
    ):
        yield (
            ("pretrain", "masked"),
            (
                f"needs a mask token, but {manifest.tokenizer.path} has none of "  # type: ignore[union-attr]
                f"{', '.join(MASK_TOKENS)}: name one in tokenizer.special_tokens"
            ),
        )


def why_no_model(
    path: str,
    tokenizer: Tokenizer | None,
    kind: Kind = "decoder",
    length: int | None = None,
    implementation: Implementation = "auto",
) -> str | None:
    """Return the reason why a model cannot run here, with a tokenizer, or on rows of
    `length` tokens; None if it can.
    """
    folder = as_path(path)
    if not folder.exists():
        return None  # it is reported as a missing file
    from gristmill.train.models.weights import check_model

    try:
        shape = check_model(folder, kind, implementation)
        if length is not None:
            replace(shape, sequence_length=max(shape.sequence_length, length))
    except (OSError, ValueError) as error:
        return str(error)
    external_tokenizer = _given_tokenizer(tokenizer)
    num_ids = (
        None if external_tokenizer is None else external_tokenizer.get_vocab_size()
    )
    if num_ids is not None and num_ids > shape.vocab_size:
        return (
            f"{folder}: the model has {shape.vocab_size} ids, but its tokenizer has "
            f"{num_ids}; give the model's own tokenizer as tokenizer.path, and a chat "
            "template of its own special tokens (tokenizer.chat_template)"
        )
    return None


def _given_tokenizer(tokenizer: Tokenizer | None) -> Any:
    """Return an external tokenizer with its added special tokens; None if it is trained
    here or cannot be read.
    """
    from gristmill.tokenize.encoding.tokenizer import (
        TokenizerError,
        read_external,
        read_template,
    )

    if (
        tokenizer is None
        or tokenizer.path is None
        or not as_path(tokenizer.path).is_file()
    ):
        return None
    try:
        with_chat = read_template(tokenizer) is not None
        return read_external(
            as_path(tokenizer.path),
            tokenizer.special_tokens,
            with_chat,
            tokenizer.end_of_text,
        )
    except TokenizerError:
        return None  # the stage `tokenizer` reports it


STAGE = torchrun_stage(
    "pretrain",
    7,
    whole("pretrain"),
    only("tokenizer", "mix"),
    preflight=preflight,
    training=Pretrain,
    row_kind="documents",
    output="model",
)
