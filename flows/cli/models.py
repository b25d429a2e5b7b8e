"""Commands that use a model: `chat`, `generate`, `verify`, `evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, echo

from gristmill.flows.cli.application import (
    EXIT_STAGE_FAILED,
    JsonOption,
    SetOption,
    StoreOption,
    app,
    fail,
    open_or_exit,
    out_file,
    print_json,
)
from gristmill.mixtures.recipes.named_recipes import is_manifest

if TYPE_CHECKING:
    from gristmill.flows.models.find_model import ModelFolders
    from gristmill.train.generation.language_model import LanguageModel
    from gristmill.train.generation.scheduler import Scheduler


ModelArgument = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="An exported folder, the folder of a training stage, or a manifest (its "
        "last trained model).",
    ),
]
TokenizerOption = Annotated[
    str | None,
    Option(
        metavar="DIR",
        help="A folder with tokenizer.json; the model's folder if absent.",
    ),
]
TemperatureOption = Annotated[
    float,
    Option(
        metavar="X", help="Sampling temperature; 0 takes the likeliest token.", min=0.0
    ),
]
TopPOption = Annotated[
    float,
    Option(
        metavar="X",
        help="Sample from the likeliest tokens with this total probability.",
        max=1.0,
    ),
]
MostOption = Annotated[
    int, Option(metavar="N", help="Maximum tokens of an answer.", min=1)
]
SeedOption = Annotated[int, Option(metavar="N", help="Seed of sampling.")]


@app.command()
def chat(
    model: ModelArgument,
    system: Annotated[
        str | None, Option(metavar="TEXT", help="A system message.")
    ] = None,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 0.95,
    max_new_tokens: MostOption = 512,
    seed: SeedOption = 0,
    tokenizer: TokenizerOption = None,
    set_: SetOption = None,
    store: StoreOption = None,
) -> None:
    """Chat with a model; answers are streamed."""
    language, scheduler = _load_model(model, tokenizer, set_, store, 1)
    from gristmill.flows.models.chat import HELP, converse
    from gristmill.train.generation.sampling import Sampling

    if language.chat is None:
        fail(
            f"{model}: its tokenizer has no chat template; to continue texts, use: "
            "gristmill generate"
        )
    if sys.stdin.isatty():
        echo(HELP)

    def read() -> str | None:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return None

    sampling = Sampling(temperature, top_p, seed)
    converse(
        language,
        scheduler,
        sampling,
        max_new_tokens,
        system,
        read,
        lambda text: print(text, end="", flush=True),
        lambda text: trace_answer(model, set_, store, text),
    )


def trace_answer(
    model: str, set_: list[str] | None, store: str | None, text: str
) -> None:
    """Print the training rows that contain passages of an answer, or why they are
    unknown.
    """
    from gristmill.flows.questions.trace_text import trace_text
    from gristmill.flows.questions.training_reads import TraceError

    if not is_manifest(model):
        echo(
            "(a folder does not record what its model has read; chat with the "
            "manifest that trained it)"
        )
        return
    try:
        trace_text(open_or_exit(model, set_, store), text).show()
    except TraceError as error:
        echo(f"({error})")


@app.command()
def generate(
    model: ModelArgument,
    prompts: Annotated[
        Path,
        Argument(
            metavar="PROMPTS",
            help="JSONL file; each line has `prompt` (a text to continue) or "
            "`messages` (a conversation to answer).",
        ),
    ],
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="File for the lines with their completions; the terminal if absent.",
        ),
    ] = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    max_new_tokens: MostOption = 256,
    stop: Annotated[
        list[str] | None,
        Option(metavar="TEXT", help="A stop string, which ends a completion."),
    ] = None,
    batch: Annotated[int, Option(metavar="N", help="Prompts per batch.", min=1)] = 32,
    seed: SeedOption = 0,
    tokenizer: TokenizerOption = None,
    set_: SetOption = None,
    store: StoreOption = None,
) -> None:
    """Complete the prompts of a file in batches; the same seed gives the same
    completions.

    A prompt that cannot be completed gets an `error` in its line, and the exit code is
    1.
    """
    from gristmill.core.files import write_text
    from gristmill.flows.models.generate import (
        as_jsonl,
        generate_lines,
        read_prompts,
    )
    from gristmill.train.generation.sampling import Sampling

    if out is not None:
        out_file("--out", out)
    prompt_lines = read_prompts(prompts)
    sampling = Sampling(temperature, top_p, seed)
    generated = generate_lines(
        *_load_model(model, tokenizer, set_, store, batch),
        prompt_lines,
        sampling,
        max_new_tokens,
        stop or (),
    )
    text = as_jsonl(generated.completions)
    if out is None:
        echo(text, nl=False)
    else:
        write_text(out, text)
    speed = generated.tokens / max(generated.seconds, 1e-9)
    echo(f"{generated.tokens} tokens, {speed:.0f} per second", err=True)
    if generated.failed:
        number, reason = next(iter(generated.failed.items()))
        fail(
            f"{len(generated.failed)} of {len(generated.completions)} prompts could "
            "not be completed; their lines have the reason in `error`. The first, line "
            f"{number}: {reason}",
            1,
        )


def verify_model(model: str, tokenizer: str | None, as_json: bool) -> int:
    """Compare a model with transformers, and return the exit code: 1 if they
    disagree.
    """
    folders = folders_or_exit(model, tokenizer, None, None)
    from gristmill.flows.models.transformers_check import (
        compare_with_transformers,
        print_findings,
    )

    try:
        findings = compare_with_transformers(folders)
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))
    if as_json:
        print_json([finding.as_json() for finding in findings])
    else:
        print_findings(findings)
    disagrees = any(finding.verdict == "DISAGREES" for finding in findings)
    return EXIT_STAGE_FAILED if disagrees else 0


def folders_or_exit(
    model: str, tokenizer: str | None, set_: list[str] | None, store: str | None
) -> ModelFolders:
    """Find the folders of a MODEL and its tokenizer, or exit with code 2."""
    from gristmill.flows.models.find_model import (
        find_model,
        find_trained,
    )

    if is_manifest(model):
        return find_trained(open_or_exit(model, set_, store), tokenizer)
    return find_model(model, tokenizer)


def _load_model(
    model: str,
    tokenizer: str | None,
    set_: list[str] | None,
    store: str | None,
    batch: int,
) -> tuple[LanguageModel, Scheduler]:
    """Load a model and create its scheduler, or exit with code 2."""
    folders = folders_or_exit(model, tokenizer, set_, store)
    from gristmill.train.generation.language_model import open_language_model
    from gristmill.train.generation.scheduler import Scheduler

    try:
        language = open_language_model(folders.weights, folders.tokenizer)
        return language, Scheduler(language.model, batch)
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))


@app.command()
def evaluate(
    model: ModelArgument,
    tasks: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="YAML file of `tasks: [...]` and `suites: [...]`; the manifest's "
            "section if absent.",
        ),
    ] = None,
    tokenizer: TokenizerOption = None,
    chat_template: Annotated[
        bool,
        Option(
            "--apply-chat-template",
            help="Apply the chat template to all tasks except `rolling`.",
        ),
    ] = False,
    seed: Annotated[
        int, Option(metavar="N", help="Seed of the bootstrap intervals.")
    ] = 0,
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on tasks and suites, with confidence intervals."""
    from gristmill.flows.models.evaluate_model import (
        evaluate_folder,
        print_evaluation,
        read_task_file,
    )
    from gristmill.flows.running.missing_libraries import is_installed, sentence_of

    section = None if tasks is None else read_task_file(tasks)
    if is_manifest(model):
        session = open_or_exit(model, set_, store)
        section = section or session.manifest.evaluate
    folders = folders_or_exit(model, tokenizer, set_, store)
    if section is None or not (section.tasks or section.suites):
        fail("no tasks: give --tasks FILE, or a manifest with evaluate.tasks or suites")
    if section.tasks and not is_installed("lm_eval"):
        fail(sentence_of("lm_eval", ["tasks"]))
    selected_tasks = section.tasks
    if chat_template:
        selected_tasks = tuple(
            task.model_copy(update={"chat_template": task.kind != "rolling"})
            for task in section.tasks
        )
    section = section.model_copy(update={"tasks": selected_tasks, "seed": seed})
    evaluation = evaluate_folder(str(folders.weights), str(folders.tokenizer), section)
    print_json(evaluation) if as_json else print_evaluation(evaluation)
