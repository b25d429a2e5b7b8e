"""What a manifest may say: the schema that every run is validated against before any work.

One YAML file names the sources, how they are prepared and mixed, and what is trained on them. Each section
below is one stage's own configuration: nothing else of the manifest reaches that stage, so that changing a key
changes that stage and those behind it, and nothing more. A section that is absent switches its stage off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, SerializeAsAny, model_validator

from gristmill.mixtures.base import NAME_PATTERN, Positive, PositiveFloat, Section
from gristmill.mixtures.engine import (
    Compute,
    Mlflow,
    Network,
    Parallel,
    Profile,
    Stream,
    Trackio,
    Wandb,
    check_engine,
    visible_gpus,
)
from gristmill.mixtures.evaluation import Documents, Evaluate, Export
from gristmill.mixtures.generated_source import AnySource, GeneratedSource
from gristmill.mixtures.mix import Mix, TextIndex
from gristmill.mixtures.model import GivenModel
from gristmill.mixtures.posttraining import Dpo, Sft
from gristmill.mixtures.prepare import STEP_SECTIONS, Step, name_steps
from gristmill.mixtures.reinforcement import Reward, Rl
from gristmill.mixtures.scaling.merging import Merge, merged_steps
from gristmill.mixtures.scaling.size_rules import take_dial
from gristmill.mixtures.sources import Ingest, Source, TokenSource
from gristmill.mixtures.steps.examples import MadeExamples
from gristmill.mixtures.tokenizer import Tokenizer
from gristmill.mixtures.training import Pretrain

Location = tuple[str | int, ...]
EMPTY_ALLOWED = ("documents", "tokenizer", "text_index", "evaluate", "export")
"""Sections that may stand with nothing behind them, which asks for their defaults."""


class Engine(Section):
    """How the work is done; never enters a fingerprint, never changes a result.

    `local` needs nothing. A cluster needs our libraries on its workers and a store that all of them can reach under
    the same name: a shared folder, or a URL such as `s3://`; a job there begins with one small task that shows whether
    a worker can. Any engine gives the same bytes; docs/engines.md says how each is set up, and what was tried.

    Rows go from job to job through the engine's own shuffle, unless `shuffle` says `files`.

    - `dask` needs `address: tcp://scheduler:8786`. Workers may come, go and be killed: lost shards are done again.
    - `spark` needs `address: spark://host:7077` (or `yarn`, `local-cluster[2,1,1024]`, ...) and Spark of the cluster's
      version here (`SPARK_HOME`, the package `pyspark`, or `make engines`). `options` are Spark's own settings.
    - `flink` needs `address: host:8081` of a JobManager, Java, and Beam's job server for its `flink_version` (an
      option; `make engines` fetches it, `flink_job_server_jar` names one), or the `job_endpoint` of one that runs.
    - `dataflow` needs `options: {project: ..., region: ..., temp_location: "gs://...", sdk_container_image: ...}`, the
      image with this package in it, and a store in `gs://`.
    - `PortableRunner`, `SparkRunner` and the like are Beam's runners as they come, with Beam's options.
    - The option `environment_type` says what does the work on Flink: `PROCESS` (the default: the program
      `gristmill-worker` of this installation, at the same path everywhere, or `environment_config: '{"command":
      FILE}'`), `EXTERNAL` (`gristmill-worker --pool HOST:PORT`, with `environment_config: HOST:PORT`), `DOCKER` (with
      `environment_config: IMAGE`), or `LOOPBACK` (this process, for trying things out).
    """

    runner: str = "local"
    """`local`, `dask`, `spark`, `flink`, `dataflow`, or the name of any Beam runner."""
    mode: Literal["auto", "memory", "threads", "processes"] = "auto"
    """What the workers of the local runner are. `auto`: processes for a job that holds Python's global lock and has
    enough input to be worth the second that they take to start, else threads; nothing of either for a single task or
    worker."""
    address: str | None = None
    """Where the cluster is: Dask's scheduler, Spark's master or Flink's JobManager."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Beam's pipeline options for a runner other than `local`, by the names of its flags; for `spark`, its settings."""
    shuffle: Literal["files", "engine"] | None = None
    """How rows get from the tasks of one job to those of the next: through `files` in the stage's folder, a part of
    each for every partition, or through the runner's own shuffle (`engine`), which leaves one file per partition. If
    absent, `files` with `local`, `engine` with all others. With `local`, `engine` is for trying it out: its rows lie in
    memory."""
    workers: Positive = 2
    """Parallel workers of the local runner; a cluster has its own."""
    worker_seconds: PositiveFloat = 60.0
    """Longest wait for the first worker of a cluster, and for the first task that one does. More where workers start
    from an image that is pulled first, which takes minutes."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Further attempts at a stage that was lost to SIGKILL, by which Linux ends what is out of memory: its own
    process, a worker of the local runner, or a rank of a training. Each resumes where the last one stopped."""
    ranks: Positive | Literal["auto"] = "auto"
    """Training processes, on all nodes together: where there are GPUs, one for each that is to be used. `auto`: one for
    each NVIDIA GPU that this machine has and CUDA_VISIBLE_DEVICES leaves, times `nodes`; one where there is none, and
    where `rl.rollouts` is `vllm`."""
    nodes: Positive = 1
    """Hosts that run this manifest together, each by the same command and in the same store, which all see under the
    same name. Whoever is first at a stage leads it; the others do tasks of its jobs meanwhile, by the local runner, or
    their share of a training, which waits for all of them. See docs/hosts.md."""
    network: Network = Network()
    parallel: Parallel = Parallel()
    compute: Compute = Compute()
    checkpoint_every: Positive = 100
    """Training steps between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Checkpoints that are kept, the newest ones."""
    permanent_every: Positive | None = None
    """Checkpoints of steps that are multiples of this are never deleted, also when the training is done, so that a
    longer one can continue from them (`continue_from`); none are kept so if absent. A training saves only every
    `checkpoint_every` steps, so this should be a multiple of it."""
    stream: Stream = Stream()
    """How training reads its rows."""
    deterministic: bool = False
    """Operations whose result may differ between two runs on the same device are an error in trainings, not only a
    warning. On CPUs there are none; the same number of processes gives the same bits either way."""
    wandb: Wandb | None = None
    """Log trainings to Weights & Biases too; not if absent."""
    mlflow: Mlflow | None = None
    """Log trainings to MLflow too; not if absent."""
    trackio: Trackio | None = None
    """Log trainings to trackio too; not if absent."""
    profile: Profile | None = None
    """Trace some steps of trainings; not if absent."""
    notify: str | None = None
    """A command, or a URL at http:// or https://, that hears of the end of each run: the command on its standard input,
    the URL by POST, as JSON with `text` (which Slack and Mattermost show), `state` (`completed`, `failed`,
    `interrupted`), `message`, `seconds`, `report` and the stages. Variables of the environment are put in (`$NAME`), so
    that the URL of a webhook, which is a credential, need not stand in the manifest. Whatever goes wrong with it is a
    warning."""

    @model_validator(mode="after")
    def _fits_the_runner(self) -> Engine:
        check_engine(self.runner, self.address, self.options)
        if self.runner != "local" and self.mode != "auto":
            raise ValueError(f"mode is for runner local, not for {self.runner}; remove it")
        self.parallel.sizes(self.num_ranks)
        if self.num_ranks % self.nodes and self.num_ranks > 1:
            raise ValueError(
                f"ranks is {self.ranks}, which are all processes of a training; give a multiple of nodes, {self.nodes}"
            )
        if self.compute.compile == "model" and self.num_ranks > 1:
            raise ValueError(
                f"compute: compile: model is for one process, but ranks is {self.num_ranks}; say block, or ranks: 1"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Training processes."""
        if self.ranks == "auto":
            return visible_gpus() * self.nodes or 1
        return self.ranks


class Manifest(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Names the run and its folders."""
    seed: int = 0
    """What every random choice is a hash of, together with stable ids."""
    sources: Annotated[dict[str, AnySource], Field(min_length=1)] = {}  # noqa: RUF012 - pydantic copies it
    """Documents, those that a language model writes too, and tokens that another tool has made. None are needed where a
    run begins with a model."""
    ingest: Ingest = Ingest()
    prepare: tuple[SerializeAsAny[Step], ...] = ()
    """The steps that judge and edit documents, in the order in which they run; a stage may come more than once."""
    documents: Documents | None = None
    tokenizer: Tokenizer | None = None
    model: GivenModel | None = None
    mix: Mix | None = None
    text_index: TextIndex | None = None
    examples: dict[Annotated[str, Field(pattern=NAME_PATTERN)], MadeExamples] = {}  # noqa: RUF012 - as `sources`
    """Examples for tuning that language models write, a set by each name: `path: examples://NAME` reads it."""
    pretrain: Pretrain | None = None
    merge: Merge | None = None
    sft: Sft | None = None
    reward: Reward | None = None
    dpo: Dpo | None = None
    rl: Rl | None = None
    evaluate: Evaluate | None = None
    export: Export | None = None
    engine: Engine = Engine()

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, value: Any) -> Any:
        """`evaluate:` with nothing behind it asks for the defaults, not for switching the stage off; a size or depth
        of `pretrain` stands for the keys that follow from it."""
        if not isinstance(value, dict):
            return value
        given = {key: ({} if item is None and key in EMPTY_ALLOWED else item) for key, item in value.items()}
        if "pretrain" in given:
            mix = given.get("mix")
            length = mix.get("sequence_length") if isinstance(mix, dict) else None
            given["pretrain"] = take_dial(given["pretrain"], length or Mix.model_fields["sequence_length"].default)
        rl, engine = given.get("rl"), given.get("engine") or {}
        if isinstance(rl, dict) and rl.get("rollouts") == "vllm" and isinstance(engine, dict):
            given["engine"] = {"ranks": 1, **engine}  # it draws in one process
        return given

    @model_validator(mode="after")
    def _merges_what_there_is(self) -> Manifest:
        if self.merge is not None and self.pretrain is not None:
            try:
                merged_steps(self.merge, self.pretrain)
            except ValueError as error:
                raise ValueError(f"merge: {error}") from error
        return self

    @property
    def steps(self) -> dict[str, Step]:
        """The steps of `prepare` by their names, in their order."""
        return dict(zip(name_steps([(step.stage, step.name) for step in self.prepare]), self.prepare, strict=True))

    @property
    def document_sources(self) -> dict[str, Source]:
        """The sources that are read as documents, in the manifest's order."""
        return {name: source for name, source in self.sources.items() if isinstance(source, Source)}

    @property
    def generated_sources(self) -> dict[str, GeneratedSource]:
        """The sources whose documents a language model writes, in the manifest's order."""
        return {name: source for name, source in self.sources.items() if isinstance(source, GeneratedSource)}

    @property
    def text_sources(self) -> dict[str, Source | GeneratedSource]:
        """All sources of documents, read and generated ones, in the manifest's order."""
        return {name: source for name, source in self.sources.items() if not isinstance(source, TokenSource)}

    @property
    def licences(self) -> dict[str, str | None]:
        """What is noted of the licence of each source of documents; of a generated one without a note what is noted of
        the sources that it is made from."""
        return {
            name: " and ".join(noted) or None
            for name, source in self.text_sources.items()
            if (noted := sorted(self._noted(name, source, ()))) is not None
        }

    def _noted(self, name: str, source: Source | GeneratedSource, above: tuple[str, ...]) -> set[str]:
        if source.licence is not None or isinstance(source, Source):
            return set() if source.licence is None else {source.licence}
        return {
            noted
            for parent in source.generate.parents
            if parent in self.text_sources and parent not in (*above, name)
            for noted in self._noted(parent, self.text_sources[parent], (*above, name))
        }

    @property
    def token_sources(self) -> dict[str, TokenSource]:
        """The sources whose tokens another tool has made, in the manifest's order."""
        return {name: source for name, source in self.sources.items() if isinstance(source, TokenSource)}


MODELS = ("model", "pretrain", "merge", "sft", "dpo", "rl")
"""Sections and stages that give a model which writes text, in the order in which they train it; a run begins with one
of the first two."""
TUNINGS = ("sft", "reward", "dpo", "rl")
"""Sections that train a model further on examples, whose rows have a length of their own."""
CONTINUING = ("pretrain", "merge")
"""Those of models that continue a text, and were never taught to answer."""


def beyond_context(stage: str, length: int, trained: int) -> str:
    """What a person should know of a tuning whose rows are longer than all before."""
    return (
        f"{stage}: its rows have {length} tokens, but the model was trained on {trained} at the most: the rotary "
        f"positions behind those are new to it, and a short tuning may not teach them; look at long answers, lower "
        f"{stage}.sequence_length, or stretch positions with pretrain.model.rope_scaling"
    )


def context_warnings(manifest: Manifest, trained: int) -> dict[str, str]:
    """Stage -> warning, for each tuning whose rows are longer than those that its model was trained on.

    Args:
        manifest: of the whole run.
        trained: the context of the model that the run begins with.
    """
    contexts, warnings = {"pretrain" if manifest.model is None else "model": trained}, {}
    for stage in TUNINGS:
        section = getattr(manifest, stage)
        if section is None:
            continue
        start = next(name for name in reversed(MODELS) if name in contexts)
        if stage == "rl" and section.start_from in contexts:
            start = section.start_from
        length = section.sequence_length or 0
        if length > contexts[start]:
            warnings[stage] = beyond_context(stage, length, contexts[start])
        contexts[stage] = max(contexts[start], length)
    return warnings


def known_keys(location: Location) -> list[str]:
    """The keys that the schema knows at a location."""
    models = _models_at(location)
    return sorted([*models[0].model_fields, *(STEP_SECTIONS if models[0] is Step else ())]) if models else []


def all_keys(model: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a section, and of the sections inside it; one that may stand in itself is gone into once."""
    for name, field in model.model_fields.items():
        yield (name,)
        for inner in models_in(field.annotation):
            if inner not in (*above, model):
                yield from ((name, *key) for key in all_keys(inner, (*above, model)))


def dotted(location: Location) -> str:
    """A location as messages name it: `mix.phases[0].end`; empty for the whole."""
    key = ""
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    return key


def _models_at(location: Location) -> list[Any]:
    """The sections that may stand at a location."""
    models: list[Any] = [Manifest]
    for part in location:
        if isinstance(part, int) or not models:
            continue
        if models[0] is Step and part in STEP_SECTIONS:
            models = [STEP_SECTIONS[part]]
            continue
        field = models[0].model_fields.get(part)
        # Where it is not a key, it is the kind that says which of several models a mapping is.
        models = (
            models_in(field.annotation)
            if field is not None
            else [one for one in models if part in _kinds_of(one)] or models
        )
    return models


def models_in(annotation: Any) -> list[Any]:
    """The sections that a key's type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None:
        return []
    return [model for inner in get_args(annotation) for model in models_in(inner)]


def _kinds_of(model: Any) -> tuple[Any, ...]:
    kind = model.model_fields.get("kind")
    return (getattr(model, "TAG", None),) if kind is None else get_args(kind.annotation)
