"""Stage `evaluate`: every model of the run on the same held-out rows, on held-out preferences, and in its own words.

Output: `evaluation.json`: per model its measurements per source, its reward accuracy on held-out pairs (of the model
that preferences were optimised for), and samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import write_json
from gristmill.mixtures.evaluation import Evaluate
from gristmill.tokenize.encoding.tokenizer import load as load_tokenizer
from gristmill.tokenize.packed import PackedSet
from gristmill.train.dpo import HOLDOUT
from gristmill.train.evaluation.held_out import ROWS_PER_FORWARD, metrics_of, score_rows
from gristmill.train.models.llama import Llama
from gristmill.train.models.sample import generate
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.chat import Chat
from gristmill.train.objectives.losses import sequence_logps
from gristmill.train.objectives.pairs import padded_pairs, prepare_pairs, reward_accuracy
from gristmill.train.parallel.world import make_deterministic
from gristmill.train.pretrain import MODEL, read_token_bytes

MODELS = ("pretrain", "sft", "dpo")
"""Stages that leave a model, in the order in which they train it."""


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Measure and sample all models; one plain process."""
    section = Evaluate.model_validate({key: value for key, value in config.items() if key != "beta"})
    make_deterministic(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed = PackedSet(inputs["mix"])
    names = [name for name in MODELS if name in inputs]
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        model = load_model(inputs[name] / MODEL, str(device))
        found[name] = {
            "sources": measure_sources(model, packed, inputs["tokenizer"], device),
            "reward_accuracy": accuracy_on_holdout(model, inputs) if name == "dpo" else None,
            "samples": sample(model, inputs["tokenizer"], section, asked=name != "pretrain"),
        }
        context.progress(number + 1, len(names), "models")
    write_json(out / "evaluation.json", {"models": found})
    return {"models": {name: {key: value for key, value in measured.items() if key != "samples"}
                       for name, measured in found.items()}}


@torch.no_grad()
def measure_sources(
    model: Llama, packed: PackedSet, tokenizer: Path, device: torch.device
) -> dict[str, dict[str, float]]:
    """Loss, perplexity, bits per byte and token accuracy on each source's held-out rows; sources without are absent."""
    token_bytes = read_token_bytes(tokenizer, device)
    found = {}
    for source in packed.manifest["validation"]:
        rows = packed.validation(source)
        if not len(rows):
            continue
        positions = packed.validation_boundaries(source).positions(rows.shape[1]) if model.shape.document_mask else None
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        for start in range(0, len(rows), ROWS_PER_FORWARD):
            part = slice(start, start + ROWS_PER_FORWARD)
            ids = torch.from_numpy(rows[part].astype(np.int64)).to(device)
            places = None if positions is None else torch.from_numpy(positions[part]).to(device)
            sums += score_rows(model, ids, token_bytes, places)
        found[source] = metrics_of(sums.tolist())
    return found


@torch.no_grad()
def accuracy_on_holdout(model: Llama, inputs: Mapping[str, Path]) -> float | None:
    """Reward accuracy on the pairs that preference optimisation held out; None where there are none."""
    lines = (inputs["dpo"] / HOLDOUT).read_text(encoding="utf-8").splitlines()
    examples = [json.loads(line) for line in lines]
    if not examples:
        return None
    chat, length = Chat(inputs["tokenizer"]), examples[0]["sequence_length"]
    pairs, _ = prepare_pairs(examples, chat, length)
    device = model.model.embed_tokens.weight.device
    logps = []
    for start in range(0, len(pairs), ROWS_PER_FORWARD):
        ids, targets = (part.to(device) for part in padded_pairs(pairs[start : start + ROWS_PER_FORWARD], chat.pad,
                                                                 length))
        logps.append(model(ids, partial(sequence_logps, targets=targets)).view(2, -1).T.cpu().numpy())
    reference = np.array([[one["reference_chosen"], one["reference_rejected"]] for one in examples], dtype=np.float32)
    return reward_accuracy(np.concatenate(logps), reference)


def sample(model: Llama, tokenizer: Path, section: Evaluate, asked: bool) -> list[dict[str, str]]:
    """What the model makes of each prompt: an answer to it where `asked`, else the rest of a document."""
    if not section.prompts:
        return []
    chat, text = Chat(tokenizer), load_tokenizer(tokenizer)
    if asked:
        prompts = [chat.encode([{"role": "user", "content": prompt}], prompt=True).ids.tolist()
                   for prompt in section.prompts]
    else:
        # In the packed set every document follows an end of text.
        prompts = [[text.eos, *encoded.ids] for encoded in text.encode(section.prompts)]
    found = generate(model, prompts, section.max_new_tokens, chat.stops, section.temperature, section.seed or 0)
    return [{"prompt": prompt, "completion": chat.decode(new)}
            for prompt, new in zip(section.prompts, found, strict=True)]
