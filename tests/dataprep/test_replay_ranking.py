"""Replayed `keep_top` equals a run with another share, also with earlier stages
replayed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gristmill.dataprep import whatif_thresholds
from gristmill.dataprep.documents import column_names, read_annotations, shard_names
from gristmill.dataprep.filters import filter as filter_stage
from gristmill.dataprep.quality import quality
from gristmill.dataprep.quality.whatif_keep_top import keep_top_rule
from gristmill.dataprep.whatif_thresholds import Rule, judge_shard, nearest, rules_of
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.quality import Quality
from tests.dataprep.random_models import write_classifier

SEED = 5
WORDS = "the river of and stone table under morning to letter garden with #tag 17 a-very-long-compound-word".split()
Settings = Mapping[str, Any]


def make_documents() -> list[list[tuple[str, str, str]]]:
    """Three shards of two sources; every fourth text is a copy, so that cuts go through
    equal scores.
    """
    rng = random.Random(2)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(3, 90))) for _ in range(60)]
    rows = [
        ("web" if n % 3 else "books", str(n), texts[n % 45 if n % 4 == 0 else n % 60])
        for n in range(120)
    ]
    return [rows[:50], rows[50:51], rows[51:]]


def run_stages(
    ingest: Path, out: Path, make_context: Callable, min_words: int, ranking: Settings
) -> dict[str, Path]:
    inputs = {"ingest": ingest}
    rules = {"rules": {"gopher_quality": {"min_words": min_words}}}
    filter_stage.run(inputs, rules, out / "filter", make_context(f"{out.name}-filter"))
    inputs["filter"] = out / "filter"
    classifier = write_classifier(ingest.parent, WORDS)
    config = {"classifier": classifier, "seed": SEED, **ranking}
    quality.run(inputs, config, out / "quality", make_context(f"{out.name}-quality"))
    return {**inputs, "quality": out / "quality"}


def all_rules(
    inputs: dict[str, Path],
    min_words: int,
    ranking: Settings,
    earlier_rules: dict[str, list[Rule]] | None,
) -> dict[str, list[Rule]]:
    shard = shard_names(inputs["ingest"])[0]
    sections = {
        "filter": Filter.model_validate(
            {"rules": {"gopher_quality": {"min_words": min_words}}}
        ),
        "quality": Quality.model_validate(
            {"classifier": {"model": "random.bin"}, **ranking}
        ),
    }
    columns = {stage: column_names(inputs[stage] / shard) for stage in sections}
    find = {"filter": filter_stage.rules, "quality": whatif_thresholds.rules}
    rules = {
        stage: rules_of(find[stage], stage, section, columns[stage])
        for stage, section in sections.items()
    }
    ranking_rule = keep_top_rule(
        inputs,
        "quality",
        sections["quality"],
        SEED,
        earlier_rules or rules,
        rules,
        columns["quality"],
    )
    assert ranking_rule is not None
    return {**rules, "quality": [*rules["quality"], ranking_rule]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("min_words", "ranking"),
    [
        (20, {"keep_top": 0.3}),
        (20, {"keep_top": 1.0}),
        (40, {"keep_top": 0.8}),
        (40, {"keep_top": 0.3}),
        (20, {"keep_top": 0.3, "per_source": True}),
        (40, {"keep_top": 0.5, "min_quality": 0.4}),
    ],
)
def test_replayed_share_equals_a_run(
    min_words: int,
    ranking: Settings,
    write_ingest: Callable,
    make_context: Callable,
    tmp_path: Path,
) -> None:
    ingest = write_ingest("ingest", make_documents())
    first = {"keep_top": 0.8}
    stored = run_stages(ingest, tmp_path / "stored", make_context, 20, first)
    truth = run_stages(ingest, tmp_path / "truth", make_context, min_words, ranking)
    before = all_rules(stored, 20, first, None)
    after = all_rules(stored, min_words, ranking, before)
    dropped = 0
    for shard in shard_names(ingest):
        passed: set[int] | None = None
        for stage in ("filter", "quality"):
            old, new = judge_shard(stored, shard, stage, before[stage], after[stage])
            kept = read_annotations(stored, shard, stage)["keep"].to_pylist()
            assert [kept[row] for row in old.rows] == old.keep.tolist()
            verdicts = set(new.rows[new.keep].tolist())
            passed = verdicts if passed is None else passed & verdicts
        table = read_annotations(truth, shard, "quality", ["keep", "reason"])
        assert passed == {
            row for row, keep in enumerate(table["keep"].to_pylist()) if keep
        }
        dropped += (
            table["reason"].cast(pa.string()).to_pylist().count("quality/keep_top")
        )
    assert (dropped == 0) == (ranking["keep_top"] == 1.0)


def test_samples_are_nearest_to_the_cut_of_their_group(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest("ingest", make_documents())
    share = {"keep_top": 0.5}
    stored = run_stages(ingest, tmp_path / "stored", make_context, 20, share)
    rules = all_rules(stored, 20, share, None)
    shard = shard_names(ingest)[0]
    verdicts, _ = judge_shard(
        stored, shard, "quality", rules["quality"], rules["quality"]
    )
    samples = nearest(verdicts, rules["quality"][-1], 3)
    assert max(value for _, _, value in samples["failing"]) <= min(
        value for _, _, value in samples["passing"]
    )
    scores = verdicts.columns["quality"]
    worst_kept = min(scores[verdicts.keep])
    assert min(distance for distance, _, _ in samples["passing"]) <= worst_kept - max(
        scores[~verdicts.keep]
    )
