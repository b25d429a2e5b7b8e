"""Beam's pipeline options, all at their defaults, which is what the local runner takes.

Beam looks at its options some fifty times per pipeline, and each look makes a parser of command lines anew: two
fifths of what a job costs besides its work. Nothing is left to be parsed here, so every group of options is made once
per process.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

_defaults: dict[type[PipelineOptions], dict[str, Any]] = {}
"""Group of options -> the attributes of a view of it, as Beam made them."""


class DefaultOptions(PipelineOptions):
    """No option is set; what a pipeline sets on its way stays its own."""

    def __init__(self) -> None:
        super().__init__(flags=[])

    def view_as(self, cls: type[PipelineOptions]) -> PipelineOptions:
        """A view of these options as one of their groups; all views share the options' values."""
        if cls not in _defaults:
            _defaults[cls] = vars(cls(flags=[]))
        view: PipelineOptions = object.__new__(cls)
        vars(view).update(_defaults[cls], _all_options=self._all_options)
        for name, value in vars(view._visible_options).items():
            if name not in self._all_options:
                self._all_options[name] = deepcopy(value)
        return view
