"""Manifests of earlier versions keep the fingerprints of all their stages, so that
stores stay usable.

`fingerprints.json` has the fingerprints of the manifests below. If the meaning of a
stage's output changes, raise its version and write the file again: `python -m
tests.flows.test_fingerprints > tests/flows/fingerprints.json`.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from gristmill.flows.stages.plan import Plan, make_plan
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.loader import load_manifest
from gristmill.mixtures.schema.engine import Engine
from gristmill.mixtures.schema.prepare import ExampleStep

GOLDEN = Path(__file__).with_name("fingerprints.json")
DEMO = ROOT / "mixtures" / "demo-chat.yaml"
MODIFIED_AT = 1_700_000_000
FILES = {
    "prose/one.txt": "Some prose.",
    "prose/two.txt": "Some more prose.",
    "code/a.py": "a = 1\n",
    "web.jsonl": '{"text": "a page"}\n',
    "chat.jsonl": '{"messages": []}\n',
    "pairs.jsonl": '{"prompt": "a"}\n',
    "prompts.jsonl": '{"prompt": "a"}\n',
    "eval/set.jsonl": '{"question": "what?"}\n',
    "words.txt": "word\n",
    "tokenizer.json": "{}",
    "model/config.json": "{}",
    "given/config.json": "{}",
    "given/tokenizer.json": "{}",
    "tokens/a.bin": "tokens",
    "tasks.jsonl": '{"question": "a", "answer": "b"}\n',
    "steps.py": "def count_word(text, word): return {'magic': text.count(word)}\ndef "
    "tidy(text): return text.strip()\n",
}
EVERYTHING = """
name: everything
seed: 5
sources:
  prose: {path: "prose/*.txt", weight: 0.5, licence: PSF, max_epochs: 3}
  web: {path: web.jsonl, weight: 0.3, where: "quality >= 0.1"}
  code: {path: "code/*.py", weight: 0.2}
ingest: {max_document_bytes: 1_000_000}
prepare:
  - clean
  - licences: {allow: [MIT]}
  - langid: {keep: [en], threshold: 0.4}
  - filter: {rules: [gopher_quality, c4]}
  - dedup: {exact: true, keep: ["length desc"], against: ["eval/*.jsonl"]}
  - dedup_lines
  - dedup_substrings
  - quality: {classifier: {positive: [prose], negative: [web]}}
  - decontaminate: {against: ["eval/*.jsonl"], action: excise}
  - opt_outs: {reservations: {ai_txt: false}}
documents: {format: hf, where: "language = 'en'"}
tokenizer: {vocab_size: 512}
mix: {tokens: 20_000, sequence_length: 64, validation: 0.01, weights: {prose: 0.6, web: 0.2, code: 0.2}}
text_index:
pretrain: {steps: 9, model: {layers: 2, width: 32, heads: 2}, early_stopping: {patience: 3}}
sft:
  data: [{path: chat.jsonl}]
  steps: 4
  replay: 0.2
  distill: {teacher: pretrain, top_k: 4}
  prepare: [{filter: {rules: [bad_words]}}, dedup]
reward: {steps: 3}
dpo:
  data: [{path: pairs.jsonl, weight: 2.0}]
  steps: 5
  lora: {rank: 4}
  prepare: [{decontaminate: {against: [eval/set.jsonl]}}]
rl:
  data: [{path: prompts.jsonl}]
  rewards: [{kind: model}, {kind: length, target_tokens: 9}]
  steps: 2
evaluate: {prompts: [a], contamination: {}}
export: {}
engine: {workers: 3}
"""
OTHERS = """
name: others
sources: {a: {path: "prose/*.txt"}}
prepare: [dedup, filter, clean]
tokenizer: {vocab_size: 300}
mix: {tokens: 2000, sequence_length: 32, phases: [{end: 0.5}, {weights: {a: 1.0}}]}
pretrain: {steps: 3, model: {init_from: model}}
sft: {data: [{path: chat.jsonl}], steps: 2, distill: {teacher: model}}
reward: {steps: 2, data: [{path: pairs.jsonl}]}
dpo: {data: [{path: pairs.jsonl}], steps: 2, loss: orpo}
rl: {data: [{path: prompts.jsonl}], rewards: [{kind: model, path: model}], start_from: sft, steps: 1}
evaluate: {}
export: {dtype: bf16}
"""
SHORT = """
name: short
seed: 3
sources: {a: {path: "prose/*.txt"}, b: {path: web.jsonl}}
prepare: [dedup]
tokenizer: {path: tokenizer.json}
mix: {tokens: 2000, sequence_length: 32}
pretrain: {steps: 5}
evaluate:
export:
"""
PREFERENCES = """
name: preferences
sources: {a: {path: "prose/*.txt"}, web: {path: web.jsonl}}
prepare: [{decontaminate: {against: ["eval/*.jsonl"]}}, {quality: {classifier: {positive: [a], negative: [web]}}}]
tokenizer: {vocab_size: 300}
mix: {tokens: 2000, sequence_length: 32}
pretrain: {steps: 5}
dpo: {data: [{path: pairs.jsonl}], steps: 2, prepare: [dedup]}
rl: {data: [{path: prompts.jsonl}], rewards: [{kind: length, target_tokens: 9}], steps: 1}
export: {}
"""
ELSEWHERE = """
name: elsewhere
sources: {web: {tokens: "tokens/*.bin", format: memmap, dtype: uint16, weight: 0.5}, a: {path: "prose/*.txt"}}
model: {path: given}
mix: {tokens: 2000, sequence_length: 32}
sft: {data: [{path: chat.jsonl}], steps: 2}
export: {}
"""
OWN = """
name: own
sources: {a: {path: "prose/*.txt"}}
prepare:
  - annotate: {use: ./steps.py:count_word, with: {word: some}, max: {magic: 3}}
  - edit: {use: ./steps.py:tidy}
tokenizer: {vocab_size: 300}
"""
ASKED = """
name: asked
sources:
  a: {path: "prose/*.txt"}
  b: {generate: {parents: [a], style: summary, model: {endpoint: "http://127.0.0.1:9/v1", model: writer}}}
prepare:
  - judge: {model: {endpoint: "http://127.0.0.1:9/v1", model: judge, concurrency: 3}, min: {judge_score: 3}}
"""
MEANING = """
name: meaning
sources: {a: {path: "prose/*.txt"}}
prepare: [{dedup_semantic: {model: model, threshold: 0.95, clusters: 3}}, {cluster: {model: model, k: 8}}]
tokenizer: {vocab_size: 300}
"""
MADE = """
name: made
seed: 4
model: {path: given}
examples:
  answered:
    data: [{path: chat.jsonl}]
    model: {endpoint: "http://127.0.0.1:9/v1", model: writer, concurrency: 3}
  revised:
    data: [{path: "examples://answered"}]
    model: {endpoint: "http://127.0.0.1:9/v1", model: writer}
    revise: {principles: words.txt, rounds: 2}
  compared:
    data: [{path: prompts.jsonl}]
    model: {endpoint: "http://127.0.0.1:9/v1", model: writer, temperature: 1.0}
    per_prompt: 2
    compare: {model: {endpoint: "http://127.0.0.1:9/v1", model: judge}}
    gives: pairs
sft: {data: [{path: "examples://revised"}], steps: 2}
dpo: {data: [{path: "examples://compared"}], steps: 2}
"""
MERGED = """
name: merged
sources: {prose: {path: "prose/*.txt"}}
tokenizer: {vocab_size: 512}
mix: {tokens: 20_000, sequence_length: 64}
pretrain: {steps: 9, model: {layers: 2, width: 32, heads: 2}}
merge: {steps: [3, 6], weights: [1, 2]}
sft: {data: [{path: chat.jsonl}], steps: 2}
"""
MEMORISED = """
name: memorised
sources: {prose: {path: "prose/*.txt"}}
prepare: [{canaries: {copies: [1, 2], secrets: 1}}]
tokenizer: {vocab_size: 512}
mix: {tokens: 20_000, sequence_length: 64}
pretrain: {steps: 9, model: {layers: 2, width: 32, heads: 2}, goldfish: {k: 3}}
evaluate: {canaries: {}}
"""
DEMO_OVERRIDES = [
    "sources.docstrings.path=prose/*.txt",
    "sources.code.path=code/*.py",
    "sft.data.0.path=chat.jsonl",
    "dpo.data.0.path=pairs.jsonl",
]
"""Fixed sources for the demo, which otherwise reads files of the machine's own
Python.
"""
MANIFESTS = {
    "everything": (EVERYTHING, []),
    "others": (OTHERS, []),
    "short": (SHORT, []),
    "preferences": (PREFERENCES, []),
    "elsewhere": (ELSEWHERE, []),
    "own": (OWN, []),
    "asked": (ASKED, []),
    "meaning": (MEANING, []),
    "made": (MADE, []),
    "merged": (MERGED, []),
    "memorised": (MEMORISED, []),
    "demo": (DEMO.read_text(), DEMO_OVERRIDES),
}


def planned(folder: Path, manifest: str) -> tuple[Plan, Engine]:
    """Return the plan and the engine of a manifest over the same files in a folder."""
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, (MODIFIED_AT, MODIFIED_AT))
    text, overrides = MANIFESTS[manifest]
    file = folder / f"{manifest}.yaml"
    file.write_text(text)
    loaded = load_manifest(file, overrides)
    return make_plan(loaded), loaded.engine


def fingerprints(folder: Path, manifest: str) -> dict[str, str]:
    """Return the fingerprints of a manifest by stage."""
    return {
        name: node.fingerprint for name, node in planned(folder, manifest)[0].items()
    }


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_every_stage_of_an_earlier_manifest_keeps_its_fingerprint(
    manifest: str, tmp_path: Path
) -> None:
    assert fingerprints(tmp_path, manifest) == json.loads(GOLDEN.read_text())[manifest]


def test_manifests_of_this_file_cover_every_stage() -> None:
    names = {
        stage for stages in json.loads(GOLDEN.read_text()).values() for stage in stages
    }
    # the stage of a set of examples is named examples-NAME
    assert {name.partition("-")[0] for name in names} == set(STAGES)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(
            json.dumps(
                {name: fingerprints(Path(temporary), name) for name in MANIFESTS},
                indent=1,
            )
        )


def test_recipe_of_prepared_examples_contains_raised_step_versions(
    tmp_path: Path,
) -> None:
    (tmp_path / "chat.jsonl").write_text("{}")
    (tmp_path / "m.yaml").write_text(
        f"name: a\nmodel: {{path: {tmp_path}}}\n"
        f"sft: {{data: [{{path: {tmp_path}/chat.jsonl}}], steps: 1, prepare: [langid, filter]}}\n"
    )
    configured = STAGES["sft_prepare"].configure
    assert configured is not None
    configuration = configured(load_manifest(str(tmp_path / "m.yaml")), False)
    assert configuration is not None
    assert [step["version"] for step in configuration[0]["prepare"]] == [
        STAGES["langid"].version,
        STAGES["filter"].version,
    ]
    assert "version" not in configuration[1]["prepare"][0]


def test_steps_receive_only_their_settings_not_their_recipe(
    tmp_path: Path,
) -> None:
    """The built-in question of a judge is named in its recipe but is not one of its
    settings.
    """
    steps = [
        node
        for manifest in ("everything", "asked")
        for node in planned(tmp_path, manifest)[0].values()
        if node.settings is not None
    ]
    assert {"judge", "filter", "quality"} <= {node.stage.name for node in steps}
    for node in steps:
        assert node.settings is not None
        type(node.settings).model_validate(dict(node.config))
    (tmp_path / "m.yaml").write_text(
        f"name: a\nmodel: {{path: {tmp_path}}}\ndpo: {{data: [{{path: {tmp_path}/pairs.jsonl}}], steps: 1, prepare: "
        "[{judge_pairs: {model: {endpoint: 'http://127.0.0.1:9/v1', model: judge}}}]}\n"
    )
    configured = STAGES["dpo_prepare"].configure
    assert configured is not None
    recipe, settings = configured(load_manifest(str(tmp_path / "m.yaml")), False) or (
        {},
        {},
    )
    assert recipe["prepare"][0]["judge_pairs"]["question"]
    ExampleStep.model_validate(
        {
            key: value
            for key, value in settings["prepare"][0].items()
            if value is not None
        }
    )
