"""Program of test_tuning_parallel.py that runs several fine-tuning stages in the same
processes.

Its arguments are the number of processes and a JSON file: a list of {"stage", "folder",
"inputs", "config"} with an optional "parallel".
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.train.forked_ranks import fork_ranks, load_all
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import Parallel, TrainingEngine
from gristmill.train.distributed.process_groups import World, make_world, process_group


def train_all(jobs: list[dict[str, Any]]) -> None:
    """Run the stages in sequence, in one process group."""
    trained_models: Any = importlib.import_module(
        "gristmill.train.stages.trained_models"
    )
    with process_group() as joined:

        @contextmanager
        def same_group(
            parallel: Parallel, split_rows: bool, split: bool = True
        ) -> Iterator[World]:
            yield make_world(parallel, joined.device, split_rows, split)

        for job in jobs:
            module: Any = importlib.import_module(
                f"gristmill.train.stages.{job['stage']}"
            )
            module.process_group = trained_models.process_group = same_group
            folder = Path(job["folder"])
            if joined.is_first:
                (folder / "work").mkdir(parents=True)
            dist.barrier()
            summary = module.run(
                {name: Path(path) for name, path in job["inputs"].items()},
                job["config"],
                folder / "data",
                Context(
                    folder / "work",
                    job["stage"],
                    emit=lambda event: None,
                    training=TrainingEngine(parallel=job.get("parallel", {})),
                ),
            )
            if joined.is_first:
                (folder / "data" / "summary.json").write_text(
                    json.dumps(summary, default=str)
                )


if __name__ == "__main__":
    load_all()
    jobs = json.loads(Path(sys.argv[2]).read_text())
    for stage in {job["stage"] for job in jobs}:
        importlib.import_module(f"gristmill.train.stages.{stage}")
    fork_ranks(int(sys.argv[1]), partial(train_all, jobs))
