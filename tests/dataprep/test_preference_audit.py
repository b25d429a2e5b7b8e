"""Audit of preference pairs: duplicates, contradictions, length bias, leaks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkout import data_folder
from gristmill.dataprep.decontamination.contamination import leaks_into
from gristmill.dataprep.examples.preferences import Audit, audit, warnings_of
from gristmill.dataprep.examples.read_examples import read_set
from gristmill.mixtures.steps.decontaminate import Decontaminate


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


PAIRS = [
    pair("q", "long answer", "short"),
    pair("Q ", "Long  answer", "short"),
    pair("q", "short", "long answer"),
    pair("q2", "Same", "same "),
    pair("q3", "ab", "cd"),
]


def test_duplicates_contradictions_and_length_are_counted() -> None:
    assert audit(PAIRS) == Audit(
        pairs=5,
        prompts=3,
        duplicates=1,
        contradictions=3,
        near_identical=1,
        longer_chosen=(2 + 1 / 2) / 5,  # 2 longer, 2 shorter, and a tie
    )
    assert audit([]).longer_chosen is None


def test_only_problems_are_warned_about() -> None:
    fine = [pair(f"q{n}", "ab" * (1 + n % 2), "abc") for n in range(10)]
    assert warnings_of("set", audit(fine)) == []
    messages = warnings_of("set", audit(PAIRS, same_answers=2))
    assert [line.split(" pairs ")[1].split(" ")[0] for line in messages] == [
        "repeat",
        "have",
        "have",
        "have",
    ]
    (longer,) = warnings_of(
        "set", audit([pair(f"q{n}", "longer", "short") for n in range(10)])
    )
    assert "100%" in longer


def test_ties_are_not_a_length_bias() -> None:
    ties = [pair(f"tie {n}", "even", "odds") for n in range(98)]
    longer = [pair(f"longer {n}", "longer", "short") for n in range(80)]
    assert audit([*ties, *longer[:2]]).longer_chosen == (2 + 98 / 2) / 100
    assert warnings_of("set", audit([*ties, *longer[:2]])) == []
    assert audit([*ties[:20], *longer]).longer_chosen == (80 + 20 / 2) / 100
    assert len(warnings_of("set", audit([*ties[:20], *longer]))) == 1


@pytest.mark.skipif(
    not data_folder().exists(), reason="the real data sets are not here"
)
def test_real_set_is_audited() -> None:
    path = data_folder() / "dpo/hh_harmless_base_test.jsonl.gz"
    measures = audit(read_set(str(path), "dpo", max_quarantined=0.01).examples)
    assert (measures.pairs, measures.prompts, measures.duplicates) == (2299, 2297, 0)
    assert measures.longer_chosen == pytest.approx(0.446, abs=5e-4)


def test_leaked_evaluation_items_are_counted(tmp_path: Path) -> None:
    item = (
        "which of the seven rivers of the old kingdom carries no boats in the "
        "winter months of the year"
    )
    (tmp_path / "quiz.jsonl").write_text(
        json.dumps({"question": item}) + "\n" + json.dumps({"question": "short"})
    )
    section = Decontaminate.model_validate({"against": str(tmp_path / "quiz.jsonl")})
    texts = [
        f"Well: {item.upper()}?",
        "nothing",
        f"{item}!",
        "the seven rivers of the old kingdom",
    ]
    leaks = leaks_into(texts, section)
    assert leaks == {"quiz": {"items": 2, "leaked": 1, "texts": 2}}
    # An n-gram of many texts is ignored, unless the text holds nearly all of the item.
    part = " ".join(item.split()[:13])
    assert leaks_into([*texts, part], section)["quiz"]["texts"] == 3
    assert leaks_into([*texts, *[part] * 20], section) == leaks
    four_pairs = replace(audit([]), pairs=4)
    (warning,) = warnings_of("set", replace(four_pairs, leaks=leaks))
    for fact in (
        "set: 2 of 4 pairs",
        "quiz",
        "1 of its 2 items",
        "dpo.prepare: [decontaminate: ...]",
    ):
        assert fact in warning
    assert warnings_of("set", four_pairs) == []
