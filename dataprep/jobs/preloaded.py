"""What the fork server of `pool.py` imports, for all workers: nothing else may import this.

The server ends with the process that started it, and with it its workers, whatever they do. It runs no thread, which
would be lost in its forks. (Of native threads it has the one of Arrow's jemalloc, which is made to be forked.)
"""

import gc
import importlib
import os
import signal
import warnings

from gristmill.dataprep.processes import ONE_THREAD, end_with_parent

end_with_parent(signal.SIGKILL)
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
for variable in ONE_THREAD:
    os.environ.setdefault(variable, "1")
gc.disable()
for name in ("cloudpickle", "pyarrow", "gristmill.dataprep.jobs.engine", "gristmill.dataprep.text.kernels"):
    importlib.import_module(name)
gc.enable()
gc.freeze()  # what is imported stays: a worker that looks for garbage in it would copy all of its memory
