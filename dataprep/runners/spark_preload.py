"""Preloads Spark's Python interface. Imported by processes that are forked; without Spark
on this machine the stage reports it.
"""

import importlib
from contextlib import suppress

from gristmill.dataprep.runners.errors import MissingEngineError
from gristmill.dataprep.runners.spark import import_spark

with suppress(MissingEngineError):
    import_spark()
    importlib.import_module("pyspark")
