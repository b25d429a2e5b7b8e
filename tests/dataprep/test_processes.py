"""What a process cost."""

from __future__ import annotations

import subprocess
import sys

from gristmill.dataprep.processes import peak_resident_bytes

BALLAST = 300_000_000


def test_the_peak_of_a_process_is_its_own_and_not_that_of_the_one_which_started_it() -> None:
    ballast = bytearray(BALLAST)
    assert peak_resident_bytes() > BALLAST
    code = ("from gristmill.dataprep.processes import peak_resident_bytes\n"
            "less = peak_resident_bytes()\nballast = bytearray(50_000_000)\n"
            "print(less, peak_resident_bytes())")
    less, more = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    assert less < 100_000_000 < len(ballast)
    assert more - less > 40_000_000
