"""Stage `evaluate`: measures all models of the run on the same held-out rows,
preferences, tasks and prompts.

Output: `evaluation.json`: per model its metrics per source, per task and per suite,
memorisation, reward accuracy on held-out pairs (only of the stage `dpo`), and samples;
paired differences per task between models; and task items that occur in the training
set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.evaluation import Evaluate
from gristmill.mixtures.manifest import CONTINUING
from gristmill.tokenize.encoding.tokenizer import load as load_tokenizer
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.data.pairs import (
    HOLDOUT,
    Pair,
    gained_more,
    padded_pairs,
    prepare_preferences,
)
from gristmill.train.evaluation.answering import (
    Reader,
    Result,
    answer_tasks,
    open_reader,
)
from gristmill.train.evaluation.held_out import (
    ROWS_PER_FORWARD,
    SourceMetrics,
    read_token_bytes,
    score_documents,
    source_metrics,
)
from gristmill.train.evaluation.intervals import paired_difference, share_with_interval
from gristmill.train.evaluation.leaked_items import effect, item_coverage
from gristmill.train.evaluation.masked_tokens import masked_metrics, span_metrics
from gristmill.train.evaluation.memorisation import probe_memorisation
from gristmill.train.evaluation.red_teaming import red_teaming
from gristmill.train.evaluation.suites import answer_suite, read_suite
from gristmill.train.evaluation.tasks import Item, Record, read_task
from gristmill.train.generation.scheduler import generate
from gristmill.train.loop.rows_read import READS, RowsRead, rows_read
from gristmill.train.models.decoder import Llama
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.losses import sequence_logps
from gristmill.train.parallel.process_groups import make_deterministic
from gristmill.train.stages.stage_inputs import MODEL, MODELS


def run(
    inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context
) -> dict[str, Any]:
    """Measure and sample all models; one plain process."""
    section = Evaluate.model_validate(
        {key: value for key, value in config.items() if key not in ("beta", READS)}
    )
    make_deterministic(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed = PackedSet(inputs["mix"]) if "mix" in inputs else None
    trained = (
        None
        if packed is None or READS not in config
        else rows_read(packed, config[READS], inputs["pretrain"])
    )
    task_items = {task.name: read_task(task) for task in section.tasks}
    suites: dict[str, dict[str, list[Record]]] = {
        suite.suite: read_suite(suite) for suite in section.suites
    }
    names = [name for name in MODELS if name in inputs]
    metrics: dict[str, Any] = {}
    answered: dict[str, dict[str, Result]] = {}
    with red_teaming(section, context) as team:
        for number, name in enumerate(names):
            model = load_model(
                inputs[name] / MODEL, str(device), runs_own_code=True, kind=None
            )
            # manifests ask for no other measurement of encoders
            if model.shape.kind != "decoder":
                answered[name], metrics[name] = (
                    {},
                    measure_filling(model, packed, inputs["tokenizer"], section),
                )
            else:
                reader = open_reader(model, inputs["tokenizer"])
                answered[name] = answer_tasks(reader, section, task_items)
                metrics[name] = {
                    "sources": measure_sources(
                        reader.model, packed, inputs["tokenizer"], section
                    ),
                    "tasks": {
                        task: result.summary for task, result in answered[name].items()
                    },
                    **_of_suites(reader, section, suites),
                    **accuracy_on_holdout(
                        reader.model, inputs if name == "dpo" else {}
                    ),
                    "samples": sample(
                        reader.model,
                        inputs["tokenizer"],
                        section,
                        asked=name not in CONTINUING,
                    ),
                    **_memorised(reader, trained, section),
                    **(
                        {}
                        if team is None
                        else {
                            "red_team": team.ask(
                                reader, name, chat=name not in CONTINUING
                            )
                        }
                    ),
                }
            context.progress(number + 1, len(names), "models")
        team_differences = (
            {} if team is None else {"red_team_differences": team.differences()}
        )
    measured = {
        "models": metrics,
        "differences": differences(answered, section),
        **_contaminated(trained, inputs["tokenizer"], section, task_items, answered),
        **team_differences,
    }
    write_json(out / "evaluation.json", measured)
    return {
        **measured,
        "models": {
            name: _without_texts(model_metrics)
            for name, model_metrics in metrics.items()
        },
    }


def _without_texts(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a model without its generated texts."""
    kept = {key: value for key, value in measured.items() if key != "samples"}
    return (
        {**kept, "red_team": {"sets": kept["red_team"]["sets"]}}
        if "red_team" in kept
        else kept
    )


def differences(
    answered: Mapping[str, Mapping[str, Result]], section: Evaluate
) -> list[dict[str, Any]]:
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


def _of_suites(
    reader: Reader,
    section: Evaluate,
    items: dict[str, dict[str, list[Record]]],
) -> dict[str, Any]:
    if not section.suites:
        return {}
    return {
        "suites": {
            suite.suite: asdict(
                answer_suite(
                    reader,
                    suite,
                    items[suite.suite],
                    section.key_seed,
                    section.bootstrap_samples,
                )
            )
            for suite in section.suites
        }
    }


def _memorised(
    reader: Reader, trained: RowsRead | None, section: Evaluate
) -> dict[str, Any]:
    if section.memorisation is None or trained is None:
        return {}
    groups = probe_memorisation(
        reader,
        trained,
        section.memorisation,
        section.key_seed,
        section.bootstrap_samples,
    )
    return {"memorisation": {name: asdict(group) for name, group in groups.items()}}


def _contaminated(
    trained: RowsRead | None,
    tokenizer: Path,
    section: Evaluate,
    items: Mapping[str, Sequence[Item]],
    answered: Mapping[str, Mapping[str, Result]],
) -> dict[str, Any]:
    if section.contamination is None or trained is None or not items:
        return {}
    decode = Chat(tokenizer).tokenizer.decode_batch
    share = item_coverage(
        trained, decode, items, section.contamination, section.key_seed
    )
    return {
        "contamination": {
            model: {
                task: effect(
                    share[task],
                    result.per_item,
                    section.contamination,
                    section.key_seed,
                    section.bootstrap_samples,
                )
                for task, result in results.items()
            }
            for model, results in answered.items()
        }
    }


def measure_sources(
    model: Llama, packed: PackedSet | None, tokenizer: Path, section: Evaluate
) -> dict[str, SourceMetrics]:
    """Metrics on each source's held-out documents (see `documents.source_metrics`);
    omits sources without any.
    """
    if packed is None:
        return {}
    token_bytes = read_token_bytes(tokenizer, next(model.parameters()).device)
    return {
        source: source_metrics(
            score_documents(model, packed, source, token_bytes),
            section.key_seed,
            section.bootstrap_samples,
        )
        for source in packed.manifest["validation"]
        if len(packed.validation(source))
    }


def measure_filling(
    model: Llama, packed: PackedSet | None, tokenizer: Path, section: Evaluate
) -> dict[str, Any]:
    """Metrics of a model that fills in masked tokens or hidden spans (see
    `masked_tokens`).
    """
    measure = masked_metrics if model.shape.encoder else span_metrics
    sources = (
        {}
        if packed is None
        else {
            source: asdict(
                measure(
                    model,
                    packed,
                    source,
                    tokenizer,
                    section.key_seed,
                    section.bootstrap_samples,
                )
            )
            for source in packed.manifest["validation"]
            if len(packed.validation(source))
        }
    )
    return {"sources": sources, "tasks": {}, "samples": []}


@torch.no_grad()
def accuracy_on_holdout(model: Llama, inputs: Mapping[str, Path]) -> dict[str, Any]:
    """`reward_accuracy` on the held-out pairs of preference optimisation, and its
    interval; None without pairs.
    """
    if "dpo" not in inputs:
        return {"reward_accuracy": None, "reward_accuracy_interval": None}
    lines = (inputs["dpo"] / HOLDOUT).read_text(encoding="utf-8").splitlines()
    examples = [json.loads(line) for line in lines]
    if not examples:
        return {"reward_accuracy": None, "reward_accuracy_interval": None}
    chat, length = Chat(inputs["tokenizer"]), examples[0]["sequence_length"]
    encoded = prepare_preferences(examples, chat, length)
    pairs = [item for item in encoded.used if isinstance(item, Pair)]
    device = model.model.embed_tokens.weight.device
    logps = []
    for start in range(0, len(pairs), ROWS_PER_FORWARD):
        ids, targets = (
            tensor.to(device)
            for tensor in padded_pairs(
                pairs[start : start + ROWS_PER_FORWARD], chat.pad, length
            )
        )
        logps.append(
            model(ids, partial(sequence_logps, targets=targets))
            .view(2, -1)
            .T.cpu()
            .numpy()
        )
    reference = np.array(
        [
            [example["reference_chosen"], example["reference_rejected"]]
            for example in examples
        ],
        dtype=np.float32,
    )
    interval = share_with_interval(gained_more(np.concatenate(logps), reference))
    return {
        "reward_accuracy": None if interval is None else interval["value"],
        "reward_accuracy_interval": interval,
    }


def sample(
    model: Llama, tokenizer: Path, section: Evaluate, asked: bool
) -> list[dict[str, str]]:
    """Completions of each prompt: the answer to it if `asked`, else the continuation of
    a document.
    """
    if not section.prompts:
        return []
    chat, text = Chat(tokenizer), load_tokenizer(tokenizer)
    if asked:
        prompts = [
            chat.encode([{"role": "user", "content": prompt}], prompt=True).ids.tolist()
            for prompt in section.prompts
        ]
    else:
        # In the packed set, every document follows an end-of-text token.
        prompts = [[text.eos, *encoded.ids] for encoded in text.encode(section.prompts)]
    completions = generate(
        model,
        prompts,
        section.max_new_tokens,
        chat.stops,
        section.temperature,
        section.key_seed,
    )
    return [
        {"prompt": prompt, "completion": chat.decode(new)}
        for prompt, new in zip(section.prompts, completions, strict=True)
    ]
