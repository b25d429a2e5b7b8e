"""`gristmill new`: a first manifest from a look at the data, with settings derived from
its size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import fmean

import gristmill.flows.stages.registry  # noqa: F401 - registers the steps of `prepare` for manifests
from gristmill.dataprep.readers.ingest import DEFAULT_EXTRACTOR
from gristmill.flows.authoring.look_at_data import Look
from gristmill.flows.authoring.manifest_text import flow_text
from gristmill.flows.planning.quantities import counted, size
from gristmill.mixtures.hub_paths import without_commit
from gristmill.mixtures.loader import parse_manifest
from gristmill.mixtures.scaling.size_rules import (
    DECAY_FRACTION,
    EMBEDDING_RATE_SCALE,
    OPTIMIZER,
    TOKENS_PER_PARAMETER,
    UNTIED,
    dial,
)
from gristmill.mixtures.schema.model import Model

BYTES_PER_TOKEN = 4.0
"""Bytes of English text per token of a vocabulary of some tens of thousands; 4,096
tokens give 3.6 (measured on novels), which KEPT_SHARE allows for.
"""
KEPT_SHARE = 0.2
"""Share of the text that filters and deduplication certainly keep: a mixture of more
tokens than MAX_EPOCHS give is an error. The proposed rules keep 23 % of the
documentation of Python packages (docs/start/own-corpus.md).
"""
MODELS = (
    ("llama-1m", 4096, 256),
    ("llama-10m", 8192, 512),
    ("llama-30m", 16384, 1024),
    ("llama-125m", 32768, 2048),
    ("llama-350m", 32768, 2048),
    ("llama-1b", 65536, 4096),
)
"""Preset, vocabulary, sequence length; smallest first. The learning rate is that of
`pretrain.size`.
"""
BATCH_TOKENS = ((100_000_000, 2_048), (1_000_000_000, 65_536), (None, 524_288))
"""(maximum training tokens, tokens per optimizer step): GPT-3's 0.5 M for the largest;
the smallest is measured in docs/size-and-laws.md.
"""
LEAST_TOKENS = 20_000
PROSE_RULES: tuple[str | dict[str, dict[str, float]], ...] = (
    {"gopher_quality": {"min_alpha_word_ratio": 0}},
    "gopher_repetition",
    "running_text",
)
"""Rules proposed for prose: Gopher's, except that `running_text` measures the share of
words with a letter without list markers and arithmetic, and rejects placeholder text
and words in random order (`gristmill bench kinds`).
"""
WORDPIECE_END = "[SEP]"
"""End-of-text token of BERT's vocabularies (Devlin et al. 2019, section 3), which have
no other.
"""
MAX_EPOCHS = 4
"""Muennighoff et al. 2023: up to four passes over the same text are almost as good as
new text.
"""


@dataclass(frozen=True)
class GivenTokenizer:
    """An existing tokenizer.json.

    Attributes:
        path: path in the manifest.
        vocabulary: number of ids.
        end_of_text: end-of-text token, if the manifest must name it.
    """

    path: str
    vocabulary: int
    end_of_text: str | None = None


def read_tokenizer(path: Path, manifest_path: str) -> GivenTokenizer:
    """Read the properties of a tokenizer.json.

    Args:
        path: path of the file.
        manifest_path: path in the manifest.

    Raises:
        gristmill.tokenize.encoding.tokenizer.TokenizerError: the tokenizer cannot be
            used.
    """
    from gristmill.tokenize.encoding.tokenizer import TokenizerError, read_external

    try:
        return GivenTokenizer(manifest_path, read_external(path).get_vocab_size())
    except TokenizerError as error:
        with suppress(TokenizerError):
            tokenizer = read_external(path, end_of_text=WORDPIECE_END)
            vocabulary = tokenizer.get_vocab_size()
            return GivenTokenizer(manifest_path, vocabulary, WORDPIECE_END)
        raise error


@dataclass(frozen=True)
class Wishes:
    """Options of `gristmill new`.

    Attributes:
        name: name of the run.
        languages: languages to keep; empty keeps all.
        tokens: training tokens; None derives them from the data.
        train: False for a manifest without training.
        language_model: path of the model; None means lid.176.
        tokenizer: existing tokenizer; None trains one.
    """

    name: str
    languages: Sequence[str] = ()
    tokens: int | None = None
    train: bool = True
    language_model: str | None = None
    tokenizer: GivenTokenizer | None = None


def source_name(path: str, used_names: Sequence[str]) -> str:
    """Derive the name of a source from its path, with a number if it is taken."""
    parts = [
        part
        for part in PurePosixPath(
            without_commit(path.partition("://")[2] or path)
        ).parts
        if not set(part) & set("*?[") and part not in ("/", "..", ".")
    ]
    stem = parts[-1] if parts else path.partition("://")[0]
    base = (
        re.sub(r"[^A-Za-z0-9]+", "-", stem.partition(".")[0]).strip("-").lower()
        or "source"
    )
    number = 1
    name = base
    while name in used_names:
        number += 1
        name = f"{base}-{number}"
    return name


def source_settings(look: Look) -> dict[str, object]:
    """Return the settings of a source in a manifest."""
    settings: dict[str, object] = {
        "path": look.path,
        "format": None if look.format == "auto" else look.format,
        "text_field": look.text_field,
        "id_field": look.id_field,
        "metadata_fields": list(look.metadata_fields) or None,
        "extract": DEFAULT_EXTRACTOR if look.extract else None,
        "split": {"paragraphs": look.split} if look.split else None,
    }
    return {key: value for key, value in settings.items() if value is not None}


def write_manifest(wishes: Wishes, looks: Mapping[str, Look], file: str) -> str:
    """Return the text of a manifest, after validating it.

    Args:
        wishes: options of the command.
        looks: findings about every source.
        file: its future path; relative paths of sources are relative to its folder.

    Raises:
        gristmill.mixtures.loader.ManifestError: a wish is not valid in a manifest.
    """
    known_sizes = [look.text_bytes for look in looks.values() if look.text_bytes]
    mean = fmean(known_sizes or [1])
    sizes = {name: float(look.text_bytes or mean) for name, look in looks.items()}
    total = sum(sizes.values())
    lines = ["sources:"]
    for name, look in looks.items():
        files = counted(look.files, "file")
        amount = "amount of text not known"
        if look.text_bytes:
            amount = f"about {size(look.text_bytes)} of text"
        lines.append(f"  {name}:   # {files}, {size(look.stored_bytes)}; {amount}")
        lines += [f"    # {remark}" for remark in look.remarks]
        settings = {**source_settings(look), "max_epochs": MAX_EPOCHS}
        lines += [f"    {key}: {flow_text(value)}" for key, value in settings.items()]
        weight = max(round(sizes[name] / total, 3), 0.001)
        lines.append(f"    weight: {weight:g}   # its share of the text")
    parts = [
        "# Written by `gristmill new` from a look at the data; `gristmill schema` "
        f"prints all keys\nname: {wishes.name}\nseed: 1\n",
        "\n".join(lines) + "\n",
        _prepare(wishes, looks),
    ]
    if wishes.train:
        tokens = wishes.tokens
        if not tokens:
            unique = total / BYTES_PER_TOKEN * KEPT_SHARE
            # Two significant digits: the estimate is rough.
            tokens = max(LEAST_TOKENS, int(float(f"{unique * MAX_EPOCHS:.1e}")))
        is_known = wishes.tokens is not None or all(
            look.text_bytes for look in looks.values()
        )
        parts.append(_training(tokens, is_known, wishes.tokenizer))
    elif wishes.tokenizer is not None:
        parts.append(f"tokenizer: {_tokenizer_section(wishes.tokenizer)}\n")
    text = "\n".join(parts)
    parse_manifest(text, file)
    return text


def _prepare(wishes: Wishes, looks: Mapping[str, Look]) -> str:
    prose = [name for name, look in looks.items() if not look.is_code]
    programs: dict[str | None, list[str]] = {}
    for name, look in looks.items():
        if look.is_code:
            programs.setdefault(look.path_field, []).append(name)
    only = _only(prose) if programs else ""
    lines = ["prepare:"]
    if prose:
        keep, suffix = '{"*": 0}', "; none is dropped"
        if wishes.languages:
            keep, suffix = f"[{', '.join(map(flow_text, wishes.languages))}]", ""
        model = ""
        if wishes.language_model:
            model = f"model: {flow_text(wishes.language_model)}, "
        advice = "" if only else "; try others with: gristmill whatif"
        lines += [
            "  # first, since the rules of filter have the stop words of each document's "
            f"language{suffix}",
            f"  - langid: {{{only}{model}keep: {keep}}}",
            f"  # Gopher's rules are for prose{advice}",
            f"  - filter: {{{only}rules: {flow_text(list(PROSE_RULES))}}}",
        ]
    if programs:
        lines.append("  # rules for programs: generated, minified and encoded files go")
    for path_field, sources in programs.items():
        rule = "code"
        if path_field is not None:
            rule = f"{{code: {{path_field: {flow_text(path_field)}}}}}"
        only_these = _only(sources) if len(sources) < len(looks) else ""
        lines.append(f"  - filter: {{{only_these}rules: [{rule}]}}")
    lines.append(
        "  - dedup: {minhash: {}}   # exact and near duplicates; of each cluster "
        "one survives"
    )
    return "\n".join(lines) + "\n"


def _only(sources: Sequence[str]) -> str:
    return f"sources: [{', '.join(map(flow_text, sources))}], "


def _tokenizer_section(tokenizer: GivenTokenizer) -> str:
    """Return the section of an existing tokenizer."""
    section = {"path": tokenizer.path}
    if tokenizer.end_of_text is not None:
        section["end_of_text"] = tokenizer.end_of_text
    return flow_text(section)


def _training(tokens: int, is_known: bool, tokenizer: GivenTokenizer | None) -> str:
    """Return the sections from the tokenizer on, for the largest preset with enough
    tokens for its size.
    """
    from gristmill.train.models.model_config import shape_of

    tokens_per_step = next(
        batch for most, batch in BATCH_TOKENS if most is None or tokens <= most
    )
    for preset, size_of_vocabulary, length in reversed(MODELS):
        vocabulary = size_of_vocabulary if tokenizer is None else tokenizer.vocabulary
        # tied, so that its parameters are those that a token is multiplied by
        model = Model(preset=preset)
        batch = max(1, tokens_per_step // length)
        steps = max(1, tokens // (batch * length))
        parameters = shape_of(model, vocabulary, length).parameters
        ratio = batch * length * steps / parameters
        choice = f"the largest preset with {TOKENS_PER_PARAMETER:g} or more"
        if ratio >= TOKENS_PER_PARAMETER:
            break
        choice = (
            f"the smallest preset; {TOKENS_PER_PARAMETER:g} are best for the compute"
        )
    rate = dial(model, tokens / model.layer_weights, length, batch).learning_rate
    guess = "   # a guess: set it once `gristmill run --until tokenize` has counted"
    section = f"{{vocab_size: {vocabulary}}}"
    if tokenizer is not None:
        section = _tokenizer_section(tokenizer)
    return (
        f"tokenizer: {section}\n\n"
        f"mix:\n  tokens: {batch * length * steps}{'' if is_known else guess}\n  "
        f"sequence_length: {length}\n  validation: 0.01\n"
        # The filters' keep rate is unknown yet, so a source may run short of its share.
        "  on_shortfall: redistribute   # a source with too little text leaves its "
        "share to the others\n\n"
        f"pretrain:\n  model: {flow_text({'preset': preset, **UNTIED})}   # "
        f"{parameters / 1e6:,.1f} M parameters besides the embedding, {ratio:,.3g} "
        f"tokens each: {choice}\n"
        f"  steps: {steps}\n  global_batch_size: {batch}\n  "
        f"micro_batch_size: {min(batch, 8)}\n"
        f"  optimizer: {{kind: {OPTIMIZER}, learning_rate: {rate:.1e}, "
        f"embedding_rate_scale: {EMBEDDING_RATE_SCALE:g}}}\n"
        f"  schedule: {{kind: wsd, warmup_steps: {max(1, steps // 20)}, "
        f"decay_fraction: {DECAY_FRACTION}}}\n\n"
        "evaluate: {}\nexport: {}\n"
    )
