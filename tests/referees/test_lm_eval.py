"""Our scores of a model against lm-evaluation-harness on the exported folder, metric by
metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gristmill.mixtures.schema.evaluation import Export, Task
from gristmill.mixtures.schema.model import Model
from gristmill.train.eval.tasks import open_tasks
from gristmill.train.generation.language_model import with_tokenizer
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn, load_model, save_model
from gristmill.train.stages.export import write_folder
from tests.jsonl import write_jsonl
from tests.train.data_sets import write_data_set

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


PARTS = ("bio", "chem", "cyber")
QUESTIONS = [
    {
        "question": f"Which of these closes {noun}?",
        "choices": ["a door", "the end of it", "return", f"pass {noun}"],
        "answer": number % 4,
    }
    for number, noun in enumerate(["a file", "it", "the module", "a line", "a class"])
]
DATA_SETS: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {
    "hellaswag": {
        "default": {
            split: [
                {
                    "activity_label": "Closing",
                    "ctx_a": f"{text} a file.",
                    "ctx_b": "then one",
                    "endings": ["goes on", "returns the text of it", "closes", "?"],
                    "label": str(number),
                }
                for number, text in enumerate(texts)
            ]
            for split, texts in (
                ("train", ["One opens", "Two read", "A name ends"]),
                ("validation", ["They write", "It is", "A line ends"]),
            )
        }
    },
    "lambada_openai": {
        "default": {
            "test": [{"text": f"{item['q'].strip()} it"} for item in CHOICES[:3]]
        }
    },
    "wikitext": {
        "wikitext-2-raw-v1": {
            split: [{"page": item["text"]} for item in TEXTS]
            for split in ("train", "validation", "test")
        }
    },
    "gsm8k": {
        "main": {
            split: [
                {"question": item["question"], "answer": f"It is {k}. #### {k}"}
                for k, item in enumerate(QUESTIONS[:2])
            ]
            for split in ("train", "test")
        }
    },
    "ai2_arc": {
        config: {
            split: [
                {
                    "question": item["question"],
                    "choices": {"text": item["choices"], "label": list("ABCD")},
                    "answerKey": "ABCD"[item["answer"]],
                }
                for item in QUESTIONS
            ]
            for split in ("train", "validation", "test")
        }
        for config in ("ARC-Easy", "ARC-Challenge")
    },
    "winogrande": {
        "winogrande_xl": {
            split: [
                {
                    "sentence": f"The text of {noun} is longer, so _ is read.",
                    "option1": "it",
                    "option2": noun,
                    "answer": str(1 + number % 2),
                }
                for number, noun in enumerate(["a module", "a line", "a file"])
            ]
            for split in ("train", "validation")
        }
    },
    "wmdp": {
        f"wmdp-{part}": {"test": QUESTIONS[: 3 + number]}
        for number, part in enumerate(PARTS)
    },
}
"""Data set of a task -> configuration -> split -> rows."""


def export_model(folder: Path, length: int) -> Path:
    """A small model with a small tokenizer, as the stage `export` writes them."""
    from gristmill.tokenize.encoding.bpe import train
    from gristmill.tokenize.encoding.tokenizer import write_tokenizer
    from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
    from gristmill.train.models.transformer import Llama

    texts = [item["text"] for item in TEXTS] + [item["q"] for item in CHOICES]
    write_tokenizer(
        train(TokenizerSample({"all": texts}, {}), 300), folder / "tokenizer"
    )
    shape = shape_of(
        Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48), 300, length
    )
    tensor_of = drawn(shape, 3)
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
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Models by their length."""
    return cache(
        lambda length: export_model(tmp_path_factory.mktemp("exported"), length)
    )


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        folder = str(tmp_path_factory.mktemp("cache"))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
        yield


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the published tasks' data sets."""
    folder = tmp_path_factory.mktemp("data")
    return {
        name: write_data_set(folder / name, configs)
        for name, configs in DATA_SETS.items()
    }


@pytest.fixture(scope="module")
def published(
    data_sets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """lm_eval's tasks, with groups `their_NAME` of those on the data sets."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("groups")
    for name, data in data_sets.items():
        members = {
            "ai2_arc": [{"task": "arc_challenge"}, {"task": "arc_easy"}],
            "wmdp": [{"group": "wmdp"}],
        }.get(name, [{"task": name}])
        tasks = [{**member, "dataset_path": str(data)} for member in members]
        write_task(folder, {"group": f"their_{name}", "task": tasks})
    return TaskManager(include_path=str(folder))


def write_task(folder: Path, config: dict[str, Any]) -> None:
    path = folder / f"{config.get('group', config['task'])}.yaml"
    path.write_text(yaml.safe_dump(config))


def their_results(
    folder: Path, name: str, task_manager: Any, **settings: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics of lm_eval on an exported folder by task and group, and its samples."""
    import lm_eval

    evaluation = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=[name],
        task_manager=task_manager,
        batch_size=2,
        device="cpu",
        bootstrap_iters=0,
        **settings,
    )
    assert evaluation is not None
    metrics = {
        name: {
            key.removesuffix(",none"): value
            for key, value in values.items()
            if "," in key and "_stderr," not in key
        }
        for name, values in evaluation["results"].items()
    }
    return metrics, evaluation["samples"]


def our_results(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Results of gristmill on the same folder, by task and group."""
    (task,) = open_tasks([Task.model_validate(settings)])
    return task.results(with_tokenizer(load_model(folder), folder), 0, 10)


def assert_equal_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    theirs = {name: metrics for name, metrics in theirs.items() if metrics}
    assert list(ours) == list(theirs)
    for name, metrics in theirs.items():
        values = {
            metric: estimate["value"] for metric, estimate in ours[name].metrics.items()
        }
        assert values == pytest.approx(metrics, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", ["multiple_choice", "cloze", "shots", "rolling"])
def test_tasks_in_own_files_have_the_values_of_lm_eval(
    kind: str, chat: bool, exported: Callable[[int], Path], tmp_path: Path
) -> None:
    from lm_eval.tasks import TaskManager

    if kind == "rolling" and chat:
        pytest.skip("a whole text is asked without a chat template")
    items = {"multiple_choice": CHOICES, "rolling": TEXTS}.get(kind, CLOZES)
    write_jsonl(tmp_path / "items.jsonl", items)
    write_jsonl(tmp_path / "solved.jsonl", SOLVED)
    files = {"test": f"{tmp_path}/items.jsonl"}
    theirs = {
        "task": "t",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    ours = {"name": "t", "path": f"{tmp_path}/items.jsonl", "prompt": "q"}
    if kind == "multiple_choice":
        theirs |= {
            "output_type": "multiple_choice",
            "doc_to_choice": "options",
            "doc_to_target": "gold",
        }
        ours |= {"kind": kind, "choices": "options", "answer": "gold"}
        metrics = ["acc", "acc_norm", "acc_bytes", "brier_score"]
    elif kind == "rolling":
        theirs |= {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
        }
        ours |= {"kind": kind, "prompt": "text"}
        metrics = ["bits_per_byte", "byte_perplexity", "word_perplexity"]
    else:
        theirs |= {"output_type": "loglikelihood", "doc_to_target": "{{a}}"}
        ours |= {"kind": "cloze", "answer": "a"}
        metrics = ["perplexity", "acc"]
    if kind == "shots":
        files["train"] = f"{tmp_path}/solved.jsonl"
        theirs |= {
            "fewshot_split": "train",
            "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": 2,
        }
        ours |= {"num_fewshot": 2, "fewshot_path": f"{tmp_path}/solved.jsonl"}
    theirs["metric_list"] = [{"metric": metric} for metric in metrics]
    (tmp_path / "theirs").mkdir()
    write_task(tmp_path / "theirs", theirs)
    tasks = TaskManager(include_path=str(tmp_path / "theirs"), include_defaults=False)
    folder = exported(LENGTH)
    assert_equal_metrics(
        our_results(folder, {**ours, "chat_template": chat}),
        their_results(folder, "t", tasks, apply_chat_template=chat)[0],
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("hellaswag", {}),
        ("hellaswag", {"num_fewshot": 1, "limit": 2}),
        ("hellaswag", {"num_fewshot": 2, "chat_template": True}),
        ("lambada_openai", {}),
        ("wikitext", {}),
        ("gsm8k", {"num_fewshot": 1}),
        ("gsm8k", {"num_fewshot": 1, "chat_template": True}),
        ("ai2_arc", {"num_fewshot": 1}),
        ("winogrande", {}),
        ("wmdp", {}),
        ("wmdp", {"chat_template": True}),
    ],
)
def test_published_tasks_have_the_values_of_lm_eval(
    name: str,
    settings: dict[str, Any],
    exported: Callable[[int], Path],
    data_sets: dict[str, Path],
    published: Any,
) -> None:
    folder = exported(320 if name == "gsm8k" else LENGTH)
    ours = our_results(folder, {"name": name, "path": str(data_sets[name]), **settings})
    theirs, samples = their_results(
        folder,
        f"their_{name}",
        published,
        num_fewshot=settings.get("num_fewshot"),
        limit=settings.get("limit"),
        apply_chat_template=settings.get("chat_template", False),
    )
    assert_equal_metrics(ours, theirs)
    if name == "gsm8k":
        answers = [sample["resps"][0][0] for sample in samples["gsm8k"]]
        assert [sample["answer"] for sample in ours["gsm8k"].samples] == answers[:2]
        assert any(answers)
