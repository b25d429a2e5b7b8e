"""`sft_prepare`: drops fine-tuning examples by steps that judge them like documents."""

from __future__ import annotations

from gristmill.flows.stages.trainings import prepares_examples

STAGE = prepares_examples("sft_prepare", 4, "sft")
