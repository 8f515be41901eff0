"""Starts the base zygote in its own namespaces, and waits for it without importing PyTorch, so that this process stays
small. Without namespaces, this process becomes the zygote.

Run as `python -m overwinter.worker.launch FD PARENT IMPORTS GPUS [GROUP ...]`, where FD is the zygote's end of a
channel, PARENT the id of the parent process, IMPORTS the additional modules to import, separated by commas, GPUS 1 if
executors of GPUs are to be forked and 0 otherwise, and each GROUP a file by which a control group is entered. If the
system supports namespaces, the zygote is the first process of its PID namespace: when it ends, the kernel ends all
processes in it. The zygote ends with this process, which ends with its parent.
"""

import os
import select
import signal
import sys
from contextlib import suppress

from overwinter.worker import namespaces, sandbox

SESSION_NICE = 9
"""Without a control group, the kernel groups the processes of a session (autogroup). This gives the session about an
eighth of the usual CPU weight, as the control group of all workers has per core (`node/cgroups.py`).
"""


def main() -> None:
    """Become the zygote, or the process that waits for it."""
    end, parent, imports, uses_gpus = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1"
    # The daemon ends its zygotes itself; a signal to the whole process group is for the daemon only.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lacking = _enter(sys.argv[5:])
    _lower_session()
    namespace_faults = namespaces.enter()
    sandbox.die_with_parent(parent)
    if not namespace_faults:
        _fork(end)
    from overwinter.worker import zygote

    names = [name for name in imports.replace(" ", "").split(",") if name]
    zygote.main(end, names, namespace_faults, lacking, uses_gpus)


def _enter(groups: list[str]) -> list[str]:
    lacking = []
    for group in groups:
        try:
            with open(group, "w") as processes:
                processes.write("0")
        except OSError as error:
            lacking.append(f"not in its control group: {error}")
    return lacking


def _lower_session() -> None:
    # Not every kernel has autogroups.
    with suppress(OSError), open("/proc/self/autogroup", "w") as session:
        session.write(f"{SESSION_NICE}")


def _fork(end: int) -> None:
    """Return in a child, the first process of its namespace; the parent waits for it."""
    alive, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        sandbox.die_with_parent(0)
        # The parent has no id in this namespace. The pipe is readable if the parent has ended already.
        if select.select([alive], [], [], 0)[0]:
            os._exit(1)
        os.close(alive)
        return
    os.close(end)
    os.close(alive)
    namespaces.drop_privileges()
    _, status = os.waitpid(pid, 0)
    os._exit(1 if status else 0)


if __name__ == "__main__":
    main()
