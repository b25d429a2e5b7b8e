"""Write the list of supported published models: docs/reference/model-families.md (`make
reference`).
"""

from __future__ import annotations

from gristmill.mixtures.model_families import FAMILIES
from gristmill.train.models.gguf_model import ARCHITECTURES as GGUF_ARCHITECTURES
from gristmill.train.models.hf_configs import ARCHITECTURES

OPENING = """# Model families

Written by `make reference` from the code. A folder whose config.json has one of these `model_type`s can be trained on
(`pretrain.model.init_from`), tuned, measured, served and exported (`model.path`); logits are those of transformers, which
the tests compare for each decoder. What a config.json asks for beyond that (another activation, another kind of
`rope_parameters` ...) is an error that names the key. A sliding window (Mistral 7B v0.1: 4,096 tokens) is not computed:
rows are as long as the window at most, where it makes no difference. Qwen3-MoE is computed with `norm_topk_prob` and
without; llama.cpp has only the former. An export has the family of the model that it was trained from; a model that was
trained here is the family named in the last column.

| `model_type` | models | class of transformers | GGUF | trained here |
| --- | --- | --- | --- | --- |
"""
TRAINED = {
    "llama": "the default",
    "qwen3": "`pretrain.model.qk_norm`",
    "mixtral": "`pretrain.model.moe`",
    "qwen3_moe": "`moe` with `qk_norm`",
    "glm": "`pretrain.blank_infilling`",
    "modernbert": "`pretrain.masked`",
    "bert": "`masked: {shape: bert}`",
    "t5": "`pretrain.span_corruption`",
}


def reference() -> str:
    """Return the page."""
    rows = [
        f"| `{model_type}` | {name} | `{ARCHITECTURES[model_type]}` | "
        f"{'yes' if model_type in GGUF_ARCHITECTURES else ''} "
        f"| {TRAINED.get(model_type, '')} |"
        for model_type, name in FAMILIES.items()
    ]
    return OPENING + "\n".join(rows)


if __name__ == "__main__":
    print(reference())
