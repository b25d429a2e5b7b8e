"""Command `annotators`: the presets of `annotate`, `judge` and `filter`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument, echo

from gristmill.flows.cli.application import JsonOption, app, print_json

if TYPE_CHECKING:
    from gristmill.mixtures.annotators import Annotator


@app.command()
def annotators(
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="Show this one: labels, licence, cost, agreement, and the step.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List published models and rules that annotate documents, or show one."""
    from gristmill.flows.cli.application import fail
    from gristmill.flows.pages.page_elements import Table
    from gristmill.flows.pages.terminal_pages import print_table
    from gristmill.flows.running.terminal import plain_console
    from gristmill.mixtures.annotators import read_annotators
    from gristmill.mixtures.yaml_text import unknown_name

    presets = read_annotators()
    if name is not None and name not in presets:
        fail(f"there is no annotator {unknown_name(name, presets)}")
    if as_json:
        chosen = presets if name is None else {name: presets[name]}
        print_json(
            {
                key: {**annotator.model_dump(exclude_none=True), "cost": annotator.cost}
                for key, annotator in chosen.items()
            }
        )
    elif name is not None:
        echo("\n".join(described(name, presets[name])))
    else:
        rows = [(key, preset.step, preset.about) for key, preset in presets.items()]
        print_table(plain_console(), Table(["annotator", "step", ""], rows))


def described(name: str, annotator: Annotator) -> list[str]:
    """Lines about a preset, with the step that uses it."""
    import yaml

    facts = {
        "licence": annotator.licence or (annotator.weights and "see its model card"),
        "languages": annotator.languages,
        "agreement": annotator.agreement,
        "source": annotator.source,
        "million documents": annotator.cost,
    }
    lines = [annotator.about, ""]
    lines += [f"{key}: {value}" for key, value in facts.items() if value]
    lines += ["", "columns:"]
    lines += [f"  {column}: {values}" for column, values in annotator.labels.items()]
    if annotator.weights is None:
        step = yaml.safe_dump(annotator.settings, default_flow_style=True).strip()
    else:
        weights = f"hf://{annotator.weights}@COMMIT"
        model = f"{{folder: {weights}}}" if annotator.answers else weights
        step = f"{{preset: {name}, model: {model}}}"
    lines += ["", "prepare:", f"  - {annotator.step}: {step}"]
    lines += [f"needs model.{key}: {origin}" for key, origin in annotator.give.items()]
    return lines
