"""`sft_prepare`: drops examples of fine-tuning by steps that judge them as documents are judged."""

from __future__ import annotations

from gristmill.flows.stages.trainings import prepares_examples

STAGE = prepares_examples("sft_prepare", 3, "sft")
