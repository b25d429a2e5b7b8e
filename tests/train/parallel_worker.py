"""Program started by test_parallel.py: several trainings in different parallel forms,
by the same processes.

Arguments: the number of processes, and a JSON file with a list of {"parallel",
"folder", "continue", "inputs", "config", "checkpoint_every"}, optionally "compute";
`continue` is the folder of a training to resume from, or null.
"""

from __future__ import annotations

import json
import shutil
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
from gristmill.train.stages import pretrain


def train_all(jobs: list[dict[str, Any]]) -> None:
    """Run the stage once per form, all in one process group."""
    with process_group() as joined:

        @contextmanager
        def same_group(parallel: Parallel) -> Iterator[World]:
            yield make_world(parallel, joined.device)

        pretrain.process_group = same_group  # type: ignore[assignment]
        for job in jobs:
            folder = Path(job["folder"])
            if joined.is_first:
                (folder / "work").mkdir(parents=True)
                if job["continue"] is not None:
                    shutil.copytree(
                        Path(job["continue"]) / "work" / "checkpoints",
                        folder / "work" / "checkpoints",
                    )
            dist.barrier()
            context = Context(
                folder / "work",
                "pretrain",
                training=TrainingEngine.model_validate(
                    {
                        key: job[key]
                        for key in ("checkpoint_every", "parallel", "compute")
                        if key in job
                    }
                ),
                emit=lambda event: None,
            )
            pretrain.run(
                {name: Path(path) for name, path in job["inputs"].items()},
                job["config"],
                folder / "data",
                context,
            )


if __name__ == "__main__":
    load_all()
    fork_ranks(
        int(sys.argv[1]), partial(train_all, json.loads(Path(sys.argv[2]).read_text()))
    )
