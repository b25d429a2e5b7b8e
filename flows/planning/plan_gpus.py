"""`gristmill plan --gpus N --gpu NAME`: size, memory, time and cost of a pre-training
before any GPU is used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gristmill.core.files import as_path, read_json
from gristmill.flows.pages.page_elements import Heading, Note, table
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.planning.quantities import at_least, duration, quantity, size
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import TOKENIZER
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.train.models.model_config import Shape, shape_to_train
from gristmill.train.planning.devices import (
    GIGA,
    TERA,
    Device,
    UnknownDeviceError,
    named_device,
)
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.planning.memory import Form
from gristmill.train.planning.parallel_forms import (
    UNKNOWN_LINK,
    Step,
    rank_forms,
)

SECONDS_PER_HOUR = 3600
MOST_FORMS = 8


class PlanError(ValueError):
    """The manifest has no pre-training, or the GPU is unknown."""


@dataclass(frozen=True)
class GpuChoice:
    """A GPU by name, or by its peak and memory.

    Attributes:
        name: name in the table of devices, or reported by the driver.
        teraflops, gigabytes: bfloat16 peak and memory of a GPU that is not in the
            table.
    """

    name: str
    teraflops: float | None = None
    gigabytes: float | None = None

    def device(self) -> Device:
        """Return the device.

        Raises:
            PlanError: the GPU is unknown, or only one of peak and memory is given.
        """
        if (self.teraflops is None) != (self.gigabytes is None):
            raise PlanError(
                "--peak-tflops and --memory-gb belong together: give both, or neither"
            )
        if self.teraflops is not None and self.gigabytes is not None:
            return Device(
                self.name, self.teraflops * TERA, self.gigabytes * GIGA, UNKNOWN_LINK
            )
        try:
            return named_device(self.name)
        except UnknownDeviceError as error:
            raise PlanError(str(error)) from error


@dataclass(frozen=True)
class FlopsPerToken:
    """Arithmetic of a token: 6 N, exactly, and with causal attention halved."""

    six_n: float
    exact: float
    exact_causal: float


@dataclass(frozen=True)
class PlannedModel:
    """Shape and size of the model; see `Shape`."""

    parameters: int
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    flops_per_token: FlopsPerToken


@dataclass(frozen=True)
class PlannedTraining:
    """Rows, tokens and arithmetic of the training.

    Attributes:
        flops: of the whole training.
    """

    steps: int
    rows_per_step: int
    sequence_length: int
    tokens: int
    flops: float
    tokens_per_parameter: float


@dataclass(frozen=True)
class PlannedForm:
    """A form of parallelism, with its memory, time and cost.

    Attributes:
        form: its label.
        fits: True if it fits into the memory of the GPUs.
        memory: part -> bytes of the fullest GPU, with their `total`.
        mfu: share of the peak.
        cost: in the currency of the price; None without one.
    """

    form: str
    parallel: Form
    micro_batch_size: int
    micro_batches: int
    activation_checkpointing: bool
    fits: bool
    memory: dict[str, float]
    seconds_per_step: float
    mfu: float
    hours: float
    gpu_hours: float
    cost: float | None


@dataclass(frozen=True)
class GpuPlan:
    """Plan of a pre-training on GPUs.

    Attributes:
        assumed_mfu: MFU of the arithmetic alone.
        forms: the best first.
        price: of a GPU hour, if given.
    """

    gpus: int
    gpu: Device
    assumed_mfu: float
    model: PlannedModel
    training: PlannedTraining
    forms: list[PlannedForm]
    price: float | None


def plan_gpus(
    session: Session,
    gpus: int,
    choice: GpuChoice,
    utilisation: float,
    price: float | None,
) -> GpuPlan:
    """Plan a pre-training on GPUs: model, training, forms of parallelism, cost.

    Args:
        session: the opened manifest, with its committed outputs.
        gpus: number of GPUs.
        choice: model of the GPUs.
        utilisation: MFU of the arithmetic alone.
        price: of a GPU hour, for the cost; None if unknown.

    Raises:
        PlanError: the manifest has no `pretrain:` section, or the GPU is unknown.
    """
    device = choice.device()
    pretrain, shape, length = _training(session)
    step = Step(pretrain.global_batch_size, length, pretrain.optimizer.kind)
    forms = []
    for candidate in rank_forms(shape, step, gpus, device, utilisation):
        hours = candidate.seconds * pretrain.steps / SECONDS_PER_HOUR
        gpu_hours = hours * gpus
        load, memory = candidate.load, candidate.memory
        forms.append(
            PlannedForm(
                candidate.form.label(),
                candidate.form,
                load.micro_rows,
                load.micro_batches,
                load.checkpointing,
                candidate.fits,
                {**asdict(memory), "total": memory.total},
                candidate.seconds,
                candidate.utilisation,
                hours,
                gpu_hours,
                None if price is None else gpu_hours * price,
            )
        )
    flops = flops_per_token(shape, length)
    tokens = pretrain.steps * pretrain.global_batch_size * length
    return GpuPlan(
        gpus,
        device,
        utilisation,
        PlannedModel(
            shape.parameters,
            shape.vocab_size,
            shape.layers,
            shape.width,
            shape.heads,
            shape.kv_heads,
            shape.ffn_width,
            FlopsPerToken(flops.six_n, flops.whole, flops.causal),
        ),
        PlannedTraining(
            pretrain.steps,
            pretrain.global_batch_size,
            length,
            tokens,
            flops.whole * tokens,
            tokens / shape.parameters,
        ),
        forms,
        price,
    )


def _training(session: Session) -> tuple[Pretrain, Shape, int]:
    """Return the pre-training, the shape of its model, and the length of its rows.

    The vocabulary's size is that of the committed tokenizer, of the tokenizer file, or
    the setting.
    """
    manifest = session.manifest
    pretrain = manifest.pretrain
    if pretrain is None or manifest.mix is None:
        raise PlanError(
            f"{session.manifest_file} has no `pretrain:` section; there "
            "is nothing to plan GPUs for"
        )
    if pretrain.model.use is not None or pretrain.kind != "decoder":
        raise PlanError(
            f"{session.manifest_file}: GPUs are planned for the built-in decoder, and "
            "pretrain trains a model of your own or of transformers"
        )
    assert manifest.tokenizer is not None  # the manifest requires one for a mixture
    file = manifest.tokenizer.path and as_path(manifest.tokenizer.path)
    committed = session.committed(TOKENIZER)
    if committed is not None:
        file = committed.data / "tokenizer.json"
    vocab_size = manifest.tokenizer.vocab_size
    if file:
        tokenizer = read_json(file)
        added = [token["id"] for token in tokenizer.get("added_tokens", ())]
        vocab_size = max([*tokenizer["model"]["vocab"].values(), *added]) + 1
    length = manifest.mix.sequence_length
    return pretrain, shape_to_train(pretrain, vocab_size, length), length


MEMORY_NAMES = {
    "parameters": "master weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered blocks",
    "activations": "activations",
    "loss": "loss and logits",
    "overhead": "overhead",
}


def print_plan_for_gpus(plan: GpuPlan) -> None:
    """Print a plan with its best forms, or the closest ones if none fits."""
    model, training, gpu = plan.model, plan.training, plan.gpu
    flops = model.flops_per_token
    gpu_memory = gpu.memory / GIGA
    fitting = [form for form in plan.forms if form.fits]
    forms = fitting[:MOST_FORMS] or plan.forms[:MOST_FORMS]
    best = forms[0]
    memory = {name: best.memory[key] for key, name in MEMORY_NAMES.items()}
    total = size(best.memory["total"])
    rows = [
        (
            form.form,
            f"{form.micro_batches}x{form.micro_batch_size}",
            "yes" if form.activation_checkpointing else "no",
            form.memory["total"] / GIGA,
            form.mfu,
            duration(form.hours),
        )
        for form in forms
    ]
    columns = {"form": "", "micro": ">", "recompute": ">", "GB": ".1f"}
    columns |= {"MFU": ".0%", "time": ">"}
    largest = max(memory, key=memory.__getitem__)
    closest = (
        f"no form fits: the closest needs {total} per GPU, most of it {largest} "
        f"({size(memory[largest])}); take more GPUs or larger ones, shorter rows or a "
        "smaller model"
    )
    num_hidden = len(plan.forms) - len(forms)
    parts = ", ".join(f"{name} {size(part)}" for name, part in memory.items())
    cost = ""
    if best.cost is not None:
        cost = f", {at_least(best.cost)} at {plan.price:g} per GPU and hour"
    print_parts(
        Heading("Model and training"),
        f"{quantity(model.parameters)} parameters ({model.layers} layers, width "
        f"{model.width}, {model.heads}/{model.kv_heads} heads, vocabulary "
        f"{model.vocab_size:,})",
        f"{quantity(training.tokens)} tokens: {training.steps:,} steps of "
        f"{training.rows_per_step:,} rows of {training.sequence_length:,}; "
        f"{training.tokens_per_parameter:.3g} tokens per parameter",
        f"{training.flops:.3g} FLOPs; per token {quantity(flops.exact)} "
        f"(6N: {quantity(flops.six_n)}, with causal attention halved: "
        f"{quantity(flops.exact_causal)})",
        Heading(
            f"{plan.gpus} x {gpu.name} ({gpu.flops / 1e12:,.0f} TFLOP/s bf16, "
            f"{gpu_memory:.0f} GB each; {plan.assumed_mfu:.0%} MFU assumed)"
        ),
        table(columns, rows),
        None if best.fits else Note(closest, "warning"),
        f"({num_hidden} more forms are in --json)" if num_hidden else None,
        Heading(f"Memory of a GPU, {best.form}"),
        f"{parts}: {total} of {gpu_memory:.0f} GB",
        Heading("Time and cost"),
        f"{duration(best.hours)}, {at_least(best.gpu_hours)} GPU-hours{cost}",
    )
