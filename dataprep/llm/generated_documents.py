"""Stage `generate`: a language model writes new documents from documents, before
`ingest`.

Its output is files that `ingest` reads like those of any source, so that all later
steps treat parents and children alike: `dedup` finds copies of a parent,
`decontaminate` finds items of evaluations.

    NAME/part-*.jsonl          new documents of a source: `locator`, `text` and their
                               future metadata: `kind`, `style`, `parents` (ids),
                               `model`, and the parents' licences if they have any
    quarantine/NAME.jsonl      parents for which the endpoint wrote nothing, with its
                               error
    lineage.parquet            parents of generated documents (`lineage.py`)

Parents are read here exactly as `ingest` will read them again, so that they have the
same ids. Memory: 8 bytes per parent, and the texts of one or two shards.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.files import read_json, write_json_lines, write_text
from gristmill.core.seeds import seeded_key
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import (
    Counted,
    Counts,
    add_counts,
    check_conservation,
    check_quarantine,
)
from gristmill.dataprep.documents import Inputs, document_id
from gristmill.dataprep.inner_steps import run_step
from gristmill.dataprep.licences.statements import of_metadata
from gristmill.dataprep.llm.batch_requests import ask_tasks
from gristmill.dataprep.llm.lineage import (
    GENERATED,
    SCHEMA,
    lineage_rows,
    write_lineage,
)
from gristmill.dataprep.llm.prompt_templates import read_lines, read_template
from gristmill.dataprep.llm.prompting import Answer, Request
from gristmill.dataprep.llm.request_counts import GeneratedSource
from gristmill.dataprep.readers import ingest
from gristmill.dataprep.runners.tasks import Done, ShardTask, shard_tasks
from gristmill.dataprep.user_code.own_documents import read_judged_columns
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.generated_source import Generate
from gristmill.mixtures.spdx import join

READS = ("id", "text", "source", "locator", "url", "metadata")
GIVEN = (*READS[1:], "persona", "language", "number", "others")
"""Names that templates may use."""
EMPTY, SHORT, CUT = "generate/empty", "generate/short", "generate/cut"


class Failure(TypedDict):
    """New document that was not written."""

    parent: str
    """Id of the first parent, in hexadecimal."""
    number: int
    error: str


class GeneratedShard(Counted):
    """Result of writing the new documents of a shard of parents."""

    parents: int
    errors: list[Failure]


class GenerateRecipe(TypedDict):
    """Recipe of the stage."""

    sources: Mapping[str, Recipe]
    """Sections of the parents' sources, as of the stage `ingest`."""
    ingest: Recipe
    """Section of the manifest."""
    generate: Mapping[str, Recipe]
    """Name of a generated source -> section."""
    order: Sequence[str]
    """Names, each after those that it is generated from."""
    seed: int
    """Of sources without a seed."""


@dataclass(frozen=True)
class GenerateSummary:
    """Summary of the generated sources by name."""

    generated: Mapping[str, GeneratedSource]


def run(
    inputs: Inputs, config: GenerateRecipe, out: Path, context: Context
) -> GenerateSummary:
    """Generate the documents of all generated sources, one source after another.

    Args:
        inputs: empty.
        config: names, sections and order of the sources.

    Raises:
        AskingError: answers are unavailable, or the budget is spent; all answers
            received are stored.
        ConservationError, QuarantineError: see `counts`.
    """
    generated: dict[str, GeneratedSource] = {}
    for name in config["order"]:
        section = Generate.model_validate(config["generate"][name])
        generated[name] = _Source(name, section, config, out, context).make()
    lineage = [SCHEMA.empty_table()]
    for name in generated:
        for path in sorted((context.work / f"lineage-{name}").glob("*.json")):
            lineage.append(lineage_rows(read_json(path), name))
    write_lineage(out, pa.concat_tables(lineage))
    return GenerateSummary(generated)


class Parent(NamedTuple):
    """Document that new ones are written from."""

    id: str
    """In hexadecimal."""
    licence: str | None


@dataclass(frozen=True)
class _Chosen:
    """Requests of a shard of parents.

    Attributes:
        used: number of the shard's parents.
        new_documents: for each, its parents (the first one leads), and its own number.
        prompts: per new document its request, or the reason for having none.
    """

    used: int
    new_documents: Sequence[tuple[Sequence[Parent], int]]
    prompts: Sequence[Request | str]


class _Source:
    """One generated source."""

    def __init__(
        self,
        name: str,
        section: Generate,
        recipe: GenerateRecipe,
        out: Path,
        context: Context,
    ) -> None:
        self.name = name
        self.section = section
        self.recipe = recipe
        self.out = out
        self.seed = recipe["seed"] if section.seed is None else section.seed
        self.lineage = context.work / f"lineage-{name}"
        self.context = replace(context, stage=f"{context.stage} {name}")
        self.template = read_template(section.template, f"generate-{section.style}")
        self.template.check(GIVEN)
        self.personas = read_lines(section.personas)

    def make(self) -> GeneratedSource:
        """Choose parents, ask the model and write its answers."""
        inputs = self._read_parents()
        tasks = shard_tasks(inputs["ingest"])
        share, limit = self.section.share, self.section.limit
        largest_key = int(share * (2**64 - 1)) if share < 1 else 2**64 - 1
        keys = array("Q")
        parents = 0
        for task in tasks:
            ids = read_judged_columns(inputs, task.name, None, ("id",)).given["id"]
            parents += len(ids)
            keys.extend(
                key for key in map(self._key, ids.to_pylist()) if key <= largest_key
            )
        eligible = len(keys)
        if limit is not None and limit < eligible:
            largest_key = int(np.partition(keys, limit - 1)[limit - 1])
        total = min(eligible, limit or eligible) * self.section.per_document
        results, tallies = ask_tasks(
            f"generate-{self.name}",
            tasks,
            self.section.model,
            partial(self._read, inputs, largest_key),
            self._write,
            self.context,
            lambda shards: total,
        )
        counts = add_counts(result["counts"] for result in results)
        check_conservation(counts, self.context.stage)
        errors = [error for result in results for error in result["errors"]]
        if errors:
            write_text(
                self.out / "quarantine" / f"{self.name}.jsonl",
                "".join(json.dumps(error) + "\n" for error in errors),
            )
        check_quarantine(counts, self.section.max_quarantined, self.context.stage)
        is_shipped = self.section.template is None
        return GeneratedSource(
            style=self.section.style if is_shipped else self.template.place,
            made_from=self.section.parents,
            parents=parents,
            eligible=eligible,
            used=sum(result["parents"] for result in results),
            requests=counts.get("read", 0),
            kept=counts.get("kept", 0),
            dropped=counts.get("dropped", {}),
            quarantined=counts.get("quarantined", 0),
            bytes=counts.get("bytes_kept", 0),
            asked=tallies[0] if tallies else {},
        )

    def _read_parents(self) -> dict[str, Path]:
        """Ingest the parents and run the preparing steps on them; return the folders by
        step.
        """
        sources = {
            source: self.recipe["sources"][source]
            if source in self.recipe["sources"]
            else ingest.generated_files(self.out / source)
            for source in self.section.parents
        }
        work = self.context.work / f"parents-{self.name}"
        inputs = {"ingest": work / "ingest"}
        recipe = {"sources": sources, "ingest": self.recipe["ingest"]}
        self._run(ingest.run, {}, recipe, work / "ingest")
        for number, step in enumerate(self.section.prepare):
            name = f"{step.stage}-{number}"
            config = step.config.model_dump(mode="json")
            if "seed" in config and config["seed"] is None:
                config["seed"] = self.seed
            self._run(partial(run_step, step.stage), inputs, config, work / name)
            inputs[name] = work / name
        return inputs

    def _run(
        self,
        function: Callable[[Inputs, Recipe, Path, Context], object],
        inputs: Inputs,
        config: Recipe,
        out: Path,
    ) -> None:
        """Run a stage's function inside this stage, unless it has finished already."""
        done = out.with_name(f"{out.name}.done")
        work = out.with_name(f"{out.name}.work")
        if done.exists():
            return
        work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        context = replace(
            self.context,
            work=work,
            stage=f"{self.context.stage}, {out.name} of its parents",
            answers=self.context.answers or self.context.work / "answers",
        )
        function(inputs, config, out, context)
        write_text(done, "")

    def _key(self, document: str, *more: str | int) -> int:
        return seeded_key(self.seed, "generate", self.name, document, *more)

    def _read(self, inputs: Inputs, bound: int, shard: str) -> _Chosen:
        """Requests about the parents of a shard."""
        read = read_judged_columns(inputs, shard, None, READS)
        rows = [
            values
            for values in read.given.select(READS).to_pylist()
            if self._key(values["id"]) <= bound
        ]
        parents: list[Parent] = []
        for row in rows:
            statement = of_metadata(row["metadata"])
            parents.append(Parent(row["id"], statement.licence if statement else None))
        new_documents: list[tuple[Sequence[Parent], int]] = []
        prompts: list[Request | str] = []
        texts = [row["text"][: self.section.characters] for row in rows]
        for place, row in enumerate(rows):
            document = row["id"]
            metadata = json.loads(row["metadata"])
            for number in range(self.section.per_document):
                others: list[int] = []
                if other_count := self.section.others:
                    draws = np.random.default_rng(self._key(document, "others", number))
                    most = min(len(rows), other_count + 1)
                    drawn = draws.choice(len(rows), most, replace=False).tolist()
                    others = [index for index in drawn if index != place][:other_count]
                filled = {
                    **{key: row[key] for key in READS[1:]},
                    "text": texts[place],
                    "metadata": metadata,
                    "language": self.section.language,
                    "persona": None,
                    "number": number,
                    "others": [texts[index] for index in others],
                }
                if self.personas:
                    key = self._key(document, "persona", number)
                    filled["persona"] = self.personas[key % len(self.personas)]
                child_parents = [parents[index] for index in (place, *others)]
                about = " ".join(parent.id for parent in child_parents)
                prompts.append(
                    self.template.request(filled, number=number, about=about)
                )
                new_documents.append((child_parents, number))
        return _Chosen(len(parents), new_documents, prompts)

    def _write(
        self, task: ShardTask, chosen: _Chosen, answers: Sequence[Answer]
    ) -> Done[GeneratedShard]:
        lines: list[dict[str, str]] = []
        edges: list[tuple[str, str]] = []
        errors: list[Failure] = []
        counts: Counts = {
            "read": len(chosen.new_documents),
            "kept": 0,
            "dropped": {},
            "quarantined": 0,
            "bytes_kept": 0,
        }
        for (parents, number), answer in zip(
            chosen.new_documents, answers, strict=True
        ):
            first = parents[0].id
            if answer.error is not None:
                counts["quarantined"] += 1
                errors.append(
                    {"parent": first, "number": number, "error": answer.error}
                )
                continue
            new = answer.text.strip()
            reason = None
            if not new:
                reason = EMPTY
            elif answer.finish == "length" and self.section.cut == "drop":
                reason = CUT
            elif len(new) < self.section.shortest:
                reason = SHORT
            if reason is not None:
                counts["dropped"][reason] = counts["dropped"].get(reason, 0) + 1
                continue
            locator = f"{first}/{self.section.style}-{number}"
            child = document_id(self.name, locator, new).hex()
            line = {
                "locator": locator,
                "text": new,
                "kind": GENERATED,
                "style": self.section.style,
                "parents": " ".join(parent.id for parent in parents),
                "model": self.section.model.called,
            }
            licences = [parent.licence for parent in parents if parent.licence]
            if licences:
                line["licence"] = join(licences)
            lines.append(line)
            edges.extend((parent.id, child) for parent in parents)
            counts["kept"] += 1
            counts["bytes_kept"] += len(new.encode())
        path = self.out / self.name / f"{Path(task.name).stem}.jsonl"
        kept = self.lineage / f"{Path(task.name).stem}.json"
        write_json_lines(path, lines)
        write_text(kept, json.dumps(edges))
        return Done(
            [path, kept],
            {
                "counts": counts,
                "parents": chosen.used,
                "errors": errors,
            },
        )
