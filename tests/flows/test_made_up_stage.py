"""A stage that is not part of gristmill, defined in one file, supports every
command.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.flows.questions.explain import history
from gristmill.flows.questions.status import DocumentCounts, stage_states
from gristmill.flows.questions.what_changed import explain_plan
from gristmill.flows.questions.whatif import compare, thresholds
from gristmill.flows.questions.whatif import replay as replay_with
from gristmill.flows.report.facts import gather_facts
from gristmill.flows.report.report import render_report
from gristmill.flows.running.session import Session
from gristmill.flows.stages import registry
from gristmill.mixtures.loader import ManifestError
from gristmill.mixtures.schema import prepare
from tests.jsonl import write_jsonl
from tests.sessions import open_beside, run_all

STAGE_FILE = '''
import os, signal
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.conservation import balance
from gristmill.dataprep.documents import annotate, kept_rows, read_documents, write_table
from gristmill.dataprep.runners.tasks import Done, run_tasks, shard_tasks
from gristmill.flows.stages.stage import PrepareStep, Stage
from gristmill.mixtures.base import Fraction, Judging


class Shouting(Judging):
    """Documents in capital letters."""

    max_capital_share: Fraction = 0.5
    """Share of the letters that are capitals."""


def run(inputs, config, out, context):
    tasks = shard_tasks(inputs["ingest"])
    results = run_tasks("shouting", tasks, partial(judge, inputs=inputs, config=config, out=out), context)
    if not (context.work / "died").exists() and os.environ.get("DIE_ONCE"):
        (context.work / "died").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return {"counts": balance(results, 0.0, context.stage, errors=out)}


def judge(task, inputs, config, out):
    documents = read_documents(inputs, task.name, ["id", "source", "text"])
    rows = kept_rows(inputs, task.name)
    texts = documents["text"].take(pa.array(rows)).to_pylist()
    shares = [sum(map(str.isupper, text)) / max(sum(map(str.isalpha, text)), 1) for text in texts]
    reasons = ["shouting/max_capital_share" if share > config["max_capital_share"] else None for share in shares]
    table, counts = annotate(documents, rows, rows, reasons, {"capital_share": pa.array(shares, pa.float64())})
    write_table(out / task.name, table)
    return Done([out / task.name], {"counts": counts})


STAGE = Stage("shouting", 1, "made_up_shouting:run", step=PrepareStep(Shouting, lambda section: ["capital_share"]))
'''
MANIFEST = """
name: loud
sources: {web: {path: web.jsonl}}
prepare:
  - shouting: {max_capital_share: 0.6}
tokenizer: {vocab_size: 300}
"""
TEXTS = [
    "all quiet here, nothing to see at all",
    "ALL LOUD HERE, NOTHING TO SEE AT ALL",
    "HALF of it is in capitals HERE",
]


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A manifest whose only step is the stage of STAGE_FILE."""
    (tmp_path / "made_up_shouting.py").write_text(STAGE_FILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))
    stage = importlib.import_module("made_up_shouting").STAGE
    for register in (registry.STAGES, prepare.STEP_SECTIONS, prepare._ENTRIES):
        monkeypatch.setitem(register, stage.name, stage)  # undone after the test
    prepare.register_step(stage.name, stage.step.section)
    write_jsonl(tmp_path / "web.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "loud.yaml").write_text(MANIFEST)
    yield tmp_path / "loud.yaml"
    monkeypatch.delitem(sys.modules, "made_up_shouting")


def opened(manifest: Path, *overrides: str, until: str = "shouting") -> Session:
    return open_beside(manifest, *overrides, until=until)


@pytest.mark.slow
def test_stage_is_run_listed_explained_replayed_and_reported(
    loud: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = opened(loud)
    assert list(session.plan) == ["ingest", "shouting"]
    assert [row.reason for row in explain_plan(session)] == [
        "never made",
        "never made",
    ]
    assert run_all(session) == 0
    assert "shouting Completed" in capsys.readouterr().out
    assert run_all(session) == 0
    assert "shouting Cached" in capsys.readouterr().out

    rows_by_stage = {row.stage: row for row in stage_states(session)}
    assert rows_by_stage["shouting"].documents == DocumentCounts(
        read=3, kept=2, quarantined=0, dropped={"shouting/max_capital_share": 1}
    )
    assert [(row.stage, row.kept) for row in gather_facts(session).funnel] == [
        ("ingest", 3),
        ("shouting", 2),
    ]
    page = render_report(session, None).replace("<wbr>", "")
    assert "shouting/max_capital_share" in page
    assert "capital_share" in page

    explained = history(session, "web.jsonl#2")
    assert explained.outcome == "dropped by shouting: shouting/max_capital_share"
    (verdict,) = explained.stages
    assert (verdict.threshold, verdict.values) == (0.6, {"capital_share": 1.0})

    (rule,) = thresholds(session)
    assert (rule.key, rule.bound, rule.seen, rule.failing) == (
        "shouting.max_capital_share",
        0.6,
        3,
        1,
    )
    stricter = replay_with(
        compare(session, opened(loud, "shouting.max_capital_share=0.3")), 1, None
    )
    assert (
        stricter.now["web"].documents,
        stricter.then["web"].documents,
    ) == (2, 1)


@pytest.mark.slow
def test_killed_stage_is_resumed(
    loud: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIE_ONCE", "1")
    assert run_all(opened(loud, "engine.retries=0")) == 1
    assert "shouting: its process was killed" in capsys.readouterr().err
    assert run_all(opened(loud, "engine.retries=0")) == 0
    assert "shouting Resumed" in capsys.readouterr().out


def test_settings_of_a_stage_are_validated(
    loud: Path,
) -> None:
    loud.write_text(MANIFEST.replace("max_capital_share", "max_capital_shares"))
    with pytest.raises(
        ManifestError,
        match=r"loud\.yaml:5: prepare\[0\]\.shouting\.max_capital_shares: unknown key, "
        r"did you mean 'max_capital_share'\?",
    ):
        opened(loud)
    loud.write_text(MANIFEST.replace("shouting", "shoutin"))
    with pytest.raises(
        ManifestError,
        match=r"loud\.yaml:5: prepare\[0\]\.shoutin: unknown key, did you mean",
    ):
        opened(loud)
