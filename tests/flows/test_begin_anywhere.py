"""Minimal manifests: each form is a complete run."""

from __future__ import annotations

import json
import random
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.checkout import ROOT
from gristmill.flows.questions.explain import history
from gristmill.flows.questions.trace import trace_step
from gristmill.flows.running.run import Runner
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.stages.plan import UnknownStageError
from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.schema.evaluation import Export
from gristmill.mixtures.schema.model import Model
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.tokenizer import load, write_tokenizer
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.reward_model import (
    RewardModel,
    save_reward_model,
    with_new_score,
)
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import (
    drawn,
    load_model,
    read_shape,
    save_model,
    stored,
)
from gristmill.train.stages.export import write_folder
from tests.jsonl import write_jsonl
from tests.tokenize.test_import_tokens import write_llmc, write_megatron

VOCAB = 320
OWN_END = 7
"""An end-of-text id of a published model that its tokenizer and template do not
name.
"""
PRETRAINED = """\
sources: {s: {path: cleaned.jsonl}}
tokenizer: {path: mistral/tokenizer.json}
mix: {tokens: 999, sequence_length: 16}
pretrain: {steps: 1, model: {init_from: mistral}}"""
UNMARKED = """\
{%- for message in messages -%}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""A model's usual chat template, without marks around the answers."""


def write_small_model(folder: Path) -> list[str]:
    """Write a model in transformers' format to `model` and its tokenizer to
    `tokenizer`; returns the tokenizer's words.
    """
    words = "red blue one two sky grass rose river stone".split()
    tokenizer = folder / "tokenizer"
    write_tokenizer(
        train(TokenizerSample({"all": [" ".join(words) * 20]}, {}), VOCAB),
        tokenizer,
        UNMARKED,
    )
    shape = shape_of(
        Model(layers=1, width=16, heads=2, kv_heads=1), load(tokenizer).vocab_size, 64
    )
    with torch.device("meta"):
        sizes = {
            name: parameter.shape for name, parameter in Llama(shape).named_parameters()
        }
    save_model(
        folder / "trained",
        shape,
        {name: drawn(shape, 3)(name, size) for name, size in sizes.items()},
    )
    write_folder(folder / "trained", tokenizer, Export(), folder / "model")
    return words


def write_small_reward_model(folder: Path) -> None:
    """Write the stage `reward`'s model before its first step, from `write_small_model`,
    to `reward-model`.
    """
    shape = read_shape(folder / "trained")
    with torch.device("meta"):
        sizes = {
            name: parameter.shape
            for name, parameter in RewardModel(shape).named_parameters()
        }
    tensor_of = with_new_score(stored(folder / "trained"), 5)
    chat = Chat(folder / "tokenizer")
    save_reward_model(
        folder / "reward-model",
        shape,
        {name: tensor_of(name, size) for name, size in sizes.items()},
        sorted(chat.stops),
        chat.pad,
    )
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "reward-model" / file).write_bytes(
            (folder / "tokenizer" / file).read_bytes()
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in transformers' format with its tokenizer, examples of all kinds, tokens
    of two tools, and documents.
    """
    folder = tmp_path_factory.mktemp("anywhere")
    words = write_small_model(folder)
    tokenizer, vocab = folder / "tokenizer", load(folder / "tokenizer").vocab_size
    rng = random.Random(1)
    texts = [" ".join(rng.choices(words, k=5)) for _ in range(24)]
    for name, rows in {
        "chats": [
            {
                "messages": [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": text[::-1]},
                ]
            }
            for text in texts
        ],
        "pairs": [
            {"prompt": text, "chosen": f"{text} yes", "rejected": f"no {number}"}
            for number, text in enumerate(texts)
        ],
        "prompts": [{"prompt": text} for text in texts],
        "cleaned": [
            {
                "id": f"doc-{number}",
                "text": f"{text}. {text}.",
                "metadata": {"url": f"https://a.b/{number}"},
            }
            for number, text in enumerate(texts)
        ],
    }.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    eos = load(tokenizer).eos
    documents = [
        [
            rng.choice([token_id for token_id in range(vocab) if token_id != eos])
            for _ in range(rng.randint(5, 60))
        ]
        for _ in range(60)
    ]
    write_llmc(folder / "web.bin", documents, eos)
    write_megatron(
        folder / "books_text_document",
        [[*tokens, eos] for tokens in documents],
        range(61),
    )
    return folder


def opened(folder: Path, text: str, until: str | None = None) -> Session:
    file = folder / "run.yaml"
    file.write_text(textwrap.dedent(text))
    return open_session(str(file), [], str(folder / "store"), until, False)


def made(session: Session) -> dict[str, dict[str, Any]]:
    """Run every stage; returns summaries by stage."""
    runner = Runner(session, lambda event: None)
    for name in session.plan:
        runner.run_stage(name)
    return {name: session.folder(name).manifest()["summary"] for name in session.plan}


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        (
            "sft: {data: [{path: chats.jsonl}], steps: 1}\nexport: {}",
            "tokenizer model sft_data sft export",
        ),
        (
            "dpo: {data: [{path: pairs.jsonl}], steps: 1}",
            "tokenizer model dpo_data reference dpo",
        ),
        ("reward: {data: [{path: pairs.jsonl}], steps: 1}", "tokenizer model reward"),
        (
            "rl: {data: [{path: prompts.jsonl}], rewards: [{kind: length, "
            "target_tokens: 9}], steps: 1}",
            "tokenizer model rl",
        ),
        ("evaluate: {}", "tokenizer model evaluate"),
        ("export: {}", "tokenizer model export"),
    ],
)
def test_manifest_with_a_given_model_plans_no_earlier_stages(
    folder: Path, text: str, stages: str
) -> None:
    session = opened(folder, f"name: tuned\nmodel: {{path: model}}\n{text}\n")
    assert list(session.plan) == stages.split()
    for name, node in session.plan.items():
        assert set(node.inputs) <= set(session.plan), name


@pytest.mark.slow
def test_manifest_can_only_fine_tune_a_given_model(folder: Path) -> None:
    """The export has the model's shape, tokenizer and template, but other weights."""
    session = opened(
        folder,
        """
        name: tuned
        model: {path: model}
        sft: {data: [{path: chats.jsonl}], steps: 2, global_batch_size: 2, optimizer: {learning_rate: 0.01}}
        export: {}
        """,
    )
    summaries = made(session)
    assert summaries["sft_data"]["sequence_length"] == 64  # the model's context length
    assert summaries["sft"]["last_loss"] < summaries["sft"]["first_loss"]
    exported = session.folder("export").data
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (exported / name).read_bytes() == (folder / "model" / name).read_bytes()
    before, after = (
        load_model(model_folder).state_dict()
        for model_folder in (folder / "model", exported)
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_given_model_is_evaluated_and_exported_unchanged(folder: Path) -> None:
    session = opened(
        folder,
        """
        name: as-it-is
        model: {path: model}
        evaluate: {prompts: [red], max_new_tokens: 4}
        export: {}
        """,
    )
    summaries = made(session)
    assert list(summaries["evaluate"]["models"]) == ["model"]
    assert summaries["export"]["model"] == "model"
    before, after = (
        load_model(model_folder).state_dict()
        for model_folder in (folder / "model", session.folder("export").data)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "section"),
    [
        ("dpo", "{data: [{path: pairs.jsonl}], steps: 1, global_batch_size: 2}"),
        ("reward", "{data: [{path: pairs.jsonl}], steps: 1, global_batch_size: 2}"),
        (
            "rl",
            "{data: [{path: prompts.jsonl}], rewards: [{kind: length, target_tokens: "
            "9}], steps: 1, "
            "global_batch_size: 4, group_size: 2, max_new_tokens: 4}",
        ),
    ],
)
def test_every_kind_of_tuning_starts_from_a_given_model(
    folder: Path, stage: str, section: str
) -> None:
    summaries = made(
        opened(folder, f"name: tuned\nmodel: {{path: model}}\n{stage}: {section}\n")
    )
    assert summaries[stage]["parameters"] == summaries["model"]["parameters"]


@pytest.mark.slow
def test_manifest_can_only_prepare_documents(folder: Path) -> None:
    """A manifest may also only read documents that another tool cleaned."""
    session = opened(
        folder,
        """
        name: prepared
        sources: {web: {path: cleaned.jsonl, id_field: id}}
        prepare: [{dedup: {exact: true}}]
        """,
    )
    assert list(session.plan) == ["ingest", "dedup"]
    assert made(session)["dedup"]["counts"]["kept"] == 24
    session = opened(
        folder, "name: read\nsources: {web: {path: cleaned.jsonl, id_field: id}}\n"
    )
    assert list(session.plan) == ["ingest"]
    first = pq.read_table(
        next(session.folder("ingest").data.glob("part-*.parquet"))
    ).to_pylist()[0]
    assert first["locator"] == "doc-0"


@pytest.mark.slow
def test_imported_tokens_are_mixed_and_traced_to_their_documents(
    folder: Path,
) -> None:
    """A mixture needs only the tokens and the file of their tokenizer, without
    documents or preparation.
    """
    session = opened(
        folder,
        """
        name: tokens
        sources:
          web: {tokens: web.bin, weight: 3}
          books: {tokens: books_text_document, where: "tokens >= 10"}
        tokenizer: {path: tokenizer/tokenizer.json}
        mix: {tokens: 1600, sequence_length: 32, validation: 0.1}
        pretrain: {model: {layers: 1, width: 16, heads: 2}, steps: 3, global_batch_size: 4}
        """,
        until="mix",
    )
    assert list(session.plan) == ["tokenizer", "import_tokens", "mix"]
    summaries = made(session)
    assert summaries["mix"]["realised"]["books"]["share"] == pytest.approx(
        0.25, abs=0.02
    )
    assert summaries["import_tokens"]["sources"]["books"]["formats"] == ["megatron"]
    complete_run = open_session(
        session.manifest_file, [], str(folder / "store"), None, False
    )
    traced_documents = trace_step(complete_run, 1).documents
    assert {traced.locator.partition("#")[0] for traced in traced_documents} <= {
        "web.bin",
        "books_text_document.bin",
    }
    first = traced_documents[0]
    document = history(complete_run, first.id, with_text=True)
    assert document.locator == first.locator
    assert document.mix is not None
    assert 1 in document.mix.steps
    assert history(complete_run, first.locator).id == first.id
    assert "".join(piece.text for piece in document.text)


@pytest.mark.slow
def test_documents_and_tokens_are_mixed_together(folder: Path) -> None:
    session = opened(
        folder,
        """
        name: both
        sources: {own: {path: cleaned.jsonl}, web: {tokens: web.bin}}
        prepare: [{dedup: {exact: true}}]
        tokenizer: {path: tokenizer/tokenizer.json}
        mix: {tokens: 320, sequence_length: 16, validation: 0.0}
        """,
    )
    assert list(session.plan) == [
        "ingest",
        "dedup",
        "tokenizer",
        "tokenize",
        "import_tokens",
        "mix",
    ]
    realised = made(session)["mix"]["realised"]
    assert {name: source["share"] for name, source in realised.items()} == {
        "own": 0.5,
        "web": 0.5,
    }
    assert history(session, "web.bin#3").source == "web"
    assert history(session, "cleaned.jsonl#3").source == "own"


MODEL = "name: a\nmodel: {path: m}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "name: a\n",
            "m.yaml:1: sources: required but absent, unless a section `model:` gives "
            "a model to start from",
        ),
        (
            "name: a\nsources: {s: {path: p}}\nsft: {data: [{path: d}]}\n",
            "m.yaml:3: sft: needs a model: a section `model: {path: FOLDER}` that "
            "gives one, or `pretrain:` that trains one; "
            "both are absent",
        ),
        (
            MODEL + "mix: {tokens: 99}\n",
            "m.yaml:3: mix: needs a section `sources:` too, which is absent",
        ),
        (
            MODEL
            + "sources: {s: {path: p}}\nmix: {tokens: 999}\npretrain: {steps: 1}\n",
            "m.yaml:2: model: gives a model to start from, but `pretrain:` trains "
            "one; to continue pre-training, remove this "
            "and set its folder as pretrain.model.init_from",
        ),
        (
            MODEL + "sft:\n  data: [{path: d}]\n  replay: 0.1\n",
            "m.yaml:5: sft.replay: refers to a pre-training of this manifest: add a "
            "section `pretrain:`, or remove it",
        ),
        (
            MODEL + "evaluate: {contamination: {}}\n",
            "m.yaml:3: evaluate.contamination: refers to a pre-training",
        ),
        (
            MODEL + "dpo: {data: [{path: d}], validate_every: 5}\n",
            "m.yaml:3: dpo.validate_every: measures the held-out rows of a mixture: "
            "it needs a section `mix:`; or remove it",
        ),
        (
            MODEL + "rl: {data: [{path: d}], rewards: [{kind: exact}], start_from: "
            "pretrain}\n",
            "m.yaml:3: rl.start_from: refers to a pre-training",
        ),
        (
            MODEL + "export: {weights: average}\n",
            "m.yaml:3: export.weights: a model that was trained elsewhere has no "
            "running mean",
        ),
        (
            "name: a\nsources: {s: {tokens: t.bin}}\n",
            "m.yaml:2: sources.s.tokens: needs a section `mix:` too, since only that "
            "reads tokens",
        ),
        (
            "name: a\nsources: {s: {tokens: t.bin}}\ntokenizer: {}\nmix: {tokens: "
            "999}\n",
            "m.yaml:2: sources.s.tokens: was encoded with a tokenizer, which gives "
            "the ids their meaning: name its file as "
            "`tokenizer: {path: tokenizer.json}`",
        ),
        (
            "name: a\nsources: {s: {tokens: t.bin}}\nprepare: [dedup]\ntokenizer: "
            "{path: t.json}\nmix: {tokens: 999}\n",
            "m.yaml:3: prepare: prepares documents, but all sources are of tokens",
        ),
        (
            "name: a\nsources: {s: {tokens: t.bin}, d: {path: p}}\nprepare: "
            "[{filter: {sources: [s]}}]\n"
            "tokenizer: {path: t.json}\nmix: {tokens: 999}\n",
            "m.yaml:3: prepare[0].filter.sources[0]: 's' is a source of tokens, "
            "which has no text; name a source",
        ),
    ],
)
def test_missing_section_is_reported_with_line_and_key(text: str, problem: str) -> None:
    with pytest.raises(ManifestError) as error:
        parse_manifest(text, "m.yaml")
    assert any(
        str(manifest_problem).startswith(problem)
        for manifest_problem in error.value.problems
    ), str(error.value)


def test_invalid_model_folder_is_rejected_before_any_work(
    folder: Path,
) -> None:
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "config.json").write_text('{"model_type": "new"}')
    (folder / "other" / "tokenizer.json").write_bytes(
        (folder / "model" / "tokenizer.json").read_bytes()
    )
    with pytest.raises(
        ManifestError, match=r"run.yaml:3: model.path: .*nowhere does not exist"
    ):
        opened(folder, "name: a\n\nmodel: {path: nowhere}\nexport: {}\n")
    with pytest.raises(
        ManifestError,
        match=r"run.yaml:2: model.path: .*model_type 'new'",
    ):
        opened(folder, "name: a\nmodel: {path: other}\nexport: {}\n")


def test_until_rejects_a_stage_before_the_first_of_the_manifest(
    folder: Path,
) -> None:
    with pytest.raises(
        UnknownStageError,
        match=r"has no stage 'ingest'.* it has tokenizer, model",
    ):
        opened(folder, "name: a\nmodel: {path: model}\nexport: {}\n", until="ingest")


def test_every_manifest_of_the_page_is_valid() -> None:
    page = ROOT / "docs" / "begin-anywhere.md"
    manifests = [
        block.partition("```")[0] for block in page.read_text().split("```yaml\n")[1:]
    ]
    names = [parse_manifest(text, "m.yaml").name for text in manifests]
    assert names == ["tuned", "as-it-is", "tokens", "read", "prepared"]


@pytest.fixture(scope="module")
def mistral(folder: Path) -> dict[str, Any]:
    """The config.json of a Mistral in the folder `mistral`, with a window of 32 tokens
    and its own end-of-text id.
    """
    shutil.copytree(folder / "model", folder / "mistral")
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 32,
    }
    config |= {"max_position_embeddings": 128, "eos_token_id": OWN_END}
    (folder / "mistral" / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.slow
def test_exported_mistral_keeps_its_end_of_text_ids(
    folder: Path, mistral: dict[str, Any]
) -> None:
    session = opened(folder, "name: again\nmodel: {path: mistral}\nexport: {}\n")
    made(session)
    exported = session.folder("export").data
    config = json.loads((exported / "config.json").read_text())
    for key in ("architectures", "model_type", "sliding_window"):
        assert config[key] == mistral[key]
    assert OWN_END not in Chat(folder / "tokenizer").stops
    assert config["eos_token_id"] == sorted(
        {OWN_END, *Chat(folder / "tokenizer").stops}
    )
    assert (
        json.loads((exported / "generation_config.json").read_text())["eos_token_id"]
        == config["eos_token_id"]
    )


@pytest.mark.parametrize("start", ["model: {path: mistral}", PRETRAINED])
@pytest.mark.parametrize(
    ("stage", "section"),
    [
        ("sft", "data: [{path: chats.jsonl}]"),
        ("reward", "data: [{path: pairs.jsonl}]"),
        ("dpo", "data: [{path: pairs.jsonl}]"),
        (
            "rl",
            "data: [{path: prompts.jsonl}], rewards: [{kind: length, target_tokens: "
            "9}]",
        ),
    ],
)
def test_tuning_beyond_the_sliding_window_is_rejected_before_any_work(
    folder: Path, mistral: dict[str, Any], start: str, stage: str, section: str
) -> None:
    text = (
        f"name: a\n{start}\n{stage}: {{{section}, steps: 1, sequence_length: {{}}}}\n"
    )
    opened(folder, text.replace("{}", "32"))
    with pytest.raises(ManifestError) as error:
        opened(folder, text.replace("{}", "33"))
    assert [problem.key for problem in error.value.problems] == [
        f"{stage}.sequence_length"
    ]
