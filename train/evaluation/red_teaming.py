"""A red team at work on all models of a run: what it asks is read, and those who judge are opened, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gristmill.dataprep.context import Context
from gristmill.mixtures.evaluation import Evaluate, RedTeam
from gristmill.train.evaluation.answering import Reader
from gristmill.train.evaluation.probe_answers import Judges, answer_probes, open_judges
from gristmill.train.evaluation.probes import read_probes
from gristmill.train.evaluation.safety_measures import (
    Measured,
    describe_set,
    measure_set,
    safety_differences,
    worst_answers,
)

KEPT = "red-team"
"""Folder of what models have answered, in the stage's work folder."""


@contextmanager
def red_teaming(section: Evaluate, context: Context) -> Iterator[RedTeaming | None]:
    """The red team of a section, if it has one.

    Raises:
        gristmill.train.evaluation.probes.ProbeError: a file is not what the section says; see also `open_judges`.
    """
    if section.red_team is None:
        yield None
        return
    with open_judges(section.red_team, context) as judges:
        yield RedTeaming(section, section.red_team, judges, context)


class RedTeaming:
    """What the red team asks and has measured so far.

    Args:
        section: says seed and samples of the bootstrap.
        team: what is asked.
        judges: who judge answers.
        context: where answers are kept.
    """

    def __init__(self, section: Evaluate, team: RedTeam, judges: Judges, context: Context) -> None:
        self._seed, self._samples, self._section = section.key_seed, section.bootstrap_samples, team
        self._sets, self._judges, self._kept = read_probes(team), judges, context.work / KEPT
        self._measured: dict[str, dict[str, dict[str, Measured]]] = {}

    def ask(self, reader: Reader, name: str, chat: bool) -> dict[str, Any]:
        """Ask a model everything.

        Args:
            reader: the model.
            name: of the stage that made it.
            chat: ask through the chat template, but for what is to be continued.

        Returns:
            `sets`: name -> its measures by category; `worst`: the answers to read first.
        """
        said = answer_probes(reader, self._sets, self._section, self._judges, self._seed, self._kept / name, chat)
        asked = {one: list(zip(probes, said[one], strict=True)) for one, probes in self._sets.items()}
        cut = None if self._section.toxicity is None else self._section.toxicity.cut
        self._measured[name] = {one: measure_set(of_set, cut) for one, of_set in asked.items()}
        return {
            "sets": {
                one: describe_set(of_set, self._measured[name][one], self._seed, self._samples)
                for one, of_set in asked.items()
            },
            "worst": worst_answers(asked, self._section),
        }

    def differences(self) -> list[dict[str, Any]]:
        """Each later model against the one before it, on the same prompts."""
        return safety_differences(self._measured, self._seed, self._samples)
