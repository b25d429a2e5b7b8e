"""User-defined callbacks, which observe a training and may scale its learning rate or
end it.

They run on the first rank. Their answers and errors are broadcast, so that all ranks
end at the same step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from gristmill.core.files import canonical_json
from gristmill.dataprep.user_functions import (
    call_own,
    check_call,
    load_function,
    load_own,
)
from gristmill.mixtures.training import Callback, CallbackEvent
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.train.parallel.process_groups import World, on_first

EVENTS: tuple[CallbackEvent, ...] = get_args(CallbackEvent)
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """Answers of the callbacks to an event.

    Attributes:
        stopped: `callback`, `step` and `reason` of the first callback that ends the
            training, and `of`, the hash of its code and options; None if the training
            goes on.
        scales: `callback`, `step`, `event`, `learning_rate_scale` and `reason` of each
            change to the learning rate of later steps.
    """

    stopped: dict[str, Any] | None
    scales: list[dict[str, Any]]


NOTHING = Said(None, [])


@dataclass(frozen=True)
class _Made:
    """A loaded callback.

    Attributes:
        section: its section of the manifest.
        key: hash of its code and options.
        events: function or method to call at each of its events.
        thing: instance of a callback class; None for a function.
    """

    section: Callback
    key: str
    events: Mapping[CallbackEvent, Callable[[Metrics], Any]]
    thing: Any = None

    @property
    def keeps_state(self) -> bool:
        """True if checkpoints hold its state."""
        return hasattr(self.thing, "state_dict") and hasattr(
            self.thing, "load_state_dict"
        )


class Callbacks:
    """Callbacks of one training. Every rank creates one, and each method is a
    collective.

    Args:
        sections: callbacks in the order in which they are called.
        world: the processes.

    Raises:
        OwnCodeError: a callback cannot be loaded, constructed or called; methods raise
            it for errors of the callbacks.
    """

    def __init__(self, sections: Sequence[Callback], world: World) -> None:
        self._world = world
        self._made: list[_Made] = []
        self._events: set[str] = set(
            on_first(lambda: self._make(sections), world) if sections else ()
        )
        self._keys = {_key(section) for section in sections}

    def wants(self, event: CallbackEvent) -> bool:
        """Return True if a callback handles an event; metrics are computed only
        then.
        """
        return event in self._events

    def tell(self, event: CallbackEvent, metrics: Callable[[], dict[str, Any]]) -> Said:
        """Call the callbacks that handle an event.

        Args:
            event: its name.
            metrics: creates their argument, JSON with a `step`; called on the first
                rank only.

        Returns:
            their answers, in the order of the calls.
        """
        return (
            on_first(lambda: self._tell(event, metrics()), self._world)
            if self.wants(event)
            else NOTHING
        )

    def asked_for(self, stopped: Mapping[str, Any] | None) -> bool:
        """Return True if one of these callbacks ended the training of a checkpoint."""
        return stopped is not None and stopped["of"] in self._keys

    def state(self) -> dict[str, Any]:
        """State of the callbacks that have a `state_dict`, for a checkpoint."""
        return on_first(self._states, self._world) if self._keys else {}

    def load(self, states: Mapping[str, Any]) -> None:
        """Restore the state of the callbacks from a checkpoint."""
        if self._keys:
            on_first(lambda: self._load(states), self._world)

    def _make(self, sections: Sequence[Callback]) -> list[str]:
        self._made = [_made(section) for section in sections]
        return [event for callback in self._made for event in callback.events]

    def _tell(self, event: CallbackEvent, metrics: dict[str, Any]) -> Said:
        read_only_metrics = _read_only(metrics)
        answers = [
            (callback, answer)
            for callback in self._made
            if event in callback.events
            if (answer := _answer(callback, event, read_only_metrics)) is not None
        ]
        stopped = next(
            (
                {
                    "callback": callback.section.use.reference,
                    "step": metrics["step"],
                    "reason": answer,
                    "of": callback.key,
                }
                for callback, answer in answers
                if isinstance(answer, str)
            ),
            None,
        )
        return Said(
            stopped,
            [
                {
                    "callback": callback.section.use.reference,
                    "step": metrics["step"],
                    "event": event,
                    **answer,
                }
                for callback, answer in answers
                if not isinstance(answer, str)
            ],
        )

    def _states(self) -> dict[str, Any]:
        return {
            callback.key: _state(callback)
            for callback in self._made
            if callback.keeps_state
        }

    def _load(self, states: Mapping[str, Any]) -> None:
        for callback in self._made:
            if callback.keeps_state and callback.key in states:
                call_own(
                    callback.section,
                    callback.thing.load_state_dict,
                    states[callback.key],
                )


def _made(section: Callback) -> _Made:
    """Load a callback."""
    reference, code = section.use, load_function(section.use)
    if not isinstance(code, type):
        return _Made(
            section,
            _key(section),
            {section.on or EVENTS[0]: load_own(section, "metrics")},
        )
    if section.on is not None:
        raise OwnCodeError(
            f"{reference.place}: {reference.name} is a class, whose methods say when "
            "they are called; remove `on`"
        )
    construct = load_own(section)
    instance = call_own(section, construct)
    events = {
        event: getattr(instance, event)
        for event in EVENTS
        if callable(getattr(instance, event, None))
    }
    if not events:
        raise OwnCodeError(
            f"{reference.place}: {reference.name} has none of the methods "
            f"{', '.join(EVENTS)}"
        )
    for event, method in events.items():
        check_call(reference, method, ("metrics",), {}, event)
    return _Made(section, _key(section), events, instance)


def _key(section: Callback) -> str:
    """Hash of a callback's code and options."""
    return hashlib.sha256(canonical_json(section.model_dump(mode="json"))).hexdigest()


def _answer(
    callback: _Made, event: CallbackEvent, metrics: Metrics
) -> str | dict[str, Any] | None:
    """Call a callback. Returns None, the reason to end the training, or
    `learning_rate_scale` and `reason`.
    """
    reference, answer = (
        callback.section.use,
        call_own(callback.section, callback.events[event], metrics),
    )
    if answer is None:
        return None
    scale = _scale(answer) if isinstance(answer, Mapping) else None
    if scale is None and (not isinstance(answer, str) or not answer.strip()):
        raise OwnCodeError(
            f"{reference.place}: {reference.name} returned {answer!r} "
            f"{event.replace('_', ' ')}; return None to go "
            "on, a text that says why the training is to end, or "
            "{'learning_rate_scale': FACTOR, "
            "'reason': TEXT} with a finite factor above 0"
        )
    if event == "on_checkpoint":
        # Fingerprints do not cover the interval of checkpoints.
        raise OwnCodeError(
            f"{reference.place}: {reference.name} returned {answer!r} on a "
            "checkpoint, but how often one is saved may "
            "not change a result; do so after_step or after_validation"
        )
    return scale or str(answer)


def _scale(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Scale of the learning rate and its reason; None unless it is a finite positive
    number.
    """
    factor, reason = answer.get("learning_rate_scale"), answer.get("reason", "")
    if (
        set(answer) - {"learning_rate_scale", "reason"}
        or not isinstance(reason, str)
        or isinstance(factor, bool)
        or (
            not isinstance(factor, int | float)
            or not math.isfinite(factor)
            or factor <= 0
        )
    ):
        return None
    return {"learning_rate_scale": float(factor), "reason": reason}


def _state(callback: _Made) -> Any:
    reference, state = (
        callback.section.use,
        call_own(callback.section, callback.thing.state_dict),
    )
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise OwnCodeError(
            f"{reference.place}: what {reference.name}.state_dict returned is not "
            f"JSON: {error}"
        ) from error


def _read_only(value: Any) -> Any:
    """Read-only view of JSON."""
    if isinstance(value, Mapping):
        return MappingProxyType(
            {name: _read_only(inner) for name, inner in value.items()}
        )
    return tuple(map(_read_only, value)) if isinstance(value, list) else value
