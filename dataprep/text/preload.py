"""Preloads numba, which takes a third of a second before it loads a kernel, and the
tables of all code points, a fifth.

Imported by processes that are forked.
"""

from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.unicode_tables import code_point_flags, lower_case


@kernel
def _nothing() -> None:
    return


_nothing()
code_point_flags()
lower_case()
