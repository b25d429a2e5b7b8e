"""User-defined callbacks, which observe a training and may end it.

They run on the first rank. Their answers and errors are broadcast, so that all ranks
end at the same step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict, get_args

from gristmill.core.files import json_digest
from gristmill.dataprep.user_functions import (
    call_own,
    check_call,
    load_function,
    load_own,
    wrong,
)
from gristmill.mixtures.schema.pretrain import Callback, CallbackEvent
from gristmill.train.distributed.process_groups import World, on_first
from gristmill.train.loop.objective import JsonObject, Metrics

EVENTS: tuple[CallbackEvent, ...] = get_args(CallbackEvent)


class StoppedBy(TypedDict):
    """Callback that ended a training, the last step, and the reason."""

    callback: str
    step: int
    reason: str


class Stop(StoppedBy):
    """End of a training in its checkpoints; `of` is the hash of the callback's code and
    options.
    """

    of: str


@dataclass(frozen=True)
class _Loaded:
    """A loaded callback.

    Attributes:
        section: its section of the manifest.
        key: hash of its code and options.
        events: function or method to call at each of its events.
        instance: instance of a callback class; None for a function.
    """

    section: Callback
    key: str
    events: Mapping[CallbackEvent, Callable[[Metrics], Any]]
    instance: Any = None

    @property
    def keeps_state(self) -> bool:
        """True if checkpoints hold its state."""
        return hasattr(self.instance, "state_dict") and hasattr(
            self.instance, "load_state_dict"
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
        self._callbacks: list[_Loaded] = []
        self._events: set[str] = set(
            on_first(lambda: self._make(sections), world) if sections else ()
        )
        self._keys = {_key(section) for section in sections}

    def wants(self, event: CallbackEvent) -> bool:
        """Return True if a callback handles an event; metrics are computed only
        then.
        """
        return event in self._events

    def tell(
        self, event: CallbackEvent, step: int, metrics: Callable[[], Metrics]
    ) -> Stop | None:
        """Call the callbacks that handle an event.

        Args:
            event: its name.
            step: steps done.
            metrics: creates their argument; called on the first rank only.

        Returns:
            the end of the training by the first callback that asked for it; None if
            it goes on.
        """

        def call() -> Stop | None:
            read_only_metrics = _read_only(metrics())
            stopped: Stop | None = None
            for callback in self._callbacks:
                if event not in callback.events:
                    continue
                reason = _reason_to_end(callback, event, read_only_metrics)
                if reason is not None and stopped is None:
                    stopped = Stop(
                        callback=callback.section.use.reference,
                        step=step,
                        reason=reason,
                        of=callback.key,
                    )
            return stopped

        return on_first(call, self._world) if self.wants(event) else None

    def asked_for(self, stopped: Stop | None) -> bool:
        """Return True if one of these callbacks ended the training of a checkpoint."""
        return stopped is not None and stopped["of"] in self._keys

    def state(self) -> JsonObject:
        """State of the callbacks that have a `state_dict`, for a checkpoint."""

        def collect() -> JsonObject:
            states: JsonObject = {}
            for callback in self._callbacks:
                if not callback.keeps_state:
                    continue
                state = call_own(callback.section, callback.instance.state_dict)
                try:
                    states[callback.key] = json.loads(
                        json.dumps(state, allow_nan=False)
                    )
                except (TypeError, ValueError) as error:
                    problem = f"returned a state_dict that is not JSON: {error}"
                    raise wrong(callback.section, problem) from error
            return states

        return on_first(collect, self._world) if self._keys else {}

    def load(self, states: Metrics) -> None:
        """Restore the state of the callbacks from a checkpoint."""

        def restore() -> None:
            for callback in self._callbacks:
                if callback.keeps_state and callback.key in states:
                    call_own(
                        callback.section,
                        callback.instance.load_state_dict,
                        states[callback.key],
                    )

        if self._keys:
            on_first(restore, self._world)

    def _make(self, sections: Sequence[Callback]) -> list[str]:
        for section in sections:
            if not isinstance(load_function(section.use), type):
                event = section.on or EVENTS[0]
                events = {event: load_own(section, "metrics")}
                self._callbacks.append(_Loaded(section, _key(section), events))
                continue
            if section.on is not None:
                raise wrong(
                    section,
                    "is a class, whose methods say when they are called; remove `on`",
                )
            instance = call_own(section, load_own(section))
            events = {
                event: getattr(instance, event)
                for event in EVENTS
                if callable(getattr(instance, event, None))
            }
            if not events:
                raise wrong(section, f"has none of the methods {', '.join(EVENTS)}")
            for event, method in events.items():
                check_call(section.use, method, ("metrics",), {}, event)
            self._callbacks.append(_Loaded(section, _key(section), events, instance))
        return [event for callback in self._callbacks for event in callback.events]


def _key(section: Callback) -> str:
    """Hash of a callback's code and options."""
    return json_digest(section.model_dump(mode="json"))


def _reason_to_end(
    callback: _Loaded, event: CallbackEvent, metrics: Metrics
) -> str | None:
    """Call a callback. Returns its reason to end the training, or None."""
    answer = call_own(callback.section, callback.events[event], metrics)
    if answer is None:
        return None
    if not isinstance(answer, str) or not answer.strip():
        raise wrong(
            callback.section,
            f"returned {answer!r} {event.replace('_', ' ')}; return None to go on, or a "
            "text that says why the training is to end",
        )
    if event == "on_checkpoint":
        # Fingerprints do not cover the interval of checkpoints.
        raise wrong(
            callback.section,
            f"returned {answer!r} on a checkpoint, but how often one is saved may not "
            "change a result; end the training after_step or after_validation",
        )
    return answer


def _read_only(value: Any) -> Any:
    """Read-only view of JSON."""
    if isinstance(value, Mapping):
        return MappingProxyType(
            {name: _read_only(inner) for name, inner in value.items()}
        )
    return tuple(map(_read_only, value)) if isinstance(value, list) else value
