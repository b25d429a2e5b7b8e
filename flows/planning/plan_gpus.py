"""`gristmill plan --gpus N --gpu NAME`: size, memory, time and cost of a pre-training
before any GPU is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.core.files import as_path, read_json
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.report.mixture import waste_of
from gristmill.flows.report.stage_summaries import PackingCosts, read_as
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.registry import MIX, TOKENIZER
from gristmill.mixtures.training import Pretrain
from gristmill.train.models.model_config import Shape, shape_to_train
from gristmill.train.planning.devices import (
    GIGA,
    TERA,
    Device,
    PricesError,
    UnknownDeviceError,
    named_device,
    read_prices,
)
from gristmill.train.planning.flops import (
    CHINCHILLA,
    REPLICATION,
    chinchilla_optimum,
    flops_per_token,
    kaplan_optimum,
)
from gristmill.train.planning.parallel_forms import (
    HOST_LINK,
    Candidate,
    Step,
    rank_forms,
)

SECONDS_PER_HOUR = 3600
MOST_FORMS = 8
MOST_MEASURED_ROWS = 8


class PlanError(ValueError):
    """The manifest has no pre-training, or the GPU or price list is unknown."""


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
                self.name, self.teraflops * TERA, self.gigabytes * GIGA, HOST_LINK
            )
        try:
            return named_device(self.name)
        except UnknownDeviceError as error:
            raise PlanError(str(error)) from error


def plan_gpus(
    session: Session,
    gpus: int,
    choice: GpuChoice,
    utilisation: float,
    prices_file: Path | None = None,
) -> dict[str, Any]:
    """Plan a pre-training on GPUs: model, training, data, forms of parallelism, prices.

    Args:
        session: the opened manifest, with its committed outputs.
        gpus: number of GPUs.
        choice: model of the GPUs.
        utilisation: MFU of the arithmetic alone.
        prices_file: price list; None means the one of this package.

    Raises:
        PlanError: the manifest has no `pretrain:` section, or the GPU or price list is
            unknown.
    """
    device = choice.device()
    try:
        prices = read_prices(prices_file)
    except PricesError as error:
        raise PlanError(str(error)) from error
    section, shape, length = _training(session)
    tokens = section.steps * section.global_batch_size * length
    step = Step(
        section.global_batch_size,
        length,
        section.optimizer.kind,
        offload=session.manifest.engine.compute.offload_optimizer,
    )
    ranked = rank_forms(shape, step, gpus, device, utilisation)
    price = prices.per_gpu_hour.get(device.name)
    return {
        "gpus": gpus,
        "gpu": asdict(device),
        "assumed_mfu": utilisation,
        "model": _model(shape, length),
        "training": {
            "steps": section.steps,
            "rows_per_step": section.global_batch_size,
            "sequence_length": length,
            "tokens": tokens,
            **_scaling(shape, length, tokens),
        },
        "data": _data(session, section, length),
        "forms": [_form(candidate, section.steps, gpus, price) for candidate in ranked],
        "prices": {
            "as_of": prices.as_of,
            "currency": prices.currency,
            "per_gpu_hour": price,
        },
    }


def measured_checks(session: Session, steps: int, utilisation: float) -> list[Any]:
    """Train the manifest's model for some steps on rows of random tokens, and compare
    (`measured.Check`).
    """
    from gristmill.train.planning.measured_step import check

    section, shape, length = _training(session)
    rows = min(section.global_batch_size, section.micro_batch_size, MOST_MEASURED_ROWS)
    return check(shape, rows, length, section.optimizer, steps, utilisation)


def _training(session: Session) -> tuple[Pretrain, Shape, int]:
    section = session.manifest.pretrain
    if section is None or session.manifest.mix is None:
        raise PlanError(
            f"{session.manifest_file} has no `pretrain:` section; there "
            "is nothing to plan GPUs for"
        )
    if section.model.use is not None:
        raise PlanError(
            f"{session.manifest_file}: pretrain.model.use names a model of your own, "
            "whose memory and "
            "arithmetic are not known; GPUs are planned for the built-in decoder"
        )
    length = session.manifest.mix.sequence_length
    return section, shape_to_train(section, _vocab_size(session), length), length


def _vocab_size(session: Session) -> int:
    """Return the vocabulary size of the committed tokenizer, of the tokenizer file, or
    of the setting.
    """
    section = session.manifest.tokenizer
    assert section is not None  # the manifest requires one for a mixture
    committed = committed_inputs(session, session.plan).get(TOKENIZER)
    if committed:
        path: Path = committed / "tokenizer.json"
    elif section.path:
        path = as_path(section.path)
    else:
        return section.vocab_size
    tokenizer = read_json(path)
    ids = [
        *tokenizer["model"]["vocab"].values(),
        *(token["id"] for token in tokenizer.get("added_tokens", ())),
    ]
    return max(ids) + 1


def _model(shape: Shape, length: int) -> dict[str, Any]:
    flops = flops_per_token(shape, length)
    return {
        "parameters": shape.parameters,
        "vocab_size": shape.vocab_size,
        "layers": shape.layers,
        "width": shape.width,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "ffn_width": shape.ffn_width,
        "flops_per_token": {
            "six_n": flops.six_n,
            "exact": flops.whole,
            "exact_causal": flops.causal,
        },
    }


def _scaling(shape: Shape, length: int, tokens: int) -> dict[str, Any]:
    """Compare the run with the compute-optimal ones."""
    flops = flops_per_token(shape, length).whole * tokens
    lookup = shape.padded_vocab_size * shape.width * (1 if shape.tied_embeddings else 2)
    optima = {
        "Kaplan et al. 2020": kaplan_optimum(flops),
        "Hoffmann et al. 2022, 20 tokens": chinchilla_optimum(flops),
        CHINCHILLA.source: CHINCHILLA.optimum(flops),
        REPLICATION.source: REPLICATION.optimum(flops),
    }
    return {
        "flops": flops,
        "tokens_per_parameter": tokens / shape.parameters,
        "parameters_without_embeddings": shape.parameters - lookup,
        "optima": {
            name: {
                "parameters": size,
                "tokens": number,
                "this_run_parameters": shape.parameters / size,
                "this_run_tokens": tokens / number,
            }
            for name, (size, number) in optima.items()
        },
    }


def _data(session: Session, section: Pretrain, length: int) -> dict[str, Any] | None:
    """Compare the tokens read of each source with those available; None before `mix` is
    committed.
    """
    folder = session.committed(MIX)
    if folder is None:
        return None
    summary = folder.manifest()["summary"]
    read = section.steps * section.global_batch_size
    num_passes = read / summary["rows"]
    sources = {}
    for name, realised in summary["realised"].items():
        tokens_read = realised["tokens"] * num_passes
        unique = realised["available_tokens"]
        epochs = tokens_read / unique if unique else 0.0
        sources[name] = {
            "share": realised["share"],
            "tokens_read": tokens_read,
            "tokens_there": unique,
            "epochs": epochs,
            "wraps_at_step": int(section.steps / epochs) + 1 if epochs > 1 else None,
        }
    packing = summary["packings"][summary["packing"]]
    return {
        "passes_over_the_set": num_passes,
        "set_tokens": summary["tokens"],
        "sources": sources,
        "packing": {
            "kind": summary["packing"],
            **asdict(waste_of(read_as(PackingCosts, packing))),
        },
    }


def _form(
    candidate: Candidate, steps: int, gpus: int, price: float | None
) -> dict[str, Any]:
    hours = candidate.seconds * steps / SECONDS_PER_HOUR
    return {
        "form": candidate.form.label(),
        "parallel": asdict(candidate.form),
        "micro_batch_size": candidate.load.micro_rows,
        "micro_batches": candidate.load.micro_batches,
        "activation_checkpointing": candidate.load.checkpointing,
        "fits": candidate.fits,
        "memory": {**asdict(candidate.memory), "total": candidate.memory.total},
        "host_memory": candidate.host_memory,
        "bubble": candidate.bubble,
        "seconds_per_step": candidate.seconds,
        "mfu": candidate.utilisation,
        "hours": hours,
        "gpu_hours": hours * gpus,
        "cost": None if price is None else hours * gpus * price,
    }


def shown_forms(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the best forms, or the closest ones if none fits."""
    fitting = [form for form in plan["forms"] if form["fits"]]
    return fitting[:MOST_FORMS] or plan["forms"][:MOST_FORMS]


MEMORY_NAMES = {
    "parameters": "master weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered blocks",
    "activations": "activations",
    "loss": "loss and logits",
    "overhead": "overhead",
}


def print_plan_for_gpus(plan: Mapping[str, Any], checks: Sequence[Any] = ()) -> None:
    """Print a plan of `plan_gpus`, and the comparison with measured steps if there are
    any.
    """
    console = plain_console()
    _print_model(console, plan)
    _print_optima(console, plan["training"])
    print_data(console, plan["data"])
    _print_forms(console, plan)
    if checks:
        _heading(console, "Checked against real steps of this model on this machine")
        table = _table("", "foretold", "measured", "unit", "error")
        for check in checks:
            table.add_row(
                check.name,
                quantity(check.predicted),
                quantity(check.measured),
                check.unit,
                f"{check.error:+.1%}",
            )
        console.print(table)


def quantity(value: float) -> str:
    """Format three digits with a letter for the thousands: 1.23B."""
    for size, letter in (
        (1e21, "Z"),
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "B"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(hours: float) -> str:
    """Format hours as days, hours, minutes or seconds."""
    if hours >= 48:
        return f"{hours / 24:.1f} d"
    if hours >= 1:
        return f"{hours:.1f} h"
    if hours * 60 >= 1:
        return f"{hours * 60:.1f} min"
    return f"{hours * 3600:.1f} s" if hours * 3600 >= 1 else "< 1 s"


def size(value: float) -> str:
    """Format bytes with three digits and a unit: 1.55 GB."""
    number = quantity(value)
    if not number[-1].isalpha():
        return f"{number} B"
    unit = {"k": "k", "B": "G"}.get(number[-1], number[-1])
    return f"{number[:-1]} {unit}B"


def at_least(value: float, digits: int) -> str:
    """Format a number with some decimals, or as `less than` the smallest one that they
    show.
    """
    least = 10.0**-digits
    return (
        f"{value:,.{digits}f}"
        if value >= least or not value
        else f"less than {least:.{digits}f}"
    )


def _heading(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}", style="bold"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(
            name, justify="left" if number == 0 else "right", overflow="fold"
        )
    return table


def _print_model(console: Console, plan: Mapping[str, Any]) -> None:
    model, training = plan["model"], plan["training"]
    flops = model["flops_per_token"]
    _heading(console, "Model and training")
    console.print(
        f"{quantity(model['parameters'])} parameters ({model['layers']} layers, width "
        f"{model['width']}, {model['heads']}/{model['kv_heads']} heads, vocabulary "
        f"{model['vocab_size']:,})"
    )
    console.print(
        f"{quantity(training['tokens'])} tokens: {training['steps']:,} steps of "
        f"{training['rows_per_step']:,} rows of {training['sequence_length']:,}; "
        f"{training['tokens_per_parameter']:.3g} tokens per parameter"
    )
    console.print(
        f"{training['flops']:.3g} FLOPs; per token {quantity(flops['exact'])} "
        f"(6N: {quantity(flops['six_n'])}, with causal attention halved: "
        f"{quantity(flops['exact_causal'])})"
    )


def _print_optima(console: Console, training: Mapping[str, Any]) -> None:
    _heading(console, "Optimal for this compute, and this run as a multiple of it")
    table = _table("", "parameters", "run", "tokens", "run")
    for name, optimum in training["optima"].items():
        table.add_row(
            name,
            quantity(optimum["parameters"]),
            f"{quantity(optimum['this_run_parameters'])}x",
            quantity(optimum["tokens"]),
            f"{quantity(optimum['this_run_tokens'])}x",
        )
    console.print(table)
    console.print(
        "(Kaplan counts no embeddings: this run has "
        f"{quantity(training['parameters_without_embeddings'])} without)",
        style="dim",
    )


def print_data(console: Console, data: Mapping[str, Any] | None) -> None:
    """Print the tokens read and available per source, and the cost of packing; `data`
    is that of `plan_gpus`.
    """
    _heading(console, "Data")
    if data is None:
        console.print(
            "nothing is mixed yet, so the tokens of each source are unknown; run up "
            "to the stage mix to see them"
        )
        return
    table = _table("source", "share", "reads", "has", "epochs", "wraps at step")
    for name, source in data["sources"].items():
        wraps = (
            "never"
            if source["wraps_at_step"] is None
            else f"{source['wraps_at_step']:,}"
        )
        table.add_row(
            name,
            f"{source['share']:.1%}",
            quantity(source["tokens_read"]),
            quantity(source["tokens_there"]),
            f"{source['epochs']:.2f}",
            wraps,
        )
    console.print(table)
    console.print(
        f"{data['passes_over_the_set']:.2f} passes over a set of "
        f"{quantity(data['set_tokens'])} tokens"
    )
    packing = data["packing"]
    console.print(
        f"packing {packing['kind']}: {packing['padding']:.1%} padding in the rows, "
        f"{packing['dropped']:.1%} "
        f"of the tokens dropped, {packing['split']:.1%} of the documents cut"
    )


def _print_forms(console: Console, plan: Mapping[str, Any]) -> None:
    gpu = plan["gpu"]
    gpu_memory = gpu["memory"] / GIGA
    forms = shown_forms(plan)
    best = forms[0]
    _heading(
        console,
        f"{plan['gpus']} x {gpu['name']} ({gpu['flops'] / 1e12:,.0f} TFLOP/s bf16, "
        f"{gpu_memory:.0f} GB each; {plan['assumed_mfu']:.0%} MFU assumed)",
    )
    if not best["fits"]:
        memory = best["memory"]
        largest = max(MEMORY_NAMES, key=lambda name: memory[name])
        advice = "take more GPUs or larger ones, shorter rows or a smaller model"
        if not best["host_memory"]:
            advice += (
                "; engine.compute.offload_optimizer keeps the optimizer's "
                "moments in host memory"
            )
        console.print(
            f"no form fits: the closest needs {memory['total'] / GIGA:.1f} GB per "
            "GPU, most of it "
            f"{MEMORY_NAMES[largest]} ({memory[largest] / GIGA:.1f} GB); {advice}"
        )
    table = _table("form", "micro", "recompute", "GB", "bubble", "MFU", "time")
    for form in forms:
        table.add_row(
            form["form"],
            f"{form['micro_batches']}x{form['micro_batch_size']}",
            "yes" if form["activation_checkpointing"] else "no",
            f"{form['memory']['total'] / GIGA:.1f}",
            f"{form['bubble']:.0%}",
            f"{form['mfu']:.0%}",
            duration(form["hours"]),
            style=None if form["fits"] else "dim",
        )
    console.print(table)
    num_hidden = len(plan["forms"]) - len(forms)
    if num_hidden:
        console.print(
            f"({num_hidden} more forms are in --json, those that do not fit among them)",
            style="dim",
        )

    _heading(console, f"Memory of a GPU, {best['form']}")
    parts = ", ".join(
        f"{name} {size(best['memory'][key])}" for key, name in MEMORY_NAMES.items()
    )
    console.print(f"{parts}: {size(best['memory']['total'])} of {gpu_memory:.0f} GB")
    if best["host_memory"]:
        console.print(
            "in its host's memory (engine.compute.offload_optimizer): "
            f"{best['host_memory'] / GIGA:.2f} GB"
        )

    _heading(console, "Time and cost")
    cost = ""
    if best["cost"] is not None:
        prices = plan["prices"]
        cost = (
            f", {at_least(best['cost'], 2)} {prices['currency']} at "
            f"{prices['per_gpu_hour']:g} per GPU and hour "
            f"(table of {prices['as_of']}; your own: --prices)"
        )
    console.print(
        f"{duration(best['hours'])}, {at_least(best['gpu_hours'], 2)} GPU-hours{cost}"
    )
