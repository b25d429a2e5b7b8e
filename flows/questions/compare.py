"""Two runs side by side: their manifests, outputs, funnels, mixtures, losses and held-out measurements.

A run is read from its record and from the outputs that the record names, so that runs of other versions of a manifest,
or of data that has changed since, can be compared too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from gristmill.core.store import Store, read_runs
from gristmill.flows.questions.status import run_state
from gristmill.flows.questions.what_changed import ABSENT, changed_keys
from gristmill.flows.report.evaluation import evaluation_rows
from gristmill.flows.report.mixture import mixture_rows
from gristmill.flows.report.report_facts import Facts, funnel, topics_of, training, with_tokens
from gristmill.flows.report.training import loss_rows
from gristmill.flows.stages.registry import STAGES, TOKENIZE
from gristmill.mixtures.prepare import name_steps, written_steps
from gristmill.mixtures.sources import INGEST
from gristmill.mixtures.user_code import name_code

LAST = "last"
Row = dict[str, Any]


class UnknownRunError(LookupError):
    """No run, or more than one, is called so; the message lists what there is."""


def find_run(store: Store, wanted: str) -> dict[str, Any]:
    """The record of a run by its name, a part of it that no other has, `last` or `last-1` (the one before).

    Raises:
        UnknownRunError: there is none, or several.
    """
    records = [record for _, record in read_runs(store)]
    if not records:
        raise UnknownRunError(f"{store.root} has no runs yet; start one with: gristmill run MANIFEST")
    back = 0 if wanted == LAST else wanted.removeprefix(f"{LAST}-")
    if str(back).isdecimal() and (wanted == LAST or wanted.startswith(f"{LAST}-")):
        if int(back) >= len(records):
            raise UnknownRunError(f"{wanted}: there are only {len(records)} runs in {store.root}; see: gristmill runs")
        return records[-1 - int(back)]
    found = [record for record in records if record["run"] == wanted]
    found = found or [record for record in records if wanted in record["run"]]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(record["run"] for record in (found or records)[-3:])
    raise UnknownRunError(
        f"{wanted!r} is {'part of the names of several runs' if found else 'no run'} of "
        f"{store.root} (such as {shown}); see: gristmill runs"
    )


def facts_of(store: Store, record: Mapping[str, Any]) -> Facts:
    """What is known of a run, by topic, as in `gather_facts`; topics whose output is not committed are absent."""
    folders = {
        stage: store.folder(stage, record["name"], record["stages"][stage]["fingerprint"])
        for stage in stages_of(record)
    }
    folders = {stage: folder for stage, folder in folders.items() if folder.state() == "committed"}
    manifests = {stage: folder.manifest() for stage, folder in folders.items()}
    summaries = {stage: manifest["summary"] for stage, manifest in manifests.items()}
    facts: Facts = {
        "summaries": summaries,
        "funnel": with_tokens(funnel(summaries, steps_of(record)), summaries.get(TOKENIZE)),
        "training": {
            name: training(folder)
            for name, folder in folders.items()
            if name in STAGES and STAGES[name].trained is not None
        },
        "seconds": {stage: manifest["seconds"] for stage, manifest in manifests.items()},
    }
    for name, folder in folders.items():
        facts |= topics_of(STAGES[name], folder) if name in STAGES else {}
    return facts


def stages_of(record: Mapping[str, Any]) -> list[str]:
    """The stages of a run in the order in which they ran; a record has them in that of the alphabet."""
    order = [INGEST, *steps_of(record), *STAGES]
    return sorted(record["stages"], key=lambda stage: order.index(stage) if stage in order else len(order))


def steps_of(record: Mapping[str, Any]) -> list[str]:
    """The names of a run's steps of `prepare`, in their order."""
    return name_steps(written_steps(record["manifest"].get("prepare", [])))


def keyed(value: Any) -> Any:
    """A manifest whose lists are mappings, so that an entry is compared key by key: preparing steps by name."""
    if isinstance(value, Mapping):
        return {str(key): keyed(inner) for key, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        steps = written_steps(value)
        if all(stage for stage, _ in steps):
            return {
                name: keyed(entry[stage])
                for name, (stage, _), entry in zip(name_steps(steps), steps, value, strict=True)
            }
        names = [next(iter(entry)) for entry in value]
        if all(len(entry) == 1 for entry in value) and len(set(names)) == len(names):
            return {name: keyed(entry[name]) for name, entry in zip(names, value, strict=True)}
        return {str(index): keyed(entry) for index, entry in enumerate(value)}
    return value


def keyed_manifest(manifest: Mapping[str, Any]) -> Any:
    """The manifest of a run's record with its lists keyed by name."""
    return keyed(name_code(deepcopy(dict(manifest))))


def compare_runs(store: Store, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that two runs can be compared by.

    Returns:
        `runs`: name and state of both; `manifest`: key, first, second of what differs (None where a key is absent);
        `stages`: fingerprints, whether both used the same output, and its seconds; `funnel`, `mixture`, `training` and
        `evaluation`: rows that name what they are about, with `first` and `second` of every figure, None where one of
        the runs has none.
    """
    records, facts = (first, second), (facts_of(store, first), facts_of(store, second))
    return {
        "runs": [{"run": record["run"], "state": run_state(record)} for record in records],
        "manifest": [
            {"key": key, "first": None if old is ABSENT else old, "second": None if new is ABSENT else new}
            for key, old, new in changed_keys(*(keyed_manifest(record["manifest"]) for record in records))
        ],
        "stages": _stages(records, facts),
        "funnel": _paired([found["funnel"] for found in facts], ("stage",), ("kept", "bytes_kept", "tokens_kept")),
        "mixture": _paired(
            [mixture_rows(found) if "packed" in found else [] for found in facts],
            ("source",),
            ("tokens", "share", "epochs"),
        ),
        "training": _paired([loss_rows(found) for found in facts], ("stage",), ("steps", "first", "last")),
        "evaluation": _paired(
            [evaluation_rows(found) for found in facts],
            ("model", "source"),
            ("bits_per_byte", "perplexity", "token_accuracy"),
        ),
    }


def _stages(records: Sequence[Mapping[str, Any]], facts: Sequence[Facts]) -> list[Row]:
    rows = []
    for stage in dict.fromkeys(stage for record in records for stage in stages_of(record)):
        entries = [record["stages"].get(stage, {}) for record in records]
        prints = [entry.get("identity", entry.get("fingerprint")) for entry in entries]
        rows.append(
            {
                "stage": stage,
                "same": prints[0] == prints[1],
                "fingerprint": _both(*(None if one is None else one[:16] for one in prints)),
                "seconds": _both(*(found["seconds"].get(stage) for found in facts)),
            }
        )
    return rows


def _paired(sides: Sequence[Sequence[Row]], keys: tuple[str, ...], values: tuple[str, ...]) -> list[Row]:
    """Rows of both sides that have the same keys, with `{first, second}` for every value."""
    indexed = [{tuple(row[key] for key in keys): row for row in rows} for rows in sides]
    return [
        {
            **dict(zip(keys, at, strict=True)),
            **{value: _both(*(side.get(at, {}).get(value) for side in indexed)) for value in values},
        }
        for at in dict.fromkeys(at for side in indexed for at in side)
    ]


def _both(first: Any, second: Any) -> Row:
    return {"first": first, "second": second}


def loss_curves(store: Store, records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Stage -> run -> (step, loss), for pictures of both runs over one axis."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for record in records:
        for stage, lines in facts_of(store, record)["training"].items():
            curves.setdefault(stage, {})[record["run"]] = [
                (line["step"], line["loss"]) for line in lines if "loss" in line
            ]
    return curves
