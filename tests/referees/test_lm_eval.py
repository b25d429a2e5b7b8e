"""Our scores of a model against lm-evaluation-harness on the exported folder, metric by
metric.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.mixtures.schema.evaluation import Export, Task
from gristmill.mixtures.schema.model import Model
from gristmill.train.eval.answering import answer_task, open_reader
from gristmill.train.eval.tasks import read_task
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn, load_model, save_model
from gristmill.train.stages.export import write_folder
from tests.train.jsonl import write_jsonl

# Importing it takes seconds, which collection need not spend.
pytestmark = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm_eval is not installed"
)

LENGTH = 32
# Their Brier score needs the same number of choices in every item.
CHOICES = [
    {
        "q": "Return the text of",
        "options": ["a module", "it", "the whole of the source file"],
        "gold": 2,
    },
    {
        "q": "def close(self):",
        "options": ["pass", "return self.close()", "None"],
        "gold": 0,
    },
    {
        "q": "A name that ends in a blank ",
        "options": ["and goes on", "ééé", "?"],
        "gold": 1,
    },
    {
        "q": "one two three four five six seven eight nine ten eleven twelve "
        "thirteen fourteen fifteen " * 2,
        "options": ["sixteen", "a", "b"],
        "gold": 1,
    },
]
TEXTS = [
    {"text": "Short."},
    {"text": "Lines of text that is longer than the model can read at once. " * 6},
    {"text": "def function(value):\n    return value + 1\n"},
]
CLOZES = [
    {"q": "Return the text of", "a": " a module"},
    {"q": "A name that ends in a blank ", "a": "and goes on"},
    {"q": "def close(self):\n    ", "a": "pass"},
    {"q": "one two three", "a": "four"},
]
SOLVED = [
    {"q": "first", "a": " one"},
    {"q": "second ", "a": "two"},
    {"q": "third", "a": "three"},
]
CLOZE_METRICS = ("perplexity", "acc")
METRICS = ("acc", "acc_norm", "acc_bytes", "brier_score")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a small tokenizer, as the stage `export` writes them."""
    from gristmill.tokenize.encoding.bpe import train
    from gristmill.tokenize.encoding.tokenizer import write_tokenizer
    from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

    folder = tmp_path_factory.mktemp("exported")
    texts = [item["text"] for item in TEXTS] + [item["q"] for item in CHOICES]
    write_tokenizer(
        train(TokenizerSample({"all": texts}, {}), 300), folder / "tokenizer"
    )
    shape = shape_of(
        Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48), 300, LENGTH
    )
    tensor_of = drawn(shape, 3)
    from gristmill.train.models.transformer import Llama

    with torch.device("meta"):
        names = {
            name: parameter.shape for name, parameter in Llama(shape).named_parameters()
        }
    save_model(
        folder / "trained",
        shape,
        {
            name: tensor_of(name, size) * (8.0 if len(size) > 1 else 1.0)
            for name, size in names.items()
        },
    )
    write_folder(
        folder / "trained", folder / "tokenizer", Export(dtype="fp32"), folder / "out"
    )
    return folder / "out"


@pytest.fixture(scope="module")
def their_results(
    exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Results of lm-evaluation-harness, offline, without bootstrap."""
    patch = pytest.MonkeyPatch()
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        patch.setenv(name, "1")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("tasks")
    for name, items in (
        ("choices", CHOICES),
        ("texts", TEXTS),
        ("clozes", CLOZES),
        ("solved", SOLVED),
    ):
        write_jsonl(folder / f"{name}.jsonl", items)
    (folder / "choices.yaml").write_text(f"""
task: gristmill_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: options
doc_to_target: gold
metric_list: [{", ".join(f"{{metric: {name}}}" for name in METRICS)}]
metadata: {{version: 1.0}}
""")
    (folder / "texts.yaml").write_text(f"""
task: gristmill_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{{metric: bits_per_byte}}, {{metric: byte_perplexity}}, {{metric: word_perplexity}}]
metadata: {{version: 1.0}}
""")
    for name, shots in (("cloze", 0), ("shots", 2)):
        (folder / f"{name}.yaml").write_text(f"""
task: gristmill_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/clozes.jsonl, train: {folder}/solved.jsonl}}}}
test_split: test
fewshot_split: train
fewshot_config: {{sampler: first_n}}
num_fewshot: {shots}
output_type: loglikelihood
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
metadata: {{version: 1.0}}
""")
    patch.setenv("HF_HOME", str(folder / "cache"))
    model = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(exported),
        batch_size=2,
        max_length=LENGTH,
    )
    results: dict[str, Any] = {}
    for is_chat, tasks in (
        (False, ("choices", "texts", "cloze", "shots")),
        (True, ("choices", "cloze", "shots")),
    ):
        evaluation = lm_eval.simple_evaluate(
            model=model,
            tasks=[f"gristmill_{task}" for task in tasks],
            bootstrap_iters=0,
            apply_chat_template=is_chat,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        )
        results |= {
            f"{name}{' chat' if is_chat else ''}": values
            for name, values in evaluation["results"].items()
        }
    patch.undo()
    return results


@pytest.fixture(scope="module")
def our_summary(
    exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    reader = open_reader(load_model(exported), exported)
    folder = tmp_path_factory.mktemp("ours")

    def ask(settings: dict[str, Any]) -> dict[str, Any]:
        items = settings.pop("items")
        if examples := settings.pop("solved", None):
            write_jsonl(folder / "solved.jsonl", examples)
            settings |= {"num_fewshot": 2, "fewshot_path": str(folder / "solved.jsonl")}
        path = folder / f"{settings['kind']}.jsonl"
        write_jsonl(path, items)
        task = Task.model_validate({"name": "t", "path": str(path), **settings})
        return answer_task(reader, task, read_task(task), 0, 10).summary

    return ask


@pytest.mark.parametrize("chat", [False, True])
def test_multiple_choice_scores_equal_those_of_lm_eval(
    their_results: dict[str, Any],
    our_summary: Callable[[dict[str, Any]], dict[str, Any]],
    chat: bool,
) -> None:
    summary = our_summary(
        {
            "kind": "multiple_choice",
            "prompt": "q",
            "choices": "options",
            "answer": "gold",
            "items": CHOICES,
            "chat_template": chat,
        }
    )
    for name in METRICS:
        our_value = summary[name.removesuffix("_score")]["value"]
        their_value = their_results[f"gristmill_choices{' chat' if chat else ''}"][
            f"{name},none"
        ]
        assert our_value == pytest.approx(their_value, abs=1e-6), name


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("solved", [[], SOLVED])
def test_cloze_perplexities_equal_those_of_lm_eval(
    their_results: dict[str, Any],
    our_summary: Callable[[dict[str, Any]], dict[str, Any]],
    chat: bool,
    solved: list[dict[str, str]],
) -> None:
    summary = our_summary(
        {
            "kind": "cloze",
            "prompt": "q",
            "answer": "a",
            "items": CLOZES,
            "solved": solved,
            "chat_template": chat,
        }
    )
    their_values = their_results[
        f"gristmill_{'shots' if solved else 'cloze'}{' chat' if chat else ''}"
    ]
    for name in CLOZE_METRICS:
        assert summary[name]["value"] == pytest.approx(
            their_values[f"{name},none"], rel=1e-5
        ), name


def test_rolling_scores_equal_those_of_lm_eval_beyond_the_context(
    their_results: dict[str, Any],
    our_summary: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    summary = our_summary({"kind": "rolling", "prompt": "text", "items": TEXTS})
    for name in ("bits_per_byte", "byte_perplexity", "word_perplexity"):
        assert summary[name]["value"] == pytest.approx(
            their_results["gristmill_texts"][f"{name},none"], rel=1e-6
        ), name
