"""Tasks run by lm-evaluation-harness (the library lm_eval) on gristmill's models.

Its code builds requests and solved items, filters answers and computes metrics.
Imported only where tasks are configured, since lm_eval is an extra.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

import datasets
import numpy as np
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import bits_per_byte, brier_score, mean, weighted_mean
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gristmill.core import hub
from gristmill.core.files import as_path
from gristmill.core.seeds import seeded_key
from gristmill.dataprep.user_functions import blaming, call_own, load_own, wrong
from gristmill.mixtures.base import repeated
from gristmill.mixtures.hub_paths import HUB
from gristmill.mixtures.schema.evaluation import OwnMetric, Task
from gristmill.mixtures.yaml_text import did_you_mean
from gristmill.train.eval.held_out import LARGEST_EXPONENT
from gristmill.train.eval.intervals import (
    Estimate,
    mean_with_interval,
    percentiles,
    resampled_means,
)
from gristmill.train.eval.likelihood import Request
from gristmill.train.eval.task_files import TaskError, read_task
from gristmill.train.generation.language_model import LanguageModel, TextStream
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request as Prompt
from gristmill.train.generation.scheduler import Scheduler
from gristmill.train.loop.objective import JsonObject

Aggregation = Callable[[Sequence[Any]], float]
"""Function from the items' values to a metric."""
PROMPTS_TOGETHER = 16
SAMPLES = 5
"""Generated answers that a result has."""
SAMPLE_CHARACTERS = 400
"""Characters at the end of a prompt that a sample has."""
LOCAL_GROUP = "gristmill_local"
"""Name of the group that gives tasks of lm-evaluation-harness a local data set."""
OUTPUT_TYPES = {
    "multiple_choice": "multiple_choice",
    "cloze": "loglikelihood",
    "rolling": "loglikelihood_rolling",
    "generate": "generate_until",
}
FUNCTIONS_OF_MEANS = (
    "bits_per_byte,",
    "byte_perplexity,",
    "perplexity,",
    "word_perplexity,",
)
"""Metrics that are functions of the means of the items' values."""
task_manager = cache(TaskManager)
"""Index of all tasks of lm-evaluation-harness, which takes seconds to build."""
LOADING_ERRORS = (
    AttributeError,
    DatasetsError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TemplateError,
    TypeError,
    ValueError,
)
"""Errors of a task's own code, such as a library that it lacks, and of its data set."""


def perplexity(average: Aggregation, values: Sequence[Any]) -> float:
    """Exponential of an average of negative log-likelihoods, at most that of
    LARGEST_EXPONENT.
    """
    return math.exp(min(-average(values), LARGEST_EXPONENT))


def mean_brier(pairs: Sequence[tuple[int, np.ndarray]]) -> float:
    """Brier score of items that may differ in their number of choices: pairs of right
    choice and shares.
    """
    return mean([brier_score([pair]) for pair in pairs])


def metric(name: str, aggregation: Aggregation = mean, **options: Any) -> Any:
    """Metric in a configuration of lm-evaluation-harness."""
    return {
        "metric": name,
        "aggregation": aggregation,
        "higher_is_better": True,
        **options,
    }


METRICS = {
    "multiple_choice": [
        metric("acc"),
        metric("acc_norm"),
        metric("acc_bytes"),
        metric("brier_score", mean_brier),
    ],
    "cloze": [metric("acc"), metric("perplexity", partial(perplexity, mean))],
    "rolling": [
        metric("bits_per_byte", bits_per_byte),
        metric("byte_perplexity", partial(perplexity, weighted_mean)),
        metric("word_perplexity", partial(perplexity, weighted_mean)),
    ],
    "generate": [metric("exact_match", regexes_to_ignore=[r"^\s+|\s+$"])],
}
"""Metrics of tasks in files of the user's, by kind. The perplexities of
lm-evaluation-harness overflow for an untrained model.
"""


class HarnessModel(TemplateLM):
    """A language, as lm-evaluation-harness asks a model.

    Args:
        language: the model with its tokenizer.
        is_chat: prompts are rendered by the chat template.
    """

    def __init__(self, language: LanguageModel, is_chat: bool) -> None:
        super().__init__()
        self.language = language
        self.is_chat = is_chat

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text."""
        return self.language.end

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without context."""
        return self.language.start

    @property
    def tokenizer_name(self) -> str:
        """Name in caches of requests, which are not used."""
        return ""

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text, with those that stand before one unless the chat template
        writes them.
        """
        if self.is_chat or add_special_tokens is False:
            return self.language.encode(string)
        return self.language.prompt(string)

    def apply_chat_template(
        self, chat_history: list[Any], add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation, up to the model's answer or in the middle of it."""
        text = self.language.template.text(chat_history, prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        begun = chat_history[-1]["content"].strip()
        return text[: text.rindex(begun) + len(begun)]

    def _loglikelihood_tokens(
        self, requests: list[Any], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self.language.score(
            [
                Request(tuple(context) or (self.prefix_token_id,), tuple(scored))
                for _, context, scored in requests
            ]
        )
        return [(score.logp, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the model's length."""
        windows = [
            [
                ("", *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]),
                    self.prefix_token_id,
                    self.language.length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([*chain(*windows)]))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Answers up to a stop text, the stop of a turn, or the most new tokens.

        Raises:
            ValueError: the most new tokens leave no room for a prompt.
        """
        language = self.language
        stops = language.stops if self.is_chat else frozenset({language.end})
        scheduler = Scheduler(language.model, PROMPTS_TOGETHER)
        streams: list[TextStream] = []
        for number, request in enumerate(requests):
            prompt, settings = request.args
            settings = normalize_gen_kwargs(settings)
            new_tokens = settings["max_gen_toks"]
            room = language.length - new_tokens
            if room < 1:
                raise ValueError(
                    f"answers of {new_tokens} tokens leave no room for a prompt in the "
                    f"model's {language.length} tokens; lower max_new_tokens"
                )
            ids = (self.tok_encode(prompt) or [self.prefix_token_id])[-room:]
            sampling = Sampling(
                settings.get("temperature", 0.0), settings.get("top_p", 1.0), number
            )
            scheduler.add(Prompt(tuple(ids), new_tokens, stops, sampling))
            streams.append(TextStream(language.decode, settings["until"]))
        answers = [""] * len(requests)
        while not scheduler.is_idle:
            for update in scheduler.step():
                stream = streams[update.number]
                answers[update.number] += stream.push(update.tokens)
                if stream.is_stopped:
                    scheduler.cancel(update.number)
        return [
            answer + stream.finish()
            for answer, stream in zip(answers, streams, strict=True)
        ]


class AnswerSample(TypedDict):
    """End of a prompt, the model's answer, and the reference answer or answers."""

    prompt: str
    answer: str
    target: object


@dataclass
class Result:
    """Results of a task or group.

    Attributes:
        items: number of items.
        metrics: by name, with the filter after a comma if it has one.
        per_item: values for paired comparisons, by metric.
        samples: first generated answers.
    """

    items: int
    metrics: dict[str, Estimate] = field(default_factory=dict)
    per_item: dict[str, np.ndarray] = field(default_factory=dict)
    samples: list[AnswerSample] = field(default_factory=list)

    @property
    def summary(self) -> JsonObject:
        """Results as JSON, with the metrics beside the number of items."""
        summary: JsonObject = {"items": self.items, **self.metrics}
        if self.samples:
            summary["samples"] = self.samples
        return summary


Results = dict[str, Result]
"""Results by task and group."""


@dataclass(frozen=True)
class HarnessTask:
    """An entry of `tasks`, loaded.

    Attributes:
        section: the entry.
        loaded: the tasks and groups of lm-evaluation-harness that it stands for.
        cache: folder with its data set in Arrow, removed with the task.
    """

    section: Task
    loaded: TaskDict
    cache: TemporaryDirectory[str]

    def questions(self) -> dict[str, list[str]]:
        """Texts of each task's items with their right answers, without shots."""
        return {
            name: [
                question_text(task, item)
                for _, item in task.doc_iterator(limit=self.section.limit)
            ]
            for name, task in self.loaded["tasks"].items()
        }

    def results(
        self, language: LanguageModel, seed: int, bootstrap_samples: int
    ) -> Results:
        """Results by task and group, with bootstrap intervals over items; a collective
        call if the model is sharded.
        """
        evaluation = self._evaluate(language)
        results: Results = {}
        resampled: dict[str, Any] = {}
        for name, task in self.loaded["tasks"].items():
            samples = evaluation["samples"][name]
            measured = evaluation["results"][name]
            result = results[name] = Result(measured["sample_len"])
            resampled[name] = {"sample_len": result.items}
            for key, _ in _metrics(measured):
                values, aggregate = item_values(task, key, samples)
                if aggregate is mean or key.startswith(FUNCTIONS_OF_MEANS):
                    resampled[name][key] = resampled_metric(
                        values, aggregate, seeded_key(seed, name), bootstrap_samples
                    )
                    if "perplexity" not in key:
                        result.per_item[key.removesuffix(",none")] = np.array(
                            [aggregate([value]) for value in values]
                        )
            if task.OUTPUT_TYPE == "generate_until":
                result.samples = [
                    {
                        "prompt": sample["arguments"][0][0][-SAMPLE_CHARACTERS:],
                        "answer": sample["resps"][0][0],
                        "target": sample["target"],
                    }
                    for sample in samples[: min(SAMPLES, result.items)]
                ]
        for name, group in self.loaded["groups"].items():
            resampled[name] = group.aggregate(resampled)
            results[name] = Result(resampled[name].get("sample_len", 0))
        for name, result in results.items():
            for key, value in _metrics(evaluation["results"][name]):
                estimate: Estimate = {"value": value}
                if key in resampled[name]:
                    estimate |= percentiles(resampled[name][key])
                result.metrics[key.removesuffix(",none")] = estimate
        for metric in self.section.metrics:
            name = self.section.name
            scores = own_metric(metric, evaluation["samples"][name])
            if isinstance(scores, float):
                results[name].metrics[metric.called] = {"value": scores}
            else:
                results[name].per_item[metric.called] = scores
                results[name].metrics[metric.called] = mean_with_interval(
                    scores, seed, bootstrap_samples
                )
        return results

    def _evaluate(self, language: LanguageModel) -> Any:
        """Results of lm-evaluation-harness.

        Raises:
            TaskError: the model or the chat template cannot read an item.
        """
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(DEFAULT_OTHER_SEED)
        try:
            with _alone(self.cache):
                return evaluator.evaluate(
                    HarnessModel(language, self.section.chat_template),
                    self.loaded,
                    limit=self.section.limit,
                    bootstrap_iters=0,
                    apply_chat_template=self.section.chat_template,
                    fewshot_as_multiturn=True,
                )
        except (AssertionError, ValueError) as error:
            raise TaskError(f"task {self.section.name}: {error}") from error


def load_tasks(sections: Sequence[Task]) -> list[HarnessTask]:
    """Load tasks with their items.

    Raises:
        TaskError: a task is unknown, its data set or an item is not as it needs, or two
            tasks share a name.
    """
    tasks = []
    for section in sections:
        prepared = TemporaryDirectory(prefix="gristmill-")
        with _alone(prepared):
            loaded = (
                published_task(section)
                if section.kind is None
                else own_task(section, section.kind)
            )
        for task in loaded["tasks"].values():
            default = task.get_config("num_fewshot")
            if section.num_fewshot and default == 0:
                raise TaskError(
                    f"task {section.name}: lm-evaluation-harness asks "
                    f"{task.task_name} without shots; remove num_fewshot"
                )
            task.set_config(
                "num_fewshot",
                default if section.num_fewshot is None else section.num_fewshot,
            )
        tasks.append(HarnessTask(section, loaded, prepared))
    names = [
        name
        for task in tasks
        for name in (*task.loaded["tasks"], *task.loaded["groups"])
    ]
    if twice := repeated(names):
        raise TaskError(f"two tasks are called {twice!r}; remove one")
    return tasks


def published_task(section: Task) -> TaskDict:
    """Task, group or tag of lm-evaluation-harness on a local copy of its data set."""
    name, manager = section.name, task_manager()
    entry = manager.task_index.get(name)
    if entry is None:
        raise TaskError(
            f"task {name}: lm-evaluation-harness has no task of this name"
            f"{did_you_mean(name, manager.all_tasks) or '.'} Give `kind` if the files "
            "are your own"
        )
    if (entry.cfg or {}).get("unsafe_code"):
        raise TaskError(
            f"task {name}: it runs programs that the model wrote; export the model, and "
            "run lm_eval with --confirm_run_unsafe_code on the folder"
        )
    is_hub = section.path.startswith(HUB)
    folder = hub.snapshot(section.path) if is_hub else as_path(section.path)
    if not folder.is_dir():
        raise TaskError(
            f"task {name}: {section.path} is not a folder of this machine with a data "
            "set; copy it, or give hf://datasets/NAME@COMMIT"
        )
    key = "group" if name in manager.all_groups else "task"
    members = entry.tags if name in manager.all_tags else [name]
    # A data set is read by its files alone, also if the task would generate it.
    local = {"dataset_path": str(folder), "custom_dataset": None}
    group = {
        "group": LOCAL_GROUP,
        "task": [{key: member, **local} for member in sorted(members)],
    }
    some_group = manager.task_index[manager.all_groups[0]]
    manager.task_index[LOCAL_GROUP] = replace(
        some_group, name=LOCAL_GROUP, yaml_path=None, cfg=group
    )
    try:
        loaded = manager.load([LOCAL_GROUP])
    except LOADING_ERRORS as error:
        raise TaskError(
            f"task {name}: lm-evaluation-harness cannot load it with the data set "
            f"{section.path}: {error}"
        ) from error
    del loaded["groups"][LOCAL_GROUP]
    return loaded


def own_task(section: Task, kind: str) -> TaskDict:
    """Task in files of the user's, as lm-evaluation-harness configures one."""
    items = read_task(section)
    config = {
        "task": section.name,
        "custom_dataset": lambda **_: {
            split: datasets.Dataset.from_list(rows) for split, rows in items.items()
        },
        "test_split": "asked",
        "fewshot_split": "solved",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": len(items["solved"]),
        "output_type": OUTPUT_TYPES[kind],
        "doc_to_text": "prompt",
        "doc_to_target": "target",
        "target_delimiter": section.target_delimiter,
        "fewshot_delimiter": section.fewshot_delimiter,
        "metric_list": METRICS[kind],
    }
    if kind == "multiple_choice":
        config["doc_to_choice"] = "choices"
    if kind == "generate":
        config["generation_kwargs"] = {
            "until": list(section.stop),
            "max_gen_toks": section.max_new_tokens,
            "do_sample": False,
        }
    return {"tasks": {section.name: ConfigurableTask(config=config)}, "groups": {}}


@contextmanager
def _alone(cache: TemporaryDirectory[str]) -> Iterator[None]:
    """Keep libraries off the network, their progress bars off the terminal, and data
    sets out of the user's cache, where `datasets` would not see that a file changed.
    """
    config = datasets.config
    before = config.HF_HUB_OFFLINE, config.HF_DATASETS_CACHE
    config.HF_HUB_OFFLINE, config.HF_DATASETS_CACHE = True, cache.name
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        config.HF_HUB_OFFLINE, config.HF_DATASETS_CACHE = before


def _metrics(measured: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """`METRIC,FILTER` and value of all metrics of a task's or group's results."""
    for key, value in measured.items():
        metric, _, filter_name = key.partition(",")
        if filter_name and not metric.endswith("_stderr") and np.isfinite(value):
            yield key, float(value)


def item_values(
    task: ConfigurableTask, key: str, samples: Sequence[Any]
) -> tuple[list[Any], Aggregation]:
    """Values of a metric `METRIC,FILTER` by item, and the function of them that is the
    metric.
    """
    metric, _, filter_name = key.partition(",")
    values = [
        sample[metric]
        for sample in samples
        if sample["filter"] == filter_name and metric in sample
    ]
    aggregate = task.aggregation().get(metric, mean)
    if metric == "brier_score":
        return [aggregate([value]) for value in values], mean
    return values, aggregate


def resampled_metric(
    values: Sequence[Any], aggregate: Aggregation, seed: int, bootstrap_samples: int
) -> np.ndarray:
    """Metric of bootstrap samples, computed from means: (bootstrap_samples,)."""
    columns = np.array(values, np.float64).reshape(len(values), -1)
    means = resampled_means(columns, seed, bootstrap_samples).tolist()
    return np.array([aggregate([tuple(row) if row[1:] else row[0]]) for row in means])


def own_metric(metric: OwnMetric, samples: Sequence[Any]) -> np.ndarray | float:
    """Values of a user's metric on n answered items: (n,), or one number for all.

    Raises:
        OwnCodeError: the function fails, or returns another shape or a number that is
            not finite.
    """
    function = load_own(metric, "predictions", "references")
    answers = [sample["filtered_resps"][0] for sample in samples]
    references = [sample["doc"]["target"] for sample in samples]
    returned = call_own(metric, function, answers, references)
    with blaming(metric.use):
        values = np.asarray(returned, dtype=np.float64)
    if values.shape not in ((), (len(answers),)):
        raise wrong(
            metric,
            f"returned values of shape {values.shape} for {len(answers)} items; return "
            "a number, or a list with one for each item",
        )
    invalid = np.flatnonzero(~np.isfinite(values))
    if len(invalid):
        where = f" for item {invalid[0] + 1}" if values.shape else ""
        raise wrong(
            metric, f"returned {values.flat[invalid[0]]}{where}; return finite numbers"
        )
    return values if values.shape else float(values)


def question_text(task: ConfigurableTask, item: Any) -> str:
    """Text of an item, and its right answer."""
    text, target = task.doc_to_text(item), task.doc_to_target(item)
    choices = task.doc_to_choice(item) if task.config.doc_to_choice else []
    if isinstance(text, int):  # the choices are the texts before the same answer
        text = choices[text]
    if isinstance(target, list):
        target = target[0]
    if choices and isinstance(target, int):
        target = choices[target]
    return f"{text} {target}"
