"""`dpo_prepare`: drops preference pairs by steps that judge them like documents."""

from __future__ import annotations

from gristmill.flows.stages.trainings import prepares_examples

STAGE = prepares_examples("dpo_prepare", 4, "dpo")
