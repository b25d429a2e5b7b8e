"""Import of Spark's Python interface for the fork server of a run's stages; not for
import elsewhere.
"""

from gristmill.dataprep.runners.spark import import_spark

import_spark()
import pyspark  # noqa: E402, F401
