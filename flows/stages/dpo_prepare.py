"""`dpo_prepare`: drops pairs of preferences by steps that judge them as documents are judged."""

from __future__ import annotations

from gristmill.flows.stages.trainings import prepares_examples

STAGE = prepares_examples("dpo_prepare", 3, "dpo")
