"""Why a margin grows: because chosen answers become likelier, or because they fall less than the rejected ones.

Preference losses see the difference alone, so that both may fall together (Pal et al. 2024, "Smaug"; Pang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

LINES_IN_A_ROW = 3
"""So many logged lines must agree before an alarm: a single batch may fall by chance."""
MOST_PAIRS = 0.5


def falls(line: Mapping[str, Any]) -> bool:
    """Whether in a line of metrics the margin is positive although most chosen answers became less likely."""
    return bool(line["rewards/margins"] > 0 and line["log_ratio/chosen"] < 0 and line["fell/chosen"] > MOST_PAIRS)


def decline_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a stage's summary says of it, from its lines of metrics.

    Returns:
        `alarm_step`, the first step at which so many lines in a row had fallen, or None; and of the last line the
        shares of pairs whose chosen and whose rejected answer fell.
    """
    streak, alarm = 0, None
    measured = [line for line in lines if "fell/chosen" in line and "fell/rejected" in line]
    for line in measured:
        streak = streak + 1 if falls(line) else 0
        if streak == LINES_IN_A_ROW and alarm is None:
            alarm = line["step"]
    last = measured[-1] if measured else {}
    return {"alarm_step": alarm, "fell_chosen": last.get("fell/chosen"), "fell_rejected": last.get("fell/rejected")}


class DeclineAlarm:
    """Warns once when chosen answers keep falling.

    Args:
        warn: told what is happening and what helps.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._streak = warn, 0

    def look(self, line: Mapping[str, Any]) -> None:
        """Take in a logged line."""
        self._streak = self._streak + 1 if falls(line) else 0
        if self._streak == LINES_IN_A_ROW:
            self._warn(f"dpo: chosen answers fall: {line['fell/chosen']:.0%} of them are less likely than under the "
                       f"reference, by {-line['log_ratio/chosen']:.3f} nats per token on average, in "
                       f"{LINES_IN_A_ROW} logged steps in a row; the margin grows because rejected ones fall faster. "
                       "dpo.sft_weight (1, as Pang et al. 2024) holds them up; so do a higher dpo.beta and a lower "
                       "dpo.optimizer.learning_rate")
