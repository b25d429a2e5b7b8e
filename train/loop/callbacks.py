"""Callbacks: code of the user's that watches a training, and may scale its learning rate or end it.

They run on the first rank; what they say, and what they raise, all ranks hear, so that all end at the same step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from gristmill.dataprep.files import canonical_json
from gristmill.dataprep.own_functions import call_own, check_call, load_function, load_own
from gristmill.mixtures.own_code import OwnCodeError
from gristmill.mixtures.training import Callback, CallbackEvent
from gristmill.train.parallel.world import World, on_first

EVENTS: tuple[CallbackEvent, ...] = get_args(CallbackEvent)
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """What callbacks say to an event.

    Attributes:
        stopped: `callback`, `step` and `reason` of the first that ends the training, and `of`, which names its code;
            None where none does.
        scales: `callback`, `step`, `event`, `learning_rate_scale` and `reason` of each that scales the learning rate
            of the steps behind this one.
    """

    stopped: dict[str, Any] | None
    scales: list[dict[str, Any]]


NOTHING = Said(None, [])


@dataclass(frozen=True)
class _Made:
    """A callback that is ready to be called.

    Attributes:
        section: what the manifest says of it.
        key: names its code and options.
        events: what is called at each event that it wants.
        thing: the object, of a class.
    """

    section: Callback
    key: str
    events: Mapping[CallbackEvent, Callable[[Metrics], Any]]
    thing: Any = None

    @property
    def keeps_state(self) -> bool:
        """Whether something of it is to lie in checkpoints."""
        return hasattr(self.thing, "state_dict") and hasattr(self.thing, "load_state_dict")


class Callbacks:
    """The callbacks of one training. Every rank makes one, and calls each method together with the others.

    Args:
        sections: which callbacks, in the order in which they are called.
        world: the processes.

    Raises:
        OwnCodeError: one of them cannot be loaded, made or called; so does every method, for what they raise.
    """

    def __init__(self, sections: Sequence[Callback], world: World) -> None:
        self._world = world
        self._made: list[_Made] = []
        self._events: set[str] = set(on_first(lambda: self._make(sections), world) if sections else ())
        self._keys = {_key(section) for section in sections}

    def wants(self, event: CallbackEvent) -> bool:
        """Whether one of them is to be told of an event: what is not wanted is not worked out."""
        return event in self._events

    def tell(self, event: CallbackEvent, metrics: Callable[[], dict[str, Any]]) -> Said:
        """Call those that want an event.

        Args:
            event: which one.
            metrics: makes what they see, JSON with a `step`; called on the first rank alone.

        Returns:
            what they say, in the order in which they are called.
        """
        return on_first(lambda: self._tell(event, metrics()), self._world) if self.wants(event) else NOTHING

    def asked_for(self, stopped: Mapping[str, Any] | None) -> bool:
        """Whether one of these callbacks has ended the training that a checkpoint is of."""
        return stopped is not None and stopped["of"] in self._keys

    def state(self) -> dict[str, Any]:
        """What those that have a `state_dict` keep, for a checkpoint."""
        return on_first(self._states, self._world) if self._keys else {}

    def load(self, states: Mapping[str, Any]) -> None:
        """Give back what a checkpoint holds of them."""
        if self._keys:
            on_first(lambda: self._load(states), self._world)

    def _make(self, sections: Sequence[Callback]) -> list[str]:
        self._made = [_made(section) for section in sections]
        return [event for one in self._made for event in one.events]

    def _tell(self, event: CallbackEvent, metrics: dict[str, Any]) -> Said:
        seen = _read_only(metrics)
        said = [
            (one, answer)
            for one in self._made
            if event in one.events
            if (answer := _answer(one, event, seen)) is not None
        ]
        stopped = next(
            (
                {"callback": one.section.use.reference, "step": metrics["step"], "reason": answer, "of": one.key}
                for one, answer in said
                if isinstance(answer, str)
            ),
            None,
        )
        return Said(
            stopped,
            [
                {"callback": one.section.use.reference, "step": metrics["step"], "event": event, **answer}
                for one, answer in said
                if not isinstance(answer, str)
            ],
        )

    def _states(self) -> dict[str, Any]:
        return {one.key: _state(one) for one in self._made if one.keeps_state}

    def _load(self, states: Mapping[str, Any]) -> None:
        for one in self._made:
            if one.keeps_state and one.key in states:
                call_own(one.section, one.thing.load_state_dict, states[one.key])


def _made(section: Callback) -> _Made:
    """A callback from its code."""
    own, code = section.use, load_function(section.use)
    if not isinstance(code, type):
        return _Made(section, _key(section), {section.on or EVENTS[0]: load_own(section, "metrics")})
    if section.on is not None:
        raise OwnCodeError(f"{own.place}: {own.name} is a class, whose methods say when they are called; remove `on`")
    make = load_own(section)
    thing = call_own(section, make)
    events = {event: getattr(thing, event) for event in EVENTS if callable(getattr(thing, event, None))}
    if not events:
        raise OwnCodeError(f"{own.place}: {own.name} has none of the methods {', '.join(EVENTS)}")
    for event, method in events.items():
        check_call(own, method, ("metrics",), {}, event)
    return _Made(section, _key(section), events, thing)


def _key(section: Callback) -> str:
    """Names a callback's code and options."""
    return hashlib.sha256(canonical_json(section.model_dump(mode="json"))).hexdigest()


def _answer(one: _Made, event: CallbackEvent, metrics: Metrics) -> str | dict[str, Any] | None:
    """What a callback says to an event: nothing, why the training is to end, or `learning_rate_scale` and `reason`."""
    own, said = one.section.use, call_own(one.section, one.events[event], metrics)
    if said is None:
        return None
    scaled = _scale(said) if isinstance(said, Mapping) else None
    if scaled is None and (not isinstance(said, str) or not said.strip()):
        raise OwnCodeError(
            f"{own.place}: {own.name} returned {said!r} {event.replace('_', ' ')}; return None to go "
            "on, a text that says why the training is to end, or {'learning_rate_scale': FACTOR, "
            "'reason': TEXT} with a finite factor above 0"
        )
    if event == "on_checkpoint":
        # When checkpoints are saved is in no fingerprint.
        raise OwnCodeError(
            f"{own.place}: {own.name} returned {said!r} on a checkpoint, but how often one is saved may "
            "not change a result; do so after_step or after_validation"
        )
    return scaled or str(said)


def _scale(said: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a callback wants of the learning rate; None where that is no positive number."""
    factor, reason = said.get("learning_rate_scale"), said.get("reason", "")
    if (
        set(said) - {"learning_rate_scale", "reason"}
        or not isinstance(reason, str)
        or isinstance(factor, bool)
        or (not isinstance(factor, int | float) or not math.isfinite(factor) or factor <= 0)
    ):
        return None
    return {"learning_rate_scale": float(factor), "reason": reason}


def _state(one: _Made) -> Any:
    own, state = one.section.use, call_own(one.section, one.thing.state_dict)
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise OwnCodeError(f"{own.place}: what {own.name}.state_dict returned is not JSON: {error}") from error


def _read_only(value: Any) -> Any:
    """The same, such that who is given it can change nothing."""
    if isinstance(value, Mapping):
        return MappingProxyType({name: _read_only(inner) for name, inner in value.items()})
    return tuple(map(_read_only, value)) if isinstance(value, list) else value
