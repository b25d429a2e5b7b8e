"""Teacher behind an endpoint, for on-policy distillation: log-probabilities of the
tokens that the student drew, from vLLM's completions API (`prompt_logprobs`).

Answers are stored, so a training that resumes within a batch continues with the same
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gristmill.core.stage_context import Context
from gristmill.dataprep.llm.client import Asking
from gristmill.dataprep.llm.prompting import Request
from gristmill.mixtures.steps.asked_model import AskedModel
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.generation.language_model import UNFINISHED
from gristmill.train.loop.batch_plan import slices
from gristmill.train.rl.rollout import Rollouts
from gristmill.train.stages.teacher import TeacherError


@dataclass(frozen=True)
class EndpointTeacher:
    """A model behind an endpoint that scores tokens; `context` is the stage's."""

    model: AskedModel
    context: Context

    def scores(self, rows: Sequence[list[int]]) -> Iterator[list[tuple[float, str]]]:
        """Yield log-probability and text of all tokens of each row but the first.

        Raises:
            gristmill.dataprep.llm.client.AskingError: the endpoint does not answer.
            TeacherError: it refuses a row.
        """
        context = replace(self.context, answers=self.context.work / "teacher")
        with Asking(self.model, context, len(rows), "/completions") as asking:
            answers = asking.answers(Request((), ids=row) for row in rows)
            for row, answer in zip(rows, answers, strict=True):
                if answer.error is not None:
                    raise TeacherError(f"rl.teacher_endpoint: {answer.error}")
                entries = [
                    scored[str(token)]
                    for token, scored in zip(row, json.loads(answer.text), strict=True)
                    if scored
                ]
                yield [(entry["logprob"], entry["decoded_token"]) for entry in entries]

    def check_vocabulary(self, chat: Chat, length: int) -> None:
        """Compare the text of every id with that of the run's tokenizer.

        Args:
            chat: the run's tokenizer.
            length: most ids of a request, with the one that the endpoint generates.

        Raises:
            TeacherError: an id has another text, or the endpoint does not know it.
        """
        ids = sorted(chat.tokenizer.get_vocab(with_added_tokens=True).values())
        rows = [[ids[0], *ids[part]] for part in slices(len(ids), length - 2)]
        for row, scored in zip(rows, self.scores(rows), strict=True):
            for token, (_, theirs) in zip(row[1:], scored, strict=True):
                ours = chat.decode([token], special=True)
                if theirs != ours and UNFINISHED not in ours:
                    raise TeacherError(
                        f"rl.teacher_endpoint: token {token} is {theirs!r} there, but "
                        f"{ours!r} in the run's tokenizer; a teacher needs the same "
                        "vocabulary"
                    )

    def logps(self, rollouts: Rollouts) -> Tensor:
        """Log-probabilities of the drawn tokens, (N, R); 0 elsewhere."""
        ends = (rollouts.sizes + rollouts.lengths).tolist()
        rows = [ids[:end] for ids, end in zip(rollouts.ids.tolist(), ends, strict=True)]
        logps = torch.zeros_like(rollouts.reference)
        for scored, size, row in zip(
            self.scores(rows), rollouts.sizes.tolist(), logps, strict=True
        ):
            answer = scored[size - 1 :]
            row[: len(answer)] = torch.tensor([logp for logp, _ in answer])
        return logps * rollouts.mask
