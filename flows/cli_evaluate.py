"""The command `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill.flows.cli import EXIT_USAGE, JsonOption, SetOption, StoreOption, app, fail, open_or_exit, print_json


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder with config.json and model.safetensors, or a "
                                         "manifest, of which the last trained model is meant.")],
    tasks: Annotated[Path | None, typer.Option(help="A YAML file `tasks: [...]`; a manifest's own if absent.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder with tokenizer.json; the model's own if absent.")
                         ] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap intervals.")] = 0,
    set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
) -> None:
    """Ask a model tasks with known answers, and say how sure the scores are."""
    from gristmill.flows.evaluate_model import EvaluationError, evaluate_folder, print_evaluation, read_task_file

    try:
        asked = () if tasks is None else read_task_file(tasks)
        if model.endswith((".yaml", ".yml")):
            session = open_or_exit(model, set_, store)
            asked = asked or (session.manifest.evaluate.tasks if session.manifest.evaluate else ())
            trained = [folder for name in ("dpo", "sft", "pretrain") if (folder := session.committed(name)) is not None]
            made = session.committed("tokenizer")
            if not trained or made is None:
                fail(f"{model}: no model is trained yet; run: {session.command('run')}", EXIT_USAGE)
            model, tokenizer = str(trained[0].data / "model"), tokenizer or str(made.data)
        if not asked:
            fail("no tasks: give --tasks FILE, or a manifest with evaluate.tasks", EXIT_USAGE)
        found = evaluate_folder(model, tokenizer, asked, seed)
    except EvaluationError as error:
        fail(str(error), EXIT_USAGE)
    print_json(found) if as_json else print_evaluation(found)
