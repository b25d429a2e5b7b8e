"""Report of masked personal data: numbers by source and kind, and examples."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.cleaning import clean
from gristmill.dataprep.cleaning.entities import NoPipelineError, check_labels
from gristmill.dataprep.cleaning.found_pii import EXAMPLES_SHOWN, PersonalData
from gristmill.dataprep.cleaning.masking import mask
from gristmill.dataprep.documents import read_documents
from gristmill.dataprep.edits import apply_edits
from gristmill.mixtures.steps.clean import Clean, Entities, Mask

ADDRESS = "jane.roe7@mail.org"
SHARDS = [
    [
        ("web", "1", f"Write to {ADDRESS} or call 212-555-2368 today."),
        ("web", "2", f"{ADDRESS}, joe@mail.org; ann@mail.org, bob@mail.org"),
        ("web", "3", "nobody here"),
    ],
    [("code", "4", f"# {ADDRESS}"), ("web", "5", "Tel. 212-555-2369")],
]
MASK = {"kinds": ["email", "phone"], "style": "tag"}


@pytest.fixture
def found(
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
) -> Callable[..., Sequence[PersonalData]]:
    """Run `clean` on some shards: (shards, settings of mask) -> what it found."""

    def run(shards: Any, settings: Any) -> Sequence[PersonalData]:
        name = f"run{len(list(tmp_path.iterdir()))}"
        inputs = {"ingest": write_ingest(f"{name}/ingest", shards)}
        config = Clean.model_validate({"mask": settings}).model_dump()
        context = make_context(f"{name}/work")
        return clean.run(inputs, config, tmp_path / name / "out", context).personal_data

    return run


def test_values_are_counted_by_source_and_kind(found: Any) -> None:
    rows = found(SHARDS, MASK)
    counts = {
        (row["source"], row["kind"]): (row["documents"], row["values"]) for row in rows
    }
    assert counts == {
        ("code", "email"): (1, 1),
        ("web", "email"): (2, 5),
        ("web", "phone"): (2, 2),
    }


def test_examples_show_shapes_between_masked_text(found: Any) -> None:
    rows = {(row["source"], row["kind"]): row for row in found(SHARDS, MASK)}
    examples = rows["web", "email"]["examples"]
    shown = {(one["before"], one["value"], one["after"]) for one in examples}
    assert shown == {
        ("Write to ", "xxxx.xxx9@xxxx.xxx", " or call <PHONE> today."),
        ("", "xxxx.xxx9@xxxx.xxx", ", <EMAIL>; "),
        ("<EMAIL>, ", "xxx@xxxx.xxx", "; <EMAIL>, "),
        (", <EMAIL>; ", "xxx@xxxx.xxx", ", <EMAIL>"),
    }
    assert all(ADDRESS not in str(row) for row in rows.values())
    unmasked = found(SHARDS, {**MASK, "show_values": True})
    assert ADDRESS in str(unmasked)
    assert "555-2368" not in str(
        [row["examples"] for row in unmasked if row["kind"] == "email"]
    )


def test_examples_do_not_depend_on_shards(found: Any) -> None:
    documents = [("web", str(n), f"mail a{n}@mail.org") for n in range(40)]
    random.Random(1).shuffle(documents)
    once = found([documents], MASK)
    assert len(once[0]["examples"]) == EXAMPLES_SHOWN
    assert found([documents[:7], documents[7:9], documents[9:]], MASK) == once


def test_quarantined_texts_have_no_values(
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(texts: Any, most: int) -> Any:
        if any("nobody" in text for text in texts.to_pylist()):
            raise ValueError("refused")
        return cap_newlines(texts, most)

    cap_newlines = clean.cap_newlines
    monkeypatch.setattr(clean, "cap_newlines", refuse)
    inputs = {"ingest": write_ingest("ingest", SHARDS)}
    config = {"mask": MASK, "max_newlines": 9, "max_quarantined": 0.5}
    summary = clean.run(inputs, config, tmp_path / "out", make_context("work"))
    assert summary.counts["quarantined"] == 1
    assert sum(row["values"] for row in summary.personal_data) == 8


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a spaCy pipeline that was taught a few names."""
    spacy = pytest.importorskip("spacy")
    from spacy.training import Example

    nlp = spacy.blank("en")
    nlp.add_pipe("tagger")  # excluded when it is loaded
    recogniser = nlp.add_pipe("ner")
    names = ["Ada Byron", "Zoë Krüger", "Kurt Maier", "Mary Hill"]
    examples = [
        Example.from_dict(
            nlp.make_doc(f"Yesterday {name} came to {place}."),
            {
                "entities": [
                    (10, 10 + len(name), "PERSON"),
                    (19 + len(name), 19 + len(name) + len(place), "GPE"),
                ],
                "tags": ["X"] * len(nlp.make_doc(f"Yesterday {name} came to {place}.")),
            },
        )
        for name in names
        for place in ("Berlin", "Oslo")
    ]
    spacy.util.fix_random_seed(1)
    optimizer = nlp.initialize(lambda: examples)
    assert {"PERSON", "GPE"} <= set(recogniser.labels)
    for _ in range(40):
        nlp.update(examples, sgd=optimizer)
    folder = tmp_path_factory.mktemp("pipeline")
    nlp.to_disk(folder)
    return str(folder)


def test_names_of_a_spacy_pipeline_are_masked(
    pipeline: str,
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
) -> None:
    texts = [
        "Yesterday Zoë Krüger came to Oslo.",
        f"Yesterday Ada Byron came to Berlin. {ADDRESS}",
    ]
    shards = [[("web", str(number), text) for number, text in enumerate(texts)]]
    inputs = {"ingest": write_ingest("ingest", shards)}
    settings = {**MASK, "entities": {"path": pipeline, "labels": ["PERSON"]}}
    config = Clean.model_validate({"mask": settings}).model_dump()
    out = tmp_path / "out"
    summary = clean.run(inputs, config, out, make_context("work"))
    shard = "part-00000.parquet"
    read = read_documents({**inputs, "clean": out}, shard, ["text"])
    assert read["text"].to_pylist() == [
        "Yesterday <PERSON> came to Oslo.",
        "Yesterday <PERSON> came to Berlin. <EMAIL>",
    ]
    assert [(row["kind"], row["values"]) for row in summary.personal_data] == [
        ("email", 1),
        ("person", 2),
    ]
    assert {one["value"] for one in summary.personal_data[1]["examples"]} == {
        "xxx xxxxxx",
        "xxx xxxxx",
    }


def test_placeholders_of_equal_names_are_equal(pipeline: str) -> None:
    options = Mask.model_validate({"kinds": [], "entities": {"path": pipeline}})
    texts = pa.array(["Yesterday Ada Byron came to Oslo."] * 2, pa.large_string())
    masked = apply_edits(texts, mask(texts, options).edits).to_pylist()
    assert masked[0] == masked[1]
    assert masked[0].startswith("Yesterday PERSON")
    assert masked[0].endswith(" came to Oslo.")


def test_unknown_labels_and_folders_are_rejected_beforehand(
    pipeline: str, tmp_path: Path
) -> None:
    check_labels(Entities.model_validate({"path": pipeline, "labels": ["GPE"]}))
    with pytest.raises(NoPipelineError, match=r"ADDRESS.*GPE, PERSON"):
        check_labels(Entities.model_validate({"path": pipeline, "labels": ["ADDRESS"]}))
    with pytest.raises(NoPipelineError):
        check_labels(Entities.model_validate({"path": str(tmp_path)}))
