"""Editing stages apply in manifest order, whatever their names, in tokens as in
`explain`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gristmill.core.files import read_json, write_json
from gristmill.core.stage_context import read_inputs
from gristmill.dataprep.documents import read_table, shard_names
from gristmill.flows.questions.explain import explain_row
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.what_changed import differences
from gristmill.flows.running.execute import run_stage
from gristmill.flows.running.run import Runner
from gristmill.flows.running.session import Session, open_session
from gristmill.tokenize.encoding.encode import docs_name, tokens_name
from gristmill.tokenize.encoding.tokenizer import load
from tests.flows.conftest import Silent
from tests.jsonl import write_jsonl

ORDERS = int(os.environ.get("GRISTMILL_TEST_ORDERS", "5"))
ENGLISH = """the of and to in that have with be was for on as by at from this which are not but were their river
window garden letter machine teacher evening village story winter summer music history ocean market bridge""".split()
EXTRA = "quartz zephyr lantern marble copper saffron velvet timber harbour cinder pepper walnut".split()


def words(random_: random.Random, vocabulary: list[str], number: int) -> str:
    return " ".join(random_.choices(vocabulary, k=number))


def write_project(folder: Path, random_: random.Random) -> list[str]:
    """Write documents whose passages several editing stages change, and return the
    evaluation items.
    """
    items = [words(random_, EXTRA + ENGLISH, 14) for _ in range(6)]
    boilerplate = [words(random_, ENGLISH, 7) for _ in range(3)]
    passages = [
        f"{words(random_, ENGLISH, 9)} write to someone@mail{n}.org and "
        f"{words(random_, ENGLISH, 9)}"
        for n in range(3)
    ]
    # Passages of two documents span an item and a line of boilerplate, so that edits
    # would overlap.
    tangled = [
        f"{words(random_, ENGLISH, 6)} {item} {words(random_, ENGLISH, 6)}\n\n\n{line}"
        for item, line in zip(items, itertools.cycle(boilerplate), strict=False)
    ]
    lines = []
    for number in range(40):
        parts = [words(random_, ENGLISH, random_.randint(8, 20)) for _ in range(6)]
        parts += random_.sample(boilerplate, 1)
        parts += [
            f"{words(random_, ENGLISH, 4)} {passage}"
            for passage in random_.sample(passages, random_.randint(0, 2))
        ]
        parts += [tangled[number % len(tangled)]] if number < 2 * len(tangled) else []
        random_.shuffle(parts)
        lines.append(json.dumps({"text": random_.choice(["\n", "\n\n\n"]).join(parts)}))
    (folder / "web.jsonl").write_text("\n".join(lines), encoding="utf-8")
    write_jsonl(folder / "items.jsonl", [{"question": item} for item in items])
    return items


EDITING: dict[str, dict[str, Any]] = {
    "clean": {"max_newlines": 1, "mask": {"kinds": ["email"], "style": "tag"}},
    "dedup_lines": {"min_words": 5},
    "dedup_substrings": {"min_words": 8, "certain_words": 10},
    "decontaminate": {
        "against": "items.jsonl",
        "ngram": 5,
        "max_document_frequency": 1000,
        "action": "excise",
        "margin_characters": 12,
        "min_left_words": 0,
    },
}


def write_manifest(folder: Path, order: list[str]) -> str:
    manifest = {
        "name": "edits",
        "sources": {"web": {"path": "web.jsonl"}},
        "ingest": {"shard_bytes": 4000},
        "prepare": [{name: EDITING[name]} for name in order],
        "tokenizer": {"vocab_size": 400},
    }
    path = folder / f"{'-'.join(order)}.yaml"
    path.write_text(yaml.safe_dump(manifest, sort_keys=False))
    return str(path)


def run_here(session: Session) -> None:
    """Run all stages in this process, each from its `stage.json` alone."""
    runner = Runner(session, Silent())
    for name, node in session.plan.items():
        folder = runner.folder(name)
        if folder.state() != "committed":
            folder.begin(runner.describe(node))
            summary = run_stage(folder.path, read_json(folder.path / "stage.json"))
            folder.commit({**runner.header(node), "started": 0.0}, summary)


def edited_one_after_another(
    inputs: Mapping[str, Path], order: list[str], shard: str
) -> list[tuple[bytes, str | None]]:
    """Return the ids of a shard with the texts after plain sequential edits; None if a
    stage dropped it.
    """
    documents = read_table(inputs["ingest"] / shard, ["id", "text"]).to_pylist()
    texts: list[bytes | None] = [document["text"].encode() for document in documents]
    for stage in order:
        for row, verdict in enumerate(read_table(inputs[stage] / shard).to_pylist()):
            text = texts[row]
            if text is None or not verdict["keep"]:
                texts[row] = None
                continue
            for edit in reversed(verdict["edits"] or []):
                text = (
                    text[: edit["begin"]] + edit["text"].encode() + text[edit["end"] :]
                )
            texts[row] = text
    return [
        (document["id"], None if text is None else text.decode())
        for document, text in zip(documents, texts, strict=True)
    ]


def tokens_as_text(inputs: Mapping[str, Path], shard: str) -> dict[bytes, str]:
    tokenizer = load(inputs["tokenizer"])
    tokens = np.fromfile(inputs["tokenize"] / tokens_name(shard), "<u2")
    return {
        row["id"]: tokenizer.decode(
            tokens[row["offset"] : row["offset"] + row["tokens"]].tolist()
        )
        for row in read_table(inputs["tokenize"] / docs_name(shard)).to_pylist()
    }


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.slow] if seed > 1 else [])
        for seed in range(ORDERS)
    ],
)
def test_tokens_explain_and_reference_agree_on_text_for_any_stage_order(
    tmp_path: Path, seed: int
) -> None:
    random_ = random.Random(seed)
    items = write_project(tmp_path, random_)
    order = sorted(EDITING, key=lambda _: random_.random())
    if seed == 0:
        order = ["dedup_substrings", "dedup_lines", "decontaminate", "clean"]
    print(f"seed {seed}: {', '.join(order)}")
    session = open_session(
        write_manifest(tmp_path, order), [], str(tmp_path / "store"), "tokenize"
    )
    run_here(session)
    inputs = committed_inputs(session)
    recipes = {name: node.recipe for name, node in session.plan.items()}
    edit_counts = dict.fromkeys(order, 0)
    for shard in shard_names(inputs["ingest"]):
        decoded = tokens_as_text(inputs, shard)
        expected = edited_one_after_another(inputs, order, shard)
        assert decoded == {
            document_id: text for document_id, text in expected if text is not None
        }
        explained = [
            explain_row(recipes, (inputs, shard, row)) for row in range(len(expected))
        ]
        for explanation, (document_id, text) in zip(explained, expected, strict=True):
            assert [verdict.stage for verdict in explanation.stages] == order[
                : len(explanation.stages)
            ]
            for verdict in explanation.stages:
                edit_counts[verdict.stage] += verdict.edits is not None
            if text is not None:
                assert (explanation.id, explanation.characters) == (
                    document_id.hex(),
                    len(text),
                )
                assert text.startswith(explanation.excerpt)
        assert not [
            item for item in items for text in decoded.values() if item in text
        ], "items are left in the tokens"
        assert not [text for text in decoded.values() if "@" in text], (
            "addresses are left in the tokens"
        )
    assert min(edit_counts.values()) > 0, (
        f"{edit_counts}: a stage had nothing to edit, so that its order was not tested"
    )


def test_the_order_of_inputs_is_a_list_in_the_records_and_survives_sorted_keys(
    tmp_path: Path,
) -> None:
    (tmp_path / "web.jsonl").write_text('{"text": "one two three"}\n')
    (tmp_path / "items.jsonl").write_text(
        '{"question": "one two three four five six seven eight"}\n'
    )
    manifest = write_manifest(tmp_path, ["dedup_substrings", "decontaminate", "clean"])
    session = open_session(manifest, [], str(tmp_path / "store"), "tokenize")
    description = Runner(session, Silent()).describe(session.plan["tokenize"])
    stages = ["ingest", "dedup_substrings", "decontaminate", "clean", "tokenizer"]
    write_json(tmp_path / "stage.json", description)
    written = read_json(tmp_path / "stage.json")
    assert list(read_inputs(written)) == stages
    assert [entry["stage"] for entry in written["input_fingerprints"]] == stages
    assert written["edits"] == ["dedup_substrings", "decontaminate", "clean"]


def test_changed_order_of_edits_is_reported(tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_text('{"text": "one two three"}\n')
    (tmp_path / "items.jsonl").write_text(
        '{"question": "one two three four five six seven eight"}\n'
    )
    plan = open_session(
        write_manifest(tmp_path, ["dedup_substrings", "decontaminate"]),
        [],
        "nowhere",
        "tokenize",
    ).plan
    assert plan["tokenize"].edits == ("dedup_substrings", "decontaminate")
    node = plan["tokenize"]
    inputs = [
        {"stage": name, "fingerprint": fingerprint}
        for name, fingerprint in node.inputs.items()
    ]
    record = {
        "recipe": node.recipe,
        "version": node.stage.version,
        "input_fingerprints": inputs,
    }
    assert differences(record, node)["input"] == [
        "edits are applied in the order dedup_substrings, decontaminate"
    ]
    same = {**record, "edits": list(node.edits)}
    assert not any(differences(same, node).values())
    assert not any(differences(record, replace(node, edits=("clean",))).values())
