"""Command `demo`: a training that is killed and resumed, and questions about its run."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option, echo, style

from gristmill.flows.cli.application import SetOption, StoreOption, app
from gristmill.flows.cli.run import run
from gristmill.mixtures.recipes.named_recipes import CHAT_DEMO, DEMO

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

GRISTMILL = (sys.executable, "-m", "gristmill.flows.cli.main")
PRETRAIN, TOKENIZER = "pretrain", "tokenizer"
METRICS, WEIGHTS = "metrics.jsonl", "model/model.safetensors"
POLL_SECONDS = 0.2
SHOWN_LINES = 16
"""Most lines shown of an answer."""
DROPPED = (
    "SELECT id, reason, words FROM documents WHERE reason LIKE 'gopher_quality/%' "
    "ORDER BY id LIMIT 3"
)
THRESHOLD = "filter.gopher_quality.min_words=60"
OTHER_MIXTURE = (
    "sources.docstrings.weight=0.3",
    "sources.code.weight=0.7",
    "pretrain.steps=40",
)
"""Settings of the training that goes on from the trained model."""
PROMPT = "log1p(x)\n\nNatural logarithm of one plus the input"
COMPLETION_TOKENS = "48"


@app.command()
def demo(
    chat: Annotated[
        bool,
        Option(help="Run the manifest `demo-chat`: also fine-tuning and preferences."),
    ] = False,
    set_: SetOption = None,
    store: StoreOption = None,
) -> None:
    """Train a tiny model on the text that comes with Python, kill and resume the
    training, and ask why: minutes on a CPU.
    """
    if chat:
        run(CHAT_DEMO, set_=set_, store=store, no_ui=True)
    with tempfile.TemporaryDirectory(prefix="gristmill-demo-") as folder:
        Tour(set_ or [], store, Path(folder)).take()


@dataclass(frozen=True)
class Tour:
    """Commands that are shown with their output.

    Attributes:
        settings: replaced settings of the demo's manifest.
        store: folder or URL of the outputs.
        folder: for files of the commands.
    """

    settings: list[str]
    store: str | None
    folder: Path

    def take(self) -> None:
        """Run the commands of each part, and print what each showed in a line."""
        parts = (
            self.kill_and_resume,
            self.explain_a_drop,
            self.trace_a_step,
            self.change_the_mixture,
            self.trace_a_completion,
        )
        lines = [part() for part in parts]
        heading("What you saw")
        for line in lines:
            echo(fill(line, 79, initial_indent="- ", subsequent_indent="  "))

    def kill_and_resume(self) -> str:
        """Kill a training, resume it, and compare it with an undisturbed one."""
        heading("Train a tiny model, and kill the training half-way")
        killed_after = self.run_and_kill()
        if killed_after is None:
            return (
                "The model was trained before: `rm -r gristmill-store` to begin again."
            )
        echo(style(f"\nkilled after step {killed_after}", bold=True))
        heading("The same command resumes")
        self.watch("run", DEMO, "--no-ui")
        resumed = self.checksum()
        heading("Train once more, undisturbed")
        self.watch("stage", PRETRAIN, DEMO, "--no-ui", "--force")
        verdict = "the same bits" if self.checksum() == resumed else "OTHER BITS"
        return (
            f"The training was killed after step {killed_after} and resumed; an "
            f"undisturbed one gave {verdict} (SHA-256 {resumed[:12]})."
        )

    def run_and_kill(self) -> int | None:
        """Kill a run when half of its training's steps are logged.

        Returns:
            the last logged step, or None if the run ended before.
        """
        session = self.open()
        half = half_of_steps(session)
        process = self.start("run", DEMO, "--no-ui")
        while process.poll() is None:
            step = last_logged(session)
            if step >= half:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return step
            time.sleep(POLL_SECONDS)
        if process.returncode:
            raise Exit(process.returncode)
        return None

    def explain_a_drop(self) -> str:
        """Explain a dropped document, and try another threshold."""
        heading("Why was a document dropped?")
        documents = self.ask("query", DEMO, DROPPED)
        document = documents[0]["id"][:16]
        self.show("explain", DEMO, document)
        heading("What would another threshold keep?")
        self.show("whatif", DEMO, "--samples", "0", "--set", THRESHOLD)
        return (
            f"Document {document} was dropped by {documents[0]['reason']}. Every one "
            "has its reason, and other thresholds are tried in a second."
        )

    def trace_a_step(self) -> str:
        """Show what a step of the training read."""
        step = half_of_steps(self.open())
        heading(f"What did step {step} read?")
        trace = self.ask("trace", DEMO, "--step", str(step))
        self.show("trace", DEMO, "--step", str(step))
        return (
            f"Step {step} read {trace['tokens']:,} tokens of "
            f"{len(trace['documents'])} documents, known by name."
        )

    def change_the_mixture(self) -> str:
        """Train the model further on another mixture of the same tokens."""
        heading("Go on with another mixture")
        model = self.data(PRETRAIN) / "model"
        tokenizer = self.data(TOKENIZER) / "tokenizer.json"
        start = time.monotonic()
        settings = (
            *OTHER_MIXTURE,
            f"tokenizer={{path: {tokenizer}}}",
            f"pretrain.model={{init_from: {model}}}",
        )
        self.show("run", DEMO, "--no-ui", "--until", PRETRAIN, *set_options(settings))
        seconds = time.monotonic() - start
        return (
            f"Training on with 70 % code instead of 20 % took {seconds:.0f} s: no "
            "document was prepared or tokenised again."
        )

    def trace_a_completion(self) -> str:
        """Complete a text, and trace it to the documents that it was learnt from."""
        heading("What did it learn, and from where?")
        one_step = ("--set", "pretrain.steps=1")
        self.ask_text("run", DEMO, "--no-ui", "--until", PRETRAIN, *one_step)
        completion = self.complete()
        for title, text in (
            ("after one step", self.complete(*one_step)),
            ("after all steps", completion),
        ):
            echo(style(f"{title}:", bold=True))
            for line in (PROMPT + text).splitlines():
                echo(indent(fill(line, 74, drop_whitespace=False), "  "))
            echo()
        file = self.folder / "completion.txt"
        file.write_text(PROMPT + completion)
        self.show("trace", DEMO, "--text", str(file))
        trace = self.ask("trace", DEMO, "--text", str(file))
        documents = {
            place["locator"]: place["steps"][0]["step"]
            for span in trace["spans"]
            for place in span["places"]
            if place["steps"]
        }
        locator, step = next(iter(documents.items()), ("none", 0))
        return (
            f"It writes documentation now: {trace['covered'] / trace['characters']:.0%} "
            f"of the text above is in passages of documents such as {locator}, which "
            f"step {step} read."
        )

    def complete(self, *settings: str) -> str:
        """Return the likeliest completion of the prompt."""
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
        line = self.ask_text(
            *("generate", DEMO, str(prompts)),
            *("--max-new-tokens", COMPLETION_TOKENS, *settings),
        )
        completion: str = json.loads(line)["completion"]
        return completion

    def checksum(self) -> str:
        """Return the SHA-256 of the trained weights."""
        manifest = self.open().folder(PRETRAIN).manifest()
        return manifest["files"][WEIGHTS]["sha256"]

    def data(self, stage: str) -> Path:
        """Return the folder of a stage's output files."""
        return self.open().folder(stage).data

    def open(self) -> Session:
        """Open the demo's manifest."""
        from gristmill.flows.running.session import open_session

        return open_session(DEMO, self.settings, self.store)

    def with_options(self, arguments: Sequence[str]) -> list[str]:
        """Add settings and store to a command; `whatif` compares all its settings."""
        settings = [] if arguments[0] == "whatif" else self.settings
        store = [] if self.store is None else ["--store", self.store]
        return [arguments[0], *set_options(settings), *store, *arguments[1:]]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Print a command and start it in this terminal."""
        self.print_command(arguments)
        return subprocess.Popen([*GRISTMILL, *self.with_options(arguments)])

    def watch(self, *arguments: str) -> None:
        """Run a command in this terminal."""
        if code := self.start(*arguments).wait():
            raise Exit(code)

    def print_command(self, arguments: Sequence[str]) -> None:
        """Print a command as a user types it."""
        command = shlex.join(self.with_options(arguments))
        echo(style(f"$ gristmill {command}", bold=True))

    def show(self, *arguments: str) -> None:
        """Run a command, and print it and the first lines of its output."""
        self.print_command(arguments)
        lines = self.ask_text(*arguments).splitlines()
        for line in lines[:SHOWN_LINES]:
            echo(line)
        if len(lines) > SHOWN_LINES:
            echo(f"... and {len(lines) - SHOWN_LINES} more lines")

    def ask(self, *arguments: str) -> Any:
        """Return the JSON that a command prints."""
        return json.loads(self.ask_text(*arguments, "--json"))

    def ask_text(self, *arguments: str) -> str:
        """Return what a command prints."""
        process = subprocess.run(
            [*GRISTMILL, *self.with_options(arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            echo(process.stdout + process.stderr, err=True)
            raise Exit(process.returncode)
        return process.stdout


def set_options(settings: Iterable[str]) -> list[str]:
    """Return the options that replace settings."""
    return [part for setting in settings for part in ("--set", setting)]


def half_of_steps(session: Session) -> int:
    """Return the step in the middle of the training."""
    pretrain = session.manifest.pretrain
    return pretrain.steps // 2 if pretrain and pretrain.steps else 1


def last_logged(session: Session) -> int:
    """Return the last step that a training in the store has logged; 0 without one."""
    steps = [0]
    for folder in session.store.outputs_of(PRETRAIN):
        path = Path(folder.work) / METRICS
        if path.exists():
            complete_lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
            steps += [json.loads(line)["step"] for line in complete_lines[-1:]]
    return max(steps)


def heading(text: str) -> None:
    """Print the heading of a part."""
    echo(style(f"\n{text}\n", bold=True, underline=True))
