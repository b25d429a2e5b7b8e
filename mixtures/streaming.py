"""The section `engine.stream`: how training reads its rows. Nothing here changes which rows, or what they hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gristmill.mixtures.section import Positive, PositiveFloat, Section


class Stream(Section):
    """Reading ahead of the training, and a packed set that lies in an object store.

    The rows of a set on a local disk are read by memory map, and all keys but the first have no meaning. From a store
    (`s3://` needs the extra `s3`), whole shards are fetched into a folder of limited size while the training runs; rows
    of shards that are not there (yet) are read one by one, ahead of their step. Every row is held against its
    checksum. A store that fails is asked again, and the training goes on meanwhile with what it has.
    """

    read_ahead_steps: Positive = 32
    """Steps whose rows are read before they are needed, each process its own share of them. They lie in memory: steps
    times rows of a batch on one process times bytes of a row (2 per token). With a set in a store this is also how
    long an outage of it goes unnoticed."""
    cache_bytes: Annotated[int, Field(ge=0)] = 16 << 30
    """Largest size of the shards in `cache_folder`; 0 reads every row from the store. Beside them lie the checksums
    and boundaries of all rows, about a hundredth of the set."""
    cache_folder: str | None = None
    """Where fetched shards lie, on a local disk; `gristmill/stream` in the user's cache folder if absent. All processes
    of a machine, and several trainings, may share it. A training whose own folder lies in a store works below it, in a
    copy that is sent to the store with each checkpoint: there must be room for its checkpoints, and for the models that
    it starts from."""
    connections: Positive = 16
    """Requests to the store at a time, per process."""
    timeout_seconds: PositiveFloat = 30.0
    """A request that takes longer has failed."""
    retry_seconds: PositiveFloat = 1800.0
    """An object that the store has not given for so long ends the training, with an error that names it."""
