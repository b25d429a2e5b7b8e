"""The command `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill.flows.cli_models import ModelArgument, TokenizerOption, folders_or_exit
from gristmill.flows.command_line import (
    EXIT_USAGE,
    JsonOption,
    SetOption,
    StoreOption,
    app,
    fail,
    open_or_exit,
    print_json,
)


@app.command()
def evaluate(
    model: ModelArgument,
    tasks: Annotated[Path | None, typer.Option(
        metavar="FILE", help="A YAML file `tasks: [...]`; a manifest's own if absent.")] = None,
    tokenizer: TokenizerOption = None,
    chat_template: Annotated[bool, typer.Option(
        "--apply-chat-template", help="Ask all tasks but `rolling` through the chat template.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the bootstrap intervals.")] = 0,
    set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
) -> None:
    """Ask a model tasks with known answers, and say how sure the scores are."""
    from gristmill.flows.evaluate_model import EvaluationError, evaluate_folder, print_evaluation, read_task_file

    try:
        asked = () if tasks is None else read_task_file(tasks)
        if model.endswith((".yaml", ".yml")):
            session = open_or_exit(model, set_, store)
            asked = asked or (session.manifest.evaluate.tasks if session.manifest.evaluate else ())
        found_at = folders_or_exit(model, tokenizer, set_, store)
        if not asked:
            fail("no tasks: give --tasks FILE, or a manifest with evaluate.tasks", EXIT_USAGE)
        if chat_template:
            asked = tuple(task.model_copy(update={"chat_template": task.kind != "rolling"}) for task in asked)
        found = evaluate_folder(str(found_at.weights), str(found_at.tokenizer), asked, seed)
    except EvaluationError as error:
        fail(str(error), EXIT_USAGE)
    print_json(found) if as_json else print_evaluation(found)
