"""`gristmill verify MODEL`: a model's numbers computed by gristmill and by other
projects' software.

transformers must give the same logits and the same greedy continuation,
lm-evaluation-harness the same scores, TRL the same losses on its own batches.
Everything runs on the CPU in float32, without a network.
"""

from __future__ import annotations

import copy
import json
import operator
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.flows.models.find_model import ModelFolders
from gristmill.flows.pages.page_elements import table
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.sections.evaluation import Export, Task
from gristmill.train.evaluation.answering import Reader, answer_task, open_reader
from gristmill.train.evaluation.tasks import read_task
from gristmill.train.generation.scheduler import generate
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.losses import IGNORED, score_tokens, sequence_logps
from gristmill.train.objectives.preference_losses import (
    LossSettings,
    PairLogps,
    preference_loss,
)
from gristmill.train.stages.export import write_folder

NEW_TOKENS, BETA = 16, 0.1
# equal numbers of options, which its Brier score requires
CHOICES: list[dict[str, object]] = [
    {
        "q": "The capital of France is",
        "options": ["Paris", "a river", "the colour blue"],
        "gold": 0,
    },
    {
        "q": "def close(self):",
        "options": ["pass", "return self.close()", "None"],
        "gold": 1,
    },
    {
        "q": "A question that ends in a blank ",
        "options": ["and goes on", "ééé", "?"],
        "gold": 2,
    },
]
CLOZES = [
    {"q": "The capital of France is", "a": " Paris"},
    {"q": "Ends in a blank ", "a": "and goes on"},
    {"q": "def close(self):\n    ", "a": "pass"},
]
TEXTS = [
    {"text": "Short."},
    {"text": "Lines of text that is longer than a little model can read at once. " * 8},
    {"text": "def function(value):\n    return value + 1\n"},
]
PAIRS = [
    {
        "prompt": "The sky is",
        "chosen": " blue and wide.",
        "rejected": " made of cheese, they say.",
    },
    {
        "prompt": "Two and two are",
        "chosen": " four.",
        "rejected": " five, or six, or seven.",
    },
]


KEYS = ("referee", "measure", "ours", "theirs", "gap", "allowed", "verdict")
"""Keys of a finding in JSON."""


@dataclass(frozen=True)
class Finding:
    """A number computed by gristmill and by a referee.

    Attributes:
        referee: name of the other software.
        measure: name of the number.
        ours, theirs: the values; None if the referee cannot compute it.
        allowed: largest gap that rounding explains.
        unasked: reason if the referee cannot compute it.
    """

    referee: str
    measure: str
    ours: float | None = None
    theirs: float | None = None
    allowed: float = 0.0
    unasked: str = "is not installed"

    @property
    def gap(self) -> float | None:
        """Absolute difference of the two values."""
        if self.ours is None or self.theirs is None:
            return None
        return abs(self.ours - self.theirs)

    @property
    def verdict(self) -> str:
        """`agrees`, `DISAGREES` (also if the gap is NaN), or the reason without a
        comparison.
        """
        if self.gap is None:
            return self.unasked
        return "agrees" if self.gap <= self.allowed else "DISAGREES"

    def as_json(self) -> dict[str, str | float | None]:
        """The finding as JSON."""
        return {name: getattr(self, name) for name in KEYS}


def referee(model: ModelFolders) -> list[Finding]:
    """Compare a model's numbers with those of every installed referee; a training's
    model is exported first.

    Raises:
        FileNotFoundError, ValueError: the model cannot be loaded.
    """
    os.environ.update(
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1"
    )
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = model.weights
        if "model_type" not in json.loads((folder / "config.json").read_bytes()):
            folder = work / "exported"
            write_folder(model.weights, model.tokenizer, Export(), folder)
        reader = open_reader(load_model(folder), folder)
        findings: list[Finding] = []
        for name, modules, ask in REFEREES:
            if all(find_spec(module) is not None for module in modules):
                findings += ask(reader, folder, work)
            else:
                findings.append(Finding(name, "-"))
        return findings


def _theirs(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer loaded by transformers, without running code of the
    folder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return model.eval(), tokenizer


@torch.no_grad()
def _transformers(reader: Reader, folder: Path, work: Path) -> Iterator[Finding]:
    """Compare logits of random ids, ids of a text, and the greedy continuation of a
    prompt.
    """
    theirs, tokenizer = _theirs(folder)
    finding = partial(Finding, "transformers")
    shape = reader.model.shape
    ids = torch.randint(
        shape.vocab_size,
        (2, min(shape.sequence_length, 64)),
        generator=torch.Generator().manual_seed(0),
    )
    logits = reader.model(ids)
    their_logits = theirs(ids, use_cache=False).logits.float()
    place = (logits - their_logits).abs().argmax()
    yield finding(
        "logit that differs most",
        float(logits.flatten()[place]),
        float(their_logits.flatten()[place]),
        1e-4 * max(1.0, float(their_logits.abs().max())),
    )
    text = TEXTS[1]["text"]
    encoded = reader.encode(text)
    their_encoded = tokenizer(text, add_special_tokens=False).input_ids
    same = sum(map(operator.eq, encoded, their_encoded))
    most = max(len(encoded), len(their_encoded))
    yield finding("ids of a text that are the same", most, same)
    prompt = reader.encode(PAIRS[0]["prompt"])
    ours = generate(reader.model, [prompt], NEW_TOKENS, reader.stops)[0]
    generated = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=sorted(reader.stops),
        pad_token_id=reader.prefix,
    )[0, len(prompt) :].tolist()
    their_ids = [token for token in generated if token not in reader.stops]
    same = sum(map(operator.eq, ours, their_ids))
    most = max(len(ours), len(their_ids))
    yield finding("greedy ids that are the same", most, same)


LM_EVAL_TASKS: dict[str, tuple[Sequence[Mapping[str, object]], str, str]] = {
    "multiple_choice": (
        CHOICES,
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: "
        "options\ndoc_to_target: gold\n",
        "acc acc_norm acc_bytes brier_score",
    ),
    "cloze": (
        CLOZES,
        "output_type: loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n",
        "perplexity acc",
    ),
    "rolling": (
        TEXTS,
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n",
        "bits_per_byte byte_perplexity",
    ),
}
OUR_TASKS: dict[str, dict[str, str]] = {
    "multiple_choice": {"prompt": "q", "choices": "options", "answer": "gold"},
    "cloze": {"prompt": "q", "answer": "a"},
    "rolling": {"prompt": "text"},
}


def _lm_eval(reader: Reader, folder: Path, work: Path) -> Iterator[Finding]:
    """Compare scores of a few questions and texts, one of them longer than a small
    model's context.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for kind, (items, settings, metrics) in LM_EVAL_TASKS.items():
        data = work / f"{kind}.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items))
        (work / f"{kind}.yaml").write_text(
            f"task: gristmill_{kind}\ndataset_path: json\n"
            f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {work / 'cache'}}}\ntest_split: test\n"
            f"{settings}metric_list: [{', '.join(f'{{metric: {name}}}' for name in metrics.split())}]\n"
            "metadata: {version: 1.0}\n"
        )
    model, tokenizer = _theirs(folder)
    results = lm_eval.simple_evaluate(
        model=HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=2,
            max_length=reader.length,
        ),
        tasks=[f"gristmill_{kind}" for kind in LM_EVAL_TASKS],
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(work), include_defaults=False),
    )["results"]
    for kind, (_, _, metrics) in LM_EVAL_TASKS.items():
        path = str(work / f"{kind}.jsonl")
        task = Task.model_validate(
            {"name": kind, "kind": kind, "path": path, **OUR_TASKS[kind]}
        )
        ours = answer_task(reader, task, read_task(task), 0, 1).metrics
        for name in metrics.split():
            theirs = float(results[f"gristmill_{kind}"][f"{name},none"])
            yield Finding(
                "lm-evaluation-harness",
                f"{kind.replace('_', ' ')}: {name}",
                float(ours[name.removesuffix("_score")]["value"]),
                theirs,
                1e-5 * max(1.0, abs(theirs)),
            )


def _trl(reader: Reader, folder: Path, work: Path) -> Iterator[Finding]:
    """Compare losses of TRL's trainers for fine-tuning and preferences, each on a batch
    made by TRL.
    """
    finding = partial(Finding, "TRL")
    if "quantization_config" in json.loads((folder / "config.json").read_bytes()):
        # transformers' Trainer refuses a model whose matrices are all quantized.
        yield finding("-", unasked="takes no model in 8 bits")
        return
    import trl
    from datasets import Dataset, config, disable_progress_bars

    disable_progress_bars()
    config.HF_DATASETS_CACHE = work / "cache"
    settings: dict[str, Any] = {
        "output_dir": str(work / "trl"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "per_device_train_batch_size": len(PAIRS),
        "max_length": reader.length,
    }
    model, tokenizer = _theirs(folder)
    answers = [
        {"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS
    ]
    tuning = trl.SFTTrainer(
        model=copy.deepcopy(model),
        args=trl.SFTConfig(**settings),
        train_dataset=Dataset.from_list(answers),
        processing_class=tokenizer,
    )
    batch, loss = _their_loss(tuning)
    targets = _shifted(batch["labels"])
    with torch.no_grad():
        nll, _ = reader.model(
            batch["input_ids"], partial(score_tokens, targets=targets)
        )
    counted = int((targets != IGNORED).sum())
    yield finding("fine-tuning loss", float(nll.double().sum()) / counted, loss, 1e-4)

    # The reference differs from the policy; otherwise the loss would be the same for
    # every model.
    preferring = trl.DPOTrainer(
        model=copy.deepcopy(model),
        ref_model=_shrunk(model),
        args=trl.DPOConfig(beta=BETA, loss_type=["sigmoid"], **settings),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer,
    )
    batch, loss = _their_loss(preferring)
    ids, scored = batch["input_ids"], batch["completion_mask"].bool()
    targets = _shifted(ids.masked_fill(~scored, IGNORED))
    score = partial(sequence_logps, targets=targets)
    with torch.no_grad():
        policy = reader.model(ids, score).chunk(2)
        reference = _shrunk(reader.model)(ids, score).chunk(2)
    tokens = (targets != IGNORED).sum(dim=1).float()
    pair = PairLogps(*policy, *reference, *tokens.chunk(2))
    ours = float(preference_loss("sigmoid", pair, LossSettings(BETA))[0].mean())
    mode = "train" if preferring.model.training else "eval"
    for side, name in zip(policy, ("chosen", "rejected"), strict=True):
        values = preferring._metrics[mode][f"logps/{name}"]
        value = sum(values) / len(values)
        allowed = 1e-4 * max(1.0, abs(value))
        yield finding(f"log-probability, {name}", float(side.mean()), value, allowed)
    yield finding("preference loss", ours, loss, 1e-4 * max(1.0, abs(loss)))


def _their_loss(trainer: Any) -> tuple[Any, float]:
    """Batch of a trainer's whole data, and its loss."""
    batch = trainer.data_collator(list(trainer.train_dataset))
    with torch.no_grad():
        return batch, float(trainer.compute_loss(trainer.model, dict(batch)))


def _shrunk(model: Any) -> Any:
    """Copy of a model with nine tenths of its weights."""
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter.mul_(0.9)
    return scaled


def _shifted(labels: Tensor) -> Tensor:
    """Targets (n, t) of each position from labels (n, t) of each token."""
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)


Ask = Callable[[Reader, Path, Path], Iterator[Finding]]
REFEREES: list[tuple[str, tuple[str, ...], Ask]] = [
    ("transformers", ("transformers",), _transformers),
    ("lm-evaluation-harness", ("transformers", "lm_eval"), _lm_eval),
    ("TRL", ("transformers", "trl", "datasets"), _trl),
]


def print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings as a table per referee."""
    console = plain_console()
    for referee, group in groupby(findings, lambda finding: finding.referee):
        rows = []
        for finding in group:
            if finding.gap is None:
                console.print(f"{referee} {finding.verdict}")
            else:
                rows.append(
                    (
                        finding.measure,
                        finding.ours,
                        finding.theirs,
                        finding.gap,
                        finding.verdict,
                    )
                )
        columns = {"measure": "", "ours": ".6g", "theirs": ".6g", "gap": ".1e"}
        print_table(console, table({**columns, "": ""}, rows), referee)
