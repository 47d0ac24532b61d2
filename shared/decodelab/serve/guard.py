"""Run a command until standard input closes, then end it and all that it started.

`python guard.py COMMAND...` for `launch`: the pipe to it closes with the notebook's kernel, however
that dies, so no engine outlives it. Prints the command's process id; its output goes to stderr.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

PATIENCE = 20.0  # seconds to finish what is in flight, before it is killed


def main() -> None:
    """Start the command in a process group of its own, and exit as it does."""
    child = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    print(child.pid, flush=True)
    threading.Thread(target=end_when_alone, args=(child,), daemon=True).start()
    code = child.wait()
    end(child, at_once=True)  # what it may have left behind
    sys.exit(code)


def end_when_alone(child: subprocess.Popen) -> None:
    """Wait for the end of standard input, then ask the group to end, and at last make it."""
    while os.read(0, 1024):  # unbuffered: a buffer's lock would be held as Python exits
        pass
    end(child, at_once=False)
    time.sleep(PATIENCE)
    end(child, at_once=True)


def end(child: subprocess.Popen, at_once: bool) -> None:
    """Signal the child's whole group; nothing happens where nobody is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.name == "nt":  # no groups there
            child.kill()
        else:
            os.killpg(child.pid, signal.SIGKILL if at_once else signal.SIGTERM)


if __name__ == "__main__":
    main()
