"""What test_tuning_parallel.py starts under torchrun: several fine-tuning stages in one process group.

The argument is a JSON file: a list of {"stage", "folder", "inputs", "config"}, and "parallel" or not.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gristmill.dataprep.context import Context
from gristmill.mixtures.parallel import Parallel
from gristmill.train.parallel.world import World, make_world, process_group


def main() -> None:
    """Run the stages one after the other, all in the one process group."""
    kto: Any = importlib.import_module("gristmill.train.kto")
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with process_group() as joined:

        @contextmanager
        def same_group(parallel: Parallel, pipelined: bool, split: bool = True) -> Iterator[World]:
            yield make_world(parallel, joined.device, pipelined, split)

        for job in jobs:
            module: Any = importlib.import_module(f"gristmill.train.{job['stage']}")
            # The stage `dpo` leaves the loss kto to a module of its own.
            module.process_group = kto.process_group = same_group
            folder = Path(job["folder"])
            if joined.is_first:
                (folder / "work").mkdir(parents=True)
            dist.barrier()
            module.run({name: Path(path) for name, path in job["inputs"].items()}, job["config"], folder / "data",
                       Context(folder / "work", job["stage"], emit=lambda event: None,
                               parallel=Parallel.model_validate(job.get("parallel", {}))))


if __name__ == "__main__":
    main()
