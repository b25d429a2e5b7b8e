"""`gristmill verify MODEL`: a model's numbers computed by gristmill and by other
projects' software.

transformers must give the same logits and the same greedy continuation,
lm-evaluation-harness the same scores, TRL the same losses on its own batches.
Everything runs on the CPU in float32, without a network.
"""

from __future__ import annotations

import copy
import json
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
from rich.table import Table
from rich.text import Text
from torch import Tensor

from gristmill.flows.models.find_model import ModelFolders
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.evaluation import Export, Task
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
        return (
            None
            if self.ours is None or self.theirs is None
            else abs(self.ours - self.theirs)
        )

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
        return {
            "referee": self.referee,
            "measure": self.measure,
            "ours": self.ours,
            "theirs": self.theirs,
            "gap": self.gap,
            "allowed": self.allowed,
            "verdict": self.verdict,
        }


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
        return [
            finding
            for name, module, ask in REFEREES
            for finding in (
                ask(reader, folder, work)
                if _installed(module)
                else [Finding(name, "-")]
            )
        ]


def _installed(modules: Sequence[str]) -> bool:
    return all(find_spec(module) is not None for module in modules)


def _theirs(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer loaded by transformers, without running code of the
    folder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        ).eval(),
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
    )


@torch.no_grad()
def _transformers(reader: Reader, folder: Path, work: Path) -> Iterator[Finding]:
    """Compare logits of random ids, ids of a text, and the greedy continuation of a
    prompt.
    """
    theirs, tokenizer = _theirs(folder)
    shape = reader.model.shape
    ids = torch.randint(
        shape.vocab_size,
        (2, min(shape.sequence_length, 64)),
        generator=torch.Generator().manual_seed(0),
    )
    logits, their_logits = (
        reader.model(ids),
        theirs(ids, use_cache=False).logits.float(),
    )
    place = (logits - their_logits).abs().argmax()
    scale = max(1.0, float(their_logits.abs().max()))
    yield Finding(
        "transformers",
        "logit that differs most",
        float(logits.flatten()[place]),
        float(their_logits.flatten()[place]),
        1e-4 * scale,
    )
    text = TEXTS[1]["text"]
    same = sum(
        a == b
        for a, b in zip(
            reader.encode(text),
            tokenizer(text, add_special_tokens=False).input_ids,
            strict=True,
        )
    )
    yield Finding(
        "transformers",
        "ids of a text that are the same",
        len(reader.encode(text)),
        same,
    )
    prompt = reader.encode(PAIRS[0]["prompt"])
    ours = generate(reader.model, [prompt], NEW_TOKENS, reader.stops)[0]
    their_ids = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=sorted(reader.stops),
        pad_token_id=reader.prefix,
    )[0, len(prompt) :].tolist()
    their_ids = [token for token in their_ids if token not in reader.stops]
    yield Finding(
        "transformers",
        "greedy ids that are the same",
        max(len(ours), len(their_ids)),
        sum(a == b for a, b in zip(ours, their_ids, strict=False)),
    )


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
        task = Task.model_validate(
            {
                "name": kind,
                "kind": kind,
                "path": str(work / f"{kind}.jsonl"),
                **OUR_TASKS[kind],
            }
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
    if "quantization_config" in json.loads((folder / "config.json").read_bytes()):
        # transformers' Trainer refuses a model whose matrices are all quantized.
        yield Finding("TRL", "-", unasked="takes no model in 8 bits")
        return
    import trl
    from datasets import Dataset, config, disable_progress_bars

    disable_progress_bars()
    config.HF_DATASETS_CACHE = work / "cache"
    settings: dict[str, Any] = {
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
        args=trl.SFTConfig(output_dir=str(work / "sft"), **settings),
        train_dataset=Dataset.from_list(answers),
        processing_class=tokenizer,
    )
    batch = tuning.data_collator(list(tuning.train_dataset))
    with torch.no_grad():
        theirs = float(tuning.compute_loss(tuning.model, dict(batch)))
        nll, _ = reader.model(
            batch["input_ids"], partial(score_tokens, targets=_shifted(batch["labels"]))
        )
    counted = int((_shifted(batch["labels"]) != IGNORED).sum())
    yield Finding(
        "TRL", "fine-tuning loss", float(nll.double().sum()) / counted, theirs, 1e-4
    )
    yield from _trl_preferences(
        reader,
        model,
        tokenizer,
        Dataset.from_list(PAIRS),
        trl.DPOTrainer,
        trl.DPOConfig(
            output_dir=str(work / "dpo"), beta=BETA, loss_type=["sigmoid"], **settings
        ),
    )


def _trl_preferences(
    reader: Reader, model: Any, tokenizer: Any, pairs: Any, trainer: Any, settings: Any
) -> Iterator[Finding]:
    # The reference differs from the policy; otherwise the loss would be the same for
    # every model.
    reference_model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference_model.parameters():
            parameter.mul_(0.9)
    theirs = trainer(
        model=copy.deepcopy(model),
        ref_model=reference_model,
        args=settings,
        train_dataset=pairs,
        processing_class=tokenizer,
    )
    batch = theirs.data_collator(list(theirs.train_dataset))
    ids, scored = batch["input_ids"], batch["completion_mask"].bool()
    targets = _shifted(ids.masked_fill(~scored, IGNORED))
    with torch.no_grad():
        loss = float(theirs.compute_loss(theirs.model, dict(batch)))
        policy = reader.model(ids, partial(sequence_logps, targets=targets))
        scaled = copy.deepcopy(reader.model)
        for parameter in scaled.parameters():
            parameter.mul_(0.9)
        reference = scaled(ids, partial(sequence_logps, targets=targets))
    tokens = (targets != IGNORED).sum(dim=1).float()
    pair = PairLogps(*policy.chunk(2), *reference.chunk(2), *tokens.chunk(2))
    ours = float(preference_loss("sigmoid", pair, LossSettings(BETA))[0].mean())
    logged = {
        name: sum(values) / len(values)
        for name, values in theirs._metrics[
            "train" if theirs.model.training else "eval"
        ].items()
        if values
    }
    for side, name in (
        (policy.chunk(2)[0], "chosen"),
        (policy.chunk(2)[1], "rejected"),
    ):
        value = logged[f"logps/{name}"]
        yield Finding(
            "TRL",
            f"log-probability, {name}",
            float(side.mean()),
            value,
            1e-4 * max(1.0, abs(value)),
        )
    yield Finding("TRL", "preference loss", ours, loss, 1e-4 * max(1.0, abs(loss)))


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
        console.print(Text(referee, style="bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(overflow="fold")
        for _ in ("ours", "theirs", "gap"):
            table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_row("measure", "ours", "theirs", "gap", "", style="dim")
        for finding in group:
            if finding.gap is None:
                console.print(Text(finding.verdict))
            else:
                table.add_row(
                    finding.measure,
                    f"{finding.ours:.6g}",
                    f"{finding.theirs:.6g}",
                    f"{finding.gap:.1e}",
                    finding.verdict,
                )
        if table.row_count > 1:
            console.print(table)
