"""User-defined model in place of the decoder: a module from tokens to logits.

Its config.json holds its code by value, which runs only in the run that it belongs to.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.core.seeds import seeded_key
from gristmill.dataprep.user_functions import (
    blaming,
    check_call,
    load_function,
    taken_by_name,
    wrong,
)
from gristmill.train.models.causality import LARGEST_LEAK, logit_changes
from gristmill.train.models.model_config import OwnShape
from gristmill.train.models.transformer import Head, logits_head

INNER = "inner."
"""Prefix of parameter names within the wrapper; files have the user's names."""


class OwnModel(nn.Module):
    """Wrapper that gives a user's module the interface of the decoder.

    Attributes:
        shape: known sizes.
        inner: the user's module.
    """

    def __init__(self, shape: OwnShape, inner: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.inner = inner
        self.is_compiled = False

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
    ) -> Any:
        """Apply a head to the logits (n, t, v), which replace hidden states, without a
        matrix.

        Raises:
            OwnCodeError: the user's module fails, or does not return a logit for each
                token and id.
        """
        own = self.shape.own
        if positions is None and self.shape.document_mask:  # each row is one document
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with blaming(own.use):
            logits = (
                self.inner(ids) if positions is None else self.inner(ids, positions)
            )
        expected_shape = (*ids.shape, self.shape.vocab_size)
        if (
            not isinstance(logits, Tensor)
            or logits.shape != expected_shape
            or not logits.is_floating_point()
        ):
            actual = (
                f"a tensor of shape {tuple(logits.shape)}"
                if isinstance(logits, Tensor)
                else type(logits).__name__
            )
            raise wrong(
                own,
                f"returned {actual} for tokens of shape {tuple(ids.shape)}; return logits "
                f"of shape {expected_shape} (rows, tokens, vocabulary)",
            )
        return head(logits, None)

    def extend(self, ids: Tensor, cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (n, v) after the last of ids (n, t) that follow those of a cache, and
        all ids.
        """
        text = ids if cache is None else torch.cat((cache, ids), dim=1)
        logits: Tensor = self(text)
        return logits[:, -1], text


def build_own(shape: OwnShape) -> OwnModel:
    """Build a user's model with its initial weights on the CPU, and check that it can
    be trained.

    Raises:
        OwnCodeError: it fails, or is not a causal module from tokens to logits.
    """
    own, code = shape.own, shape.own.use
    make = load_function(code)
    lengths = taken_by_name(make, ["sequence_length"])
    options = {**dict.fromkeys(lengths, shape.sequence_length), **own.options}
    check_call(code, make, ("vocab_size",), options)
    with torch.random.fork_rng(devices=[]), blaming(code):
        torch.manual_seed(seeded_key(shape.seed, "model") >> 1)
        inner = make(shape.vocab_size, **options)
    if not isinstance(inner, nn.Module):
        raise wrong(own, f"returned {type(inner).__name__}; return a torch.nn.Module")
    arguments = ("tokens", "positions") if shape.document_mask else ("tokens",)
    check_call(code, inner.forward, arguments, {}, "forward")
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise wrong(
                own,
                f"has the parameter {name}, which is not float32, as master weights are; "
                "pretrain.precision says what is computed in",
            )
    buffers = [name for name in inner.state_dict() if name not in parameters]
    if not parameters or buffers:
        problem = "has no parameters"
        if buffers:
            problem = (
                f"keeps the buffer {buffers[0]}; register it with persistent=False"
            )
        raise wrong(own, f"{problem}: a model is what its parameters are")
    count = sum(parameter.numel() for parameter in inner.parameters())
    model = OwnModel(replace(shape, parameters=count), inner)
    on_later, _ = logit_changes(model, packs=False)
    if math.isnan(on_later):
        raise wrong(own, "returned logits that are NaN or Inf before any training")
    if on_later > LARGEST_LEAK[torch.float32]:
        raise wrong(
            own,
            "returned logits that depend on tokens that come later; let each see itself "
            "and what precedes it only",
        )
    return model
