"""Running stages: skip committed ones, continue unfinished ones, commit finished
ones.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gristmill.core.files import REPAIR, find_json, read_json, write_json
from gristmill.core.lease import Lease, ProcessIdentity, acquire, running_owner
from gristmill.core.progress import ProgressFile
from gristmill.core.secrets import mask_secrets, mask_text, split_secrets
from gristmill.core.store import FINGERPRINT_CHARS, StageFolder, remove_tree
from gristmill.dataprep.group_losses import describe_vanished
from gristmill.flows.running.events import (
    Outcome,
    StageFailed,
    StageFinished,
    StageStarted,
    StageWaits,
    StageWarning,
    Subscriber,
    parse_event,
)
from gristmill.flows.running.execute import IN_FORK
from gristmill.flows.running.follow_leader import MODULE as FOLLOW_LEADER
from gristmill.flows.running.fork_server import ForkServerError
from gristmill.flows.running.memory_advice import OUT_OF_MEMORY, advise
from gristmill.flows.running.output_identities import (
    alias_of,
    find_alias,
)
from gristmill.flows.running.process import Event, StageProcess
from gristmill.flows.running.session import Session
from gristmill.flows.running.stage_server import StageServer, is_forkable
from gristmill.flows.stages.plan import Node
from gristmill.mixtures.schema.engine import Engine
from gristmill.mixtures.schema.guard import Guard
from gristmill.mixtures.schema.pretrain import HOW_KEYS
from gristmill.mixtures.schema.sources import IMPORTED, INGEST
from gristmill.mixtures.yaml_text import join_first
from gristmill.train.distributed.rendezvous import ATTEMPTS, HOSTS_CHANGED

logger = logging.getLogger("gristmill.run")


class StageFailedError(RuntimeError):
    """A stage failed; the message gives the reason, the log, and the command to
    resume.
    """


class RunStoppedError(RuntimeError):
    """A stage was stopped with its run."""


class RunningProcesses:
    """Processes of running stages, which another thread can stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[StageProcess] = []
        self._stopped = False

    @contextmanager
    def start(self, begin: Callable[[], StageProcess]) -> Iterator[StageProcess]:
        """Start a process, which is stopped at the latest at the end of the block.

        Raises:
            RunStoppedError: the run was stopped before, or during the start.
        """
        self.check()
        # without the lock: it waits for its process, and others may start
        process = begin()
        try:
            with self._lock:
                self._running.append(process)
            self.check()
            yield process
        finally:
            # An interrupt of this process must not leave the group running.
            process.stop()
            with self._lock:
                self._running.remove(process)
        self.check()

    def check(self) -> None:
        """Raise RunStoppedError if the run was stopped."""
        if self._stopped:
            raise RunStoppedError("the run was stopped")

    def stop(self) -> None:
        """Stop all processes, with time for their checkpoints; no further one is
        started.
        """
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            threading.Thread(target=process.stop).start()


@dataclass(frozen=True)
class Runner:
    """Runner of the stages of a session.

    Attributes:
        session: an opened manifest.
        emit: receives the events of stages.
        server: forks stages if given.
        processes: of the stages that run.
    """

    session: Session
    emit: Subscriber
    server: StageServer | None = None
    processes: RunningProcesses = field(default_factory=RunningProcesses)
    _settling: threading.Lock = field(default_factory=threading.Lock)

    @property
    def engine(self) -> Engine:
        """Settings of the run."""
        return self.session.manifest.engine

    def folder(self, stage: str) -> StageFolder:
        """Folder of a stage of the plan."""
        return self.session.folder(stage)

    def run_stage(
        self, stage: str, force: bool = False, workers: int | None = None
    ) -> Outcome:
        """Make one stage's output and commit it; report a failure immediately.

        Args:
            stage: its name in the plan.
            force: rebuild a committed output.
            workers: number of workers; `engine.workers` by default.

        Raises:
            RunStoppedError: the run was stopped from another thread.
            StageFailedError: its inputs are missing, its process failed, or it lost
                more documents than its guard allows.
            LeaseLostError: another run took over the stage while this one was paused.
        """
        node = self.session.plan[stage]
        try:
            outcome = self._run_stage(node, force, workers or self.engine.workers)
            if alias_of(outcome.folder) != node.alias:
                # later stages are named by the output's identity
                with self._settling:
                    self.session.settle()
            guard = self.session.manifest.guards.get(stage)
            if guard is not None:
                self._check_losses(node, outcome.folder, guard)
            self.emit(StageFinished(node, outcome))
        except RunStoppedError:
            raise
        except Exception as error:
            self.emit(StageFailed(node, mask_text(str(error) or repr(error))))
            raise
        return outcome

    def _check_losses(self, node: Node, folder: StageFolder, guard: Guard) -> None:
        """Warn of sources, domains and languages that lost more than the guard allows,
        or raise StageFailedError.
        """
        sentence = describe_vanished(folder.manifest()["summary"], guard)
        if not sentence or guard.action == "ignore":
            return
        sentence += f"; see: {self.session.command('losses')}"
        if guard.action == "error":
            raise StageFailedError(
                f"{node.name}: {sentence}\n  its output is kept; change the step, or "
                f"raise guard.max_loss, and resume with: {self.session.resume_command}"
            )
        self.emit(StageWarning(node, sentence))

    def _run_stage(self, node: Node, force: bool, workers: int) -> Outcome:
        stage = node.name
        folder = self.folder(stage)
        was_committed = folder.state() == "committed"
        cached = Outcome(stage, node.fingerprint, "Cached", 0.0, folder)
        if node.kept_version is not None and (force or not was_committed):
            raise StageFailedError(
                f"{stage}: the kept output of version {node.kept_version} is "
                f"{folder.state()}; start again with: {self.session.resume_command}"
            )
        if was_committed and not force:
            _end_cleaning(folder)
            return cached
        for name in node.inputs:
            state = self.folder(name).state()
            if state != "committed":
                raise StageFailedError(
                    f"{stage} needs the output of {name}, which is {state}; make "
                    f"both with: {self.session.resume_command}"
                )
        lease = self._acquire(node, folder, force, workers)
        if lease is None:
            return replace(cached, note="made by another run")
        replaced: StageFolder | None = None
        if force and was_committed:
            # The old output stays in the trash until an equal one is committed.
            name = f"{folder.path.parent.name}--{folder.path.name}--{time.time_ns()}"
            trash = self.session.store.trash
            trash.mkdir(parents=True, exist_ok=True)
            replaced = StageFolder(trash / name)
            lease.release()
            folder.path.rename(replaced.path)
            lease = acquire(folder.path / "lease", lambda owner: None, lambda: True)
            assert lease is not None
        try:
            outcome = self._make(node, folder, lease, workers)
        finally:
            lease.release()
        return outcome if replaced is None else compare_with_replaced(outcome, replaced)

    def _acquire(
        self, node: Node, folder: StageFolder, force: bool, workers: int
    ) -> Lease | None:
        """Take the lease of a stage, or return None if another run makes its output;
        with several hosts, this host works on it meanwhile.
        """
        owners: list[ProcessIdentity] = []

        def is_needed() -> bool:
            self.processes.check()
            return force or folder.state() != "committed"

        with ExitStack() as stack:

            def begin(owner: ProcessIdentity) -> None:
                owners.append(owner)
                self.emit(StageWaits(node, owner["host"], owner["pid"]))
                if self.engine.nodes > 1 and (node.stage.torchrun or node.uses_workers):
                    _, secrets = split_secrets(self.describe(node, workers))
                    follower = partial(
                        StageProcess,
                        folder.path,
                        folder.logs
                        / "hosts"
                        / f"{socket.gethostname()}-{os.getpid()}.log",
                        lambda event: None,
                        secrets,
                        module=FOLLOW_LEADER,
                        arguments=[self.engine.network.interface or ""],
                    )
                    stack.enter_context(self.processes.start(follower))

            # A forced rerun of a committed stage finds a released lease, so it does not
            # wait.
            lease = acquire(folder.path / "lease", begin, is_needed, folder.publish)
        if lease is None:
            _end_cleaning(folder)
            return None
        if not is_needed():
            lease.release()
            return None
        if (
            self.engine.nodes > 1
            and owners
            and lease.follows_one_given_back()
            and not self._hosts_changed(folder)
        ):
            lease.release()
            error = find_json(folder.work / "error.json", {})
            reason = error.get("message", "it was ended there")
            raise StageFailedError(
                mask_text(
                    f"{node.name}: its leading host has given up: {reason}\n  "
                    f"resume with: {self.session.resume_command}"
                )
            )
        return lease

    def _make(
        self, node: Node, folder: StageFolder, lease: Lease, workers: int
    ) -> Outcome:
        started = time.time()
        record = self.header(node)
        # Only the process needs the credentials of addresses, so they are not written;
        # the next attempt gets them again.
        description, secrets = split_secrets(self.describe(node, workers))
        folder.begin(description, shared=self.engine.nodes > 1)
        resuming = folder.work.exists() and any(folder.work.iterdir())
        self.emit(StageStarted(node, folder, resuming))
        self._run_process(node, folder, lease, secrets)
        summary = read_json(folder.work / "result.json")
        lease.check()
        seconds = time.time() - started
        # settings of a training that its recipe does not contain
        how = {key: node.config[key] for key in HOW_KEYS if key in node.config}
        if how:
            record["how"] = how
        record["started"] = started
        record["seconds"] = round(seconds, 3)
        record["lease"] = lease.number
        for key, file in (("cost", "cost.json"), ("attempts", ATTEMPTS)):
            if content := find_json(folder.work / file):
                record[key] = content
        folder.commit(
            record,
            summary,
            lease.commit,
            lambda files: find_alias(self.session.store, node, files),
        )
        alias = alias_of(folder)
        return Outcome(
            node.name,
            node.fingerprint,
            "Resumed" if resuming else "Completed",
            seconds,
            folder,
            f"same bytes as {alias[:FINGERPRINT_CHARS]}" if alias else "",
        )

    def describe(self, node: Node, workers: int | None = None) -> dict[str, Any]:
        """Description of a stage for its process: the content of `stage.json` with
        credentials.
        """
        origins = {}
        # folders with annotations of the documents, which do not affect a training
        if node.stage.row_kind == "documents":
            for name, other_node in self.session.plan.items():
                folder = self.folder(name)
                is_origin = (
                    name in (INGEST, IMPORTED) or other_node.stage.step is not None
                )
                if is_origin and folder.state() == "committed":
                    origins[name] = str(folder.data)
        engine = {
            **self.engine.model_dump(mode="json"),
            "workers": workers or self.engine.workers,
            "ranks": self.engine.num_ranks,
        }
        step = node.stage.step
        intended = [] if step is None else step.intended_losses(node.settings)
        return {
            **self.header(node),
            "intended_losses": intended
            if node.name in self.session.manifest.guards
            else None,
            "launch": "torchrun" if node.stage.torchrun else "process",
            "run": node.stage.run,
            "config": dict(node.config),
            "inputs": [
                {"stage": name, "folder": str(self.folder(name).data)}
                for name in node.inputs
            ],
            "trained": [
                name for name in node.inputs if self.session.plan[name].stage.torchrun
            ],
            "origins": origins,
            "engine": engine,
        }

    def header(self, node: Node) -> dict[str, Any]:
        """Description of a stage's output for its records: without credentials."""
        return {
            "stage": node.name,
            "version": node.stage.version,
            "fingerprint": node.fingerprint,
            "recipe": mask_secrets(dict(node.recipe)),
            "input_fingerprints": [
                {"stage": name, "fingerprint": fingerprint}
                for name, fingerprint in node.inputs.items()
            ],
            "edits": list(node.edits),
        }

    def _run_process(
        self, node: Node, folder: StageFolder, lease: Lease, secrets: str | None
    ) -> None:
        """Run a stage's process, and retry up to `engine.retries` times if it was
        killed, or the hosts of a training have changed; that is free if the training
        has got further than before.
        """
        log = folder.logs / f"{lease.number}.log"
        progress = ProgressFile(lease.folder, lease.number)

        def on_event(content: Event) -> None:
            progress.note(content)
            event = parse_event(node, content)
            if event is not None:
                self.emit(event)

        server = self.server
        trains = server is not None and server.forks_trainings
        if not is_forkable(self.session.plan, node.name, trains):
            server = None

        def start(environment: Mapping[str, str]) -> StageProcess:
            if server and server.is_running:
                modules = [node.stage.module]
                with suppress(ForkServerError):  # the server has just ended
                    return StageProcess(
                        folder.path,
                        log,
                        on_event,
                        secrets,
                        server,
                        imports=modules,
                        environment={
                            **environment,
                            **({IN_FORK: "1"} if trains else {}),
                        },
                    )
            return StageProcess(
                folder.path, log, on_event, secrets, environment=environment
            )

        retries, furthest = self.engine.retries, 0.0
        try:
            while True:
                lease.check()
                driver: AbstractContextManager[Mapping[str, str]] = nullcontext({})
                if server:
                    driver = server.driver_environment()
                with (
                    driver as environment,
                    self.processes.start(partial(start, environment)) as process,
                ):
                    lease.on_lost = process.kill
                    lease.name_child(process.pid)
                    lease.start_heartbeat()
                    lease.check()
                    code = process.wait()
                lease.check()
                if code == 0:
                    break
                if server and server.driver:
                    server.driver.cancel(process.pid)
                is_changed = self._hosts_changed(folder)
                is_free = is_changed and progress.furthest > furthest
                may_retry = is_changed or process.was_killed(code)
                failure = self._failure_message(node, folder, code, process, log)
                if not may_retry or not (retries or is_free):
                    raise StageFailedError(failure)
                reason = failure.splitlines()[0].removeprefix(f"{node.name}: ")
                self.emit(
                    StageWarning(
                        node, f"{reason}; trying again (engine.retries: {retries} left)"
                    )
                )
                furthest = progress.furthest
                retries -= not is_free
                folder.begin(
                    read_json(folder.path / "stage.json"), shared=self.engine.nodes > 1
                )
        finally:
            progress.write()
        if not (folder.work / "result.json").exists():
            raise StageFailedError(
                f"{node.name}: its process ended without a result; see {log}"
            )

    def _hosts_changed(self, folder: StageFolder) -> bool:
        """True if a training has ended so that it can go on with other hosts."""
        file = folder.work / "error.json"
        return (
            self.engine.least_nodes < self.engine.nodes
            and file.exists()
            and read_json(file)["type"] == HOSTS_CHANGED
        )

    def _failure_message(
        self,
        node: Node,
        folder: StageFolder,
        code: int,
        process: StageProcess,
        log: Path,
    ) -> str:
        error_file = folder.work / "error.json"
        error = find_json(error_file, {})
        cause = process.cause()
        if cause is not None and not (cause[1] and error):
            reason = cause[0]
            if error.get("message") != reason:
                # For `status` and `plan`: the failed rank may not have written its
                # cause, or another may have written its own.
                try:
                    error_type = HOSTS_CHANGED if cause[1] else "StageFailedError"
                    write_json(error_file, {"type": error_type, "message": reason})
                except Exception as trouble:  # noqa: BLE001 - object stores' libraries raise errors of their own
                    logger.warning("%s cannot be written: %s", error_file, trouble)
        elif error:
            reason = error["message"]
        elif code == -9:
            reason = (
                "its process was killed, most likely out of memory: "
                f"{advise(node.stage)}"
            )
        elif code < 0:
            reason = f"its process was ended by signal {-code}"
        else:
            last_line = "".join(process.tail()[-1:])
            reason = f"its process ended with code {code}: {last_line}"
        if reason.startswith(f"{node.name}:"):
            reason = reason.partition(":")[2].strip()
        if error.get("type") in OUT_OF_MEMORY:
            reason = f"out of memory ({reason}): {advise(node.stage)}"
        reason = reason.replace(REPAIR, self.session.command("verify", "--repair"))
        if os.strerror(errno.ENOSPC) in reason:
            reason += (
                f"; free some space on the disk of {folder.path} "
                f"({self.session.gc_command} lists deletable outputs)"
            )
        return mask_text(
            f"{node.name}: {reason}\n  log: {log}\n  resume with: {self.session.resume_command}"
        )


def _end_cleaning(folder: StageFolder) -> None:
    """Clean up after an attempt that was killed after its commit, unless another
    process does.
    """
    if folder.is_tidy() or running_owner(folder.path / "lease") is not None:
        return
    lease = acquire(
        folder.path / "lease", lambda owner: None, lambda: not folder.is_tidy()
    )
    if lease is None:
        return
    try:
        folder.tidy()
    finally:
        lease.release()


def compare_with_replaced(outcome: Outcome, replaced: StageFolder) -> Outcome:
    """Note after a forced rerun whether the bytes are equal, and remove an equal
    copy.
    """
    new_files = outcome.folder.manifest()["files"]
    old_files = replaced.manifest()["files"]
    if new_files == old_files:
        remove_tree(replaced.path)
        return replace(outcome, note="same bytes as before")
    differing = sorted(
        name
        for name in {*new_files, *old_files}
        if new_files.get(name) != old_files.get(name)
    )
    return replace(
        outcome,
        note=f"differs from the output that it replaced in {join_first(differing, 3)}; the old "
        f"output is in {replaced.path}",
    )
