"""A sweep's report: a table for the terminal, JSON, one HTML file, and the manifest that it suggests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gristmill.core.files import atomic_write, write_json
from gristmill.flows.authoring.manifest_text import set_keys
from gristmill.flows.questions.trace_tables import new_table
from gristmill.flows.report.page_elements import Figure, Part, Section, Table, page
from gristmill.flows.report.pictures import predicted_and_measured, stacked_bars
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.registry import MIX
from gristmill.mixtures.load import load_manifest, parse_manifest
from gristmill.mixtures.recipes import named_recipes


def write_results(manifest_file: str, found: Mapping[str, Any]) -> list[Path]:
    """Write `NAME-sweep.json`, `NAME-sweep.html` and, where there is a suggestion, `NAME-suggested.yaml`.

    They lie beside the manifest, whose relative paths so keep their meaning in the suggested one.

    Returns:
        what was written.
    """
    file = Path(manifest_file)
    written = [file.with_name(f"{file.stem}-sweep.json"), file.with_name(f"{file.stem}-sweep.html")]
    write_json(written[0], dict(found))
    with atomic_write(written[1]) as sink:
        sink.write(as_html(file.name, found).encode())
    if found["suggestion"] is not None:
        written.append(file.with_name(f"{file.stem}-suggested.yaml"))
        text = suggested_text(manifest_file, found["suggestion"]["weights"])
        parse_manifest(text, str(written[-1]))
        with atomic_write(written[-1]) as sink:
            sink.write(text.encode())
    return written


def suggested_text(manifest_file: str, weights: Mapping[str, float]) -> str:
    """The manifest's text with other weights, where the manifest has them."""
    text = named_recipes.manifest_file(manifest_file).read_text(encoding="utf-8")
    mix = load_manifest(manifest_file).mix
    if mix is not None and mix.weights is not None:
        return set_keys(text, {(MIX, "weights"): dict(weights)})
    return set_keys(text, {("sources", name, "weight"): weight for name, weight in weights.items()})


def print_results(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a sweep for people: the mixtures from the best to the worst, each with a line for every source.

    A line for each mixture would be too wide for most terminals, and half a number looks like another one.
    """
    console = console or plain_console()
    grid = new_table(
        ("mixture", True), ("bits/byte", True), ("source", False), ("weight", True), ("bits/byte of it", True)
    )
    for one in ranked(found):
        head = [str(one["mixture"]), shown(one["target"])]
        for name in found["target"]:
            weight = f"{one['weights'][name]:.3f}" if name in one["weights"] else ""
            grid.add_row(*head, name, weight, shown(one["bits_per_byte"].get(name)))
            head = ["", ""]
    console.print(grid)
    for one in found["failed"]:
        console.print(Text(f"mixture {one['mixture']} {one['weights']}: {one['error']}", style="red"))
    for name, fitted in found["fits"].items():
        errors = ", ".join(f"{model} {error:.4f}" for model, error in fitted["errors"].items())
        console.print(Text(f"{name}: {fitted['model']} (leave-one-out error: {errors})", style="dim"))
    console.print(Text(describe_suggestion(found), style="yellow" if found["suggestion"] is None else "bold green"))


def describe_suggestion(found: Mapping[str, Any]) -> str:
    """The suggestion in a sentence, or why there is none."""
    suggestion = found["suggestion"]
    if suggestion is None:
        return str(found["refusal"])
    weights = ", ".join(f"{name} {weight:.3f}" for name, weight in suggestion["weights"].items())
    best = suggestion["best_tried"]
    return (
        f"suggested: {weights}, for which {suggestion['predicted']:.4f} bits per byte are predicted (plus or minus "
        f"{found['fit']['error']:.4f}); the best that was tried, mixture {best['mixture']}, has "
        f"{best['target']:.4f}" + _limits(found)
    )


def _limits(found: Mapping[str, Any]) -> str:
    """Where repetition limits bound the suggestion."""
    weights = found["suggestion"]["weights"]
    met = [
        f"{name} ({share:.3f})" for name, share in found["limits"].items() if share < 1 and weights[name] > share - 1e-3
    ]
    return f"; {', '.join(met)} at the most that max_epochs allows" if met else ""


def ranked(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The mixtures, the one of least bits per byte first."""
    return sorted(found["mixtures"], key=lambda one: (one["target"]["mean"], one["mixture"]))


def shown(value: Mapping[str, float | None] | None) -> str:
    """A mean with its spread."""
    if value is None:
        return ""
    return f"{value['mean']:.4f}" + ("" if value["spread"] is None else f" ± {value['spread']:.4f}")


def as_html(name: str, found: Mapping[str, Any]) -> str:
    """The sweep as one self-contained page."""
    best_first = ranked(found)
    sources, measured = list(best_first[0]["weights"]) if best_first else [], list(found["target"])
    parts: list[Part] = []
    if best_first:
        bars = [(f"{one['mixture']}: {one['target']['mean']:.4f}", one["weights"]) for one in best_first]
        parts.append(
            Figure(stacked_bars(bars, "share of tokens"), "The mixtures, that of the least mean bits per byte on top.")
        )
    if "fit" in found:
        points = [
            (one["target"]["mean"], guess, one["target"]["spread"] or 0.0)
            for one, guess in zip(found["mixtures"], found["fit"]["left_out"], strict=True)
        ]
        parts.append(
            Figure(
                predicted_and_measured(points, "bits per byte"),
                "Each mixture as it was measured, and as the others predict it.",
            )
        )
    header = ["mixture", *sources, "bits/byte", *(f"of {name}" for name in measured)]
    rows = [
        [
            one["mixture"],
            *(f"{one['weights'][source]:.3f}" for source in sources),
            shown(one["target"]),
            *(shown(one["bits_per_byte"].get(name)) for name in measured),
        ]
        for one in best_first
    ]
    parts.append(Table(header, rows, set(range(len(header)))))
    fits = [
        [source, one["model"], ", ".join(f"{model} {error:.4f}" for model, error in one["errors"].items())]
        for source, one in found["fits"].items()
    ]
    failed = [[one["mixture"], one["weights"], one["error"]] for one in found["failed"]]
    sections = [
        Section(title, [table])
        for title, table in (
            ("Fits", Table(["source", "model", "leave-one-out errors"], fits)),
            ("Not trained", Table(["mixture", "weights", "why"], failed, {0})),
        )
        if table.rows
    ]
    return page(f"Mixtures of {name}", sections, note=describe_suggestion(found), parts=parts)
