"""Whether a process of this machine lives, and since when."""

import os
import sys

__all__ = ["started_at"]


def started_at(process: int) -> int:
    """When a process started, in ticks of the machine; 0 for one that is gone or a zombie.

    1 on a system without /proc, if it lives. 0 on Windows, where os.kill(process, 0) would be Ctrl-C.
    """
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0 if os.path.isdir("/proc/self") else _answers(process)
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def _answers(process: int) -> int:
    if sys.platform == "win32":
        return 0
    try:
        os.kill(process, 0)
    except PermissionError:
        return 1  # it lives, and is another user's
    except OSError:
        return 0
    return 1
