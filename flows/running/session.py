"""A manifest opened for work: validated, planned, and tied to its store."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gristmill.dataprep.secrets import remember_secrets
from gristmill.flows.running.allowed_code import refused_listings
from gristmill.flows.running.fork_server import ForkServer
from gristmill.flows.running.preflight import find_problems, missing_files
from gristmill.flows.running.run import Observer, Runner
from gristmill.flows.running.stage_server import stage_server
from gristmill.flows.stages.plan import Plan, UnknownStageError, make_plan, present_stages
from gristmill.flows.stages.registry import STAGES, instances_of
from gristmill.flows.store.identities import forget_kept, keep_output, settle_from_store
from gristmill.flows.store.runs import RunRecord
from gristmill.flows.store.store import StageFolder, Store, store_at
from gristmill.mixtures.load import ManifestError, Written, open_manifest
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.prepare import STEP_NAME_PATTERN
from gristmill.mixtures.yaml_text import did_you_mean


@dataclass(frozen=True)
class Session:
    """A manifest, its plan and its store."""

    manifest: Manifest
    manifest_file: str
    overrides: list[str]
    store: Store
    store_option: str | None
    plan: Plan

    def folder(self, stage: str) -> StageFolder:
        """The folder of a stage of the plan.

        Raises:
            UnknownStageError: the manifest has no such stage.
        """
        if stage not in self.plan:
            raise UnknownStageError(f"{self.manifest_file} has no stage {stage!r}; it has {', '.join(self.plan)}")
        return self.store.folder(stage, self.manifest.name, self.plan[stage].fingerprint)

    def committed(self, stage: str) -> StageFolder | None:
        """The folder of a stage of the plan, if its output is committed."""
        if stage not in self.plan:
            return None
        folder = self.folder(stage)
        return folder if folder.state() == "committed" else None

    def runner(self, observer: Observer, server: ForkServer | None = None) -> Runner:
        """What runs the plan's stages; `server`, where there is one, is what they are forked from."""
        return Runner(
            self.store,
            self.plan,
            self.manifest.name,
            self.manifest.engine,
            observer,
            self.command("run"),
            self.command("verify", "--repair"),
            self.gc_command,
            server,
        )

    @contextmanager
    def stage_server(self, stages: Iterable[str], force: Collection[str]) -> Iterator[ForkServer | None]:
        """What stages of a run are forked from, as far as they are not made yet; see `running.stage_server`."""
        missing = [stage for stage in stages if stage in force or self.committed(stage) is None]
        with stage_server(self.plan, missing, self.manifest.engine) as server:
            yield server

    def keep(self, stages: Collection[str]) -> None:
        """Keep the committed outputs of some stages over a change of their versions, now and in later runs.

        Raises:
            gristmill.flows.store.identities.NothingToKeepError: the store has no such output.
        """
        for stage in self.plan:
            if stage in stages and self.committed(stage) is None:
                keep_output(self.plan[stage], self.store, self.manifest.name)
                self._settle()

    def forget_kept(self, stages: Collection[str]) -> None:
        """Let the present versions of some stages make their outputs, although earlier ones were kept."""
        forget_kept((self.plan[stage] for stage in stages), self.store, self.manifest.name)
        self._settle()

    def _settle(self) -> None:
        self.plan.update(settle_from_store(self.plan, self.store, self.manifest.name))

    def start_record(self) -> RunRecord:
        """The record of a run that starts now."""
        return RunRecord.start(self.store, self.manifest, self.manifest_file, self.overrides, self.plan)

    def command(self, verb: str, *arguments: str) -> str:
        """A gristmill command line for this manifest, overrides and store."""
        parts = [program(), verb, self.manifest_file, *arguments]
        for override in self.overrides:
            parts += ["--set", override]
        return shlex.join([*parts, *(["--store", self.store_option] if self.store_option else [])])

    @property
    def gc_command(self) -> str:
        """A gristmill command line that says what of this store can go."""
        return shlex.join([program(), "gc", *(["--store", self.store_option] if self.store_option else [])])


def program() -> str:
    """How this shell would start gristmill: by name where its environment is active, else by path."""
    script = Path(sys.executable).with_name("gristmill")
    found = shutil.which("gristmill")
    if not script.exists() or (found is not None and Path(found).samefile(script)):
        return "gristmill"
    folder = Path.cwd()
    return str(script.relative_to(folder)) if script.is_relative_to(folder) else str(script)


def open_session(
    manifest: str,
    overrides: list[str],
    store: str | None,
    until: str | None = None,
    exactly: bool = False,
    verify_inputs: bool = False,
    allow_code: bool = False,
) -> Session:
    """Validate a manifest and plan it.

    Args:
        manifest: path of the YAML file.
        overrides: `key.path=value` settings.
        store: local path or fsspec URL; otherwise GRISTMILL_STORE, otherwise `gristmill-store` in the current folder.
        until: the last stage wanted. One that the manifest leaves out stands for the last one before it.
        exactly: whether a stage that the manifest leaves out is an error.
        verify_inputs: hash the content of outside files.
        allow_code: let listings run that users wrote, now and in this store from now on; who runs a manifest does.

    Raises:
        gristmill.mixtures.load.ManifestError: the manifest is wrong, a file that it names is missing or unusable, or
            nobody has allowed its listing.
        UnknownStageError: there is no such stage.
        gristmill.flows.store.store.StoreLocationError: there can be no store at that place.
    """
    remember_secrets(overrides)
    if until is not None and not re.match(STEP_NAME_PATTERN, until):  # the manifest and the stage were interchanged
        raise UnknownStageError(f"no such stage: {until!r}; stages are {', '.join(STAGES)}")
    loaded, written = open_manifest(manifest, overrides)
    return session_of(loaded, written, manifest, overrides, store, until, exactly, verify_inputs, allow_code)


def session_of(
    loaded: Manifest,
    written: Written,
    manifest: str,
    overrides: list[str],
    store: str | None,
    until: str | None = None,
    exactly: bool = False,
    verify_inputs: bool = False,
    allow_code: bool = False,
) -> Session:
    """Plan a manifest that is validated already; see `open_session`.

    Args:
        loaded, written: the manifest, and where its keys were written.
        manifest: the file that commands name.
    """
    remember_secrets(loaded.model_dump(mode="json"))
    known = [*STAGES, *(name for name in (*loaded.steps, *instances_of(loaded)) if name not in STAGES)]
    if until is not None and until not in known:
        raise UnknownStageError(
            f"no such stage: {until!r}{did_you_mean(until, known) or ';'} stages are {', '.join(known)}"
        )
    opened = store_at(store)
    if refused := refused_listings(loaded, written, opened, allow_code):
        raise ManifestError(refused)
    try:
        plan = make_plan(loaded, verify_inputs)
    except (OSError, ValueError) as error:
        problems = missing_files(loaded, written)
        if not problems:
            raise
        raise ManifestError([*problems, *find_problems(loaded, written, present_stages(loaded))]) from error
    if until is not None and until not in plan and exactly:
        raise UnknownStageError(
            f"{manifest} has no stage {until!r}{did_you_mean(until, plan) or ';'} it has {', '.join(plan)}"
        )
    if until is not None:
        order = list(STAGES)
        last = (
            until
            if until in plan
            else next(
                (name for name in reversed(list(plan)) if order.index(plan[name].stage.name) <= order.index(until)),
                None,
            )
        )
        if last is None:
            raise UnknownStageError(f"{manifest} has no stage {until!r}, and none before it; it has {', '.join(plan)}")
        names = list(plan)
        plan = {name: plan[name] for name in names[: names.index(last) + 1]}
    plan = settle_from_store(plan, opened, loaded.name)
    session = Session(loaded, manifest, overrides, opened, store, plan)
    to_make = [name for name, node in plan.items() if node.stage.preflight and session.committed(name) is None]
    problems = find_problems(loaded, written, to_make)
    if problems:
        raise ManifestError(problems)
    return session
