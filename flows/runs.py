"""The record of a run: which manifest, which stage outputs, and how it ended. gc keeps what a record names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import write_json
from gristmill.dataprep.secrets import mask_secrets
from gristmill.flows.lease import identity
from gristmill.flows.run import Outcome
from gristmill.flows.stages import Plan
from gristmill.flows.store import Store, new_run_folder
from gristmill.mixtures.manifest import Manifest


@dataclass
class RunRecord:
    """`run.json` of one run, rewritten whenever something happened."""

    folder: Path
    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, store: Store, manifest: Manifest, file: str, overrides: list[str], plan: Plan) -> RunRecord:
        """Make a new run's folder and first record."""
        record = cls(new_run_folder(store, manifest.name))
        record.content = {
            "run": record.folder.name, "name": manifest.name, "manifest_file": str(Path(file).resolve()),
            "manifest": manifest.model_dump(mode="json", exclude_none=True), "overrides": overrides,
            "state": "running", "started": time.time(), "owner": identity(os.getpid()),
            "stages": {name: {"fingerprint": node.fingerprint} for name, node in plan.items()},
        }
        record.save()
        return record

    def add(self, outcome: Outcome) -> None:
        """Note how a stage came to its output."""
        self.content["stages"][outcome.stage] = {
            "fingerprint": outcome.fingerprint, "how": outcome.how, "seconds": round(outcome.seconds, 3),
            "folder": str(outcome.folder.path), "note": outcome.note,
        }
        self.save()

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Note how what is done inside ends: completed, failed or interrupted."""
        try:
            yield
        except BaseException as error:
            self.finish("failed" if isinstance(error, Exception) else "interrupted", str(error))
            raise
        self.finish("completed")

    def finish(self, state: str, message: str = "") -> None:
        """Note how the run ended: completed, failed or interrupted."""
        self.content.update(state=state, message=message, finished=time.time())
        self.save()

    def save(self) -> None:
        """Write the record, without credentials that addresses or settings carry."""
        write_json(self.folder / "run.json", mask_secrets(self.content))
