"""A set that begins with rows of another one that were read already, in the order in which they were (`mix.continues`).

Row j of a source's stream holds the same tokens in every set of the same documents, however many rows there are. A
training has read the rows of a source in some order; behind the rows of its set those of the stream follow:

    numbers     0 1 2 ... u-1 | u ... n-1 | n n+1 ...     of a source's rows in the order of that training
                were read     | were next | not in the set

So the kept rows are those with the first numbers, and what comes behind them takes the next ones: no row is read twice,
whatever the weights are. Which row has which number is computed from the keyed permutations of the set that was read,
row by row, without a list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.mixtures.mix import Continues
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.order import Order, OrderWithout, order_key, permute, phase_parts, rows_before
from gristmill.tokenize.packed_files import CHECKSUM_DTYPE, sums_name

USED = "used"
"""The documents that any row holds, by id, as the segments send them to the ledger."""
USED_SCHEMA = pa.schema([("high", pa.uint64()), ("low", pa.uint64())])


@dataclass(frozen=True)
class Before:
    """A set that is continued. Rows of each source count the sources of the manifest now: new ones have none.

    Attributes:
        phases: rows of each source, for every phase.
        begun: of its first phases, which it kept itself: rows of each source of the orders that they begin.
        rows: how many are kept.
        seed: of the training that read it.
        sources: the numbers that the sources had in it; -1 of one that it had not.
        before: the set that it had continued.
    """

    phases: tuple[tuple[int, ...], ...]
    begun: tuple[tuple[int, ...], ...]
    rows: int
    seed: int
    sources: tuple[int, ...]
    before: Before | None

    def kept(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """The phases of what is kept: rows of each source, and rows of each source of the orders that they begin."""
        rows, begun, left = list[tuple[int, ...]](), list[tuple[int, ...]](), self.rows
        for phase, order in zip(self.phases, (*self.begun, *self.phases[len(self.begun) :]), strict=True):
            if left:
                rows.append(phase if left >= sum(phase) else tuple(rows_before(order, left)))
                begun.append(order)
                left -= sum(rows[-1])
        return tuple(rows), tuple(begun)

    def reach(self, source: int) -> int:
        """Up to which row of a source's stream this set and those before it went."""
        own = sum(phase[source] for phase in self.phases)
        return own if self.before is None else max(own, self.before.reach(source))

    def numbers(self, source: int, name: str, rows: np.ndarray, mix_seed: int) -> np.ndarray:
        """The numbers (int64) that rows of a source's stream have in the order in which the training reads them."""
        found = rows.copy() if self.before is None else self.before.numbers(source, name, rows, mix_seed)
        own = np.cumsum([0, *(phase[source] for phase in self.phases)])
        phase_of = np.searchsorted(own, found, side="right") - 1
        for phase in range(len(self.begun), len(self.phases)):
            chosen = np.flatnonzero(phase_of == phase)
            if len(chosen):
                count, parts = self.phases[phase][source], phase_parts(phase)
                stored = permute(found[chosen] - own[phase], count, order_key(mix_seed, "mix", "rows", *parts, name))
                read = permute(
                    stored, count, order_key(self.seed, *parts, "epoch", 0, self.sources[source]), inverse=True
                )
                found[chosen] = own[phase] + read
        return found


def before_of(section: Continues | None, sources: Sequence[str]) -> Before | None:
    """The set that a section continues, its rows counted by the sources that there are now."""
    if section is None:
        return None
    numbers = tuple(section.sources.index(name) if name in section.sources else -1 for name in sources)
    phases = tuple(tuple(0 if number < 0 else rows[number] for number in numbers) for rows in section.phases)
    earlier = before_of(section.continues, sources)
    return Before(phases, () if earlier is None else earlier.kept()[1], section.rows, section.seed, numbers, earlier)


def check_reach(before: Before, sources: Sequence[str], most_rows: Sequence[int]) -> None:
    """See that no source may give fewer rows than the set that is continued had of it.

    Raises:
        MixError: `max_epochs` of one was lowered, so that rows which were read, or are next, are none of its.
    """
    for number, (name, most) in enumerate(zip(sources, most_rows, strict=True)):
        if before.reach(number) > most:
            raise MixError(
                f"sources.{name}: the set that is continued had {before.reach(number)} rows of it, but its "
                f"max_epochs allows {most}: these are the same documents more often, and which were read is "
                "settled; give it its former max_epochs, and a lower weight"
            )


def digest_of_sums(sums: np.ndarray) -> str:
    """32 hexadecimal digits of what rows hold, from their checksums (uint64, in the order of the rows)."""
    return hashlib.blake2b(sums.astype(CHECKSUM_DTYPE).tobytes(), digest_size=16).hexdigest()


def read_sums(folder: Path, files: Sequence[str]) -> np.ndarray:
    """The checksums (uint64) of all rows of some shards, one after another."""
    return np.concatenate(
        [
            np.empty(0, CHECKSUM_DTYPE),
            *(np.frombuffer((folder / sums_name(file)).read_bytes(), dtype=CHECKSUM_DTYPE) for file in files),
        ]
    )


def check_kept_rows(section: Continues, out: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """See that the kept rows hold what was read.

    Where documents were taken down since, rows of theirs are emptied, and what these held cannot be looked at.

    Args:
        section: what is kept.
        out: the packed set's folder, its shards written.
        entries: of the training shards.

    Raises:
        MixError: they hold something else.
    """
    emptied = [row for entry in entries for row in entry.get("withheld", ()) if row < section.rows]
    sums = np.delete(read_sums(out, [entry["file"] for entry in entries])[: section.rows], emptied)
    if len(sums) == sets_before(section)[0].positions and digest_of_sums(sums) != section.digest:
        raise MixError(
            f"mix.continues: the first {section.rows} rows are not those that were read: the documents are "
            "others (a source, a step of `prepare`), or a key of the mixture that decides what rows hold "
            "(sequence_length, document_starts, validation, seed, fim, a source's where or epochs); give "
            "these back, or train from step 0 without mix.continues"
        )


@dataclass(frozen=True)
class SetBefore:
    """What a checkpoint must have read so that a training can take it up with the set that continues its own.

    Attributes:
        fingerprint: of its rows.
        order: in which it read them.
        positions: how many of these begin the set that continues it.
    """

    fingerprint: str
    order: Order
    positions: int


def sets_before(section: Continues | None) -> list[SetBefore]:
    """The sets that a section continues: the last one, the one before that, and so on."""
    if section is None:
        return []
    before = before_of(section, section.sources)
    assert before is not None
    whole = Order.of_phases(before.phases, section.seed, len(before.begun))
    withheld = np.array(section.withheld, dtype=np.int64)
    order = OrderWithout(whole, withheld) if len(withheld) else whole
    positions = section.rows - int((whole.positions(withheld) < section.rows).sum())
    return [SetBefore(section.fingerprint, order, positions), *sets_before(section.continues)]
