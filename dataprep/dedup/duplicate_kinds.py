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
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from heapq import nsmallest
from itertools import chain, combinations
from pathlib import Path

from gristmill.dataprep.dedup.repeats import DuplicateKind, DuplicateSample
from gristmill.dataprep.dedup.survivors import Cluster
from gristmill.dataprep.documents import Inputs, open_table
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
Slot = tuple[int, int]
"""First and last token, exclusive, of a passage of the survivor."""
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
    sampled = nsmallest(SAMPLED, _pairs(duplicates), key=lambda pair: pair[1])
    largest = [bytes.fromhex(cluster["survivor"]) for cluster in clusters]
    members: dict[bytes, list[bytes]] = {
        survivor: [] for survivor in chain((pair[0] for pair in sampled), largest)
    }
    for survivor, member in _pairs(duplicates):
        if survivor in members:
            smallest = nsmallest(MEMBERS, [*members[survivor], member])
            members[survivor] = smallest
    ids = chain(members, *members.values(), (pair[1] for pair in sampled))
    documents = documents_of(inputs, ids, ["text"])
    texts = {identity: row["text"] for identity, row in documents.items()}
    kinds = {
        survivor: kind_of(texts[survivor], [texts[member] for member in ids_of_members])
        for survivor, ids_of_members in members.items()
    }
    counted: dict[DuplicateKind, int] = {"copy": 0, "template": 0, "revision": 0}
    for survivor, member in sampled:
        is_copy = tokens_of(texts[survivor]) == tokens_of(texts[member])
        counted["copy" if is_copy else kinds[survivor]] += 1
    sample = DuplicateSample(
        len(sampled),
        counted["copy"],
        counted["template"],
        counted["revision"],
        None if meaning is None else count_alike(sampled, texts, meaning),
    )
    described = zip(clusters, largest, strict=True)
    return sample, [
        {**cluster, "kind": kinds[survivor]} for cluster, survivor in described
    ]


def _pairs(duplicates: Path) -> Iterator[Pair]:
    """Survivor and member of each duplicate among the documents of this run."""
    columns = ["survivor", "member", "against_index"]
    with open_table(duplicates) as file:
        for batch in file.iter_batches(columns=columns, use_threads=False):
            rows = batch.filter(batch["against_index"].is_null())
            yield from zip(
                rows["survivor"].to_pylist(), rows["member"].to_pylist(), strict=True
            )


def tokens_of(text: str) -> list[str]:
    """First tokens of a text, lower-cased: runs of letters and digits, and other
    characters that are not white space.
    """
    tokens = (match[0].lower() for match in _TOKEN.finditer(text))
    return [token for token, _ in zip(tokens, range(MOST_TOKENS), strict=False)]


def kind_of(survivor: str, members: Sequence[str]) -> DuplicateKind:
    """Kind of a cluster, by the members that are not copies of the survivor."""
    tokens = tokens_of(survivor)
    others = [member for member in members if tokens_of(member) != tokens]
    if not others:
        return "copy"
    differences = [value_slots(survivor, member) for member in others]
    slots_of_members = [slots for slots in differences if slots is not None]
    if len(slots_of_members) < len(differences):
        return "revision"
    are_values = all(is_value for _, is_value in chain(*slots_of_members))
    places = [[slot for slot, _ in slots] for slots in slots_of_members]
    shared = [_overlap(*pair) for pair in combinations(places, 2)]
    return "template" if are_values or (shared and all(shared)) else "revision"


def value_slots(survivor: str, member: str) -> list[tuple[Slot, bool]] | None:
    """Passages of a survivor that a member replaces by others, and True for each whose
    tokens have numbers or names on both sides; None if the two differ otherwise.
    """
    cased, other_cased = _TOKEN.findall(survivor), _TOKEN.findall(member)
    tokens, other = tokens_of(survivor), tokens_of(member)
    matcher = SequenceMatcher(None, tokens, other, autojunk=False)
    differences = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    is_cut = max(len(tokens), len(other)) == MOST_TOKENS
    if is_cut and differences[-1][2::2] == (len(tokens), len(other)):
        differences.pop()  # it may go on after the compared tokens
    slots = []
    for tag, begin, end, other_begin, other_end in differences:
        longest = max(end - begin, other_end - other_begin)
        if tag != "replace" or longest > MOST_VALUE_TOKENS:
            return None
        passages = cased[begin:end], other_cased[other_begin:other_end]
        slots.append(((begin, end), all(map(_is_value, passages))))
    replaced = sum(end - begin for (begin, end), _ in slots)
    return slots if slots and 2 * replaced <= len(tokens) else None


def _is_value(tokens: Sequence[str]) -> bool:
    """True if a token of a passage has a digit or begins with a capital."""
    return any(token[0].isupper() or any(map(str.isdigit, token)) for token in tokens)


def _overlap(slots: Sequence[Slot], others: Sequence[Slot]) -> bool:
    """True if most slots of the shorter list share a token with one of the other."""
    fewer, more = sorted((slots, others), key=len)
    shared = sum(
        any(begin < other_end and other_begin < end for other_begin, other_end in more)
        for begin, end in fewer
    )
    return 2 * shared > len(fewer)


def count_alike(
    pairs: Sequence[Pair], texts: dict[bytes, str], model: ReadingModel
) -> int:
    """Number of pairs whose texts have the same meaning by a model's vectors."""
    from gristmill.dataprep.encoders.embeddings import load_embedder

    embedder = load_embedder(model)
    sides = (
        embedder.embed([texts[pair[side]][:MEANING_CHARACTERS] for pair in pairs])
        for side in (0, 1)
    )
    survivors, members = sides
    return int(((survivors * members).sum(axis=1) >= ALIKE).sum())
