"""Names that stand for the sizes of a whole decoder; explicit keys of the section override them."""

from __future__ import annotations

from typing import Any

_LLAMA_3 = {"rope_theta": 500_000.0}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-1m": {"layers": 4, "width": 128, "heads": 4},
    "llama-10m": {"layers": 6, "width": 384, "heads": 6},
    "llama-30m": {"layers": 10, "width": 512, "heads": 8},
    "llama-125m": {"layers": 12, "width": 768, "heads": 6},
    "llama-350m": {"layers": 24, "width": 1024, "heads": 8},
    "llama-1b": {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn_width": 8192, **_LLAMA_3},
    "llama-3b": {"layers": 28, "width": 3072, "heads": 24, "kv_heads": 8, "ffn_width": 8192, **_LLAMA_3},
    "llama-8b": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn_width": 14336,
                 "tied_embeddings": False, **_LLAMA_3},
    "moe-4m": {"layers": 4, "width": 128, "heads": 4, "moe": {"experts": 8}},
    "moe-8x125m": {"layers": 12, "width": 768, "heads": 6, "moe": {"experts": 8}},
    "moe-8x7b": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn_width": 14336, "rope_theta": 1e6,
                 "tied_embeddings": False, "moe": {"experts": 8}},
}  # fmt: skip
"""Preset -> the keys that are no defaults.

1m to 30m count the weights of the layers; 125m and 350m are the depths and widths of GPT-2 small and medium (Radford et
al. 2019) with heads of 128 channels, which fill matrix units (modded-nanogpt); 1b and 3b are Llama 3.2's (config.json
of meta-llama/Llama-3.2-1B and -3B, without the stretched context), 8b is Llama 3's (Grattafiori et al. 2024, table 3).
`moe-8x7b` is Mixtral's (Jiang et al. 2024, table 1); `moe-8x125m` and `moe-4m` are the dense ones with eight experts.
"""


def expand(values: Any) -> Any:
    """A section `model` whose preset is replaced by the keys that it stands for; the name itself stays.

    Raises:
        ValueError: no preset has that name.
    """
    if not isinstance(values, dict) or values.get("preset") is None:
        return values
    name = values["preset"]
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is none of {', '.join(PRESETS)}")
    return {**PRESETS[name], **values}
