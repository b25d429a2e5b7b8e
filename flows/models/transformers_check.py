"""`gristmill verify MODEL`: a model's numbers computed by gristmill and by
transformers.

Both must give the same logits, the same ids of a text and the same greedy continuation.
Everything runs on the CPU in float32, without a network.
"""

from __future__ import annotations

import operator
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gristmill.core.files import read_json
from gristmill.flows.models.find_model import ModelFolders
from gristmill.flows.pages.page_elements import Heading, table
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.mixtures.schema.evaluation import Export
from gristmill.train.generation.language_model import with_tokenizer
from gristmill.train.generation.scheduler import generate
from gristmill.train.models.transformers_decoder import auto_class_of
from gristmill.train.models.weights import SHAPE_FILE, load_model
from gristmill.train.stages.export import write_folder

NEW_TOKENS = 16
TEXT = "Lines of text that is longer than a little model can read at once. " * 8
PROMPT = "The sky is"


@dataclass(frozen=True)
class Finding:
    """A number computed by gristmill and by transformers.

    Attributes:
        measure: name of the number.
        ours, theirs: the values.
        allowed: largest gap that rounding explains.
    """

    measure: str
    ours: float
    theirs: float
    allowed: float = 0.0

    @property
    def gap(self) -> float:
        """Absolute difference of the two values."""
        return abs(self.ours - self.theirs)

    @property
    def verdict(self) -> str:
        """`agrees`, or `DISAGREES` (also if the gap is NaN)."""
        return "agrees" if self.gap <= self.allowed else "DISAGREES"

    def as_json(self) -> dict[str, str | float]:
        """The finding as JSON."""
        return {**asdict(self), "gap": self.gap, "verdict": self.verdict}


def compare_with_transformers(model: ModelFolders) -> list[Finding]:
    """Compare a model's numbers with those of transformers; a training's model is
    exported first.

    Raises:
        FileNotFoundError, ValueError: the model cannot be loaded.
        ImportError: transformers is not installed.
    """
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = model.weights
        if "model_type" not in read_json(folder / SHAPE_FILE):
            folder = Path(temporary) / "exported"
            write_folder(model.weights, model.tokenizer, Export(), folder)
        return list(_findings(folder))


@torch.no_grad()
def _findings(folder: Path) -> Iterator[Finding]:
    """Compare logits of random ids, ids of a text, and the greedy continuation of a
    prompt. No code of the folder is run.
    """
    import transformers

    language = with_tokenizer(load_model(folder), folder)
    auto_class = getattr(
        transformers, auto_class_of(read_json(folder / SHAPE_FILE)).name
    )
    theirs = auto_class.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False
    )
    shape = language.model.shape
    ids = torch.randint(
        shape.vocab_size,
        (2, min(shape.sequence_length, 64)),
        generator=torch.Generator().manual_seed(0),
    )
    logits = language.model(ids)
    their_logits = theirs(ids, use_cache=False).logits.float()
    place = (logits - their_logits).abs().argmax()
    yield Finding(
        "logit that differs most",
        float(logits.flatten()[place]),
        float(their_logits.flatten()[place]),
        1e-4 * max(1.0, float(their_logits.abs().max())),
    )
    encoded = language.prompt(TEXT)
    their_encoded = tokenizer(TEXT).input_ids
    same = sum(map(operator.eq, encoded, their_encoded))
    most = max(len(encoded), len(their_encoded))
    yield Finding("ids of a text that are the same", most, same)
    prompt = language.prompt(PROMPT)
    ours = generate(language.model, [prompt], NEW_TOKENS, [language.end])[0]
    generated = theirs.generate(
        **tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=language.end,
        pad_token_id=language.end,
    )[0, len(prompt) :].tolist()
    their_ids = [token for token in generated if token != language.end]
    same = sum(map(operator.eq, ours, their_ids))
    most = max(len(ours), len(their_ids))
    yield Finding("greedy ids that are the same", most, same)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings as a table."""
    rows = [
        (finding.measure, finding.ours, finding.theirs, finding.gap, finding.verdict)
        for finding in findings
    ]
    columns = {"measure": "", "ours": ".6g", "theirs": ".6g", "gap": ".1e", "": ""}
    print_parts(Heading("transformers"), table(columns, rows))
