"""What is known to be wrong before any work: outside files that are missing or unusable, names in expressions.

Everything is found in one go, each with the line, or the setting, that it was written in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

from gristmill.dataprep.files import as_path
from gristmill.mixtures.load import Location, Problem, Written
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.section import outside_paths

LOOKED_AT = ("tokenizer", "mix", "pretrain")
"""The stages of which something is known beforehand."""


def find_problems(manifest: Manifest, written: Written, stages: Container[str]) -> list[Problem]:
    """What would end a run later.

    Args:
        written: where the manifest's keys were written.
        stages: those of LOOKED_AT that would run; what only the others read may be gone.
    """
    found = [written.problem(location, message) for location, message in _unusable_files(manifest, stages)]
    found += wrong_keys(manifest, written)
    return [*found, *(wrong_expressions(manifest, written) if "mix" in stages else ())]


def missing_files(manifest: Manifest, written: Written) -> list[Problem]:
    """Every outside path of a manifest that names nothing which can be read."""
    return [written.problem(location, message) for location, path in outside_paths(manifest)
            if (message := _why_missing(manifest, location, path)) is not None]


def _why_missing(manifest: Manifest, location: Location, path: str) -> str | None:
    from gristmill.dataprep.examples.read_examples import ExamplesError, examples_listing
    from gristmill.dataprep.judges.fasttext_models import is_other_model
    from gristmill.dataprep.reading.sources import SourceError, check, outside_files

    key = ".".join(map(str, location))
    if "langid" in location and not is_other_model(path):
        return None
    try:
        if location[0] == "sources":
            key = f"source {location[1]!r}"
            check(str(location[1]), manifest.sources[str(location[1])].model_dump())
        elif "data" in location:
            key = "source 'examples'"
            examples_listing(path)
        else:
            outside_files(key, path)
    except (SourceError, ExamplesError) as error:
        return str(error).removeprefix(f"{key}: ")
    return None


def _unusable_files(manifest: Manifest, stages: Container[str]) -> Iterator[tuple[Location, str]]:
    """A tokenizer that is none, a template that is none, a model that no training can begin with."""
    ids = None
    if manifest.tokenizer is not None and "tokenizer" in stages:
        from gristmill.tokenize.encoding.chat_templates import CHAT_TEMPLATE
        from gristmill.tokenize.encoding.tokenizer import TokenizerError, check, read_external, read_template

        section, at = manifest.tokenizer, "chat_template_path"
        try:
            template = read_template(section)
            at = "path"
            if section.path is not None and as_path(section.path).is_file():
                tokenizer = read_external(as_path(section.path), section.special_tokens, template is not None)
                at, ids = "chat_template", tokenizer.get_vocab_size()
                check(tokenizer, template or CHAT_TEMPLATE)
        except TokenizerError as error:
            yield ("tokenizer", at), str(error).removeprefix(f"tokenizer.{at}: ")
    model = None if manifest.pretrain is None else manifest.pretrain.model
    if model is not None and model.init_from is not None and "pretrain" in stages:
        message = _why_no_model(as_path(model.init_from), ids)
        if message is not None:
            yield ("pretrain", "model", "init_from"), message


def _why_no_model(folder: Path, ids: int | None) -> str | None:
    """Why a training cannot begin with a folder's model; `ids`: of the tokenizer, where they are known."""
    if not folder.exists():
        return None  # it is among the missing files
    from gristmill.train.models.weights import check_model

    try:
        shape = check_model(folder)
    except (OSError, ValueError) as error:
        return str(error)
    if ids is not None and ids > shape.vocab_size:
        return (f"{folder}: the model has {shape.vocab_size} ids, but tokenizer.path has {ids}; give the model's own "
                "tokenizer as tokenizer.path")
    return None


def wrong_keys(manifest: Manifest, written: Written) -> list[Problem]:
    """Every `keep` of `dedup` that is malformed, or names a column that nothing before it measures."""
    problems: list[Problem] = []
    for number, step in enumerate(manifest.prepare):
        if step.dedup is None:
            continue
        from gristmill.dataprep.duplicates.clusters import parse_keep
        from gristmill.dataprep.duplicates.survivors import check_names
        from gristmill.dataprep.measured import measured_by

        before = [name for earlier in manifest.prepare[:number] for name in measured_by(earlier)]
        try:
            check_names(parse_keep(step.dedup.keep), before)
        except ValueError as error:
            problems.append(written.problem(("prepare", number, "dedup", "keep"),
                                            str(error).removeprefix("dedup.keep: ")))
    return problems


def wrong_expressions(manifest: Manifest, written: Written) -> list[Problem]:
    """Every `where` and `epochs` of the sources that is not of the grammar, or names a column that nothing measures."""
    expressions = list(_expressions(manifest))
    if not expressions:
        return []
    from gristmill.dataprep.measured import measured_by
    from gristmill.tokenize.mixing.quotas import MixError
    from gristmill.tokenize.mixing.where import check_names

    measured = {step.stage: measured_by(step) for step in manifest.prepare}
    uses = Counter(["tokens", "bytes", *(name for found in measured.values() for name in found)])
    # Of a name that several stages use, each has its own with the stage's name in front.
    names = {*uses, *(f"{stage}_{name}" for stage, found in measured.items() for name in found if uses[name] > 1)}
    problems = []
    for location, expression in expressions:
        key = ".".join(map(str, location))
        try:
            check_names(key, expression, names)
        except MixError as error:
            problems.append(written.problem(location, str(error).removeprefix(f"{key}: ")))
    return problems


def _expressions(manifest: Manifest) -> Iterator[tuple[Location, str]]:
    for name, source in manifest.sources.items():
        for key in ("where", "epochs"):
            if (expression := getattr(source, key)) is not None:
                yield ("sources", name, key), expression
