"""What the benchmarks of the judges compute from; the rates and shares themselves are no tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.dataprep.bench_judges import flat_model
from benchmarks.dataprep.bench_language import accuracy, macro_f1
from benchmarks.dataprep.bench_quality import FOLDS, auc, folds
from gristmill.dataprep.judges.arpa import read_arpa
from gristmill.dataprep.judges.ngram_tables import score_texts


def test_accuracy_counts_texts_and_macro_f1_counts_languages() -> None:
    truth, found = ["en", "en", "en", "de"], ["en", "en", "de", "de"]
    assert accuracy(found, truth) == 0.75
    assert macro_f1(found, truth) == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert macro_f1(["fr"] * 4, truth) == 0.0


def test_folds_are_of_about_one_size_and_do_not_depend_on_how_many_there_are() -> None:
    sizes = np.bincount(folds(1000), minlength=FOLDS)
    assert len(sizes) == FOLDS
    assert sizes.min() > 150
    assert folds(1000)[:10].tolist() == folds(10).tolist()


def test_labels_and_scores_are_split_before_they_are_compared() -> None:
    assert auc([(True, "a"), (False, "b"), (True, "c")], np.array([0.9, 0.5, 0.4])) == 0.5


def test_the_flat_model_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.arpa"
    path.write_text(flat_model(["a b a", "b\n\na"], 3), encoding="utf-8")
    tables = read_arpa(path)
    assert (tables.order, tables.closed) == (3, True)
    assert score_texts(tables, pa.array(["a b a"]))[0].tolist() == [-10.0]  # four words of -2.5 each, all known
