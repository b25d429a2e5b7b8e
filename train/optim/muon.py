"""Muon: orthogonalised momentum for the layers' matrices (Jordan et al. 2024)."""

from __future__ import annotations

import torch

from gristmill.mixtures.schema.optimizer import Optimizer
from gristmill.train.optim.builder import Parameters
from gristmill.train.optim.normuon import NorMuon


def build(parameters: Parameters, section: Optimizer) -> torch.optim.Optimizer:
    """Create PyTorch's Muon of sharded matrices, or ours with cautious decay, which
    PyTorch's does not have; their products gather what they need.

    Updates have the root mean square of AdamW's (Liu et al. 2025, "Muon is scalable for
    LLM training", section 2.2), so both share learning rate and decay.
    """
    if section.cautious_decay:
        return NorMuon(parameters, section)
    optimizer = torch.optim.Muon(
        parameters,
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    for matrix in parameters:
        optimizer.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
    return optimizer
