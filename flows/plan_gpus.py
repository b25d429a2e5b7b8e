"""`gristmill plan --gpus N --gpu NAME`: what a pre-training is, needs and costs, before any is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import as_path, read_json
from gristmill.flows.lookup import committed_inputs
from gristmill.flows.session import Session
from gristmill.flows.summary import waste_of
from gristmill.mixtures.training import Pretrain
from gristmill.train.models.shape import Shape, shape_of
from gristmill.train.planning.compute import (
    CHINCHILLA,
    REPLICATION,
    chinchilla_optimum,
    flops_per_token,
    kaplan_optimum,
)
from gristmill.train.planning.devices import GIGA, TERA, Device, UnknownDeviceError, named_device
from gristmill.train.planning.forms import HOST_LINK, Candidate, Step, rank_forms
from gristmill.train.planning.prices import PricesError, read_prices

SECONDS_PER_HOUR = 3600
MOST_FORMS = 8
MOST_MEASURED_ROWS = 8


class PlanError(ValueError):
    """The manifest has no pre-training, or a GPU or a price list was named that there is not."""


@dataclass(frozen=True)
class GpuChoice:
    """A GPU by name, or by what it can do.

    Attributes:
        name: as in the table of devices, or as the driver reports it.
        teraflops, gigabytes: of a GPU that is not in the table: bfloat16 peak and memory.
    """

    name: str
    teraflops: float | None = None
    gigabytes: float | None = None

    def device(self) -> Device:
        """What is meant.

        Raises:
            PlanError: no such GPU is known, or one of the two figures is missing.
        """
        if (self.teraflops is None) != (self.gigabytes is None):
            raise PlanError("--peak-tflops and --memory-gb belong together: give both, or neither")
        if self.teraflops is not None and self.gigabytes is not None:
            return Device(self.name, self.teraflops * TERA, self.gigabytes * GIGA, HOST_LINK)
        try:
            return named_device(self.name)
        except UnknownDeviceError as error:
            raise PlanError(str(error)) from error


def plan_gpus(
    session: Session, gpus: int, choice: GpuChoice, utilisation: float, prices_file: Path | None = None
) -> dict[str, Any]:
    """Everything that the plan says; see the keys.

    Args:
        session: the opened manifest; what is committed already is looked at.
        gpus: how many.
        choice: of which kind.
        utilisation: MFU of the arithmetic alone.
        prices_file: for the cost; the table that comes with this package if absent.

    Raises:
        PlanError: there is no `pretrain:` section, or no such GPU or table of prices.
    """
    device = choice.device()
    try:
        prices = read_prices(prices_file)
    except PricesError as error:
        raise PlanError(str(error)) from error
    section, shape, length = _training(session)
    tokens = section.steps * section.global_batch_size * length
    step = Step(section.global_batch_size, length, section.optimizer.kind,
                offload=session.manifest.engine.compute.offload_optimizer)
    ranked = rank_forms(shape, step, gpus, device, utilisation)
    price = prices.per_gpu_hour.get(device.name)
    return {
        "gpus": gpus, "gpu": asdict(device), "assumed_mfu": utilisation,
        "model": _model(shape, length),
        "training": {"steps": section.steps, "rows_per_step": section.global_batch_size, "sequence_length": length,
                     "tokens": tokens, **_scaling(shape, length, tokens)},
        "data": _data(session, section, length),
        "forms": [_form(one, section.steps, gpus, price) for one in ranked],
        "prices": {"as_of": prices.as_of, "currency": prices.currency, "per_gpu_hour": price},
    }


def measured_checks(session: Session, steps: int, utilisation: float) -> list[Any]:
    """Train the manifest's model for some steps here, on rows of random tokens, and compare (`measured.Check`)."""
    from gristmill.train.planning.measured import check

    section, shape, length = _training(session)
    rows = min(section.global_batch_size, section.micro_batch_size, MOST_MEASURED_ROWS)
    return check(shape, rows, length, section.optimizer, steps, utilisation)


def _training(session: Session) -> tuple[Pretrain, Shape, int]:
    section = session.manifest.pretrain
    if section is None or session.manifest.mix is None:
        raise PlanError(f"{session.manifest_file} has no `pretrain:` section; there is nothing to plan GPUs for")
    length = session.manifest.mix.sequence_length
    return section, shape_of(section.model, _vocab_size(session), length), length


def _vocab_size(session: Session) -> int:
    """Of the tokenizer that is committed, of the file that is named, or what is asked for."""
    section = session.manifest.tokenizer
    assert section is not None  # a mixture needs one, which the manifest has checked
    committed = committed_inputs(session, session.plan).get("tokenizer")
    path: Path | None = committed / "tokenizer.json" if committed else as_path(section.path) if section.path else None
    if path is None:
        return section.vocab_size
    read = read_json(path)
    ids = [*read["model"]["vocab"].values(), *(token["id"] for token in read.get("added_tokens", ()))]
    return max(ids) + 1


def _model(shape: Shape, length: int) -> dict[str, Any]:
    flops = flops_per_token(shape, length)
    return {
        "parameters": shape.parameters, "vocab_size": shape.vocab_size, "layers": shape.layers, "width": shape.width,
        "heads": shape.heads, "kv_heads": shape.kv_heads, "ffn_width": shape.ffn_width,
        "flops_per_token": {"six_n": flops.six_n, "exact": flops.whole, "exact_causal": flops.causal},
    }


def _scaling(shape: Shape, length: int, tokens: int) -> dict[str, Any]:
    """Where the run stands against what is optimal for its compute."""
    flops = flops_per_token(shape, length).whole * tokens
    lookup = shape.padded_vocab_size * shape.width * (1 if shape.tied_embeddings else 2)
    optima = {"Kaplan et al. 2020": kaplan_optimum(flops), "Hoffmann et al. 2022, 20 tokens": chinchilla_optimum(flops),
              CHINCHILLA.source: CHINCHILLA.optimum(flops), REPLICATION.source: REPLICATION.optimum(flops)}
    return {
        "flops": flops, "tokens_per_parameter": tokens / shape.parameters,
        "parameters_without_embeddings": shape.parameters - lookup,
        "optima": {name: {"parameters": size, "tokens": number, "this_run_parameters": shape.parameters / size,
                          "this_run_tokens": tokens / number} for name, (size, number) in optima.items()},
    }


def _data(session: Session, section: Pretrain, length: int) -> dict[str, Any] | None:
    """Tokens per source against what there is; None where nothing is mixed yet."""
    folder = session.committed("mix")
    if folder is None:
        return None
    summary = folder.manifest()["summary"]
    read = section.steps * section.global_batch_size
    passes = read / summary["rows"]
    sources = {}
    for name, realised in summary["realised"].items():
        wanted = realised["tokens"] * passes
        unique = realised["available_tokens"]
        epochs = wanted / unique if unique else 0.0
        sources[name] = {
            "share": realised["share"], "tokens_read": wanted, "tokens_there": unique, "epochs": epochs,
            "wraps_at_step": int(section.steps / epochs) + 1 if epochs > 1 else None,
        }
    return {"passes_over_the_set": passes, "set_tokens": summary["tokens"], "sources": sources,
            "packing": {"kind": summary["packing"], **waste_of(summary["packings"][summary["packing"]])}}


def _form(one: Candidate, steps: int, gpus: int, price: float | None) -> dict[str, Any]:
    hours = one.seconds * steps / SECONDS_PER_HOUR
    return {
        "form": one.form.label(), "parallel": asdict(one.form), "micro_batch_size": one.load.micro_rows,
        "micro_batches": one.load.micro_batches, "activation_checkpointing": one.load.checkpointing,
        "fits": one.fits, "memory": {**asdict(one.memory), "total": one.memory.total},
        "host_memory": one.host_memory, "bubble": one.bubble,
        "seconds_per_step": one.seconds, "mfu": one.utilisation, "hours": hours, "gpu_hours": hours * gpus,
        "cost": None if price is None else hours * gpus * price,
    }


def shown_forms(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The best forms, or the closest ones where none fits."""
    fitting = [form for form in found["forms"] if form["fits"]]
    return fitting[:MOST_FORMS] or found["forms"][:MOST_FORMS]
