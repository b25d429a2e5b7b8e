"""Texts as an awkward array for gigatoken, with shortcuts for its calls.

gigatoken calls `without_parameters`, `flatten`, `num` and `to_numpy`, each of which
passes through all layers of awkward: a fifth of a millisecond per call of gigatoken,
which takes one millisecond per megabyte. An array class may override such calls
(`__awkward_function__`), and an array selects its class by its behavior.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import awkward as ak
import numpy as np

from gristmill.dataprep.text.kernels import Bytes, Offsets

NAME = "texts"


class _Answer:
    """Result of a shortcut that converts to a NumPy array."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __awkward_function__(
        self,
        function: Callable[..., Any],
        arrays: object,
        args: tuple[Any, ...],
        kwargs: Mapping[str, object],
    ) -> np.ndarray:
        if function.__name__ != "to_numpy":
            return function(ak.Array(self._values), *args[1:], **kwargs)
        return self._values


class Texts(ak.Array):
    """A column of texts as lists of their bytes."""

    def __awkward_function__(
        self,
        function: Callable[..., Any],
        arrays: object,
        args: tuple[Any, ...],
        kwargs: Mapping[str, object],
    ) -> Any:
        layout = self.layout
        alone = len(args) == 1 and not kwargs
        if alone and function.__name__ == "without_parameters":
            return self
        offsets = layout.offsets.data
        if alone and function.__name__ == "flatten":
            return _Answer(layout.content.data[offsets[0] : offsets[-1]])
        if alone and function.__name__ == "num":
            return _Answer(np.diff(offsets))
        return function(ak.Array(ak.without_parameters(layout)), *args[1:], **kwargs)


def as_awkward(data: Bytes, offsets: Offsets) -> Texts:
    """Array of the texts from `kernels.text_buffers`."""
    layout = ak.contents.ListOffsetArray(
        ak.index.Index64(offsets),
        ak.contents.NumpyArray(data),
        parameters={"__list__": NAME},
    )
    return ak.Array(layout, behavior={NAME: Texts})
