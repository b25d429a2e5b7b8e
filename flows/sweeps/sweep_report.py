"""Report of a sweep: a table for the terminal, JSON, and the suggested manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from gristmill.core.files import write_json, write_text
from gristmill.flows.authoring.manifest_text import set_keys
from gristmill.flows.pages.page_elements import Note, Span, table
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.stages.registry import MIX
from gristmill.flows.sweeps.grid import Weights
from gristmill.flows.sweeps.results import (
    Spread,
    SweepResults,
)
from gristmill.mixtures.loader import load_manifest, parse_manifest
from gristmill.mixtures.recipes import named_recipes


def write_beside(manifest_file: str, kind: str, results: Mapping[str, object]) -> Path:
    """Write `NAME-KIND.json` beside the manifest, and return its path."""
    file = Path(manifest_file)
    json_file = file.with_name(f"{file.stem}-{kind}.json")
    write_json(json_file, results)
    return json_file


def write_results(manifest_file: str, results: SweepResults) -> list[Path]:
    """Write `NAME-sweep.json` and, if a mixture is suggested, `NAME-suggested.yaml`.

    They are written beside the manifest, so that its relative paths stay valid in the
    suggested one.

    Returns:
        paths of the written files.
    """
    json_file = write_beside(manifest_file, "sweep", asdict(results))
    if results.suggestion is None:
        return [json_file]
    suggested_file = json_file.with_name(f"{Path(manifest_file).stem}-suggested.yaml")
    text = suggested_text(manifest_file, results.suggestion.weights)
    parse_manifest(text, str(suggested_file))
    write_text(suggested_file, text)
    return [json_file, suggested_file]


def suggested_text(manifest_file: str, weights: Weights) -> str:
    """Return the manifest's text with other weights in the keys that set them."""
    text = named_recipes.manifest_file(manifest_file).read_text(encoding="utf-8")
    mix = load_manifest(manifest_file).mix
    if mix is not None and mix.weights is not None:
        return set_keys(text, {(MIX, "weights"): weights})
    return set_keys(
        text, {("sources", name, "weight"): weight for name, weight in weights.items()}
    )


def print_results(results: SweepResults) -> None:
    """Print a sweep as text: the mixtures from best to worst, with a line for every
    source.

    One line per mixture would be too wide for most terminals, and a truncated number
    reads as another number.
    """
    rows = []
    best_first = sorted(
        results.mixtures, key=lambda mixture: (mixture.target.mean, mixture.mixture)
    )
    for mixture in best_first:
        leading_cells = [str(mixture.mixture), shown(mixture.target)]
        for name in results.target:
            measured = shown(mixture.bits_per_byte.get(name))
            rows.append([*leading_cells, name, mixture.weights.get(name), measured])
            leading_cells = ["", ""]
    columns = {"mixture": ">", "bits/byte": ">", "source": ""}
    columns |= {"weight": ".3f", "bits/byte of it": ">"}
    failed = [
        Note(f"mixture {failure.mixture} {failure.weights}: {failure.error}", "warning")
        for failure in results.failed
    ]
    fits = []
    for name, fitted in results.fits.items():
        errors = [f"{model} {error:.4f}" for model, error in fitted.errors.items()]
        fits.append(
            f"{name}: {fitted.model} (leave-one-out error: {', '.join(errors)})"
        )
    suggestion = Note(Span(describe_suggestion(results), "strong"), "plain")
    print_parts(table(columns, rows), failed, fits, suggestion)


def describe_suggestion(results: SweepResults) -> str:
    """Describe the suggested mixture in a sentence, or the reason if no mixture is
    suggested.
    """
    suggestion = results.suggestion
    if suggestion is None or results.fit is None:
        return str(results.refusal)
    weights = ", ".join(
        f"{name} {weight:.3f}" for name, weight in suggestion.weights.items()
    )
    best = suggestion.best_tried
    sentence = (
        f"suggested: {weights}, with {suggestion.predicted:.4f} bits per byte "
        f"predicted (plus or minus {results.fit.error:.4f}); the best tried "
        f"mixture, {best.mixture}, has {best.target:.4f}"
    )
    bounded = [
        f"{name} ({limit:.3f})"
        for name, limit in (results.limits or {}).items()
        if limit < 1 and suggestion.weights[name] > limit - 1e-3
    ]
    if bounded:
        sentence += f"; {', '.join(bounded)} at the maximum that max_epochs allows"
    return sentence


def shown(value: Spread | None) -> str:
    """Format a mean with its spread."""
    if value is None:
        return ""
    mean = f"{value.mean:.4f}"
    return mean if value.spread is None else f"{mean} ± {value.spread:.4f}"
