"""The section `engine`: where jobs run; how trainings compute, are spread, read and watched.

Nothing here changes a row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import Fraction, Positive, PositiveFloat, Section

ADDRESSES = {
    "dask": "tcp://host:8786",
    "spark": "spark://host:7077",
    "flink": "host:8081",
}
"""Engines that are somewhere else, and what an address of each looks like."""
ENGINES = ("local", *ADDRESSES, "dataflow")
"""What `runner` may be, beside the names of Beam's own runners."""
FLINK_VERSIONS = ("1.19", "1.20", "2.0", "2.1", "2.2")
"""Lines of Flink that Beam 2.77 publishes a job server for (`FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS`)."""
FOUND_OTHERWISE = {"dask": "dask_scheduler_file", "flink": "job_endpoint"}
"""The option that stands in for an address."""
DATAFLOW_NEEDS = ("project", "region", "temp_location", "sdk_container_image")
"""Options without which Dataflow takes no job."""


NVIDIA_DEVICE = re.compile(r"nvidia\d+")
"""A GPU's file in /dev."""


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs of this machine that a training may use; looks at files alone, since torch takes seconds to load.

    >>> visible_gpus(Path("/nowhere"))
    0
    """
    number = sum(1 for path in devices.glob("nvidia*") if NVIDIA_DEVICE.fullmatch(path.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return number
    chosen = [name.strip() for name in visible.split(",")]
    return min(number, len(list(takewhile(lambda name: name not in ("", "-1"), chosen))))


def check_engine(runner: str, address: str | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError where an engine is unknown, or what is said about it does not fit it.

    Args:
        runner: its name.
        address: where it is.
        options: what it is told besides.
    """
    if runner not in ENGINES and not runner.endswith("Runner"):
        raise ValueError(
            f"there is no engine {runner}; there are {', '.join(ENGINES)}, and Beam's by their own names, "
            "as in PortableRunner"
        )
    if runner not in ADDRESSES and address is not None:
        raise ValueError(f"address is for runner {', '.join(ADDRESSES)}, not for {runner}; remove it")
    if runner in ADDRESSES and address is None and FOUND_OTHERWISE.get(runner) not in options:
        raise ValueError(f"runner {runner} needs an address: {{runner: {runner}, address: {ADDRESSES[runner]!r}}}")
    if runner == "local" and options:
        raise ValueError(f"options ({', '.join(options)}) are for a runner other than local; remove them")
    foreign = [name for name in options if not name.startswith("spark.")] if runner == "spark" else []
    if foreign:
        raise ValueError(
            f"options of runner spark are Spark's settings (spark.executor.memory, ...), but there is "
            f"{', '.join(foreign)}; Beam's own runner for Spark is SparkRunner"
        )
    line = str(options.get("flink_version", FLINK_VERSIONS[-1]))
    if line not in FLINK_VERSIONS:
        raise ValueError(f"flink_version is {line!r}, but Beam publishes a job server for {', '.join(FLINK_VERSIONS)}")
    missing = [name for name in DATAFLOW_NEEDS if name not in options] if runner == "dataflow" else []
    if missing:
        raise ValueError(f"runner dataflow needs options: {', '.join(missing)}")


class Compute(Section):
    """How a training computes on each device: what is compiled, and what is computed twice or moved to save memory.

    Changes no result but by rounding; `activation_checkpointing` without `compile`, and `offload_optimizer`, not even
    by that.
    """

    compile: Literal["auto", "off", "block", "model"] = "auto"
    """What torch.compile takes as one: nothing, each layer (quick to compile, any number of processes), or all layers
    with what lies around them (fuses more; one process). Needs a C++ compiler. `auto`: `block` for a pre-training of
    a plain dense decoder on NVIDIA GPUs that are not joined by `tensor`, `pipeline` or `context`, where there is a
    compiler; nothing elsewhere."""
    activation_checkpointing: Literal["off", "full", "selective", "budget"] = "off"
    """Which activations are forgotten in the forward pass and computed again in the backward pass (Chen et al. 2016).
    `full`: all inside a layer. `selective`: all but attention and every second matrix product (torchtitan). `budget`:
    as many as it takes to stay within `memory_budget`, chosen by the compiler; needs `compile`."""
    checkpoint_every_block: Positive = 1
    """`full`, `selective`: only every so-many-th layer forgets."""
    memory_budget: Fraction = 0.9
    """`budget`: share of the activations' memory that may be kept (OLMo-core's guide: 0.9)."""

    offload_optimizer: bool = False
    """Keep the optimizer's moments in (page-locked) host memory: each parameter's come to the GPU for its update and go
    back, 16 bytes per parameter and step over PCI Express for AdamW. Adafactor's and adamw8bit's, which are small, and
    those of an optimizer of your own stay on the GPU. A training resumes from its checkpoints with and without."""

    @model_validator(mode="after")
    def _budget_is_compiled(self) -> Compute:
        if self.activation_checkpointing == "budget" and not self.compiles:
            raise ValueError("activation_checkpointing: budget is the compiler's work; say compile: block too")
        return self

    @property
    def compiles(self) -> bool:
        """Whether something is compiled; `auto` is resolved where a training begins (`train.parallel.compiling`)."""
        return self.compile in ("block", "model")


class Parallel(Section):
    """How a training is spread over its `ranks`: their product is `ranks`.

    Changes no result but by rounding: sums are taken in another order. A checkpoint of any form continues in any
    other one.
    """

    replicate: Positive = 1
    """Groups that each hold the whole model, and exchange gradients only (HSDP; of machines whose links are slow)."""
    shard: Positive | None = None
    """Processes over which a group's weights, gradients and optimizer state are split (FSDP); all that the other keys
    leave if absent."""
    tensor: Positive = 1
    """Processes that split every matrix, and the activations between them along the sequence (Korthikanti et al. 2022);
    of one machine. A training with `lora` uses these processes to shard: adapters are not split."""
    pipeline: Positive = 1
    """Processes that each hold some of the layers, and pass activations on (1F1B, Narayanan et al. 2019); only
    `pretrain` has this form, without tied embeddings or experts; the other trainings use these processes to shard."""
    context: Positive = 1
    """Processes that compute the same rows, each a share of their tokens: for rows whose activations are too large for
    one. Keys and values of all tokens are gathered in every layer (Grattafiori et al. 2024, section 3.3.2), so that
    documents stay apart as they do in one process. Weights are split over them as over `shard`. Only `pretrain` has
    this form, of a decoder; the other trainings use these processes to shard."""
    deal_experts: bool = False
    """Whether the processes of `shard` (and `context`) keep the experts of each layer where they are, and send tokens
    to them and back, in place of gathering all experts of a layer on each (expert parallelism, Lepikhin et al. 2020).
    Their number must divide by that of the processes. A model without experts is as without."""

    def sizes(self, ranks: int, pipelined: bool = True, split: bool = True) -> tuple[int, int, int, int, int]:
        """Processes along pipeline, replicate, shard, context and tensor.

        Args:
            ranks: all processes.
            pipelined: whether the training may be, and its rows be split; otherwise those processes shard.
            split: whether its matrices may be; otherwise those processes shard.

        Raises:
            ValueError: the product is not `ranks`.
        """
        fixed = self.pipeline * self.replicate * self.context * self.tensor
        shard = self.shard or max(ranks // fixed, 1)
        if fixed * shard != ranks:
            raise ValueError(
                f"parallel: pipeline {self.pipeline} x replicate {self.replicate} x shard {shard} x context "
                f"{self.context} x tensor {self.tensor} are {fixed * shard} processes, but ranks is {ranks}"
            )
        pipeline, context = (self.pipeline, self.context) if pipelined else (1, 1)
        tensor = self.tensor if split else 1
        return pipeline, self.replicate, ranks // (pipeline * self.replicate * context * tensor), context, tensor

    def share_of(self, rank: int, ranks: int, pipelined: bool = True, split: bool = True) -> tuple[int, int]:
        """Which share of a batch a process computes, from 0, and how many there are: processes of one pipeline, and
        those that split the same rows or matrices, compute the same rows."""
        _, replicate, shard, context, tensor = self.sizes(ranks, pipelined, split)
        return rank // (context * tensor) % (replicate * shard), replicate * shard


class Network(Section):
    """How the hosts of a run (`nodes` above 1) find each other for a training, and how long they wait for one another.

    It must be a network of one's own: torchrun's rendezvous asks nobody who they are, and runs what it is sent.
    """

    interface: str | None = None
    """The network interface that reaches the other hosts, as in `eth0`; gloo and NCCL are told too. That of the default
    route if absent, or the only one; hosts that join take the one that leads to the first host."""
    port: Annotated[int, Field(ge=1, le=65535)] = 29400
    """Where the host that leads listens for the others; torchrun's own default."""
    join_seconds: PositiveFloat = 600.0
    """So long hosts wait until all are there; torchrun's own default."""
    timeout_seconds: PositiveFloat = 600.0
    """An exchange between processes that takes longer has failed, and the training with it: a host is gone, or its
    network (NCCL's own default; gloo's would be 1,800). It must be longer than one process may keep the others waiting,
    as for a checkpoint."""


class Stream(Section):
    """Reading ahead of the training, and a packed set that lies in an object store.

    The rows of a set on a local disk are read by memory map, and all keys but the first have no meaning. From a store
    (`s3://` needs the extra `s3`), whole shards are fetched into a folder of limited size while the training runs; rows
    of shards that are not there (yet) are read one by one, ahead of their step. Every row is held against its
    checksum. A store that fails is asked again, and the training continues meanwhile with what it has.
    """

    read_ahead_steps: Positive = 32
    """Steps whose rows are read before they are needed, each process its own share of them. They lie in memory: steps
    times rows of a batch on one process times bytes of a row (2 per token). With a set in a store this is also how
    long an outage of it goes unnoticed."""
    cache_bytes: Annotated[int, Field(ge=0)] = 16 << 30
    """Largest size of the shards in `cache_folder`; 0 reads every row from the store. Beside them lie the checksums
    and boundaries of all rows, about a hundredth of the set."""
    cache_folder: str | None = None
    """Where fetched shards lie, on a local disk; `gristmill/stream` in the user's cache folder if absent. All processes
    of a machine, and several trainings, may share it. A training whose own folder lies in a store works below it, in a
    copy that is sent to the store with each checkpoint: there must be room for its checkpoints, and for the models that
    it starts from."""
    connections: Positive = 16
    """Requests to the store at a time, per process."""
    timeout_seconds: PositiveFloat = 30.0
    """A request that takes longer has failed."""
    retry_seconds: PositiveFloat = 1800.0
    """An object that the store has not given for so long ends the training, with an error that names it."""


class Wandb(Section):
    """Weights & Biases beside metrics.jsonl and TensorBoard (extra `wandb`)."""

    project: Annotated[str, Field(min_length=1)]
    """Where the run appears."""
    name: str | None = None
    """What the run is called; Weights & Biases makes up a name if absent."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the stage's working folder, for `wandb sync`."""


class Mlflow(Section):
    """MLflow beside metrics.jsonl and TensorBoard (extra `mlflow`)."""

    tracking_uri: Annotated[str, Field(min_length=1)]
    """A server, `http://HOST:PORT`, or a database, `sqlite:////FOLDER/mlflow.db`."""
    experiment: Annotated[str, Field(min_length=1)]
    """Where the run appears; made if there is none of this name."""
    name: str | None = None
    """What the run is called; MLflow makes up a name if absent."""


class Trackio(Section):
    """trackio beside metrics.jsonl and TensorBoard (extra `trackio`): a database on this machine, in the folder that
    the variable TRACKIO_DIR names, which `trackio show` reads."""

    project: Annotated[str, Field(min_length=1)]
    """Where the run appears."""
    name: str | None = None
    """What the run is called; the name of its working folder, as a hash, if absent. No two trainings of a project may
    have the same, since a run that is there is continued."""
    server_url: str | None = None
    """A server of trackio's to send to instead."""


class Trackers(Section):
    """Where trainings are logged to besides metrics.jsonl and TensorBoard."""

    wandb: Wandb | None = None
    """Weights & Biases."""
    mlflow: Mlflow | None = None
    """MLflow."""
    trackio: Trackio | None = None
    """trackio."""


class Profile(Section):
    """A trace of some steps by PyTorch's profiler, in the stage's working folder: `profile/rank-0.json.gz`."""

    first_step: Positive = 10
    """The first step that is traced, counted from 1; the very first ones are not like the others."""
    steps: Positive = 3
    """How many are traced."""
    memory: bool = False
    """On a GPU, record every allocation of these steps too: `profile/rank-0-memory.pickle`, for pytorch.org/memory_viz.
    """
