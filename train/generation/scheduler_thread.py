"""Scheduler in a thread, for callers in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gristmill.train.generation.scheduler import Progress, Request, Scheduler

Listener = Callable[[Progress | BaseException], None]
"""Function called in the engine's thread with each progress of a request, or with the
error that ended the engine.
"""


class EngineStoppedError(RuntimeError):
    """The engine is stopped and takes no requests."""


class Engine:
    """Answers requests in shared batches as they arrive.

    Args:
        scheduler: owned by the engine.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wake = threading.Condition()
        # Guarded by `_wake`: requests of callers. Only the thread uses the scheduler,
        # so callers never wait for a round.
        self._asked: list[tuple[int, Request, Listener]] = []
        self._cancelled: set[int] = set()
        self._tickets = 0
        self._ended: BaseException | None = None
        self._running: dict[int, tuple[int, Listener]] = {}
        self._thread = threading.Thread(
            target=self._work, name="generation", daemon=True
        )
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> int:
        """Queue a request; returns its ticket for `cancel`.

        Raises:
            gristmill.train.generation.scheduler.PromptTooLongError: the prompt leaves
                no room for an answer.
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
        """Drop a request; does nothing if it has ended."""
        with self._wake:
            self._cancelled.add(ticket)
            self._wake.notify()

    def close(self) -> None:
        """Stop the thread; running requests get an error."""
        with self._wake:
            self._ended = self._ended or EngineStoppedError(
                "the server is being stopped"
            )
            self._wake.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: (
                        self._ended or self._asked or self._cancelled or self._running
                    )
                )
                submitted, self._asked = self._asked, []
                cancelled, self._cancelled = self._cancelled, set()
                if self._ended is not None:
                    break
            try:
                for ticket, request, listener in submitted:
                    if ticket not in cancelled:
                        self._running[self._scheduler.add(request)] = ticket, listener
                for number, (ticket, _) in list(self._running.items()):
                    if ticket in cancelled:
                        del self._running[number]
                        self._scheduler.cancel(number)
                for progress in self._scheduler.step():
                    _, listener = self._running[progress.number]
                    if progress.finish is not None:
                        del self._running[progress.number]
                    listener(progress)
            except Exception as error:  # noqa: BLE001 - any error goes to the waiting callers
                with self._wake:
                    self._ended = error
        waiting = [listener for _, listener in self._running.values()]
        for listener in (*waiting, *(listener for _, _, listener in submitted)):
            listener(self._ended)
