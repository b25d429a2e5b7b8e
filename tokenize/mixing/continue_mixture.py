"""Sets that begin with rows of another set that were already read, in the order of
reading (`mix.continues`).

Row j of a source's stream holds the same tokens in every set of the same documents, for
any number of rows. A training has read the rows of a source in some order; the later
rows of the stream follow those of its set:

    0 1 2 ... u-1 | u ... n-1 | n n+1 ...       numbers of a source's rows in the order
      were read   | were next | not in the set  of that training

The kept rows have the first numbers, and new rows take the next ones: no row is read
twice, for any weights. The number of each row is computed from the keyed permutations
of the earlier set, row by row, without a list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.mixtures.schema.mix import Continues
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.packed_files import CHECKSUM_DTYPE, ShardEntry, sums_name
from gristmill.tokenize.shuffle import (
    Order,
    OrderWithout,
    order_key,
    permute,
    phase_parts,
    rows_before,
)

USED = "used"
"""Shuffled output with the ids of documents in any row, sent by the segments to the
ledger.
"""
USED_SCHEMA = pa.schema([("high", pa.uint64()), ("low", pa.uint64())])


@dataclass(frozen=True)
class Before:
    """A set that is continued. Rows by source follow the sources of the current
    manifest; new sources have none.

    Attributes:
        phases: rows of each source, by phase.
        begun: for the first phases, which it kept from an earlier set: rows by source
            of the full order of each phase.
        rows: number of kept rows.
        seed: of the training that read it.
        sources: number of each source in it; -1 for new sources.
        before: the set that it continues.
    """

    phases: tuple[tuple[int, ...], ...]
    begun: tuple[tuple[int, ...], ...]
    rows: int
    seed: int
    sources: tuple[int, ...]
    before: Before | None

    def kept(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Phases of the kept rows: rows by source, and rows by source of the full order
        of each phase.
        """
        rows: list[tuple[int, ...]] = []
        full_orders: list[tuple[int, ...]] = []
        remaining = self.rows
        orders = (*self.begun, *self.phases[len(self.begun) :])
        for phase, order in zip(self.phases, orders, strict=True):
            if not remaining:
                break
            if remaining < sum(phase):
                phase = tuple(rows_before(order, remaining))
            rows.append(phase)
            full_orders.append(order)
            remaining -= sum(phase)
        return tuple(rows), tuple(full_orders)

    def reach(self, source: int) -> int:
        """End of a source's rows in this set and all earlier ones."""
        source_rows = sum(phase[source] for phase in self.phases)
        earlier = 0 if self.before is None else self.before.reach(source)
        return max(source_rows, earlier)

    def numbers(
        self, source: int, name: str, rows: np.ndarray, mix_seed: int
    ) -> np.ndarray:
        """Numbers (int64) of rows of a source's stream in the training's order of
        reading.
        """
        numbers = rows.copy()
        if self.before is not None:
            numbers = self.before.numbers(source, name, rows, mix_seed)
        begins = np.cumsum([0, *(phase[source] for phase in self.phases)])
        phase_of = np.searchsorted(begins, numbers, side="right") - 1
        for phase in range(len(self.begun), len(self.phases)):
            selection = np.flatnonzero(phase_of == phase)
            if len(selection):
                count = self.phases[phase][source]
                parts = phase_parts(phase)
                stored_key = order_key(mix_seed, "mix", "rows", *parts, name)
                stored = permute(numbers[selection] - begins[phase], count, stored_key)
                read_key = order_key(
                    self.seed, *parts, "epoch", 0, self.sources[source]
                )
                read = permute(stored, count, read_key, inverse=True)
                numbers[selection] = begins[phase] + read
        return numbers


def before_of(section: Continues | None, sources: Sequence[str]) -> Before | None:
    """Set that a section continues, its rows counted by the current sources."""
    if section is None:
        return None
    numbers = tuple(
        section.sources.index(name) if name in section.sources else -1
        for name in sources
    )
    phases = tuple(
        tuple(0 if number < 0 else rows[number] for number in numbers)
        for rows in section.phases
    )
    earlier = before_of(section.continues, sources)
    return Before(
        phases,
        () if earlier is None else earlier.kept()[1],
        section.rows,
        section.seed,
        numbers,
        earlier,
    )


def check_reach(
    before: Before, sources: Sequence[str], most_rows: Sequence[int]
) -> None:
    """Check that every source may give at least the rows that it had in the continued
    set.

    Raises:
        MixError: `max_epochs` of a source was lowered below the rows that it had.
    """
    for number, (name, most) in enumerate(zip(sources, most_rows, strict=True)):
        reach = before.reach(number)
        if reach > most:
            raise MixError(
                f"sources.{name}: the set that is continued had {reach} "
                f"rows of it, but its max_epochs allows {most}: these are the same "
                "documents more often, and which were read is settled; give it its "
                "former max_epochs, and a lower weight"
            )


def digest_of_sums(sums: np.ndarray) -> str:
    """Digest of rows, 32 hexadecimal digits, from their checksums (uint64, in row
    order).
    """
    return hashlib.blake2b(
        sums.astype(CHECKSUM_DTYPE).tobytes(), digest_size=16
    ).hexdigest()


def read_sums(folder: Path, files: Sequence[str]) -> np.ndarray:
    """Read the checksums (uint64) of all rows of some shards, in order."""
    content = b"".join((folder / sums_name(file)).read_bytes() for file in files)
    return np.frombuffer(content, CHECKSUM_DTYPE)


def check_kept_rows(
    section: Continues, out: Path, entries: Sequence[ShardEntry]
) -> None:
    """Check that the kept rows hold the tokens that were read.

    Rows that were emptied since, because their documents were taken down, cannot be
    checked.

    Args:
        section: the kept rows.
        out: the packed set's folder, with its shards.
        entries: of the training shards.

    Raises:
        MixError: the tokens differ.
    """
    emptied = [
        row
        for entry in entries
        for row in entry.get("withheld", ())
        if row < section.rows
    ]
    sums = np.delete(
        read_sums(out, [entry["file"] for entry in entries])[: section.rows], emptied
    )
    if (
        len(sums) == sets_before(section)[0].positions
        and digest_of_sums(sums) != section.digest
    ):
        raise MixError(
            f"mix.continues: the first {section.rows} rows are not those that were "
            "read: the documents are others (a source, a step of `prepare`), or a key "
            "of the mixture that decides what rows hold (sequence_length, "
            "validation, seed, fim, a source's where or epochs); give "
            "these back, or train from step 0 without mix.continues"
        )


@dataclass(frozen=True)
class SetBefore:
    """Earlier set of a checkpoint that may resume on the set that continues it.

    Attributes:
        fingerprint: of its rows.
        order: in which it was read.
        positions: number of its positions at the beginning of the continuing set.
    """

    fingerprint: str
    order: Order
    positions: int


def sets_before(section: Continues | None) -> list[SetBefore]:
    """Sets that a section continues, the latest first."""
    if section is None:
        return []
    before = before_of(section, section.sources)
    assert before is not None
    full_order = Order.of_phases(before.phases, section.seed, len(before.begun))
    withheld = np.array(section.withheld, np.int64)
    order = OrderWithout(full_order, withheld) if len(withheld) else full_order
    positions = section.rows - int(
        (full_order.positions(withheld) < section.rows).sum()
    )
    return [
        SetBefore(section.fingerprint, order, positions),
        *sets_before(section.continues),
    ]
