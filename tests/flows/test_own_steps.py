"""User-defined steps in a run: planned, run by value, explained, replayed, resumed,
reported.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gristmill.dataprep.whatif_thresholds import NotReplayableError
from gristmill.flows.questions.compare import compare_runs, find_run
from gristmill.flows.questions.explain import Edit, history
from gristmill.flows.questions.status import DocumentCounts, stage_states
from gristmill.flows.questions.what_changed import explain_plan
from gristmill.flows.questions.whatif import Neighbour, compare, thresholds
from gristmill.flows.questions.whatif import replay as replay_with
from gristmill.flows.report.report import render_report
from gristmill.flows.running.session import Session
from gristmill.mixtures.loader import ManifestError
from tests.commands import call
from tests.jsonl import write_jsonl
from tests.sessions import open_beside, run_all

STEPS = '''
"""Steps of this project."""
import words

def count_word(text: str, word: str) -> dict:
    print("counting", word)
    return {"magic": words.count(text, word)}

def tidy(text: str) -> str:
    return text.replace("  ", " ").replace("colour", "color")

def long_enough(text: str) -> bool:
    return len(text) > 12
'''
WORDS = "def count(text, word):\n    return text.count(word)\n"
MANIFEST = """
name: own
sources: {web: {path: web.jsonl}}
prepare:
  - annotate: {use: ./steps.py:count_word, with: {word: xyzzy}, max: {magic: 1}}
  - edit: {use: ./steps.py:tidy}
  - annotate: {use: ./steps.py:long_enough}
    name: long
tokenizer: {vocab_size: 300}
"""
TEXTS = [
    "a  colour that says xyzzy",
    "xyzzy xyzzy xyzzy",
    "tiny  text",
    "an ordinary text of some length",
    "another ordinary text, xyzzy xyzzy",
]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A manifest with three user-defined steps."""
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "words.py").write_text(WORDS)
    write_jsonl(tmp_path / "web.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "own.yaml").write_text(MANIFEST)
    return tmp_path / "own.yaml"


def opened(manifest: Path, *overrides: str, until: str = "long") -> Session:
    return open_beside(manifest, *overrides, until=until)


def kept_by_annotate(session: Session) -> int | None:
    """Return the number of documents that the stage kept."""
    row = next(row for row in stage_states(session) if row.stage == "annotate")
    return None if row.documents is None else row.documents.kept


@pytest.mark.slow
def test_user_steps_are_planned_run_explained_replayed_and_reported(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = opened(own)
    plan = {row.stage: row for row in explain_plan(session)}
    assert list(plan) == ["ingest", "annotate", "edit", "long"]
    (code,) = plan["annotate"].code
    assert code.startswith("./steps.py:count_word (sha256 ")
    assert plan["ingest"].code == []
    assert run_all(session) == 0
    assert "counting xyzzy" not in capsys.readouterr().out

    documents_by_stage = {row.stage: row.documents for row in stage_states(session)}
    assert documents_by_stage["annotate"] == DocumentCounts(
        read=5, kept=3, quarantined=0, dropped={"annotate/max_magic": 2}
    )
    assert documents_by_stage["edit"] == DocumentCounts(3, 3, 0, {})
    assert documents_by_stage["long"] == DocumentCounts(
        read=3, kept=2, quarantined=0, dropped={"annotate/long_enough": 1}
    )

    dropped = history(session, "web.jsonl#2")
    assert dropped.outcome == "dropped by annotate: annotate/max_magic"
    assert dropped.stages[0].threshold == 1
    assert dropped.stages[0].values == {"magic": 3}
    outcome = history(session, "web.jsonl#3").outcome
    assert outcome == "dropped by long: annotate/long_enough"
    edited = history(session, "web.jsonl#1", with_text=True)
    edits = edited.stages[1].edits
    assert edits is not None
    assert edits.first == [Edit(TEXTS[0], "a color that says xyzzy")]
    edited.show()
    assert "{+a color that says xyzzy+}" in capsys.readouterr().out

    (rule,) = thresholds(session)
    assert (rule.key, rule.bound, rule.seen, rule.failing) == (
        "annotate.max.magic",
        1,
        5,
        2,
    )
    assert rule.looser == Neighbour(bound=2, failing=1)
    looser = replay_with(compare(session, opened(own, "annotate.max.magic=2")), 1, None)
    assert (
        looser.now["web"].documents,
        looser.unseen["web"].documents,
    ) == (2, 1)

    page = render_report(session, None).replace("<wbr>", "")
    assert "annotate/max_magic = 1: 2 dropped" in page
    assert "The cut of annotate.max.magic lies at 1." in page
    assert "def count_word" not in page
    assert "./steps.py:count_word (sha256 " in page

    (own.parent / "words.py").write_text(WORDS + "# counts\n")
    with pytest.raises(
        NotReplayableError, match=r"^annotate\.use changes a measurement"
    ):
        compare(session, opened(own))
    assert run_all(opened(own)) == 0
    runs = [find_run(session.store, name) for name in ("last-1", "last")]
    changed = {
        change.key: (change.first, change.second)
        for change in compare_runs(session.store, *runs).manifest
    }
    assert set(changed) == {
        f"prepare.{name}.use" for name in ("annotate", "edit", "long")
    }
    assert all(
        "def " not in code and "sha256" in code
        for codes in changed.values()
        for code in codes
    )


def test_plan_names_user_code_without_running_it(own: Path) -> None:
    outcome = call("plan", own, "--store", own.parent / "store")
    assert (
        "annotate runs code of your own: ./steps.py:count_word (sha256 "
        in outcome.output
    )
    assert "def count_word" not in outcome.output
    assert "counting" not in outcome.output


@pytest.mark.slow
def test_changed_code_rebuilds_only_its_stage_and_later_ones(
    own: Path,
) -> None:
    assert run_all(opened(own)) == 0
    before = opened(own)
    (own.parent / "notes.py").write_text("# nothing that a step imports\n")
    assert opened(own).plan["long"].fingerprint == before.plan["long"].fingerprint
    (own.parent / "words.py").write_text(
        WORDS.replace("text.count", "text.lower().count")
    )
    reasons = {row.stage: row.reason for row in explain_plan(opened(own))}
    assert reasons["ingest"] == ""
    assert reasons["annotate"] == "code changed: the code of ./steps.py:count_word"
    assert opened(own).plan["ingest"].fingerprint == before.plan["ingest"].fingerprint
    own.write_text(
        MANIFEST.replace("steps.py:count_word", "words.py:count")
        .replace("with: {word: xyzzy}, ", "with: {word: xyzzy}, measures: [count], ")
        .replace("magic", "count")
    )
    reason = next(
        row.reason for row in explain_plan(opened(own)) if row.stage == "annotate"
    )
    assert "./steps.py:count_word -> ./words.py:count" in reason


@pytest.mark.slow
def test_killed_run_is_resumed_without_the_code_file(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dies = "import os, signal\n" + STEPS.replace(
        '    print("counting", word)\n',
        f"    if not os.path.exists({str(own.parent / 'died')!r}):\n"
        f'        open({str(own.parent / "died")!r}, "w").close()\n        '
        "os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    (own.parent / "steps.py").write_text(dies)
    session = opened(own, "engine.retries=0")
    for name in ("steps.py", "words.py"):
        (own.parent / name).rename(own.parent / f"{name}.gone")
    assert run_all(session) == 1
    assert "annotate: its process was killed" in capsys.readouterr().err
    assert run_all(session) == 0
    assert "Resumed" in capsys.readouterr().out
    assert kept_by_annotate(session) == 3


def test_mixture_expressions_can_use_user_columns(own: Path) -> None:
    mixed = MANIFEST.replace(
        "{path: web.jsonl}", "{path: web.jsonl, where: magic < 1 AND long_enough}"
    )
    mix = "mix: {sequence_length: 8, tokens: 16, weights: {web: 1}}\n"
    own.write_text(mixed + mix)
    open_beside(own, until="mix")
    own.write_text(mixed.replace("magic < 1", "magik < 1") + mix)
    with pytest.raises(ManifestError, match=r"there is no column 'magik'"):
        open_beside(own, until="mix")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "./steps.py:count_word",
            "./step.py:count_word",
            r"own.yaml:5: .*use: there is no file step.py in .*steps.py",
        ),
        (
            "./steps.py:count_word",
            "./steps.py:count_words",
            r"own.yaml:5: .*use: steps.py defines no 'count_words', did",
        ),
        (
            "./steps.py:count_word",
            "https://example.org/steps.py:f",
            r"own.yaml:5: .*code must come from a file beside the",
        ),
        (
            "word: xyzzy",
            "wrod: xyzzy",
            r"own.yaml:5: .*use: steps.py, line 5: count_word has the parameter "
            r"'word'.* documents have",
        ),
        (
            "word: xyzzy",
            "word: xyzzy, other: 1",
            r"line 5: count_word has no parameter 'other'; it has text, word; correct `with`",
        ),
        (
            "magic: 1",
            "magik: 1",
            r"own.yaml:5: prepare\[0\].annotate.max.magik: steps.py, line 5: count_word does not "
            r"return 'magik', did you mean 'magic'\? it returns magic",
        ),
        (
            "max: {magic: 1}",
            "min: {text: 1}",
            r"'text' has another meaning for documents; choose another name for the column",
        ),
    ],
)
def test_invalid_step_settings_are_rejected_before_any_work(
    own: Path, old: str, new: str, message: str
) -> None:
    own.write_text(MANIFEST.replace(old, new, 1))
    with pytest.raises(ManifestError, match=message):
        opened(own)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def count_word(text: str, word: str) -> dict:\n    return {'magic': 1\n",
            r"steps.py, line 2: not valid Python",
        ),
        (
            "async def count_word(text, word): return {'magic': 1}",
            r"steps.py, line 1: count_word is an async function",
        ),
        (
            "def count_word(text, word): yield {'magic': 1}",
            r"steps.py, line 1: count_word yields values; return one",
        ),
        (
            "class count_word: ...",
            r"steps.py, line 1: count_word is a class; name a function",
        ),
    ],
)
def test_invalid_step_code_is_rejected_before_any_work(
    own: Path, source: str, message: str
) -> None:
    shutil.copy(own.parent / "steps.py", own.parent / "others.py")
    (own.parent / "steps.py").write_text(source)
    own.write_text(
        MANIFEST.replace("./steps.py:tidy", "./others.py:tidy").replace(
            "./steps.py:long", "./others.py:long"
        )
    )
    with pytest.raises(ManifestError, match=message):
        opened(own)


@pytest.mark.slow
def test_output_of_user_code_does_not_break_events(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prints = (
        "import os",
        'print("no line end", end="")',
        """print('\\n@gristmill [1]\\n@gristmill {"event": 3}', end='')""",
        'os.write(1, b"raw")',
        'os.system("echo from a child")',
    )
    loud = STEPS.replace('print("counting", word)', "; ".join(prints))
    (own.parent / "steps.py").write_text(loud)
    session = opened(own)
    assert run_all(session) == 0
    assert kept_by_annotate(session) == 3
    assert os.path.exists(session.folder("long").path)
