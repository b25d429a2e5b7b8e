"""The section `engine`: where jobs run; how trainings compute, are distributed, read
data and are tracked.

Nothing here changes results.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from gristmill.mixtures.base import (
    Count,
    Fraction,
    Options,
    Positive,
    PositiveFloat,
    Section,
    Several,
    Text,
)

ADDRESSES = {
    "ray": "auto",
    "dask": "tcp://host:8786",
    "spark": "spark://host:7077",
    "flink": "host:8081",
}
"""Remote engines, with an example of each one's address."""
ENGINES = ("local", *ADDRESSES, "dataflow")
"""Values of `runner`, besides the names of Beam's own runners."""
CONNECTED = ("dask", "ray", "spark")
"""Engines whose own Python interface runs jobs, by a connection."""
FOUND_OTHERWISE = {"dask": "scheduler_file", "flink": "job_endpoint"}
"""Option that may replace the address."""
RAY_TASK_OPTIONS = (
    "accelerator_type",
    "label_selector",
    "max_retries",
    "memory",
    "num_cpus",
    "num_gpus",
    "resources",
    "scheduling_strategy",
)
"""Options of `ray` for each task, by the names of `ray.remote`."""
OWN_OPTIONS = {
    "ray": (*RAY_TASK_OPTIONS, "namespace", "runtime_env"),
    "dask": ("connection_limit", "name", "scheduler_file", "security", "timeout"),
}
"""Options of engines that are driven through their own Python interface: those of
`ray.remote` and `ray.init`, and of `distributed.Client`.
"""
DATAFLOW_NEEDS = ("project", "region", "temp_location", "sdk_container_image")
"""Options that Dataflow requires."""


EngineOptions = Mapping[str, Any]
"""`engine.options`: settings of a runner under the engine's own names."""
ShuffleForm = Literal["files", "engine"]
"""Path of rows from the tasks of one job to those of the next."""
NVIDIA_DEVICE = re.compile(r"nvidia\d+")
"""Name of a GPU's file in /dev."""


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs on this machine that a training may use.

    It only looks at files, since torch takes seconds to load.

    >>> visible_gpus(Path("/nowhere"))
    0
    """
    num_gpus = sum(
        1 for path in devices.glob("nvidia*") if NVIDIA_DEVICE.fullmatch(path.name)
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    visible_ids = [name.strip() for name in visible.split(",")]
    return min(
        num_gpus, len(list(takewhile(lambda name: name not in ("", "-1"), visible_ids)))
    )


class Compute(Section):
    """Computation on each device: what is compiled, and what is recomputed to save
    memory.

    Changes results only by rounding; `activation_checkpointing` without `compile` not
    even by that.
    """

    compile: Literal["auto", "off", "block", "model"] = "auto"
    """Unit that torch.compile compiles: nothing, each layer (quick to compile, any
    number of processes), or all layers with the parts around them (fuses more; one
    process). Needs a C++ compiler. `auto`: `block` for the pre-training of a plain
    dense decoder on NVIDIA GPUs that are not joined by `tensor` or `context`, if there
    is a compiler; otherwise nothing.
    """
    activation_checkpointing: Literal["off", "full", "selective", "budget"] = "off"
    """Activations that are dropped in the forward pass and recomputed in the backward
    pass (Chen et al. 2016). `full`: all inside a layer. `selective`: all except
    attention and every second matrix product (torchtitan). `budget`: as many as needed
    to stay within `memory_budget`, chosen by the compiler; needs `compile`.
    """
    checkpoint_every_block: Positive = 1
    """For `full` and `selective`: checkpoint every n-th layer."""
    memory_budget: Fraction = 0.9
    """For `budget`: share of the activations' memory that may be kept (OLMo-core's
    guide: 0.9).
    """

    def _problems(self) -> Iterator[str]:
        if self.activation_checkpointing == "budget" and not self.compiles:
            yield (
                "activation_checkpointing: budget needs the compiler; "
                "set compile: block too"
            )

    @property
    def compiles(self) -> bool:
        """True if something is compiled; `auto` is resolved when a training begins
        (`train.distributed.compiling`).
        """
        return self.compile in ("block", "model")


class Parallel(Section):
    """Distribution of a training over its `ranks`: the product of these sizes is
    `ranks`.

    Changes results only by rounding, since sums are computed in another order. A
    training can resume from a checkpoint of any other layout.
    """

    replicate: Positive = 1
    """Groups that each hold the whole model, and exchange only gradients (HSDP; for
    machines with slow links).
    """
    shard: Positive | None = None
    """Processes over which a group's weights, gradients and optimizer state are sharded
    (FSDP); if absent, all processes that the other keys leave.
    """
    tensor: Positive = 1
    """Processes that split every matrix, and the activations between them along the
    sequence (Korthikanti et al. 2022), all on one machine. A training with `lora` uses
    these processes for sharding: adapters are not split.
    """
    context: Positive = 1
    """Processes that compute the same rows, each a share of their tokens: for rows
    whose activations are too large for one process. Keys and values of all tokens are
    gathered in every layer (Grattafiori et al. 2024, section 3.3.2), so that documents
    stay separate as in one process. Weights are sharded over these processes as over
    `shard`. Only for `pretrain` of a decoder; the other trainings use these processes
    for sharding.
    """

    def sizes(
        self, ranks: int, split_rows: bool = True, split: bool = True
    ) -> tuple[int, int, int, int]:
        """Return the number of processes along replicate, shard, context and tensor.

        Args:
            ranks: number of all processes.
            split_rows: if the training's rows can be split; otherwise those processes
                shard.
            split: if its matrices can be split; otherwise those processes shard.

        Raises:
            ValueError: the product is not `ranks`.
        """
        fixed = self.replicate * self.context * self.tensor
        shard = self.shard or max(ranks // fixed, 1)
        if fixed * shard != ranks:
            raise ValueError(
                f"parallel: replicate {self.replicate} x shard {shard} x context "
                f"{self.context} x tensor {self.tensor} are {fixed * shard} processes, "
                f"but ranks is {ranks}"
            )
        context = self.context if split_rows else 1
        tensor = self.tensor if split else 1
        shard = ranks // (self.replicate * context * tensor)
        return self.replicate, shard, context, tensor


class Network(Section):
    """Discovery and timeouts between the hosts of a run (`nodes` above 1) during a
    training.

    Use a private network: torchrun's rendezvous does not authenticate anyone, and runs
    what it is sent.
    """

    interface: str | None = None
    """Network interface that reaches the other hosts, such as `eth0`; gloo and NCCL use
    it too. If absent, the interface of the default route, or the only one; hosts that
    join use the one that leads to the first host.
    """
    port: Annotated[int, Field(ge=1, le=65535)] = 29400
    """Port on which the leading host listens for the others; torchrun's own default."""
    join_seconds: PositiveFloat = 600.0
    """Time that hosts wait until all have joined, or `min_nodes` of them; torchrun's
    own default.
    """
    last_call_seconds: PositiveFloat = 30.0
    """Time that `min_nodes` hosts wait for further ones at each start of a training;
    torchrun's own default. Increase it if hosts first fetch large inputs from an object
    store.
    """
    timeout_seconds: PositiveFloat = 600.0
    """Time limit of an exchange between processes; a longer one fails, and the training
    with it, because a host or its network is gone (NCCL's own default; gloo's would be
    1,800). It must be longer than one process may keep the others waiting, for example
    for a checkpoint.
    """


class Stream(Section):
    """Read-ahead of a training, and packed sets in an object store.

    The rows of a set on a local disk are memory-mapped, and all keys except the first
    are ignored. From a store (`s3://`, `gs://`, `az://`), whole shards are fetched into
    a folder of limited size while the training runs; rows of shards that are not cached
    (yet) are read one by one, ahead of their step. Every row is verified against its
    checksum. If the store fails, requests are repeated while the training continues
    with the rows that it has.
    """

    read_ahead_steps: Positive = 32
    """Number of steps whose rows each process reads ahead, its own share of them. They
    are kept in memory: steps times rows of a batch on one process times bytes of a row
    (2 per token). With a set in a store this also bounds the length of an outage that
    goes unnoticed.
    """
    cache_bytes: Count = 16 << 30
    """Largest size of the shards in `cache_folder`; 0 reads every row from the store.
    The checksums and boundaries of all rows, about a hundredth of the set, are kept
    beside them.
    """
    cache_folder: str | None = None
    """Local folder of fetched shards; `gristmill/stream` in the user's cache folder if
    absent. All processes of a machine, and several trainings, may share it. A training
    whose own folder is in a store works in a copy below it, which is uploaded with each
    checkpoint: there must be room for its checkpoints, and for the models that it
    starts from.
    """
    connections: Positive = 16
    """Concurrent requests to the store, per process."""
    timeout_seconds: PositiveFloat = 30.0
    """Time limit per request; a longer one fails."""
    retry_seconds: PositiveFloat = 1800.0
    """Time without an object from the store after which the training ends, with an
    error that names the object.
    """


class Wandb(Section):
    """Weights & Biases, besides metrics.jsonl and TensorBoard (extra `wandb`)."""

    project: Text
    """Project in which the run appears."""
    name: str | None = None
    """Name of the run; Weights & Biases invents one if absent."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the stage's working folder, for `wandb sync`."""


class Mlflow(Section):
    """MLflow, besides metrics.jsonl and TensorBoard (extra `mlflow`)."""

    tracking_uri: Text
    """A server, `http://HOST:PORT`, or a database, `sqlite:////FOLDER/mlflow.db`."""
    experiment: Text
    """Experiment in which the run appears; created if it does not exist."""
    name: str | None = None
    """Name of the run; MLflow invents one if absent."""


class Trackers(Section):
    """Trackers of trainings besides metrics.jsonl and TensorBoard."""

    wandb: Wandb | None = None
    """Log trainings to Weights & Biases too; off if absent."""
    mlflow: Mlflow | None = None
    """Log trainings to MLflow too; off if absent."""


class Profile(Section):
    """A trace of some steps by PyTorch's profiler, in the stage's working folder:
    `profile/rank-0.json.gz`.
    """

    first_step: Positive = 10
    """First traced step, counted from 1; the very first steps are not
    representative.
    """
    steps: Positive = 3
    """Number of traced steps."""
    memory: bool = False
    """On a GPU, also record every allocation of these steps:
    `profile/rank-0-memory.pickle`, for pytorch.org/memory_viz.
    """


class BeamEngine(Section):
    """Execution of Beam jobs."""

    runner: str = "local"
    """`local`, `ray`, `dask`, `spark`, `flink`, `dataflow`, or the name of any Beam
    runner.
    """
    mode: Literal["auto", "memory", "threads", "processes"] = "auto"
    """Kind of the local runner's workers. `auto`: processes for a job that holds
    Python's global lock and has enough input to be worth the second that they take to
    start, otherwise threads; neither for a single task or worker.
    """
    address: str | None = None
    """Address of the cluster: Ray's head, Dask's scheduler, Spark's master or Flink's
    JobManager.
    """
    options: Options = Field(default_factory=dict)
    """Beam's pipeline options for a runner other than `local`, by the names of its
    flags; for `spark`, its settings; for `ray`, the resources of each task
    (`num_cpus`, `memory` in bytes, `num_gpus`, `resources`, ...) with `runtime_env` and
    `namespace` of the connection; for `dask`, those of its client (`scheduler_file`,
    `security`, ...).
    """
    shuffle: ShuffleForm | None = None
    """Path of rows from the tasks of one job to those of the next: `files` in the
    stage's folder, with a part of each for every partition, or the runner's own shuffle
    (`engine`), which leaves one file per partition. If absent, `files` with `local`, and
    with all others for up to 4,096 parts in a shared folder; otherwise `engine`. With
    `local`, `engine` is only for trying it out: its rows are kept in memory.
    """
    workers: Positive = 2
    """Parallel workers of the local runner; a cluster has its own."""
    worker_seconds: PositiveFloat = 60.0
    """Longest wait for the first worker of a cluster, and for its first task. Increase
    it if workers start from an image that is pulled first, which takes minutes.
    """
    nodes: Positive = 1
    """Number of hosts that run this manifest together, each by the same command and in
    the same store, which all see under the same name. The first host at a stage leads
    it; the others meanwhile do tasks of its jobs, with the local runner, or their share
    of a training, which waits for all of them. See docs/hosts.md.
    """

    def _problems(self) -> Iterator[str]:
        runner, address, options = self.runner, self.address, self.options
        if runner not in ENGINES and not runner.endswith("Runner"):
            yield (
                f"there is no engine {runner}; choose one of {', '.join(ENGINES)}, or "
                "a Beam runner by its own name, such as PortableRunner"
            )
        if runner not in ADDRESSES and address is not None:
            yield (
                f"address is for runner {', '.join(ADDRESSES)}, not for {runner}; "
                "remove it"
            )
        if (
            runner in ADDRESSES
            and address is None
            and FOUND_OTHERWISE.get(runner) not in options
        ):
            yield (
                f"runner {runner} needs an address: {{runner: {runner}, address: "
                f"{ADDRESSES[runner]!r}}}"
            )
        if runner == "local" and options:
            yield (
                f"options ({', '.join(options)}) are for a runner other "
                "than local; remove them"
            )
        known = OWN_OPTIONS.get(runner, options)
        unknown = [name for name in options if name not in known]
        if unknown:
            yield (
                f"runner {runner} has no options {', '.join(unknown)}; it has "
                f"{', '.join(known)}"
            )
        foreign = [name for name in options if not name.startswith("spark.")]
        if runner == "spark" and foreign:
            yield (
                "options of runner spark must be Spark's settings "
                f"(spark.executor.memory, ...), not {', '.join(foreign)}; Beam's own "
                "runner for Spark is SparkRunner"
            )
        missing = [name for name in DATAFLOW_NEEDS if name not in options]
        if runner == "dataflow" and missing:
            yield f"runner dataflow needs options: {', '.join(missing)}"
        if self.runner != "local" and self.mode != "auto":
            yield f"mode is for runner local, not for {self.runner}; remove it"


class TrainingEngine(Trackers):
    """Execution of trainings."""

    parallel: Parallel = Parallel()
    compute: Compute = Compute()
    checkpoint_every: Positive = 100
    """Training steps between checkpoints."""
    keep_checkpoints: Several = 2
    """Number of the newest checkpoints to keep."""
    permanent_every: Positive | None = None
    """Checkpoints at multiples of this are never deleted, even when the training is
    done, so that a longer one can continue from them (`continue_from`); if absent, no
    checkpoint is permanent. A training saves only every `checkpoint_every` steps, so
    this should be a multiple of it.
    """
    stream: Stream = Stream()
    """Read-ahead of trainings, and packed sets in a store."""
    deterministic: bool = False
    """Make operations whose result may differ between two runs on the same device an
    error in trainings, instead of a warning. On CPUs there are none; the same number of
    processes gives the same bits either way.
    """
    profile: Profile | None = None
    """Trace some steps of trainings; off if absent."""


class Engine(TrainingEngine, BeamEngine):
    """Execution of the work; it never enters a fingerprint and never changes a result.

    `local` needs nothing. A cluster needs our libraries on its workers and a store that
    all of them can reach under the same name: a shared folder, or a URL such as
    `s3://`, `gs://` or `az://`; a job there begins with one small task that checks this. Every engine gives
    the same bytes; docs/engines.md says how each is set up, and what was tested.

    Many rows pass from job to job through the engine's own shuffle (see `shuffle`). Up
    to 500,000 documents are numbered, grouped and mixed in the stage's process.

    - `ray` needs `address: auto` on a machine of the cluster (also in `ray job submit`),
      `HOST:6379` there, or `ray://HOST:10001` elsewhere. Each task asks for the
      resources in `options`, one CPU if absent, and for a GPU if it reads documents
      with a model on a GPU and the cluster has one. A task of several CPUs has as many
      threads.
    - `dask` needs `address: tcp://scheduler:8786`. Workers may come, go and be killed:
      lost shards are computed again.
    - `spark` needs `address: spark://host:7077` (or `yarn`, `local-cluster[2,1,1024]`,
      ...) and Spark in the cluster's version here (`SPARK_HOME`, or the package
      `pyspark`). `options` are Spark's own settings; a task has `spark.task.cpus`
      threads.
    - `flink` needs `address: host:8081` of a JobManager, Java, and Beam's job server
      for its version (option `flink_job_server_jar`), or the `job_endpoint` of a
      running one.
    - `dataflow` needs `options: {project: ..., region: ..., temp_location: "gs://...",
      sdk_container_image: ...}`, the image with this package in it, and a store in
      `gs://`.
    - `PortableRunner`, `SparkRunner` and other Beam runners take Beam's own options.
    - The option `environment_type` says what executes the work on Flink: `PROCESS` (the
      default: the program `gristmill-worker` of this installation, at the same path
      everywhere, or `environment_config: '{"command": FILE}'`), `EXTERNAL`
      (`gristmill-worker --pool HOST:PORT`, with `environment_config: HOST:PORT`),
      `DOCKER` (with `environment_config: IMAGE`), or `LOOPBACK` (this process, for
      trying things out).
    """

    retries: Count = 1
    """Number of further attempts at a stage that was lost to SIGKILL, with which Linux
    ends processes when memory runs out: its own process, a worker of the local runner,
    or a rank of a training. Each resumes where the last one stopped. A restart of a
    training with other hosts (`min_nodes`) counts only if no new step was logged since
    the previous one.
    """
    ranks: Positive | Literal["auto"] = "auto"
    """Number of training processes, on all `nodes` together; with GPUs, one for each GPU
    to use. `auto`: one for each NVIDIA GPU of this machine that CUDA_VISIBLE_DEVICES
    allows, times `nodes`; one if there is none.
    """
    min_nodes: Positive | None = None
    """Smallest number of `nodes` that a training starts or continues with; all if
    absent. torchrun's `--nnodes=MIN:MAX`: if a host is lost, the others restart from
    the newest checkpoint with the same batches and as many ranks per host, and a host
    that comes (back) is taken up at the next checkpoint. `parallel` without `shard`
    fits if its other keys divide the ranks of every number of hosts; the weights are
    then sharded over fewer ranks.
    """
    network: Network = Network()
    notify: str | None = None
    """A command, or an http:// or https:// URL, that is notified at the end of each
    run: the command on its standard input, the URL by POST, as JSON with `text` (which
    Slack and Mattermost show), `state` (`completed`, `failed`, `interrupted`),
    `message`, `seconds`, `report` and the stages. Environment variables are expanded
    (`$NAME`), so that the URL of a webhook, which is a credential, need not be in the
    manifest. A failed notification is only a warning.
    """
    lineage: bool = False
    """Send OpenLineage events at the start and end of runs and stages (extra
    `lineage`), to where OpenLineage's own environment variables (`OPENLINEAGE_URL`, ...)
    or `openlineage.yml` say. A server that fails is only a warning.
    """

    def _problems(self) -> Iterator[str]:
        self.parallel.sizes(self.num_ranks)
        if self.least_nodes > self.nodes:
            yield "min_nodes is larger than nodes; lower it, or leave it out"
        layout = self.parallel
        fixed = layout.replicate * layout.context * layout.tensor
        if self.least_nodes < self.nodes and (
            layout.shard or self.num_ranks // self.nodes % fixed
        ):
            yield (
                "with min_nodes, parallel must fit any number of nodes: leave out shard, "
                "and let the product of the other keys divide the ranks of a node"
            )
        if self.num_ranks % self.nodes and self.num_ranks > 1:
            yield (
                f"ranks is {self.ranks}, which counts all processes of a training; "
                f"use a multiple of nodes, {self.nodes}"
            )
        if self.compute.compile == "model" and self.num_ranks > 1:
            yield (
                "compute: compile: model is for one process, but ranks is "
                f"{self.num_ranks}; set block, or ranks: 1"
            )

    @property
    def least_nodes(self) -> int:
        """Number of hosts without which no training runs."""
        return self.min_nodes or self.nodes

    @property
    def num_ranks(self) -> int:
        """Number of training processes."""
        if self.ranks == "auto":
            return visible_gpus() * self.nodes or 1
        return self.ranks
