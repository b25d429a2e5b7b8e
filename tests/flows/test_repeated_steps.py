"""A stage may occur in `prepare` more than once: each step has a name that identifies
it everywhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.dataprep.dedup.clusters import qualified
from gristmill.flows.questions.compare import stages_of
from gristmill.flows.questions.explain import history
from gristmill.flows.questions.status import stage_states
from gristmill.flows.questions.whatif import compare, replay, thresholds
from gristmill.flows.report.facts import gather_facts
from gristmill.flows.report.report import render_report
from gristmill.flows.running.session import Session
from gristmill.mixtures.loader import ManifestError
from tests.jsonl import write_jsonl
from tests.sessions import open_beside, run_all

pytestmark = pytest.mark.slow

MANIFEST = """
name: twice
sources: {web: {path: web.jsonl, where: "filter_words > 0 AND filter_2_words < 99 AND strict_words < 99"}}
prepare:
  - filter: {rules: [{gopher_quality: {min_words: 5, min_stop_words: 0, min_alpha_word_ratio: 0,
                                       min_mean_word_length: 0}}]}
  - dedup: {minhash: null, keep: ["words desc"]}
  - clean: {mask: [email]}
  - filter: {rules: [{gopher_quality: {min_words: 8, min_stop_words: 0, min_alpha_word_ratio: 0,
                                       min_mean_word_length: 0}}]}
  - filter: {rules: [{gopher_quality: {min_words: 20, min_stop_words: 0, min_alpha_word_ratio: 0,
                                       min_mean_word_length: 0}}]}
    name: strict
tokenizer: {vocab_size: 300}
mix: {tokens: 20, sequence_length: 8, validation: 0}
"""
WORDS = (
    "river silt slowly carried toward quiet seas while older stories were told "
    "again by those who had stayed behind"
)


def text(words: int) -> str:
    return " ".join((WORDS.split() * 2)[:words])


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest that filters three times, run up to its tokens."""
    folder = tmp_path_factory.mktemp("twice")
    texts = [text(3), text(6), text(10), text(10), text(30), text(25)]
    write_jsonl(
        folder / "web.jsonl", [{"text": document_text} for document_text in texts]
    )
    (folder / "twice.yaml").write_text(MANIFEST)
    session = opened(folder / "twice.yaml")
    assert run_all(session) == 0
    return folder / "twice.yaml"


def opened(manifest: Path, *overrides: str, until: str = "mix") -> Session:
    return open_beside(manifest, *overrides, until=until)


STEPS = ["filter", "dedup", "clean", "filter-2", "strict"]


def test_each_step_has_its_own_name_place_and_inputs(twice: Path) -> None:
    session = opened(twice)
    assert list(session.plan) == ["ingest", *STEPS, "tokenizer", "tokenize", "mix"]
    assert list(session.plan["strict"].inputs) == ["ingest", *STEPS[:-1]]
    assert [session.folder(name).path.parent.name for name in STEPS] == STEPS
    assert len({node.fingerprint for node in session.plan.values()}) == 9
    assert list(opened(twice, until="filter-2").plan)[-1] == "filter-2"


def test_funnel_status_and_report_distinguish_repeated_steps(twice: Path) -> None:
    session = opened(twice)
    kept = {
        "ingest": 6,
        "filter": 5,
        "dedup": 4,
        "clean": 4,
        "filter-2": 3,
        "strict": 2,
    }
    assert {row.stage: row.kept for row in gather_facts(session).funnel} == kept
    assert {
        row.stage: row.documents.kept
        for row in stage_states(session)[:6]
        if row.documents is not None
    } == kept
    page = render_report(session, None).replace("<wbr>", "")
    assert "filter-2: gopher_quality/min_words" in page
    assert "strict: gopher_quality/min_words" in page


def test_explain_shows_the_threshold_of_each_repeated_step(
    twice: Path,
) -> None:
    explained = history(opened(twice), "web.jsonl#2")
    assert [
        (verdict.stage, verdict.keep, verdict.threshold) for verdict in explained.stages
    ] == [
        ("filter", True, None),
        ("dedup", True, None),
        ("clean", True, None),
        ("filter-2", False, 8),
    ]
    assert explained.outcome == "dropped by filter-2: gopher_quality/min_words"


def test_whatif_changes_the_threshold_of_a_single_repeated_step(twice: Path) -> None:
    session = opened(twice)
    bounds = {
        rule.key: (rule.bound, rule.failing)
        for rule in thresholds(session)
        if rule.key.endswith("min_words")
    }
    assert bounds == {
        "filter.gopher_quality.min_words": (5, 1),
        "filter-2.gopher_quality.min_words": (8, 1),
        "strict.gopher_quality.min_words": (20, 1),
    }
    comparison = compare(session, opened(twice, "filter-2.gopher_quality.min_words=2"))
    assert [rule.label for rule in comparison.changed] == [
        "filter-2: gopher_quality/min_words"
    ]
    prediction = replay(comparison, 0, None)
    assert (
        prediction.now["web"].documents,
        prediction.unseen["web"].documents,
    ) == (2, 1)


def test_changed_repeated_step_rebuilds_only_later_stages(twice: Path) -> None:
    before, after = (
        opened(twice).plan,
        opened(twice, "filter-2.gopher_quality.min_words=9").plan,
    )
    assert [
        name for name in before if before[name].fingerprint != after[name].fingerprint
    ] == [
        "filter-2",
        "strict",
        "tokenizer",
        "tokenize",
        "mix",
    ]


def test_a_column_that_several_steps_measure_is_named_after_its_step(
    twice: Path,
) -> None:
    manifest = twice.parent / "wrong.yaml"
    manifest.write_text(MANIFEST.replace("filter_2_words < 99", "words < 99"))
    with pytest.raises(
        ManifestError,
        match=r"wrong\.yaml:3: .*there is no column 'words'.*filter_2_words",
    ):
        opened(manifest)
    manifest.write_text(MANIFEST.replace('"words desc"', '"filter_2_words desc"'))
    with pytest.raises(
        ManifestError, match=r"dedup\.keep.*: there is no column 'filter_2_words'"
    ):
        opened(manifest)


def test_dedup_keep_accepts_the_column_of_a_named_step() -> None:
    names = qualified(
        {"filter": ["words"], "langid": ["language"], "filter-2": ["words"]}
    )
    assert names == {
        "words": ("filter-2", "words"),
        "language": ("langid", "language"),
        "filter_words": ("filter", "words"),
        "filter_2_words": ("filter-2", "words"),
    }


def test_a_run_lists_its_steps_in_their_order(twice: Path) -> None:
    session = opened(twice)
    record = {
        "manifest": session.manifest.model_dump(mode="json", exclude_none=True),
        "stages": {name: {} for name in session.plan},
    }
    assert stages_of(record) == list(session.plan)
