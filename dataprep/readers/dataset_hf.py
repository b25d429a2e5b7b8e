"""Files of a split in a Hugging Face `datasets` folder. Only data and JSON are read,
never code.

Two layouts: that of `save_to_disk` (Arrow files listed in `state.json`, one folder per
split under `dataset_dict.json`), and that of the hub (Parquet, JSONL, CSV or text
files, assigned to splits by `configs:` at the top of README.md, else by name, as in
https://huggingface.co/docs/hub/datasets-file-names-and-splits).
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Sequence

from gristmill.dataprep.readers.compression import one_line
from gristmill.dataprep.readers.records import Fields
from gristmill.dataprep.readers.sources import DatasetError, DatasetFolder

DEFAULT_SPLIT = "train"
_ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in file names that mean a split (datasets, data_files.py: SPLIT_KEYWORDS)."""


def data_files(folder: DatasetFolder, split: str | None) -> list[str]:
    """Files of a split, `train` if None, sorted; see `sources.DatasetFolder`.

    Raises:
        DatasetError: the folder is not a dataset, is damaged, or lacks the split; the
            message lists the splits.
    """
    split = split or DEFAULT_SPLIT
    names = folder.files
    if "dataset_dict.json" in names:
        splits = _parse(folder, "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise DatasetError(
                f"has no split {split!r}; its splits are {', '.join(map(str, splits))}"
            )
        return _saved_files(folder, f"{split}/")
    if "state.json" in names:
        saved_split = _parse(folder, "state.json").get("_split") or DEFAULT_SPLIT
        if split != saved_split:
            raise DatasetError(
                f"has no split {split!r}; it was saved with the one split {saved_split}"
            )
        return _saved_files(folder, "")
    # JSON files describe a dataset; its rows are in `.jsonl`
    data = sorted(
        name for name in names if folder.is_data(name) and not name.endswith(".json")
    )
    patterns = _card_patterns(folder)
    if patterns is None:
        return _files_by_name(data, split)
    if split not in patterns:
        raise DatasetError(
            f"has no split {split!r}; README.md names {', '.join(patterns)}"
        )
    matches = [
        name
        for name in data
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns[split])
    ]
    if not matches:
        raise DatasetError(
            f"has no file for split {split!r}: nothing matches "
            f"{', '.join(patterns[split])}"
        )
    return matches


def _saved_files(folder: DatasetFolder, place: str) -> list[str]:
    entries = _parse(folder, f"{place}state.json").get("_data_files") or []
    listed = [
        place + str(entry.get("filename"))
        for entry in entries
        if isinstance(entry, dict)
    ]
    missing = sorted(set(listed) - folder.files.keys())
    if missing or not listed:
        raise DatasetError(
            f"is incomplete: {place}state.json lists {len(listed)} data files"
            + (f", {missing[0]} is missing" if missing else "")
        )
    return sorted(listed)


def _parse(folder: DatasetFolder, name: str) -> Fields:
    try:
        parsed = json.loads(folder.read(name))
    except (ValueError, FileNotFoundError) as error:
        raise DatasetError(f"is damaged: {name} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise DatasetError(f"is damaged: {name} holds no JSON object")
    return parsed


def _card_patterns(folder: DatasetFolder) -> dict[str, list[str]] | None:
    """Split -> patterns of the default configuration in README.md, or None if it does
    not list files.
    """
    if "README.md" not in folder.files:
        return None
    import yaml

    from gristmill.mixtures.yaml_text import front_matter

    try:
        card = front_matter(folder.read("README.md").decode("utf-8", "replace"))
    except yaml.YAMLError as error:
        raise DatasetError(
            f"is damaged: the top of README.md is no YAML: {one_line(error)}"
        ) from error
    configs = card.get("configs")
    if not configs:
        return None
    try:
        usable_configs = [config for config in configs if config.get("data_files")]
        if not usable_configs:
            return None
        marked = (
            config
            for config in usable_configs
            if config.get("default") or config.get("config_name") == "default"
        )
        files = next(marked, usable_configs[0])["data_files"]
        if isinstance(files, dict):
            return {str(split): _as_list(paths) for split, paths in files.items()}
        if isinstance(files, str) or all(isinstance(file, str) for file in files):
            return {DEFAULT_SPLIT: _as_list(files)}
        return {str(entry["split"]): _as_list(entry["path"]) for entry in files}
    except (AttributeError, KeyError, TypeError) as error:
        raise DatasetError(
            "is damaged: `configs` at the top of README.md is not of the hub's form"
        ) from error


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _files_by_name(data: Sequence[str], split: str) -> list[str]:
    """Files whose path has the split's word between punctuation; all are `train` if no
    path has any split's word.
    """
    matches = [name for name in data if _names_split(name, split)]
    if matches:
        return matches
    splits = sorted(
        {alias for alias in _ALIASES for name in data if _names_split(name, alias)}
    )
    if not data:
        raise DatasetError(
            "holds no data: no state.json, dataset_dict.json, "
            "Parquet, JSONL or CSV file"
        )
    if splits or split != DEFAULT_SPLIT:
        raise DatasetError(
            f"has no split {split!r}; the names of its files say "
            f"{', '.join(splits) or DEFAULT_SPLIT}"
        )
    return list(data)


def _names_split(name: str, split: str) -> bool:
    words = "|".join(map(re.escape, _ALIASES.get(split, (split,))))
    return (
        re.search(rf"(?<![A-Za-z0-9])({words})(?![A-Za-z])", name, re.IGNORECASE)
        is not None
    )
