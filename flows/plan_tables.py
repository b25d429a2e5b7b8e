"""A plan for GPUs as people read it: grouped, and no wider than a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.flows.plan_gpus import shown_forms
from gristmill.flows.terminal import plain_console

GIGA = 1e9
MEMORY_NAMES = {
    "parameters": "master weights", "gradients": "gradients", "optimizer": "optimizer",
    "gathered": "gathered blocks", "activations": "activations", "loss": "loss and logits", "overhead": "overhead",
}


def print_plan_for_gpus(found: Mapping[str, Any], checks: Sequence[Any] = ()) -> None:
    """Print what `plan_gpus` found, and the comparison with a measured step where there is one."""
    console = plain_console()
    _print_model(console, found)
    _print_optima(console, found["training"])
    print_data(console, found["data"])
    _print_forms(console, found)
    _print_checks(console, checks)


def quantity(value: float) -> str:
    """Three digits with the letter of their thousands: 1.23B."""
    for size, letter in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(hours: float) -> str:
    """Days, hours, minutes or seconds, whichever is readable."""
    if hours >= 48:
        return f"{hours / 24:.1f} d"
    if hours >= 1:
        return f"{hours:.1f} h"
    if hours * 60 >= 1:
        return f"{hours * 60:.1f} min"
    return f"{hours * 3600:.1f} s" if hours * 3600 >= 1 else "< 1 s"


def size(value: float) -> str:
    """Bytes with three digits and their unit: 1.55 GB."""
    number = quantity(value)
    return f"{number[:-1]} {number[-1].upper().replace('K', 'k').replace('B', 'G')}B" if number[-1].isalpha() else (
        f"{number} B")


def at_least(value: float, digits: int) -> str:
    """A number with so many decimals, or that it is less than the last of them shows."""
    least = 10.0**-digits
    return f"{value:,.{digits}f}" if value >= least or not value else f"less than {least:.{digits}f}"


def _heading(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}", style="bold"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _print_model(console: Console, found: Mapping[str, Any]) -> None:
    model, training = found["model"], found["training"]
    flops = model["flops_per_token"]
    _heading(console, "Model and training")
    console.print(f"{quantity(model['parameters'])} parameters ({model['layers']} layers, width {model['width']}, "
                  f"{model['heads']}/{model['kv_heads']} heads, vocabulary {model['vocab_size']:,})")
    console.print(f"{quantity(training['tokens'])} tokens: {training['steps']:,} steps of "
                  f"{training['rows_per_step']:,} rows of {training['sequence_length']:,}; "
                  f"{training['tokens_per_parameter']:.3g} tokens per parameter")
    console.print(f"{training['flops']:.3g} FLOPs; per token {quantity(flops['exact'])} "
                  f"(6N: {quantity(flops['six_n'])}, with causal attention halved: {quantity(flops['exact_causal'])})")


def _print_optima(console: Console, training: Mapping[str, Any]) -> None:
    _heading(console, "Optimal for this compute, and this run as a multiple of it")
    table = _table("", "parameters", "run", "tokens", "run")
    for name, one in training["optima"].items():
        table.add_row(name, quantity(one["parameters"]), f"{quantity(one['this_run_parameters'])}x",
                      quantity(one["tokens"]), f"{quantity(one['this_run_tokens'])}x")
    console.print(table)
    console.print("(Kaplan counts no embeddings: this run has "
                  f"{quantity(training['parameters_without_embeddings'])} without)", style="dim")


def print_data(console: Console, data: Mapping[str, Any] | None) -> None:
    """What each source gives and has, and what packing costs; `data` as from `plan_gpus`."""
    _heading(console, "Data")
    if data is None:
        console.print("nothing is mixed yet, so what each source has is not known; run up to the stage mix to see it")
        return
    table = _table("source", "share", "reads", "has", "epochs", "wraps at step")
    for name, one in data["sources"].items():
        wraps = "never" if one["wraps_at_step"] is None else f"{one['wraps_at_step']:,}"
        table.add_row(name, f"{one['share']:.1%}", quantity(one["tokens_read"]), quantity(one["tokens_there"]),
                      f"{one['epochs']:.2f}", wraps)
    console.print(table)
    console.print(f"{data['passes_over_the_set']:.2f} passes over a set of {quantity(data['set_tokens'])} tokens")
    packing = data["packing"]
    console.print(f"packing {packing['kind']}: {packing['padding']:.1%} padding in the rows, {packing['dropped']:.1%} "
                  f"of the tokens dropped, {packing['split']:.1%} of the documents cut")


def _print_forms(console: Console, found: Mapping[str, Any]) -> None:
    gpu, forms = found["gpu"], shown_forms(found)
    best = forms[0]
    _heading(console, f"{found['gpus']} x {gpu['name']} ({gpu['flops'] / 1e12:,.0f} TFLOP/s bf16, "
                      f"{gpu['memory'] / GIGA:.0f} GB each; {found['assumed_mfu']:.0%} MFU assumed)")
    if not best["fits"]:
        largest = max(MEMORY_NAMES, key=lambda name: best["memory"][name])
        console.print(f"no form fits: the closest needs {best['memory']['total'] / GIGA:.1f} GB per GPU, most of it "
                      f"{MEMORY_NAMES[largest]} ({best['memory'][largest] / GIGA:.1f} GB); take more GPUs or larger "
                      "ones, shorter rows or a smaller model"
                      + ("" if best["host_memory"] else "; engine.compute.offload_optimizer keeps the optimizer's "
                         "moments in host memory"))
    table = _table("form", "micro", "recompute", "GB", "bubble", "MFU", "time")
    for form in forms:
        table.add_row(form["form"], f"{form['micro_batches']}x{form['micro_batch_size']}",
                      "yes" if form["activation_checkpointing"] else "no", f"{form['memory']['total'] / GIGA:.1f}",
                      f"{form['bubble']:.0%}", f"{form['mfu']:.0%}", duration(form["hours"]),
                      style=None if form["fits"] else "dim")
    console.print(table)
    rest = len(found["forms"]) - len(forms)
    if rest:
        console.print(f"({rest} more forms are in --json, those that do not fit among them)", style="dim")
    _heading(console, f"Memory of a GPU, {best['form']}")
    console.print(", ".join(f"{name} {size(best['memory'][key])}" for key, name in MEMORY_NAMES.items())
                  + f": {size(best['memory']['total'])} of {gpu['memory'] / GIGA:.0f} GB")
    if best["host_memory"]:
        console.print(f"in its host's memory (engine.compute.offload_optimizer): {best['host_memory'] / GIGA:.2f} GB")
    _heading(console, "Time and cost")
    prices = found["prices"]
    cost = "" if best["cost"] is None else (
        f", {at_least(best['cost'], 2)} {prices['currency']} at {prices['per_gpu_hour']:g} per GPU and hour (table of "
        f"{prices['as_of']}; your own: --prices)")
    console.print(f"{duration(best['hours'])}, {at_least(best['gpu_hours'], 2)} GPU-hours{cost}")


def _print_checks(console: Console, checks: Sequence[Any]) -> None:
    if not checks:
        return
    _heading(console, "Checked against real steps of this model on this machine")
    table = _table("", "foretold", "measured", "unit", "error")
    for one in checks:
        table.add_row(one.name, quantity(one.predicted), quantity(one.measured), one.unit, f"{one.error:+.1%}")
    console.print(table)
