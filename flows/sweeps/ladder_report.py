"""Report of a ladder: a table for the terminal."""

from __future__ import annotations

from operator import attrgetter

from gristmill.flows.pages.page_elements import Note, Span, table
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.sweeps.ladder import LadderResults

COLUMNS = {"name": "", "parameters": ",", "tokens": ",", "loss": ".4f"}
COLUMNS |= {"fitted": ".4f", "left_out": ".4f"}
"""Field of a training -> format of its column."""
NUMBERS = {"floor": "E", "a": "A", "alpha": "alpha", "b": "B", "beta": "beta"}


def print_ladder(ladder: LadderResults) -> None:
    """Print a ladder as text."""
    law = "; ".join(
        f"{NUMBERS[name]} {interval.value:.4g} "
        f"[{interval.low:.3g} to {interval.high:.3g}]"
        for name, interval in ladder.law.items()
    )
    print_parts(
        table(COLUMNS, map(attrgetter(*COLUMNS), ladder.rungs)),
        law,
        Note(Span(describe_target(ladder), "strong"), "plain"),
    )


def describe_target(ladder: LadderResults) -> str:
    """Describe the prediction in sentences: its interval, its error, and its
    caveats.
    """
    target = ladder.target
    predicted = target.predicted
    measured = target.measured
    sentences = [
        f"predicted for {target.parameters:,} weights and {target.tokens:,} "
        f"tokens: a held-out loss of {predicted.value:.4f} nats per token "
        f"[{predicted.low:.4f}, {predicted.high:.4f}]; the leave-one-out error "
        f"of the trainings is {ladder.error:.2%}"
    ]
    if measured is not None:
        inside = "inside" if predicted.low <= measured <= predicted.high else "outside"
        sentences.append(
            f"the target was trained to {measured:.4f}: the prediction is off by "
            f"{target.off:+.2%}, and the measured loss lies {inside} its interval"
        )
    if target.tokens > target.set_tokens:
        sentences.append(
            f"the target reads its set of {target.set_tokens:,} tokens more than "
            "once, but the law holds for text that is read once: expect a higher loss"
        )
    if ladder.best_parameters is None:
        sentences.append(
            "by this law the size or the data make no difference: give sizes and "
            "budgets that are further apart"
        )
    else:
        sentences.append(
            f"by this law {ladder.best_parameters:,.3g} weights would be best "
            "for the target's FLOPs"
        )
    return "; ".join(sentences)
