"""A model of the user's in the place of the decoder: a module that makes logits of tokens, as trainings call it.

Its config.json holds its code by value, which runs in the run that it belongs to and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.dataprep.own_functions import blaming, check_call, load_function, taken_by_name
from gristmill.dataprep.seeds import seeded_key
from gristmill.mixtures.own_code import OwnCodeError
from gristmill.train.models.llama import Head, logits_head
from gristmill.train.models.shape import OwnShape

INNER = "inner."
"""Before the names of parameters inside the wrapper; files have the user's own names."""
PROBED_TOKENS = 8
LARGEST_LEAK = 1e-3
"""How much a logit may move, by rounding, where only later tokens change; in units of the largest."""


class OwnModel(nn.Module):
    """Calls a user's module as the decoder is called.

    Attributes:
        shape: what is known of it.
        inner: the user's.
    """

    def __init__(self, shape: OwnShape, inner: nn.Module) -> None:
        super().__init__()
        self.shape, self.inner = shape, inner
        self.is_compiled = False

    def forward(
        self,
        ids: Tensor,
        head: Head = logits_head,
        cache: None = None,
        positions: Tensor | None = None,
        trained: Tensor | None = None,
    ) -> Any:
        """What a head makes of the logits (n, t, v), which it is given in place of hidden states, without a matrix.

        Raises:
            OwnCodeError: the user's module fails, or does not give a logit for each token and id.
        """
        code = self.shape.own.use
        if positions is None and self.shape.document_mask:  # the whole row is one document
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with blaming(code):
            logits = self.inner(ids) if positions is None else self.inner(ids, positions)
        wanted = (*ids.shape, self.shape.vocab_size)
        if not isinstance(logits, Tensor) or logits.shape != wanted or not logits.is_floating_point():
            found = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise OwnCodeError(
                f"{code.place}: the model {code.name} returned {found} for tokens of shape "
                f"{tuple(ids.shape)}; return logits of shape {wanted} (rows, tokens, vocabulary)"
            )
        return head(logits, None)


def build_own(shape: OwnShape) -> OwnModel:
    """A user's model with its first weights, on the CPU, after a look at whether it is one that can be trained.

    Raises:
        OwnCodeError: it fails, or is no module from tokens to logits, each of what precedes it.
    """
    code, make = shape.own.use, load_function(shape.own.use)
    options = {**dict.fromkeys(taken_by_name(make, ["sequence_length"]), shape.sequence_length), **shape.own.options}
    check_call(code, make, ("vocab_size",), options)
    with torch.random.fork_rng(devices=[]), blaming(code):
        torch.manual_seed(seeded_key(shape.seed, "model") >> 1)
        inner = make(shape.vocab_size, **options)
    if not isinstance(inner, nn.Module):
        raise OwnCodeError(f"{code.place}: {code.name} returned {type(inner).__name__}; return a torch.nn.Module")
    check_call(code, inner.forward, ("tokens", *(("positions",) if shape.document_mask else ())), {}, "forward")
    _check_parameters(shape, inner)
    model = OwnModel(replace(shape, parameters=sum(one.numel() for one in inner.parameters())), inner)
    _check_causal(model)
    return model


def _check_parameters(shape: OwnShape, inner: nn.Module) -> None:
    """Raise where a checkpoint or the model's file would not hold all that the module is."""
    code = shape.own.use
    wrong = next((name for name, one in inner.named_parameters() if one.dtype != torch.float32), None)
    if wrong is not None:
        raise OwnCodeError(
            f"{code.place}: the parameter {wrong} of {code.name} is not float32, as master weights are; "
            "pretrain.precision says what is computed in"
        )
    parameters = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    others = [name for name in inner.state_dict() if name not in parameters]
    if not parameters or others:
        what = f"keeps the buffer {others[0]}; register it with persistent=False" if others else "has no parameters"
        raise OwnCodeError(f"{code.place}: {code.name} {what}: a model is what its parameters are")


@torch.no_grad()
def _check_causal(model: OwnModel) -> None:
    """Raise where the logits of a token depend on those behind it, whose loss would then be nothing but copying."""
    shape = model.shape
    count = min(PROBED_TOKENS, shape.sequence_length)
    ids = torch.arange(count)[None] % shape.vocab_size
    training = model.training
    model.eval()
    first: Tensor = model(ids)
    ids[0, -1] = (ids[0, -1] + 1) % shape.vocab_size
    second: Tensor = model(ids)
    model.train(training)
    code, moved = shape.own.use, (first - second)[:, :-1].abs()
    if not first.isfinite().all():
        raise OwnCodeError(
            f"{code.place}: the model {code.name} returned logits that are NaN or Inf before any training"
        )
    if moved.numel() and float(moved.max()) > LARGEST_LEAK * max(1.0, float(first.abs().max())):
        raise OwnCodeError(
            f"{code.place}: the logits of {code.name} depend on tokens that come later; let each see "
            "itself and what precedes it only"
        )
