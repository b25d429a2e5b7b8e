"""Session: a manifest that is validated, planned, and connected to its store."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gristmill.core.secrets import remember_secrets
from gristmill.core.store import StageFolder, Store, store_at
from gristmill.flows.running.allowed_code import refused_listings
from gristmill.flows.running.output_identities import (
    forget_kept,
    keep_output,
    settle_from_store,
)
from gristmill.flows.running.preflight import find_problems, missing_files
from gristmill.flows.running.run_records import RunRecord
from gristmill.flows.running.stage_server import StageServer, stage_server
from gristmill.flows.stages.plan import (
    Plan,
    UnknownStageError,
    make_plan,
    present_stages,
)
from gristmill.flows.stages.registry import STAGES, instances_of
from gristmill.mixtures.loader import ManifestError, Written, open_manifest
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.prepare import STEP_NAME_PATTERN
from gristmill.mixtures.yaml_text import unknown_name


@dataclass(frozen=True)
class Session:
    """A manifest, its plan and its store."""

    manifest: Manifest
    manifest_file: str
    overrides: list[str]
    store: Store
    store_option: str | None
    plan: Plan
    until: str | None = None

    def folder(self, stage: str) -> StageFolder:
        """Folder of a stage of the plan.

        Raises:
            UnknownStageError: the manifest has no such stage.
        """
        self.check_stages([stage])
        return self.store.folder(
            stage, self.manifest.name, self.plan[stage].fingerprint
        )

    def check_stages(self, stages: Iterable[str]) -> None:
        """Raise UnknownStageError unless the plan has all these stages."""
        for stage in stages:
            if stage not in self.plan:
                raise UnknownStageError(
                    f"{self.manifest_file} has no stage "
                    f"{unknown_name(stage, self.plan, 'it has')}"
                )

    def committed(self, stage: str) -> StageFolder | None:
        """Folder of a stage of the plan if its output is committed, else None."""
        if stage not in self.plan:
            return None
        folder = self.folder(stage)
        return folder if folder.state() == "committed" else None

    def unfinished(self, stages: Iterable[str], force: Collection[str]) -> list[str]:
        """Stages of the given ones that will run: not committed, or rebuilt."""
        return [
            stage for stage in stages if stage in force or self.committed(stage) is None
        ]

    def part_of(self, stage: str) -> Manifest:
        """The manifest; of a stage with several instances, that with only this one."""
        instances = self.plan[stage].stage.instances
        return self.manifest if instances is None else instances(self.manifest)[stage]

    def stage_server(
        self, stages: Iterable[str], force: Collection[str]
    ) -> AbstractContextManager[StageServer | None]:
        """Fork server for stages that are not made yet; see `running.stage_server`."""
        missing = self.unfinished(stages, force)
        return stage_server(self.plan, missing, self.manifest.engine)

    def keep(self, stages: Collection[str]) -> None:
        """Keep the committed outputs of some stages across a change of their versions,
        now and in later runs.

        Raises:
            gristmill.flows.running.output_identities.NothingToKeepError: the store has
                no such output.
        """
        for stage in self.plan:
            if stage in stages and self.committed(stage) is None:
                keep_output(self.plan[stage], self.store, self.manifest.name)
                self.settle()

    def forget_kept(self, stages: Collection[str]) -> None:
        """Stop keeping outputs of earlier versions of some stages, so that current ones
        make them.
        """
        forget_kept(
            (self.plan[stage] for stage in stages), self.store, self.manifest.name
        )
        self.settle()

    def settle(self) -> None:
        """Name stages by the identities of outputs that the store has by now."""
        self.plan.update(settle_from_store(self.plan, self.store, self.manifest.name))

    def start_record(self) -> RunRecord:
        """Start the record of a new run."""
        return RunRecord.start(
            self.store, self.manifest, self.manifest_file, self.overrides, self.plan
        )

    def command(self, verb: str, *arguments: str) -> str:
        """Command line of gristmill for this manifest, overrides and store."""
        parts = [program(), verb, self.manifest_file, *arguments]
        for override in self.overrides:
            parts += ["--set", override]
        if self.store_option:
            parts += ["--store", self.store_option]
        return shlex.join(parts)

    @property
    def resume_command(self) -> str:
        """Command line of gristmill that continues a run of this session."""
        return self.command("run", *(["--until", self.until] if self.until else []))

    @property
    def gc_command(self) -> str:
        """Command line of gristmill that lists removable outputs of this store."""
        parts = [program(), "gc"]
        if self.store_option:
            parts += ["--store", self.store_option]
        return shlex.join(parts)


def program() -> str:
    """Name of gristmill for this shell: bare if its environment is active, else a
    path.
    """
    script = Path(sys.executable).with_name("gristmill")
    on_path = shutil.which("gristmill")
    if not script.exists() or (on_path is not None and Path(on_path).samefile(script)):
        return "gristmill"
    folder = Path.cwd()
    return (
        str(script.relative_to(folder))
        if script.is_relative_to(folder)
        else str(script)
    )


def open_session(
    manifest: str,
    overrides: list[str],
    store: str | None,
    until: str | None = None,
    exactly: bool = False,
    verify_inputs: bool = False,
    allow_code: bool = False,
    given: tuple[Manifest, Written] | None = None,
) -> Session:
    """Validate a manifest and plan it.

    Args:
        manifest: path of the YAML file.
        overrides: `key.path=value` settings.
        store: local path or fsspec URL; otherwise GRISTMILL_STORE, otherwise
            `gristmill-store` in the current folder.
        until: last stage. One that the manifest lacks stands for the last one before
            it.
        exactly: True if a stage that the manifest lacks is an error.
        verify_inputs: hash the content of outside files.
        allow_code: allow users' listing functions to run, now and later in this store;
            implied by running a manifest.
        given: a validated manifest, and the places of its keys; `manifest` is then only
            its name in commands.

    Raises:
        gristmill.mixtures.loader.ManifestError: the manifest is wrong, a file of it is
            missing or unusable, or its listing is not allowed.
        UnknownStageError: the stage does not exist.
        gristmill.core.store.StoreLocationError: the location cannot hold a store.
    """
    remember_secrets(overrides)
    # swapped manifest and stage
    if until is not None and not re.match(STEP_NAME_PATTERN, until):
        raise UnknownStageError(
            f"no such stage: {until!r}; stages are {', '.join(STAGES)}"
        )
    loaded, written = given or open_manifest(manifest, overrides)
    remember_secrets(loaded.model_dump(mode="json"))
    stage_names = list(dict.fromkeys([*STAGES, *loaded.steps, *instances_of(loaded)]))
    if until is not None and until not in stage_names:
        raise UnknownStageError(
            f"no such stage: {unknown_name(until, stage_names, 'stages are')}"
        )
    opened_store = store_at(store)
    refused = refused_listings(loaded, written, opened_store, allow_code)
    if refused:
        raise ManifestError(refused)
    try:
        plan = make_plan(loaded, verify_inputs)
    except (OSError, ValueError) as error:
        problems = missing_files(loaded, written)
        if not problems:
            raise
        raise ManifestError(
            [*problems, *find_problems(loaded, written, present_stages(loaded))]
        ) from error
    if until is not None:
        last = [until] if until in plan else []
        if not last and not exactly:
            order = list(STAGES)
            last = [
                name
                for name, node in plan.items()
                if order.index(node.stage.name) <= order.index(until)
            ]
        if not last:
            raise UnknownStageError(
                f"{manifest} has no stage {unknown_name(until, plan, 'it has')}"
            )
        names = list(plan)
        plan = {name: plan[name] for name in names[: names.index(last[-1]) + 1]}
    plan = settle_from_store(plan, opened_store, loaded.name)
    session = Session(loaded, manifest, overrides, opened_store, store, plan, until)
    missing_stages = [
        name
        for name, node in plan.items()
        if node.stage.preflight and session.committed(name) is None
    ]
    problems = find_problems(loaded, written, missing_stages)
    if problems:
        raise ManifestError(problems)
    return session
