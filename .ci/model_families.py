"""Write the list of supported published models: docs/reference/model-families.md (`make
reference`).

`--try` runs the tests of every decoder of transformers, which takes minutes, and writes
their outcomes beside this file; the page's table shows them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file

from gristmill.mixtures.model_families import FAMILIES
from gristmill.train.models.gguf_model import ARCHITECTURES as GGUF_ARCHITECTURES
from gristmill.train.models.hf_configs import ARCHITECTURES
from gristmill.train.models.transformers_decoder import check_module, write_module
from gristmill.train.models.weights import load_model
from tests.train.decoder_families import FAMILIES as DECODERS
from tests.train.decoder_families import save_tiny_decoder
from tests.train.encoder_families import FAMILIES as ENCODERS
from tests.train.encoder_families import save_tiny_encoder

OPENING = """# Model families

Written by `make reference` from the code. gristmill loads a folder as transformers saves it, by its config.json:

- **Families of its own decoder**, in the first table: also trained from scratch, and with every form of parallelism.
- **Any other causal decoder of the installed transformers**, and **encoders and encoder-decoders**, computed by
  transformers' own class (`implementation: transformers`; `auto` takes it where the own decoder does not compute what
  config.json asks for). The other tables have those that were tried. Code in a folder (`auto_map`) is never run.

## Own decoder

Logits are those of transformers, which the tests compare for each decoder. What a config.json asks for beyond that
(another activation, another kind of `rope_parameters` ...) is left to transformers' class, or with `implementation: own`
an error that names the key. A sliding window (Mistral 7B v0.1: 4,096 tokens) is not computed: rows are as long as the
window at most, where it makes no difference. Qwen3-MoE is computed with `norm_topk_prob` and without; llama.cpp has only
the former. An export has the family of the model that it was trained from; a model that was trained here is the family
named in the last column.

| `model_type` | models | class of transformers | GGUF | trained here |
| --- | --- | --- | --- | --- |
"""
TRAINED = {
    "llama": "the default",
    "qwen3": "`pretrain.model.qk_norm`",
    "mixtral": "`pretrain.model.moe`",
    "qwen3_moe": "`moe` with `qk_norm`",
    "glm": "`pretrain.blank_infilling`",
}


TRIED = """

## Decoders of transformers

They work in `pretrain.model.init_from`, `sft`, `dpo`, `rl`, `evaluate`, `chat`, `generate` and `export`, with full
weights or adapters, on one process or sharded (`engine.parallel.shard`). Not with `reward`, `export.gguf`, `float8`,
`engine.compute.compile`, and tensor or context parallelism; each is an error that says so. Losses need no
logits of all positions at once, where the class computes logits as products with the output matrix, also with a bias,
a factor or a softcap; this is measured on the model before the first step. Dropout is off, and experts get no balancing
loss. Files are read tensor by tensor, except the experts that transformers joins. Of models that read images too (Gemma 3
and 4, Llama 4, Mistral 3, Qwen 3.5 ... as they are published), the part for text is trained; the other weights and the
settings of the processor are exported as they were.

Each cell is the outcome of a test with {version} on a tiny model with random weights: *yes*, or *refused* with an error.
*Logits*: the folder loads, and they are those of `from_pretrained`. *Packs*: documents of a packed row are computed as
if each were alone. *Masks* says that the class does this itself, which is tested before the first step of every
training; otherwise each document becomes a row of its own, padded to the longest, which takes more memory. *SFT*: losses
equal those of a plain loop over the module. *DPO*: the first loss is ln 2, and it falls. *LoRA*: adapters alone are
trained. *Resumes*: to the same bits. *Exports*: names, values and configuration of the loaded folder.

| `model_type` | class | masks | {columns} |
| --- | --- | --- | {rule} |
"""
TRIES = {
    "logits": "test_logits_and_exported_files_are_those_of_transformers",
    "packs": "test_documents_of_a_row_are_computed_as_if_alone",
    "SFT": "test_fine_tuning_equals_a_plain_loop_over_the_module",
    "DPO": "test_preferences_begin_at_ln_2",
    "LoRA": "test_adapters_train_frozen_weights_or_the_family_is_refused",
    "resumes": "test_fine_tuning_resumes_to_the_same_bits",
    "exports": "test_logits_and_exported_files_are_those_of_transformers",
    "GGUF": "test_gguf_of_classes_of_transformers_is_refused",
}
"""Column -> test of a decoder of transformers."""
REFUSED = {("LoRA", "gpt2"), *(("GGUF", family) for family in DECODERS)}
"""Columns and families whose test is that of an error."""
OUTCOMES = Path(__file__).with_suffix(".json")
TRIED_ENCODERS = """

## Encoders and encoder-decoders

Trained here are ModernBERT (`pretrain.masked`), BERT (`masked: {shape: bert}`) and T5 1.1 (`pretrain.span_corruption`);
`init_from` takes these, and others that transformers loads as masked or sequence-to-sequence language models. They work
in `pretrain`, `evaluate` and `export`, and with `sft.task` in `sft`, on one process or sharded. What the decoders above say of logits, exports,
dropout and masks holds for these too, but of masked tokens alone are logits computed.

| `model_type` | class | masks |
| --- | --- | --- |
"""


def tried(model_type: str) -> str:
    """Try a family, and return its row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        published, exported = (
            Path(temporary) / "published",
            Path(temporary) / "exported",
        )
        save = save_tiny_decoder if model_type in DECODERS else save_tiny_encoder
        theirs = save(model_type, published)
        model: Any = load_model(published, kind=None)
        ids = torch.arange(2, 22)[None]
        ours, beside = {}, {}
        if model.shape.kind == "encoder_decoder":
            ours, beside = {"decoder_ids": ids}, {"decoder_input_ids": ids}
        with torch.no_grad():
            torch.testing.assert_close(
                model(ids, **ours), theirs(ids, **beside).logits, rtol=0, atol=1e-5
            )
        check_module(model, torch.float32)
        write_module(model, torch.float32, frozenset(), {}, 1 << 30, exported)
        before, after = (
            load_file(folder / "model.safetensors") for folder in (published, exported)
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    separates = model.separates_documents and model.reads_positions
    masks = "yes" if separates else ""
    return f"| `{model_type}` | `{type(model).__name__}` | {masks} |"


def try_decoders() -> None:
    """Run the tests of TRIES, and write the outcomes."""
    process = subprocess.run(
        [
            sys.executable,
            *("-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"),
            "tests/train/test_transformers_decoder.py",
            "tests/train/test_transformers_training.py",
            *("-k", " or ".join(sorted(set(TRIES.values())))),
        ],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = {
        f"{test}[{family}]": outcome
        for outcome, test, family in re.findall(
            r"^(PASSED|FAILED) \S+::(\w+)\[(\w+)\]", process.stdout, re.MULTILINE
        )
    }
    OUTCOMES.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
    sys.exit(process.returncode)


def cell(column: str, family: str, outcomes: dict[str, str]) -> str:
    """Return the outcome of a family's test."""
    if outcomes.get(f"{TRIES[column]}[{family}]") != "PASSED":
        return "FAILS"
    return "refused" if (column, family) in REFUSED else "yes"


def reference() -> str:
    """Return the page."""
    import transformers

    transformers.logging.set_verbosity_error()
    rows = [
        f"| `{model_type}` | {name} | `{ARCHITECTURES[model_type]}` | "
        f"{'yes' if model_type in GGUF_ARCHITECTURES else ''} "
        f"| {TRAINED.get(model_type, '')} |"
        for model_type, name in FAMILIES.items()
    ]
    outcomes = json.loads(OUTCOMES.read_text())
    decoders = [
        f"{tried(family)} {' | '.join(cell(name, family, outcomes) for name in TRIES)} |"
        for family in DECODERS
    ]
    return (
        OPENING
        + "\n".join(rows)
        + TRIED.format(
            version=f"transformers {transformers.__version__}",
            columns=" | ".join(TRIES),
            rule=" | ".join("---" for _ in TRIES),
        )
        + "\n".join(decoders)
        + TRIED_ENCODERS
        + "\n".join(map(tried, ENCODERS))
    )


if __name__ == "__main__":
    if "--try" in sys.argv:
        try_decoders()
    print(reference())
