"""Stage `evaluate`: measures all models of the run on the same held-out rows,
preferences, tasks and prompts.

Output: `evaluation.json`: per model its metrics per source, per task and per suite,
reward accuracy on held-out pairs (only of the stage `dpo`), and samples; paired
differences per task between models; and task items that occur in the training set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Required, TypedDict

import torch

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.cleaning.canary_texts import Canary, draw_canaries
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import CONTINUING
from gristmill.mixtures.schema.evaluation import Evaluate
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.mixtures.steps.canaries import Canaries
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.distributed.process_groups import make_deterministic
from gristmill.train.eval.canaries import Memorised, count_lines, measure_canaries
from gristmill.train.eval.held_out import (
    read_token_bytes,
    score_documents,
    source_metrics,
)
from gristmill.train.eval.intervals import (
    paired_difference,
)
from gristmill.train.eval.leaked_items import effect, item_coverage
from gristmill.train.eval.masked_tokens import hidden_token_metrics
from gristmill.train.eval.suites import answer_suites, read_suite
from gristmill.train.eval.tasks import answer_tasks, open_tasks
from gristmill.train.generation.language_model import LanguageModel, with_tokenizer
from gristmill.train.generation.scheduler import generate
from gristmill.train.loop.objective import JsonObject
from gristmill.train.loop.rows_read import READS, RowsRead, rows_read
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import load_model
from gristmill.train.stages.stage_inputs import MODEL, MODELS, Inputs

if TYPE_CHECKING:
    from gristmill.train.eval.harness import Results

INSERTED = "inserted"
"""Config key for the settings of the step `canaries`."""
Grouped = Mapping[str, Mapping[str, object]]
"""Metrics of each source, task or suite."""


class ModelEvaluation(TypedDict, total=False):
    """Metrics of a model.

    Attributes:
        sources: of held-out rows.
        tasks, suites: metrics of each task and suite.
        canaries: memorised secrets, by number of copies.
        samples: completions of the section's prompts.
    """

    sources: Required[Grouped]
    tasks: Required[Grouped]
    suites: Grouped
    canaries: list[Memorised]
    samples: list[dict[str, str]]


class Evaluation(TypedDict, total=False):
    """Content of `evaluation.json`.

    Attributes:
        models: metrics of each model, in the order of the stages.
        differences: paired differences of tasks between models.
        contamination: effect of leaked items, by model and task.
    """

    models: Required[dict[str, ModelEvaluation]]
    differences: Required[list[JsonObject]]
    contamination: Grouped


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> Evaluation:
    """Measure and sample all models; one plain process. Returns the evaluation without
    generated texts.
    """
    section = Evaluate.model_validate(
        {key: config[key] for key in config.keys() - {READS, INSERTED}}
    )
    make_deterministic(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed = PackedSet(inputs["mix"]) if "mix" in inputs else None
    trained = None
    if packed is not None and READS in config:
        trained = rows_read(
            packed, Pretrain.model_validate(config[READS]), inputs["pretrain"]
        )
    tokenizer = inputs["tokenizer"]
    tasks = open_tasks(section.tasks)
    suites = {str(suite.suite): read_suite(suite) for suite in section.suites}
    inserted, lines = find_canaries(config, trained, tokenizer)
    names = [name for name in MODELS if name in inputs]
    models: dict[str, ModelEvaluation] = {}
    answered: dict[str, Results] = {}
    for number, name in enumerate(names):
        model = load_model(
            inputs[name] / MODEL, str(device), runs_own_code=True, kind=None
        )
        sources = measure_sources(model, packed, tokenizer, section)
        models[name] = {"sources": sources, "tasks": {}, "samples": []}
        answered[name] = {}
        # manifests ask for no other measurement of encoders
        if model.shape.kind == "decoder":
            language = with_tokenizer(model, tokenizer)
            answered[name] = answer_tasks(language, section, tasks)
            models[name] |= {
                "tasks": {
                    task: result.summary for task, result in answered[name].items()
                },
                "suites": answer_suites(language, section, suites),
                "samples": sample(language, section, asked=name not in CONTINUING),
            }
            if section.canaries is not None:
                models[name]["canaries"] = measure_canaries(
                    language,
                    inserted,
                    lines,
                    section.canaries,
                    section.key_seed,
                    section.bootstrap_samples,
                )
        context.progress(number + 1, len(names), "models")
    evaluation: Evaluation = {
        "models": models,
        "differences": differences(answered, section),
    }
    if section.contamination is not None and trained is not None and tasks:
        decode = Chat(tokenizer).tokenizer.decode_batch
        questions = {
            name: texts for task in tasks for name, texts in task.questions().items()
        }
        share = item_coverage(
            trained, decode, questions, section.contamination, section.key_seed
        )
        evaluation["contamination"] = {
            model_name: {
                task: effect(
                    share[task],
                    result.per_item,
                    section.contamination,
                    section.key_seed,
                    section.bootstrap_samples,
                )
                for task, result in results.items()
                if task in share
            }
            for model_name, results in answered.items()
        }
    write_json(out / "evaluation.json", evaluation)
    for metrics in models.values():
        metrics.pop("samples", None)
    return evaluation


def find_canaries(
    config: Recipe, trained: RowsRead | None, tokenizer: Path
) -> tuple[list[Canary], Counter[str]]:
    """Secrets of the step `canaries`, and the number of each line in the rows read."""
    if INSERTED not in config:
        return [], Counter()
    section = Canaries.model_validate(config[INSERTED])
    lines: Counter[str] = Counter()
    if trained is not None:
        lines = count_lines(trained, Chat(tokenizer).tokenizer.decode_batch)
    return draw_canaries(section), lines


def differences(answered: Mapping[str, Results], section: Evaluate) -> list[JsonObject]:
    """Paired differences between each model and the previous one, on the same items."""
    names = list(answered)
    return [
        {
            "task": task,
            "metric": metric,
            "from": before,
            "to": after,
            **paired_difference(
                values,
                answered[after][task].per_item[metric],
                section.key_seed,
                section.bootstrap_samples,
            ),
        }
        for before, after in pairwise(names)
        for task, result in answered[before].items()
        for metric, values in result.per_item.items()
    ]


def measure_sources(
    model: Llama, packed: PackedSet | None, tokenizer: Path, section: Evaluate
) -> Grouped:
    """Metrics of the validation rows of each source with data; of an encoder those of
    masked tokens, of an encoder-decoder those of hidden spans.
    """
    if packed is None:
        return {}
    seed = section.key_seed
    samples = section.bootstrap_samples
    token_bytes = read_token_bytes(tokenizer, next(model.parameters()).device)
    sources: dict[str, JsonObject] = {}
    for source in packed.manifest["validation"]:
        if not len(packed.validation(source)):
            continue
        if model.shape.kind == "decoder":
            sources[source] = {
                **source_metrics(
                    score_documents(model, packed, source, token_bytes), seed, samples
                )
            }
        else:
            sources[source] = hidden_token_metrics(
                model, packed, source, tokenizer, seed, samples
            )
    return sources


def sample(
    language: LanguageModel, section: Evaluate, asked: bool
) -> list[dict[str, str]]:
    """Completions of each prompt: the answer to it if `asked`, else the continuation of
    a document.
    """
    if not section.prompts:
        return []
    if asked:
        prompts = [
            language.chat_prompt([{"role": "user", "content": prompt}])
            for prompt in section.prompts
        ]
    else:
        prompts = [language.text_prompt(prompt) for prompt in section.prompts]
    completions = generate(
        language.model,
        prompts,
        section.max_new_tokens,
        language.stops,
        section.temperature,
        section.key_seed,
    )
    return [
        {"prompt": prompt, "completion": language.decode(new)}
        for prompt, new in zip(section.prompts, completions, strict=True)
    ]
