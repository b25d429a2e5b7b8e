"""Preloaded module of the fork server of `pool.py`, with the imports of all workers;
not for import elsewhere.

The server ends with the process that started it, and its workers end with the server.
It must not start threads, which forks do not inherit. (Its only native thread is that
of Arrow's jemalloc, which supports forks.)
"""

import gc
import importlib
import os
import signal
import warnings

from gristmill.core.processes import ONE_THREAD, end_with_parent

end_with_parent(signal.SIGKILL)
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
for variable in ONE_THREAD:
    os.environ.setdefault(variable, "1")
gc.disable()
for name in (
    "cloudpickle",
    "pyarrow",
    "gristmill.dataprep.runners.tasks",
    "gristmill.dataprep.text.kernels",
):
    importlib.import_module(name)
gc.enable()
# a garbage collection of the imported objects in a worker would copy all of their
# memory
gc.freeze()
