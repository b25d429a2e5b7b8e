"""The sft_data stage: shares of tokens, rejected and counted records, gates and
messages.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import ConservationError
from gristmill.dataprep.examples import prepare_examples
from gristmill.dataprep.examples.kept_examples import (
    QUARANTINED,
    PreparedCounts,
    check_records,
    set_names,
)
from gristmill.dataprep.examples.read_examples import read_set
from gristmill.mixtures.schema.posttraining import Sft
from gristmill.mixtures.schema.prepare import ExampleStep
from gristmill.tokenize.chat_template import CHAT_TEMPLATE
from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import (
    NothingToTrainError,
    TemplateMismatchError,
)
from gristmill.train.stages.sft_data import HELD_OUT, GateError, ReplayError
from tests.jsonl import write_jsonl


def write(path: Path, count: int, answer: str) -> str:
    write_jsonl(
        path,
        [{"prompt": f"q {n}", "completion": f"{answer} {n}"} for n in range(count)],
    )
    return str(path)


@pytest.fixture
def inputs_with_template(tokenizer_folder: Path, tmp_path: Path) -> Any:
    def inputs(template: str) -> dict[str, Path]:
        folder = tmp_path / "tokenizer"
        shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(template)
        return {"tokenizer": folder}

    return inputs


def test_example_whose_calls_are_left_out_is_named(
    run_stage: Any, inputs_with_template: Any, tmp_path: Path
) -> None:
    plain = (
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + "
        "'<|end|>' -}}{%- endfor -%}"
    )
    inputs = inputs_with_template(
        plain + "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    call = {"function": {"name": "add", "arguments": {"a": 3}}}
    rows = [
        [
            {"role": "user", "content": "add 3"},
            {"role": "assistant", "content": "3", **more},
        ]
        for more in ({}, {"tool_calls": [call]})
    ]
    data = tmp_path / "calls.jsonl"
    write_jsonl(data, [{"messages": messages} for messages in rows])
    config = {"data": [{"path": str(data)}], "seed": 1, "sequence_length": 64}
    with pytest.raises(
        TemplateMismatchError, match=r"1 of 2 examples[\s\S]*calls\.jsonl:2[\s\S]*'add'"
    ):
        run_stage("sft_data", inputs, config, tmp_path / "out")
    paths = [
        write(tmp_path / "good.jsonl", 4, "The file"),
        str(data),
        f"{tmp_path}/ca*",
    ]
    several = {**config, "data": [{"path": path} for path in paths]}
    with pytest.raises(TemplateMismatchError) as error:
        run_stage("sft_data", inputs, several, tmp_path / "out")
    assert [f"sft data {path}:" in str(error.value) for path in paths] == [
        False,
        True,
        True,
    ]
    tolerant_config = {**config, "data": [{"path": str(data), "max_quarantined": 0.5}]}
    summary = run_stage("sft_data", inputs, tolerant_config, tmp_path / "out")
    assert (summary["sets"][0]["used"], summary["sets"][0]["unrenderable"]) == (1, 1)


def test_cut_and_unmarked_ends_of_turn_are_distinguished(
    run_stage: Any, inputs_with_template: Any, tokenizer_folder: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "a.jsonl", 4, "The file")
    config = {"data": [{"path": data}], "seed": 1, "sequence_length": 64}
    unmarked = CHAT_TEMPLATE.replace(
        "{{- '<|end|>' -}}\n{%- endgeneration -%}",
        "{%- endgeneration -%}{{- '<|end|>' -}}",
    )
    with pytest.raises(GateError, match=r"a\.jsonl:1[\s\S]*chat template"):
        run_stage(
            "sft_data", inputs_with_template(unmarked), config, tmp_path / "unmarked"
        )
    with pytest.raises(GateError, match=r"4 .*11 tokens"):
        run_stage(
            "sft_data",
            {"tokenizer": tokenizer_folder},
            {**config, "sequence_length": 11},
            tmp_path / "cut",
        )
    lowered = {
        **config,
        "sequence_length": 11,
        "gates": {"min_end_of_turn_trained": 0.0},
    }
    summary = run_stage(
        "sft_data", {"tokenizer": tokenizer_folder}, lowered, tmp_path / "lowered"
    )
    assert (summary["end_of_turn_share"], summary["cut_answers"]) == (0.0, 4)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            GateError,
            r"a\.jsonl:1[\s\S]*special token",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{% generation %}<|user|>"
            "{{ m.content }}<|end|>{% endgeneration %}{% else %}<|assistant|>"
            "{{ m.content }}<|end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}",
            NothingToTrainError,
            "marks no answer",
        ),
        (
            "{%- for m in messages -%}{{- m.role + m.content + (messages | "
            "length) | string -}}{%- endfor -%}",
            TemplateMismatchError,
            r"4 of 4 [\s\S]*a\.jsonl:1",
        ),
    ],
    ids=["answers end with no special token", "only the user is marked", "counts"],
)
def test_template_that_cannot_be_trained_on_is_rejected(
    run_stage: Any,
    inputs_with_template: Any,
    tmp_path: Path,
    template: str,
    error: type[Exception],
    message: str,
) -> None:
    data = write(tmp_path / "a.jsonl", 4, "The file")
    config = {"data": [{"path": data}], "seed": 1, "sequence_length": 64}
    with pytest.raises(error, match=message):
        run_stage("sft_data", inputs_with_template(template), config, tmp_path / "out")


def test_weights_and_replay_are_shares_of_tokens(
    run_stage: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    small, large = (
        write(tmp_path / "small.jsonl", 10, "a"),
        write(tmp_path / "large.jsonl", 60, "b"),
    )
    config = {
        "data": [{"path": small, "weight": 1.0}, {"path": large, "weight": 3.0}],
        "replay": 0.25,
        "seed": 5,
        "reads": {"steps": 3, "global_batch_size": 4, "batch_ramp": [], "seed": 11},
    }
    summary = run_stage("sft_data", inputs, config, tmp_path)
    small_set, large_set = summary["sets"]
    assert large_set["drawn"] == 60
    assert 10 < small_set["drawn"] < 60
    assert small_set["drawn_share"] == pytest.approx(0.25, abs=0.01)
    assert summary["replay"]["share"] == pytest.approx(0.25, abs=0.02)
    packed = PackedSet(tmp_path / "data")
    assert packed.sources == ["small", "large", "replay"]
    assert (
        dict(zip(packed.sources, packed.rows_per_source, strict=True))
        == summary["rows_per_set"]
    )
    trained = LossMasks(packed).trained_per_row
    sources = packed.source_of(np.arange(packed.rows))
    assert trained[sources < 2].sum() == summary["trained_tokens"]
    assert (
        trained[sources < 2].sum()
        == small_set["drawn_tokens"] + large_set["drawn_tokens"]
    )
    assert summary["answers"] == small_set["drawn"] + large_set["drawn"]
    mask = (tmp_path / "data" / "train-00000.mask").read_bytes()
    run_stage("sft_data", inputs, config, tmp_path)
    assert (tmp_path / "data" / "train-00000.mask").read_bytes() == mask


def test_answers_to_one_prompt_are_on_one_side_of_the_holdout(
    run_stage: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "set.jsonl"
    write_jsonl(
        path,
        [
            {"prompt": f"q {n}", "completion": f"{answer} {n}"}
            for n in range(12)
            for answer in ("a", "b", "c")
        ],
    )
    config = {"data": [{"path": str(path)}], "holdout": 0.5, "seed": 5}
    (summary,) = run_stage("sft_data", inputs, config, tmp_path)["sets"]
    sides = [
        {
            piece["id"].hex()
            for piece in packed.pieces(np.arange(packed.rows)).to_pylist()
        }
        for packed in (
            PackedSet(tmp_path / "data"),
            PackedSet(tmp_path / "data" / HELD_OUT),
        )
    ]
    assert len(sides[0]) + len(sides[1]) == summary["used"] == 36
    assert len(sides[1]) == summary["held_out"]
    prompts = [
        {
            example["messages"][0]["content"]
            for example in read_set(str(path), "sft").examples
            if example["id"] in side
        }
        for side in sides
    ]
    assert not prompts[0] & prompts[1]
    assert min(map(len, prompts)) > 1
    with pytest.raises(NothingToTrainError, match=r"sft\.holdout"):
        run_stage(
            "sft_data",
            inputs,
            {**config, "data": [{"path": str(path), "limit": 1}], "holdout": 0.999},
            tmp_path,
        )


def test_every_record_is_used_dropped_or_rejected_with_its_reason(
    run_stage: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    path, events = tmp_path / "set.jsonl", list[dict[str, Any]]()
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": "q " * 60, "completion": "a"},
        {"text": "no form"},
        {"prompt": "<|end|>", "completion": "a"},
        {"prompt": "q2", "completion": "a"},
    ]
    write_jsonl(path, rows)
    config = {"data": [{"path": str(path), "max_quarantined": 0.2}]}
    (counts,) = run_stage("sft_data", inputs, config, tmp_path, emit=events.append)[
        "sets"
    ]
    assert [
        counts[key] for key in ("records", "refused", "unrenderable", "dropped", "used")
    ] == [5, 1, 1, 1, 2]
    assert any(
        event.get("message", "").startswith("set: 2 of 4 examples") for event in events
    )
    assert counts["records"] == sum(
        counts[key]
        for key in ("refused", "unrenderable", "dropped", "used", "beyond_limit")
    )
    (line,) = map(
        json.loads, (tmp_path / "data" / QUARANTINED).read_text().splitlines()
    )
    assert line["place"] == "set.jsonl:3"
    assert "text" in line["reason"]


def test_prepared_examples_are_encoded_and_dropped_ones_counted(
    run_stage: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    rows = [{"prompt": f"q {n % 3}", "completion": f"a {n % 3}"} for n in range(5)]
    for name, records in (("twice", rows), ("once", rows[:3])):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "set.jsonl", records)
    step = ExampleStep.model_validate({"dedup": {"minhash": None, "index": False}})
    data = [{"path": str(tmp_path / "twice" / "set.jsonl")}]
    (tmp_path / "work").mkdir()
    prepare_examples.run(
        {},
        {"kind": "sft", "data": data, "prepare": [step.model_dump(mode="json")]},
        tmp_path / "prepared",
        Context(tmp_path / "work", "sft_prepare", emit=lambda event: None),
    )
    prepared_inputs = {**inputs, "sft_prepare": tmp_path / "prepared"}
    (counts,) = run_stage(
        "sft_data", prepared_inputs, {"data": data}, tmp_path / "of_prepared"
    )["sets"]
    assert (counts["records"], counts["prepared_dropped"], counts["examples"]) == (
        5,
        {"exact_duplicate": 2},
        3,
    )
    run_stage(
        "sft_data",
        inputs,
        {"data": [{"path": str(tmp_path / "once" / "set.jsonl")}]},
        tmp_path / "of_once",
    )
    for file in ("train-00000.bin", "train-00000.mask", "train-00000.docs.parquet"):
        assert (tmp_path / "of_prepared" / "data" / file).read_bytes() == (
            tmp_path / "of_once" / "data" / file
        ).read_bytes()


def test_unaccounted_record_is_an_error() -> None:
    counts = PreparedCounts(
        records=9,
        refused=1,
        refused_reasons={},
        beyond_limit=2,
        prepared_dropped={"a": 1},
        quarantined=1,
    )
    check_records("sft_data: set", counts, 4)
    with pytest.raises(ConservationError, match=r"9 records .* 8 .*dropped before 1"):
        check_records("sft_data: set", replace(counts, quarantined=0), 4)


def test_replay_needs_rows_of_the_mixture_length(
    run_stage: Any, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = {
        "data": [{"path": write(tmp_path / "a.jsonl", 3, "a")}],
        "replay": 0.1,
        "sequence_length": 48,
    }
    with pytest.raises(ReplayError, match=r"32 .*sft\.sequence_length .*48"):
        run_stage("sft_data", inputs, config, tmp_path)


def test_sets_are_named_after_their_files() -> None:
    paths = [
        "python-docs://",
        "a/chats.jsonl.zst",
        "b/chats.parquet",
        "s3://bucket/folder/",
        "*.jsonl",
        "replay.json",
    ]
    assert set_names(paths, ["replay"]) == [
        "python-docs",
        "chats",
        "chats-2",
        "folder",
        "set",
        "replay-2",
    ]


def test_weights_are_given_for_all_sets_or_none() -> None:
    with pytest.raises(ValueError, match=r"b\b.* weight"):
        Sft(steps=1, data=[{"path": "a", "weight": 1.0}, {"path": "b"}])
