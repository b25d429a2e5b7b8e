"""muP: learning rates by width, so that a rate tuned on a narrow model transfers to a
wide one.

With m = width / base width (Yang & Hu 2021, "Tensor Programs V", table 8), a matrix of
the layers gets 1 / m of Adam's rate. Muon's updates, scaled to AdamW's root mean square
(Liu et al. 2025), have spectral norms that grow with sqrt(width) and should not grow
(Yang et al. 2023, "A spectral condition for feature learning"): a matrix gets 1 /
sqrt(m). The gain of the final norm holds the output multiplier 1 / m
(`train/models/initialisation.py`) and also gets 1 / m of the rate, which for Adam
equals the multiplier (lemma J.1).

Decay per step, rate times decay, does not depend on the width (Wang & Aitchison 2024,
section 3.2).
"""

from __future__ import annotations

from gristmill.mixtures.schema.optimizer import OPTIMIZERS, OptimizerKind
from gristmill.train.models.initialisation import FINAL_NORM, LAYERS


def rate_factor(
    name: str, dimensions: int, width_factor: float, kind: OptimizerKind
) -> float:
    """Share of the learning rate for a parameter.

    Args:
        name: the parameter's.
        dimensions: 2 of a matrix.
        width_factor: m.
        kind: the optimizer's.
    """
    if LAYERS in name and dimensions == 2:
        return width_factor**-0.5 if OPTIMIZERS[kind].on_matrices else 1 / width_factor
    return 1 / width_factor if name.endswith(FINAL_NORM) else 1.0
