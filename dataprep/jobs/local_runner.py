"""Beam's local runner with what it lacks: worker processes that are watched, and bundles that go to who is free.

As shipped it cuts the work into one bundle per worker beforehand, so that one long shard leaves the others idle, a
worker process that dies leaves it waiting for ever, and workers that are threads of this very process are spoken to
through gRPC servers. Here each thread has a worker of Beam's that it calls. The few classes that are extended here
are internal to Beam, which is why pyproject.toml pins its minor version.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from apache_beam.metrics import monitoring_infos
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner.execution import GroupingBuffer
from apache_beam.runners.portability.fn_api_runner.fn_runner import BundleManager, FnApiRunner
from apache_beam.transforms.environments import EmbeddedPythonEnvironment

from gristmill.dataprep.jobs.job_errors import WorkerError
from gristmill.dataprep.jobs.worker_processes import WorkerProcess, WorkerProcessEnvironment

NOTICE_SECONDS = 1.0
BUNDLES_PER_WORKER = 32
"""The most bundles that a worker gets of one step: each costs some milliseconds, and evens out the load."""


class LocalRunner(FnApiRunner):
    """Runs a pipeline on this machine.

    Args:
        mode: `memory` (in this thread), `threads` or `processes`.
        workers: how many threads or processes.
        module: of this package, which worker processes need, or empty: it is imported once for all.
    """

    def __init__(self, mode: str, workers: int, module: str = "") -> None:
        processes = WorkerProcessEnvironment(module) if mode == "processes" else None
        super().__init__(default_environment=processes or EmbeddedPythonEnvironment.default())
        self._workers = 1 if mode == "memory" else workers

    def run_via_runner_api(self, pipeline_proto: Any, options: Any) -> Any:
        """Run a pipeline in Beam's portable form."""
        self._num_workers = self._workers  # whatever Beam made of its own option for it
        return super().run_via_runner_api(pipeline_proto, options)

    def _get_bundle_manager(self, bundle_context_manager: Any) -> Any:
        if self._workers == 1 and isinstance(self._default_environment, EmbeddedPythonEnvironment):
            return super()._get_bundle_manager(bundle_context_manager)
        return DynamicBundles(bundle_context_manager,
                              cache_token_generator=FnApiRunner.get_cache_token_generator(static=False))


class DynamicBundles(BundleManager):
    """Runs a step as many small bundles; whichever worker is free takes the next one."""

    def process_bundle(
        self, inputs: Mapping[str, Any], expected_outputs: Any, fired_timers: Mapping[Any, Any],
        expected_output_timers: Mapping[Any, Any], dry_run: bool = False,
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        """Process all inputs of a step; the first error stops it, and ends the worker processes.

        Raises:
            WorkerError: a worker process ended by itself.
        """
        handlers = self.bundle_context_manager.worker_handlers
        parts = split_inputs(inputs, BUNDLES_PER_WORKER * len(handlers))
        run = _Run(parts)

        def work(handler: Any) -> None:
            bundles = BundleManager(_OneWorker(self.bundle_context_manager, handler),
                                    cache_token_generator=self._cache_token_generator)
            for part in run.take():
                timers = fired_timers if part is parts[0] else {}
                result, _ = bundles.process_bundle(part, expected_outputs, timers, expected_output_timers, dry_run)
                run.results.append(result)

        threads = [threading.Thread(target=run.guard, args=(work, handler), daemon=True) for handler in handlers]
        try:
            for thread in threads:
                thread.start()
            run.ended.wait()
            if run.error is not None:
                raise run.error
        except BaseException as error:
            run.stop()
            _end(handlers, error)
            raise
        finally:
            for thread in threads:
                thread.join()
        return _merge(run.results), []


class _Run:
    """Bundles that are handed out, what came back, and the first error."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._parts, self._lock = iter(parts), threading.Lock()
        self._left = len(parts)

    def take(self) -> Iterator[dict[str, Any]]:
        """Bundles until there are none, or somebody failed."""
        while not self.ended.is_set():
            with self._lock:
                part = next(self._parts, None)
            if part is None:
                return
            yield part
            with self._lock:
                self._left -= 1
                if not self._left:
                    self.ended.set()

    def guard(self, work: Any, handler: Any) -> None:
        """Work with one worker; an error ends the run for all."""
        try:
            work(handler)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            with self._lock:
                self.error = self.error or error
            self.ended.set()

    def stop(self) -> None:
        """Hand out no more."""
        self.ended.set()


class _OneWorker:
    """A step's context in which there is just this worker."""

    def __init__(self, context: Any, handler: Any) -> None:
        self._context, self.worker_handlers = context, [handler]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def split_inputs(inputs: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """Cut what was grouped into up to `most` bundles, in the order of the keys; anything else stays one bundle."""
    keys = max((len(buffer._table) for buffer in inputs.values() if isinstance(buffer, GroupingBuffer)), default=1)
    number = max(1, min(keys, most))
    parts: list[dict[str, Any]] = [{} for _ in range(number)]
    for name, buffer in inputs.items():
        for part, piece in zip(parts, buffer.partition(number), strict=True):
            part[name] = piece
    return parts


def _end(handlers: list[Any], error: BaseException) -> None:
    """End the worker processes; where one of them died by itself, that is the error."""
    processes = [handler for handler in handlers if isinstance(handler, WorkerProcess)]
    # A broken connection shows before the process that held it is gone altogether.
    patience = NOTICE_SECONDS if isinstance(error, grpc.RpcError) else 0.0
    died = [number for number, handler in enumerate(processes) if handler.has_died(patience)]
    for handler in processes:
        handler.kill()
    if died and isinstance(error, Exception):
        raise WorkerError(processes[died[0]].describe_death(died[0])) from None


def _merge(results: list[Any]) -> Any:
    infos = [info for result in results for info in result.process_bundle.monitoring_infos]
    merged = beam_fn_api_pb2.ProcessBundleResponse(monitoring_infos=monitoring_infos.consolidate(infos))
    return beam_fn_api_pb2.InstructionResponse(process_bundle=merged)
