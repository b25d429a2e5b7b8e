"""Reading of manifests: all mistakes in one go, each with file, line, key, value and
what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from gristmill.mixtures.annotators import expand_presets
from gristmill.mixtures.base import Location, OutsidePath, RawSection, inside, value_at
from gristmill.mixtures.cross_checks import contradictions
from gristmill.mixtures.manifest import (
    Manifest,
    all_keys,
    dotted,
    known_keys,
    models_in,
)
from gristmill.mixtures.other_names import hint_of
from gristmill.mixtures.recipes.named_recipes import is_named, manifest_file
from gristmill.mixtures.schema.generated_source import GeneratedSource
from gristmill.mixtures.schema.prepare import (
    NAME,
    STEP_SECTIONS,
    name_steps,
    take_bare_name,
    written_steps,
    wrong_step_names,
)
from gristmill.mixtures.schema.sources import Source, TokenSource
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.rules import expand
from gristmill.mixtures.user_code import (
    NAME_TAG,
    OWN_TAG,
    OwnCodeError,
    OwnFunction,
    OwnPlace,
    own_functions,
    take_code,
)
from gristmill.mixtures.yaml_text import (
    compose_yaml,
    did_you_mean,
    in_words,
    parse_yaml,
    why_invalid,
    why_unreadable,
)

KEPT_TOKEN_NAMES = ("token", "password", "secret", "api_key")
WHOLE_FILE = "(file)"
SETTING = "--set "
"""Prefix of a problem's place if a setting caused it."""
TAGS = (Source.TAG, TokenSource.TAG, GeneratedSource.TAG, OWN_TAG, NAME_TAG)
"""Tags that pydantic puts into the location of an error to name the form of a value."""
FORM = re.compile(r"[\w-]+\[.*\]|constrained-\w+|[A-Z]\w*|str|int|float|bool")
"""Parts of pydantic's locations that name a form of a value which may have several."""
MOST_OF_A_VALUE = 200
"""Largest number of characters of a value in an error."""
MOST_PLACES = 3
"""Largest number of suggested places for a misplaced key."""


@dataclass(frozen=True)
class Problem:
    """A mistake in a manifest.

    Its line is 0 if it has none: the file cannot be read, a setting replaces the key,
    or the manifest comes from Python.
    """

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        if self.line:
            return f"{self.file}:{self.line}: {self.key}: {self.message}"
        if self.key == WHOLE_FILE or self.file.startswith(SETTING):
            return f"{self.file}: {self.message}"
        return f"{self.file}: {self.key}: {self.message}"


class ManifestError(ValueError):
    """A manifest that cannot be run, with every problem in it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = sorted(
            set(problems), key=lambda problem: (problem.line, problem.key)
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True)
class Written:
    """Places where the keys of a manifest were written: lines of its file, or settings
    that replace them.

    Attributes:
        file: the manifest's file.
        raw: its content, with the settings applied.
        lines: 1-based line of every key and list item.
        settings: location that each setting replaces -> its key, as given.
    """

    file: str
    raw: Any
    lines: Mapping[Location, int]
    settings: Mapping[Location, str]

    def problem(self, location: Sequence[str | int], message: str) -> Problem:
        """Return a mistake at a key, named as in the file or in a setting."""
        at = written_location(location, self.raw)
        parts = [at[:end] for end in range(len(at), -1, -1)]
        settings = [self.settings[part] for part in parts if part in self.settings]
        if at not in self.lines:
            settings += [
                setting
                for place, setting in self.settings.items()
                if place[: len(at)] == at
            ]
        key = dotted(at) or WHOLE_FILE
        if settings:
            text = message if key == settings[0] else f"{key}: {message}"
            return Problem(f"{SETTING}{settings[0]}", 0, key, text)
        lines = [self.lines[part] for part in parts if part in self.lines]
        return Problem(self.file, lines[0] if lines else 0, key, message)


def load_manifest(path: str | Path, overrides: Sequence[str] = ()) -> Manifest:
    """Read and validate a manifest.

    Args:
        path: the YAML file, or a name in the package (`named_recipes`). Relative paths
            inside it are relative to its folder, those of a named one to the current
            folder.
        overrides: `key.path=value` settings that replace values of the file; the value
            is read as YAML.

    Raises:
        ManifestError: with all problems, before any work.
    """
    return open_manifest(path, overrides)[0]


def open_manifest(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[Manifest, Written]:
    """Read and validate a manifest, and return also where each key was written, for
    problems found later.
    """
    try:
        text = manifest_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = str(error) if is_named(path) else why_unreadable(error)
        if isinstance(error, FileNotFoundError) and not is_named(path):
            message += ", or write one with: gristmill new --source PATH"
        problem = Problem(str(path), 0, WHOLE_FILE, message)
        raise ManifestError([problem]) from error
    return _parse(text, str(path), overrides)


def parse_manifest(text: str, file: str, overrides: Sequence[str] = ()) -> Manifest:
    """Validate a manifest's text; `file` names it in errors and anchors its relative
    paths.
    """
    return _parse(text, file, overrides)[0]


def _parse(text: str, file: str, overrides: Sequence[str]) -> tuple[Manifest, Written]:
    try:
        node = compose_yaml(text)
        raw = parse_yaml(text)
    except yaml.YAMLError as error:
        line, reason = why_invalid(error)
        problem = Problem(file, line, "(syntax)", f"not valid YAML: {reason}")
        raise ManifestError([problem]) from error
    if not isinstance(raw, dict) or node is None:
        message = "a manifest is a mapping that starts with `name:`"
        raise ManifestError([Problem(file, 1, WHOLE_FILE, message)])
    lines: dict[Location, int] = {}
    twice: set[Location] = set()
    problems = []
    for location, line in _key_lines(node):
        if location in lines:
            twice.add(location)
            if location[:-1] not in twice:  # YAML would silently keep the last one
                key = dotted(location)
                problems.append(Problem(file, line, key, "given twice; keep one"))
        lines[location] = line
    folder = Path(file).resolve().parent
    return check_manifest(raw, file, folder, overrides, lines, problems)


def check_manifest(
    raw: dict[str, object],
    file: str,
    folder: Path,
    overrides: Sequence[str] = (),
    lines: Mapping[Location, int] | None = None,
    problems: Iterable[Problem] = (),
) -> tuple[Manifest, Written]:
    """Validate the content of a manifest, which is changed in place: the overrides are
    applied to it.

    Args:
        raw: content as parsed from YAML.
        file: name of the manifest in errors.
        folder: base of relative paths.
        overrides: see `load_manifest`.
        lines: 1-based line of every key and list item, if it was read from a file.
        problems: problems found before.

    Raises:
        ManifestError: with all problems, before any work.
    """
    override_problems, settings = _apply_overrides(raw, overrides)
    problems = [*override_problems, *problems]
    written = Written(file, raw, lines or {}, settings)
    steps = raw.get("prepare") or []
    if unknown := [*expand_presets(steps, folder, ("prepare",))]:
        # its other settings cannot be judged without those of the preset
        raise ManifestError([*problems, *(written.problem(*one) for one in unknown)])
    manifest: Manifest | None = None
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        problems += _field_problems(error.errors(), written)
    reserved_names = [*Manifest.model_fields, *STEP_SECTIONS]
    step_names = wrong_step_names(written_steps(raw.get("prepare")), reserved_names)
    secret = (
        "secrets do not belong in a manifest, which is kept with every run; use "
        "environment variables"
    )
    contradictory = [
        *contradictions(raw),
        *((("prepare", index, NAME), text) for index, text in step_names.items()),
        *(
            (location, secret)
            for location in _locations(raw)
            if str(location[-1]).lower() in KEPT_TOKEN_NAMES
        ),
    ]
    problems += [written.problem(*problem) for problem in contradictory]
    if problems or manifest is None:
        raise ManifestError(problems)
    for location, function in own_functions(manifest):
        section = value_at(manifest, location[:-1])
        try:
            code = take_code(function, folder)
            if isinstance(section, OwnPlace):
                section.check_code(code)
        except OwnCodeError as error:
            problems.append(written.problem(location, str(error)))
    if problems:
        raise ManifestError(problems)
    anchored: Manifest = anchor(manifest, folder)
    return anchored, written


def _key_lines(node: yaml.Node, at: Location = ()) -> Iterator[tuple[Location, int]]:
    """Yield the 1-based line of every key and list item, by its location."""
    yield at, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            inner = (*at, str(name))
            for location, line in _key_lines(value, inner):
                yield location, key.start_mark.line + 1 if location == inner else line
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _key_lines(value, (*at, index))


def _apply_overrides(
    raw: dict[str, object], overrides: Sequence[str]
) -> tuple[list[Problem], dict[Location, str]]:
    """Apply overrides in place, and return their problems, and each replaced location
    with the key that replaced it.
    """
    problems: list[Problem] = []
    settings: dict[Location, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            message = "write an override as key.path=value, e.g. pretrain.steps=50"
            problems.append(Problem(f"{SETTING}{key}", 0, key, message))
            continue
        message = ""
        try:
            *parents, last = full_key(key, raw).split(".")
            value = parse_yaml(text)
            target: Any = raw
            at: Location = ()
            for parent in parents:
                target, way = _child(target, parent)
                at += way
            place: str | int = last
            if isinstance(target, list):
                place = _index(target, last)
            elif not isinstance(target, dict):
                raise LookupError(f"there is nothing below {target!r}")
            target[place] = value
            settings[*at, place] = key
        except yaml.YAMLError as error:
            message = f"{shortened(text)} is not valid YAML: {why_invalid(error)[1]}"
        except LookupError as error:
            message = f"cannot be overridden: {error.args[0]}"
        if message:
            problems.append(Problem(f"{SETTING}{key}", 0, key, message))
    return problems, settings


def full_key(key: str, raw: RawSection | None = None) -> str:
    """Return an override's key as the file has it: `filter.gopher_quality.x` is
    `prepare.filter.rules.gopher_quality.x`.

    Args:
        key: key as given.
        raw: the manifest, whose steps may have their own names.
    """
    first, *key_parts = key.split(".")
    stages = {stage: stage for stage in STEP_SECTIONS}
    steps = written_steps((raw or {}).get("prepare"))
    for name, (stage, _) in zip(name_steps(steps), steps, strict=True):
        if stage:
            stages[name] = stage
    if first not in stages:
        return key
    rules = STEP_SECTIONS[stages[first]].model_fields.get("rules")
    rule_sections = [] if rules is None else models_in(rules.annotation)
    if key_parts and any(
        key_parts[0] in section.model_fields for section in rule_sections
    ):
        key_parts = ["rules", *key_parts]
    return ".".join(["prepare", first, *key_parts])


def short_key(key: str) -> str:
    """Return a step's key as people write it: `filter.rules.gopher_quality.x` is
    `filter.gopher_quality.x`.
    """
    step, separator, key_in_rules = key.partition(".rules.")
    return f"{step}.{key_in_rules}" if separator and "." not in step else key


def _child(parent: Any, key: str) -> tuple[Any, Location]:
    """Return the value below one part of an override's path, and its location;
    `prepare.dedup` finds the step by name.
    """
    if isinstance(parent, list):
        steps = written_steps(parent)
        for index, ((stage, _), name) in enumerate(
            zip(steps, name_steps(steps), strict=True)
        ):
            if stage and name == key:
                parent[index] = entry = take_bare_name(parent[index])
                return entry[stage], (index, stage)
        for index, entry in enumerate(parent):
            if entry == key:
                parent[index] = entry = {key: {}}
            if isinstance(entry, dict) and key in entry:
                return entry[key], (index, key)
        index = _index(parent, key)
        return parent[index], (index,)
    if not isinstance(parent, dict):
        raise LookupError(f"there is nothing below {parent!r}")
    if key == "rules" and isinstance(parent.get(key), list):
        # As a mapping, so that null disables a rule set.
        with suppress(ValueError):  # the schema reports it
            parent[key] = expand(parent[key])
    if parent.get(key) is None:
        # A filter without rules keeps its default rule sets when a threshold of one of
        # them is overridden.
        parent[key] = (
            {name: {} for name in Filter().rules.model_dump()} if key == "rules" else {}
        )
    return parent[key], (key,)


def _index(entries: list[Any], key: str) -> int:
    if not key.isdecimal() or int(key) >= len(entries):
        raise LookupError(
            f"there is no entry {key!r} in that list, which has "
            f"{len(entries)}, counted from 0"
        )
    return int(key)


def _field_problems(errors: Iterable[Any], written: Written) -> Iterator[Problem]:
    """Yield the problems that pydantic found. A value that has none of its forms is one
    problem; if it has the type of a form, only the keys in it are problems.
    """
    by_value: dict[Location, list[Any]] = {}
    for item in errors:
        place = _walk(item["loc"], written.raw)[1]
        if place is None:
            yield _field_problem(item, written)
        else:
            by_value.setdefault(place, []).append(item)
    for place, items in by_value.items():
        inner = [
            item
            for item in items
            if written_location(item["loc"], written.raw) != place
        ]
        if inner:
            yield from (_field_problem(item, written) for item in inner)
            continue
        forms = " or ".join(map(in_words, items)).replace(
            " or input should be ", " or "
        )
        message = forms.replace(" or must be ", " or ")
        yield _field_problem({**items[0], "type": "forms", "msg": message}, written)


def _field_problem(item: Any, written: Written) -> Problem:
    location = written_location(item["loc"], written.raw)
    if item["type"] == "extra_forbidden":
        allowed_keys = known_keys(item["loc"][:-1])
        name = str(location[-1])
        step_hint = ""
        if len(location) == 1 and not did_you_mean(name, known_keys(())):
            step_hint = did_you_mean(name, STEP_SECTIONS)
            if name in STEP_SECTIONS:
                step_hint = "; it is a step, an entry of `prepare:`"
        hint = (
            step_hint
            or hint_of(name, str(location[0]))
            or did_you_mean(name, allowed_keys)
            or _where_it_belongs(name, written.raw, str(location[0]))
            or (f"; known here: {', '.join(allowed_keys)}" if allowed_keys else "")
        )
        return written.problem(location, f"unknown key{hint}")
    if item["type"] == "missing":
        return written.problem(location, "required but absent")
    value = item.get("input")
    got = "" if isinstance(value, Mapping | BaseModel) else f" (got {shortened(value)})"
    return written.problem(location, in_words(item) + got)


def shortened(value: Any) -> str:
    """Return a value as an error repeats it: the first MOST_OF_A_VALUE characters."""
    text = repr(value)
    if len(text) <= MOST_OF_A_VALUE:
        return text
    return f"{text[:MOST_OF_A_VALUE]}... {len(text)} characters"


def _where_it_belongs(name: str, raw: Any, section: str) -> str:
    """Return `, did you mean 'pretrain.steps'?` for a key of its own section, else of
    others, those of this manifest first.
    """
    keys = [
        ".".join(key)
        for key in all_keys(Manifest)
        if key[-1] == name and key[0] not in ("prepare", "sources")
    ]
    keys += [
        short_key(".".join((stage, *key)))
        for stage, section in STEP_SECTIONS.items()
        for key in all_keys(section)
        if key[-1] == name
    ]
    keys = [key for key in keys if key.startswith(f"{section}.")] or keys
    used = {*raw, *(stage for stage, _ in written_steps(raw.get("prepare")))}
    best_keys = sorted(
        keys, key=lambda key: (key.partition(".")[0] not in used, key.count("."))
    )[:MOST_PLACES]
    return f", did you mean {' or '.join(map(repr, best_keys))}?" if best_keys else ""


def written_location(location: Sequence[str | int], raw: Any) -> Location:
    """Return a location that pydantic names in errors as the file has it.

    Rules in a list are a mapping to pydantic, and it inserts the kind of a source and
    the form of a value.
    """
    return _walk(location, raw)[0]


def _walk(location: Sequence[str | int], raw: Any) -> tuple[Location, Location | None]:
    """Return a location as the file has it, and the place of the first value in it that
    may have several forms.
    """
    written: list[str | int] = []
    place: Location | None = None
    value = raw
    for part in location:
        if part in TAGS:
            continue
        if FORM.fullmatch(str(part)) and part not in inside(value):
            place = tuple(written) if place is None else place
            continue
        for index, entry in enumerate(value if isinstance(value, list) else ()):
            if isinstance(part, str) and (entry == part or part in inside(entry)):
                written.append(index)
                value = entry
                break
        written.append(part)
        try:
            value = value[part]
        except (LookupError, TypeError):
            value = None
    return tuple(written), place


def _locations(value: Any, at: Location = ()) -> Iterator[Location]:
    """Yield the location of every key, including those that only overrides have."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (*at, str(key))
            yield from _locations(inner, (*at, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _locations(inner, (*at, index))


def anchor(value: Any, folder: Path) -> Any:
    """Make relative outside paths absolute: they are relative to the manifest's folder,
    not the current one.

    User code is captured from there too.

    Raises:
        OwnCodeError: the code does not exist.
    """
    if isinstance(value, OwnFunction):
        return take_code(value, folder)
    if isinstance(value, OutsidePath):
        is_absolute = "://" in value or Path(value).is_absolute()
        return value if is_absolute else OutsidePath(folder / value)
    if isinstance(value, BaseModel):
        changed = {}  # `model_copy` counts keys that it gets as set
        for name in type(value).model_fields:
            anchored = anchor(getattr(value, name), folder)
            if anchored != getattr(value, name):
                changed[name] = anchored
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, dict):
        return {name: anchor(inner, folder) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(anchor(inner, folder) for inner in value)
    return value
