"""What test_parallel.py starts under torchrun: several trainings, each in another parallel form, in one launch.

The argument is a JSON file: a list of {"parallel", "folder", "continue", "inputs", "config", "checkpoint_every"}, and
"compute" or not; `continue` is the folder of a training whose checkpoints are gone on from, or null.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from gristmill.dataprep.context import Context
from gristmill.mixtures.compute import Compute
from gristmill.mixtures.parallel import Parallel
from gristmill.train import pretrain
from gristmill.train.parallel.world import World, make_world, process_group


def main() -> None:
    """Run the stage once per form, all in the one process group."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
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
                    shutil.copytree(Path(job["continue"]) / "work" / "checkpoints", folder / "work" / "checkpoints")
            dist.barrier()
            context = Context(folder / "work", "pretrain", checkpoint_every=job["checkpoint_every"],
                              parallel=Parallel.model_validate(job["parallel"]),
                              compute=Compute.model_validate(job.get("compute", {})), emit=lambda event: None)
            pretrain.run({name: Path(path) for name, path in job["inputs"].items()}, job["config"], folder / "data",
                         context)


if __name__ == "__main__":
    main()
