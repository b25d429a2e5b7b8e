"""Red teaming of all models of a run: loads prompts and judges once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from gristmill.core.stage_context import Context
from gristmill.mixtures.sections.evaluation import Evaluate, RedTeam
from gristmill.train.evaluation.answering import Reader
from gristmill.train.evaluation.probe_answers import Judges, answer_probes, open_judges
from gristmill.train.evaluation.probes import read_probes
from gristmill.train.evaluation.safety_measures import (
    Measured,
    SetResult,
    WorstAnswer,
    describe_set,
    measure_set,
    safety_differences,
    worst_answers,
)

KEPT = "red-team"
"""Folder of saved answers in the stage's work folder."""


class RedTeamResult(TypedDict):
    """Results of one model: its measures by set, and the answers to read first."""

    sets: dict[str, SetResult]
    worst: list[WorstAnswer]


@contextmanager
def red_teaming(section: Evaluate, context: Context) -> Iterator[RedTeaming | None]:
    """Red team of a section, if it has one.

    Raises:
        gristmill.train.evaluation.probes.ProbeError: a file does not have the format of
            the section; see also `open_judges`.
    """
    if section.red_team is None:
        yield None
        return
    with open_judges(section.red_team, context) as judges:
        yield RedTeaming(section, section.red_team, judges, context)


class RedTeaming:
    """Prompts of a red team, and measurements so far.

    Args:
        section: seed and samples of the bootstrap.
        team: sets of prompts.
        judges: functions that judge answers.
        context: its work folder stores the answers.
    """

    def __init__(
        self, section: Evaluate, team: RedTeam, judges: Judges, context: Context
    ) -> None:
        self._seed = section.key_seed
        self._samples = section.bootstrap_samples
        self._section = team
        self._judges = judges
        self._sets = read_probes(team)
        self._kept = context.work / KEPT
        self._measured: dict[str, dict[str, dict[str, Measured]]] = {}

    def ask(self, reader: Reader, name: str, chat: bool) -> RedTeamResult:
        """Ask a model all prompts.

        Args:
            reader: the model.
            name: of its stage.
            chat: ask through the chat template, except for prompts to continue.
        """
        answers = answer_probes(
            reader,
            self._sets,
            self._section,
            self._judges,
            self._seed,
            self._kept / name,
            chat,
        )
        results = {
            set_name: list(zip(probes, answers[set_name], strict=True))
            for set_name, probes in self._sets.items()
        }
        cut = None if self._section.toxicity is None else self._section.toxicity.cut
        self._measured[name] = {
            set_name: measure_set(of_set, cut) for set_name, of_set in results.items()
        }
        return {
            "sets": {
                set_name: describe_set(
                    of_set, self._measured[name][set_name], self._seed, self._samples
                )
                for set_name, of_set in results.items()
            },
            "worst": worst_answers(results, self._section),
        }

    def differences(self) -> list[dict[str, object]]:
        """Differences between each model and the previous one, on the same prompts."""
        return safety_differences(self._measured, self._seed, self._samples)
