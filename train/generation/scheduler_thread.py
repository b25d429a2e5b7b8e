"""A scheduler at work in a thread of its own, for callers in others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gristmill.train.generation.scheduler import Progress, Request, Scheduler

Listener = Callable[[Progress | BaseException], None]
"""Called in the engine's thread with each progress of a request, or with what ended the engine."""


class EngineStoppedError(RuntimeError):
    """The engine takes no more requests."""


class Engine:
    """Answers requests together as they come.

    Args:
        scheduler: not used by anything else from now on.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wake = threading.Condition()
        # Guarded by `_wake`: what callers ask for. The scheduler itself is the thread's alone, so no caller ever waits
        # for a round to end.
        self._asked: list[tuple[int, Request, Listener]] = []
        self._cancelled: set[int] = set()
        self._tickets = 0
        self._ended: BaseException | None = None
        self._running: dict[int, tuple[int, Listener]] = {}
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> int:
        """Let a request wait for its turn; returns the ticket that `cancel` wants.

        Raises:
            gristmill.train.generation.scheduler.PromptTooLongError: there is no room for an answer.
            EngineStoppedError: the engine was closed, or failed.
        """
        self._scheduler.check(request)
        with self._wake:
            if self._ended is not None:
                raise EngineStoppedError(f"no more answers: {self._ended}")
            self._tickets += 1
            self._asked.append((self._tickets, request, listener))
            self._wake.notify()
            return self._tickets

    def cancel(self, ticket: int) -> None:
        """Forget a request; nothing happens if it has ended."""
        with self._wake:
            self._cancelled.add(ticket)
            self._wake.notify()

    def close(self) -> None:
        """End the thread; requests that still run get an error."""
        with self._wake:
            self._ended = self._ended or EngineStoppedError("the server is being stopped")
            self._wake.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._asked or self._cancelled or self._running)
                asked, cancelled = self._asked, self._cancelled
                self._asked, self._cancelled = [], set()
                if self._ended is not None:
                    break
            try:
                self._round(asked, cancelled)
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait get it
                with self._wake:
                    self._ended = error
        for listener in [*(listener for _, listener in self._running.values()), *(one[2] for one in asked)]:
            listener(self._ended)

    def _round(self, asked: list[tuple[int, Request, Listener]], cancelled: set[int]) -> None:
        for ticket, request, listener in asked:
            if ticket not in cancelled:
                self._running[self._scheduler.add(request)] = ticket, listener
        for number in [number for number, (ticket, _) in self._running.items() if ticket in cancelled]:
            del self._running[number]
            self._scheduler.cancel(number)
        for one in self._scheduler.step():
            listener = self._running[one.number][1]
            if one.finish is not None:
                del self._running[one.number]
            listener(one)
