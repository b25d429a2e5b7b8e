"""Run every recipe to its end on small stand-in data, and write cost and results to
docs/recipe-runs.md.

`.ci/recipe_runs.py [NAME ...]`; with names, only their sections are written again. The
data are those of tests/flows/recipe_stand_ins.py. The model of languages is the one of
the tests, or that of $GRISTMILL_LID_MODEL.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests have the stand-ins

from benchmarks.areas import surroundings  # noqa: E402
from gristmill.dataprep.conservation import top_reasons  # noqa: E402
from gristmill.dataprep.examples.make_examples import MadeSet  # noqa: E402
from gristmill.dataprep.fasttext.fasttext_models import MODEL_VARIABLE  # noqa: E402
from gristmill.dataprep.whatif_thresholds import short_name  # noqa: E402
from gristmill.flows.report.facts import Facts, gather_facts  # noqa: E402
from gristmill.flows.report.mixture import mixture_rows  # noqa: E402
from gristmill.flows.report.training import effect_rows, loss_rows  # noqa: E402
from gristmill.flows.running.session import open_session  # noqa: E402
from gristmill.flows.stages.registry import PRETRAIN  # noqa: E402
from gristmill.mixtures.loader import load_manifest  # noqa: E402
from gristmill.mixtures.recipes.named_recipes import (  # noqa: E402
    describe_recipe,
    recipe_file,
    recipe_names,
)
from tests.chat_endpoint import Endpoint  # noqa: E402
from tests.flows.recipe_stand_ins import (  # noqa: E402
    MODEL,
    model_at,
    settings_of,
    write,
    write_stand_ins,
)

PAGE = ROOT / "docs" / "recipe-runs.md"
HEAD = """\
# What each recipe does on small data

Each recipe was run to its end on small invented data by `make recipes`, which writes this page; behind each time stands
when and where. Among the pages are a copy, one that repeats itself, one in another language and so on; models have one
layer and take some dozens of steps; a language model that judges or writes is a program of a few lines. So the figures
show that each step does what it is for, and the times what a run costs before it has much to do: most of it is the
start of the stages, of which some run beside each other. Seconds of processors hardly depend on what else the machine
did, those by the clock do.

*It worked if* says what to look for in a run of yours, with what was published. The [gallery](gallery.md) has the
commands for your data, `gristmill recipes NAME` what differs from the paper, and `gristmill plan recipe:NAME --set ...
--predict` what yours would take. The tables are those of the report, shortened. A test runs the recipes again and
compares the documents that each step read and kept.
"""
SOURCES_SHOWN = 9


@dataclass(frozen=True)
class Cost:
    """Seconds of a command by the clock, and seconds of processors of it and its
    children.
    """

    seconds: float
    cpu_seconds: float


def main(names: Sequence[str]) -> None:
    """Run recipes, and write their sections."""
    old = (
        dict(re.findall(r"(?ms)^## (\S+)\n(.*?)(?=^## |\Z)", PAGE.read_text()))
        if PAGE.exists()
        else {}
    )
    os.environ.setdefault(MODEL_VARIABLE, str(MODEL))
    with tempfile.TemporaryDirectory() as folder, Endpoint(write) as endpoint:
        os.chdir(folder)
        Path("data").mkdir()
        write_stand_ins(Path("data"))
        os.chdir("data")
        for name in names or recipe_names():
            settings = settings_of(name, model_at(endpoint.url))
            cost = run(name, [*settings, "--store", f"{folder}/{name}"])
            facts = gather_facts(
                open_session(f"recipe:{name}", settings[1::2], f"{folder}/{name}"),
                whole=False,
            )
            old[name] = (
                "\n" + "\n\n".join(section(name, facts, cost, settings[1::2])) + "\n\n"
            )
            print(f"{name}: {cost.seconds:.1f} s", file=sys.stderr)
            sections = "".join(
                f"## {name}\n{old[name]}" for name in recipe_names() if name in old
            )
            PAGE.write_text(f"{HEAD}\n{sections.rstrip()}\n")


def run(name: str, arguments: Sequence[str]) -> Cost:
    """Run a recipe as a user does, in a process of its own.

    Raises:
        SystemExit: it failed; the message has its output.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gristmill",
                "run",
                f"recipe:{name}",
                "--no-ui",
                *arguments,
            ],
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            raise SystemExit(f"recipe:{name} failed\n{printed.read()}")
    return Cost(time.monotonic() - start, usage.ru_utime + usage.ru_stime)


def section(
    name: str, facts: Facts, cost: Cost, settings: Sequence[str]
) -> Iterator[str]:
    """Return the paragraphs of a recipe that was run with some settings."""
    yield describe_recipe(name)
    stages = ", ".join(
        f"{stage.stage} {stage.seconds:.1f}"
        for stage in facts.stages
        if stage.seconds is not None
    )
    yield (
        f"**{cost.cpu_seconds:.0f} s** of processors, {cost.seconds:.0f} s by the "
        f"clock ({surroundings('train')}). Seconds of each stage: {stages}."
    )
    if facts.funnel:
        yield table(
            ("step", "read", "kept", "dropped by"),
            [
                (
                    row.stage,
                    f"{row.read:,}",
                    f"{row.kept:,}",
                    ", ".join(
                        f"{short_name(rule)} {count}"
                        for rule, count in top_reasons(row.dropped, row.quarantined)
                    ),
                )
                for row in facts.funnel
            ],
        )
    yield from filter(None, (generated(facts), mixture(facts), classifiers(facts)))
    if facts.training:
        yield table(
            ("training", "steps", "first loss", "last loss"),
            [
                (row.stage, f"{row.steps:,}", f"{row.first:.3f}", f"{row.last:.3f}")
                for row in loss_rows(facts)
            ],
        )
    pretrain_rows = [row for row in effect_rows(facts) if row[0] == PRETRAIN]
    if pretrain_rows:
        changes = ", ".join(
            f"{row[1].removeprefix('text of ')} {row[2]} to {row[3]}"
            for row in pretrain_rows
        )
        yield (
            "Bits per byte, from the first batch's to those of held-out text at "
            f"the end: {changes}."
        )
    other_rows = [row for row in effect_rows(facts) if row[0] != PRETRAIN]
    if other_rows:
        yield table(("training", "held out", "before", "after", ""), other_rows)
    yield from filter(None, [at_its_size(name, settings)])
    yield f"*It worked if* {expectation(name)}"


def generated(facts: Facts) -> str:
    """Summarise the sets of examples that a model wrote."""
    sentences = []
    for stage, content in facts.summaries.items():
        if "gives" not in content or "answers" not in content:
            continue
        summary = facts.summary(stage, MadeSet)
        prompts = f"{summary.prompts['read']:,} prompts"
        sentence = f"`{stage}` gave {summary.examples:,} {summary.gives} from {prompts}"
        for kind, reward in summary.rewards.items():
            sentence += f"; mean reward of {kind} answers {reward.mean:.3f}"
        sentences.append(f"{sentence}.")
    return " ".join(sentences)


def mixture(facts: Facts) -> str:
    """Return the number of mixed tokens, and the share of each source beside the
    requested one.
    """
    if facts.packed is None:
        return ""
    rows = sorted(mixture_rows(facts), key=lambda row: -row.share)
    shares = [
        f"{row.source} {row.share:.1%} ({row.requested:.1%})"
        for row in rows[:SOURCES_SHOWN]
    ]
    return (
        f"{sum(row.tokens for row in rows):,} tokens mixed, share (asked for): "
        f"{', '.join(shares)}."
    )


def classifiers(facts: Facts) -> str:
    """Return the area under the curve of each classifier that was trained here, on
    held-out documents.
    """
    sentences = []
    for stage, summary in facts.summaries.items():
        results: Any = summary.get("distilled", summary)
        if "auc" in results:
            sentences.append(
                f"`{stage}`: AUC {results['auc']:.3f} on "
                f"{results['held_out']:,} held-out documents."
            )
    return " ".join(sentences)


def at_its_size(name: str, settings: Sequence[str]) -> str:
    """Return the cost of a recipe's pre-training at its own size; empty if it has none,
    or begins with a user's model.
    """
    pretrain = load_manifest(f"recipe:{name}").pretrain
    if pretrain is None or pretrain.model.init_from is not None:
        return ""
    paths = []
    for setting in settings:
        if ".path=" in setting:
            paths += ["--set", setting]
    command = [
        sys.executable,
        "-m",
        "gristmill",
        "plan",
        f"recipe:{name}",
        "--gpus",
        "1",
        "--json",
        *paths,
    ]
    plan = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    form = min(
        (form for form in plan["forms"] if form["fits"]), key=lambda form: form["hours"]
    )
    return (
        f"The pre-training at the recipe's own size, by `gristmill plan recipe:{name} "
        f"--set ... --gpus 1`: {plan['model']['parameters'] / 1e6:.0f} M parameters, "
        f"{plan['training']['tokens'] / 1e9:.2f} B tokens, "
        f"{plan['training']['flops']:.1e} FLOPs, {form['hours']:.1f} hours of one "
        f"{plan['gpu']['name']} at an assumed MFU of {plan['assumed_mfu']:.0%}, "
        f"{form['memory']['total'] / 1e9:.0f} GB."
    )


def expectation(name: str) -> str:
    """Return a recipe's own text about expected results."""
    match = re.search(
        r"(?ms)^# It worked if: (.*?)\n# What differs", recipe_file(name).read_text()
    )
    assert match is not None, name
    return match[1].replace("\n# ", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, in which columns of numbers are aligned to the right."""
    rules = []
    for column in range(len(head)):
        is_numeric = all(re.fullmatch(r"[-\d,.%]+", row[column]) for row in rows)
        rules.append("---:" if is_numeric else "---")
    lines = [head, rules, *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        for line in lines
    )


if __name__ == "__main__":
    main(sys.argv[1:])
