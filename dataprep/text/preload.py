"""Preloads numba, which takes a third of a second before it loads a kernel, and the
tables of all code points, a fifth.

Imported by processes that are forked.
"""

import numpy as np

from gristmill.dataprep.text.hashing import fmix32
from gristmill.dataprep.text.unicode_tables import code_point_flags, lower_case

fmix32(np.uint32(0))
code_point_flags()
lower_case()
