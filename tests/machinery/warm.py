"""``python -IS warm.py SOCKET WORDS`` stands for ``python WORDS``: a fork of `warm_server.py` runs them.

Python's own start and torch's import take a second and more for each of the hundreds of ranks that tests start; a fork
takes a hundredth of it. This process passes on what it has inherited, signals that it gets, and the fork's exit status.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys

PASSED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGXCPU,
    signal.SIGALRM, signal.SIGCONT,
)  # fmt: skip


def main(address, *words):
    if not words or (words[0].startswith("-") and words[0] not in ("-m", "-W")):
        os.execv(sys.executable, [sys.executable, *words])
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(address)
    files = [int(name) for name in os.listdir("/proc/self/fd") if int(name) != server.fileno()]
    files = [file for file in sorted(files) if _is_open(file)]
    kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "cores": sorted(os.sched_getaffinity(0)),
        "ignored": [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN],
        "limits": [(kind, resource.getrlimit(kind)) for kind in kinds],
        "files": files,
    }
    socket.send_fds(server, [json.dumps(request).encode()], files)
    process = int(server.recv(64))
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: _send(process, number))
    status = int(server.recv(64) or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _is_open(file):
    try:
        os.fstat(file)
    except OSError:  # that of listdir itself
        return False
    return True


def _send(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


if __name__ == "__main__":
    main(*sys.argv[1:])
