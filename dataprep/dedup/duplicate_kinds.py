"""Kinds of duplicates, on a sample: copies, instances of a template, and revisions.

Templated texts (a query with other values, a page with another price) share a skeleton
of tokens; they are not copies, and dropping them may lose every value but one. A member
of a cluster is compared with its survivor, token by token:

- a copy has the same tokens, apart from case;
- an instance of a template differs only in short passages, each of which replaces
  another one, at places where other members of the cluster differ too, or whose values
  are numbers and names;
- a revision has any other difference, such as added or deleted sentences.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from heapq import nsmallest
from itertools import chain, combinations, islice
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.dedup.repeats import Cluster, DuplicateKind, DuplicateSample
from gristmill.dataprep.documents import ID_BYTES, Inputs, open_table
from gristmill.dataprep.row_groups import documents_of
from gristmill.mixtures.schema.encoder_settings import ReadingModel

SAMPLED = 100
"""Compared duplicates, those with the smallest ids, which are hashes."""
MEMBERS = 4
"""Compared members of a cluster."""
MOST_TOKENS = 500
"""Compared tokens of a text, from its beginning."""
MOST_VALUE_TOKENS = 12
"""Tokens of a value in a template, on either side."""
ALIKE = 0.9
"""Cosine from which two texts are alike in meaning: the threshold of
`dedup_semantic`.
"""
MEANING_CHARACTERS = 20_000

Pair = tuple[bytes, bytes]
"""Ids of a survivor and of a duplicate that it represents."""
_TOKEN = re.compile(r"\w+|[^\w\s]")


def sample_duplicates(
    inputs: Inputs,
    duplicates: Path,
    clusters: Sequence[Cluster],
    meaning: ReadingModel | None,
) -> tuple[DuplicateSample, list[Cluster]]:
    """Compare a sample of the duplicates, and members of the largest clusters, with
    their survivors.

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        duplicates: `clusters.parquet` of the step.
        clusters: the largest ones.
        meaning: model that compares the meanings, if any.

    Returns:
        the sample, and the clusters with their kinds.
    """
    smallest = (batch.sort_by("member")[:SAMPLED] for batch in _batches(duplicates))
    sampled = nsmallest(SAMPLED, _pairs(smallest), key=itemgetter(1))
    members: dict[bytes, list[bytes]] = {survivor: [] for survivor, _ in sampled}
    members |= {bytes.fromhex(cluster["survivor"]): [] for cluster in clusters}
    compared = pa.array([*members], pa.binary(ID_BYTES))
    for survivor, member in _pairs(
        batch.filter(pc.is_in(batch["survivor"], compared))
        for batch in _batches(duplicates)
    ):
        members[survivor] = nsmallest(MEMBERS, [*members[survivor], member])
    ids = chain(members, *members.values(), (member for _, member in sampled))
    documents = documents_of(inputs, ids, ["text"])
    texts = {identity: row["text"] for identity, row in documents.items()}
    tokens = {identity: tokens_of(text) for identity, text in texts.items()}
    kinds = {
        survivor: kind_of(tokens[survivor], [tokens[member] for member in some])
        for survivor, some in members.items()
    }
    counted = Counter(
        "copy"
        if lowered(tokens[survivor]) == lowered(tokens[member])
        else kinds[survivor]
        for survivor, member in sampled
    )
    sample = DuplicateSample(
        len(sampled),
        counted["copy"],
        counted["template"],
        counted["revision"],
        None if meaning is None else count_alike(sampled, texts, meaning),
    )
    return sample, [
        {**cluster, "kind": kinds[bytes.fromhex(cluster["survivor"])]}
        for cluster in clusters
    ]


def _batches(duplicates: Path) -> Iterator[pa.RecordBatch]:
    """Duplicates among the documents of this run."""
    columns = ["survivor", "member", "against_index"]
    with open_table(duplicates) as file:
        for batch in file.iter_batches(columns=columns, use_threads=False):
            yield batch.filter(batch["against_index"].is_null())


def _pairs(batches: Iterable[pa.RecordBatch]) -> Iterator[Pair]:
    """Survivor and member of each duplicate."""
    for batch in batches:
        ids = (batch[column].to_pylist() for column in ("survivor", "member"))
        yield from zip(*ids, strict=True)


def tokens_of(text: str) -> list[str]:
    """First tokens of a text: runs of letters and digits, and other characters that are
    not white space.
    """
    return [match[0] for match in islice(_TOKEN.finditer(text), MOST_TOKENS)]


def kind_of(survivor: Sequence[str], members: Sequence[Sequence[str]]) -> DuplicateKind:
    """Kind of a cluster, by the tokens of members that are not copies of the
    survivor.
    """
    others = [member for member in members if lowered(member) != lowered(survivor)]
    if not others:
        return "copy"
    replaced = [replaced_tokens(survivor, member) for member in others]
    if not all(places for places, _ in replaced):
        return "revision"
    shared = [
        2 * len(first & second) > min(len(first), len(second))
        for (first, _), (second, _) in combinations(replaced, 2)
    ]
    are_values = all(are_values for _, are_values in replaced)
    return "template" if are_values or (shared and all(shared)) else "revision"


def replaced_tokens(
    survivor: Sequence[str], member: Sequence[str]
) -> tuple[set[int], bool]:
    """Places of the tokens that a member replaces in short passages, and True if all
    passages have numbers or names on both sides; no places if the two differ otherwise.
    """
    matcher = SequenceMatcher(None, lowered(survivor), lowered(member), autojunk=False)
    places: set[int] = set()
    are_values = True
    for tag, begin, end, other_begin, other_end in matcher.get_opcodes():
        if tag == "equal" or MOST_TOKENS in (end, other_end):
            continue  # a text may go on after the compared tokens
        passages = survivor[begin:end], member[other_begin:other_end]
        if tag != "replace" or max(map(len, passages)) > MOST_VALUE_TOKENS:
            return set(), False
        places |= {*range(begin, end)}
        are_values &= all(map(_is_value, passages))
    return places, are_values


def lowered(tokens: Sequence[str]) -> list[str]:
    """Tokens in lower case."""
    return [token.lower() for token in tokens]


def _is_value(tokens: Sequence[str]) -> bool:
    """True if a token of a passage has a digit or begins with a capital."""
    return any(token[0].isupper() or any(map(str.isdigit, token)) for token in tokens)


def count_alike(
    pairs: Sequence[Pair], texts: Mapping[bytes, str], model: ReadingModel
) -> int:
    """Number of pairs whose texts have the same meaning by a model's vectors."""
    from gristmill.dataprep.encoders.embeddings import load_embedder

    sides = [
        texts[identity][:MEANING_CHARACTERS] for pair in pairs for identity in pair
    ]
    vectors = load_embedder(model).embed(sides)
    return int(((vectors[::2] * vectors[1::2]).sum(axis=1) >= ALIKE).sum())
