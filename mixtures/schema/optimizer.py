"""The section `optimizer` of every training, and facts of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from gristmill.mixtures.base import (
    Fraction,
    NotNegative,
    Positive,
    PositiveFloat,
)
from gristmill.mixtures.user_code import BuiltInOrOwn

OptimizerKind = Literal[
    "adamw",
    "lion",
    "adafactor",
    "adamw8bit",
    "muon",
    "normuon",
    "soap_muon",
]


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts of a kind; its update is in `train/optim/<kind>.py`."""

    betas: tuple[float, float] | None
    """Default of `betas`: the published values for language models; None if unused."""
    state_bytes: float
    """Bytes of state per parameter."""
    on_matrices: bool = False
    """True for an optimizer of the layers' matrices, which leaves the other parameters
    to AdamW, with its learning rate, decay and `betas`.
    """
    adamws_rate: bool = False
    """True if the learning rate is AdamW's, for which the laws of `size` were
    fitted.
    """
    fixed_size: bool = False
    """True if updates have a fixed size, which muP can scale
    (`train/optim/mup.py`).
    """
    library: str | None = None
    """Library that it needs."""


ADAMW_BETAS = (0.9, 0.95)
"""GPT-3 (Brown et al. 2020, appendix B)."""


def _on_matrices(state_bytes: float) -> OptimizerFacts:
    return OptimizerFacts(
        ADAMW_BETAS, state_bytes, on_matrices=True, adamws_rate=True, fixed_size=True
    )


OPTIMIZERS: dict[str, OptimizerFacts] = {
    # two float32 moments
    "adamw": OptimizerFacts(ADAMW_BETAS, 8, adamws_rate=True, fixed_size=True),
    # Chen et al. 2023, algorithm 2; one moment
    "lion": OptimizerFacts((0.9, 0.99), 4, fixed_size=True),
    # factored moments, which are negligible
    "adafactor": OptimizerFacts(None, 0),
    # two moments of a byte
    "adamw8bit": OptimizerFacts(
        ADAMW_BETAS, 2, adamws_rate=True, fixed_size=True, library="torchao"
    ),
    "muon": _on_matrices(4),
    # also the rows' second moments, with the second beta (Li et al. 2025, section 4)
    "normuon": _on_matrices(4),
    # two moments, and a covariance and a basis of the shorter side
    "soap_muon": _on_matrices(16),
}


class Optimizer(BuiltInOrOwn):
    """The update rule. Weight decay is decoupled (Loshchilov & Hutter 2019) and on
    matrices only, for every kind.
    """

    takes: ClassVar[tuple[str, ...] | None] = ("params",)
    offers: ClassVar[tuple[str, ...]] = ("lr",)
    added = (
        "decay_embeddings",
        "embedding_rate_scale",
        "cautious_decay",
        "precondition_every",
    )

    kind: OptimizerKind = "adamw"
    """`adamw`: fused AdamW. `lion`: the sign of a running mean (Chen et al. 2023); it
    needs a learning rate 3 to 10 times smaller and a decay larger by the same factor.
    `adafactor`: second moments by rows and columns (Shazeer & Stern 2018). `adamw8bit`:
    AdamW with moments in 8 bits, through torchao (extra `quant`). `muon`:
    orthogonalised momentum for matrices of the layers (Jordan et al. 2024) at AdamW's
    scale (Liu et al. 2025), AdamW for embeddings, output and norms. `normuon`: the same
    with rows of equal size (Li et al. 2025). `soap_muon`: the same after whitening in
    the eigenbasis of the gradients' covariance (Vyas et al. 2025).
    """
    learning_rate: PositiveFloat = 1e-3
    """Learning rate at the peak of the schedule. Adafactor's is relative: it is
    multiplied by the root mean square of each parameter's weights (at least 1e-3) and
    is at most 1 / sqrt(step), so another kind's rate does not carry over to it (Shazeer
    & Stern 2018, section 8 and algorithm 4, which use 1e-2).
    """
    betas: tuple[Fraction, Fraction] | None = None
    """Decay rates of the running means of gradients and of their squares; each kind's
    published values if absent (adamw, adamw8bit, muon, normuon, soap_muon: 0.9 and
    0.95; lion: 0.9 and 0.99). Not for Adafactor.
    """
    eps: PositiveFloat = 1e-8
    """Constant added to the root of the second mean (adamw, adamw8bit, muon's
    AdamW).
    """
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, per step and learning rate."""
    decay_embeddings: bool = True
    """False leaves embeddings out of the decay, as OLMo 2 does (OLMo et al. 2025,
    section 3): small embeddings have large gradients in early layers. A matrix tied to
    the output is an embedding too.
    """
    embedding_rate_scale: PositiveFloat = 1.0
    """Factor of the learning rate for embeddings; their decay per step stays the same.
    A matrix tied to the output is an embedding too. `size` and `gristmill new` have 12
    for untied ones.
    """
    momentum: Fraction = 0.95
    """Momentum of muon, normuon and soap_muon (Jordan et al. 2024; Li et al. 2025; Vyas
    et al. 2025); the others use `betas`.
    """
    cautious_decay: bool = False
    """For Muon and NorMuon: let a weight of the layers decay only if the decay goes in
    the direction of its update (Chen et al. 2025, "Cautious Weight Decay").
    """
    precondition_every: Positive = 10
    """Steps between updates of SOAP-Muon's basis (Vyas et al. 2024, section 6: 10)."""
    clip_norm: PositiveFloat = 1.0
    """Largest global norm of the gradients; all are scaled together."""

    def _problems(self) -> Iterator[str]:
        if self.cautious_decay and self.kind not in ("muon", "normuon"):
            yield (
                "optimizer.cautious_decay is for muon and normuon, not "
                f"for {self.kind}; remove it"
            )
        if OPTIMIZERS[self.kind].betas is None and self.betas is not None:
            yield (
                f"optimizer.betas has no effect on {self.kind}, whose "
                "decay follows the step; remove it"
            )
        yield from self.unused_beside_own("optimizer", "learning_rate", "clip_norm")
        if "lr" in getattr(self, "with"):
            yield (
                "optimizer.with.lr: set the learning rate in optimizer.learning_rate, "
                "which the schedule scales; remove it from `with`"
            )

    @property
    def decays(self) -> tuple[float, float]:
        """Betas in effect: the manifest's, or the default of the kind."""
        betas = self.betas or OPTIMIZERS[self.kind].betas
        assert betas is not None
        return betas


class TuningOptimizer(Optimizer):
    """The update rule for a model that is already trained."""

    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, per step and learning rate; 0, since tuning should stay
    near its start.
    """
