"""A process that has torch loaded and forks: `warm.py` asks it for new Python processes, which cost no import.

``python warm_server.py SOCKET`` listens until its parent ends. A request brings the arguments of Python (``-m MODULE``
or a program, and what follows), the environment, the working directory and the open files of the one that asks; the
fork takes them all and runs the program to its end as Python would. The one that asks gets its process id, then its
exit status; if it ends before, the fork is killed.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import warnings

LOADED = ("sklearn.datasets", "matplotlib.figure", "torch.utils.data", "torch.func", "mpi4py.run")
MPI_IS_OPEN = {"mpi4py.MPI"}
MOST_FILES = 64  # passed on to a fork
_BASE = [folder for folder in sys.path[1:] if folder]


def load():
    """Import all that is not the main module of a program, and what these programs import later."""
    import fedmpi

    for module in pkgutil.walk_packages(fedmpi.__path__, "fedmpi."):
        if module.name.count(".") > 1 and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in LOADED:
        importlib.import_module(name)
    assert not MPI_IS_OPEN.intersection(sys.modules), "a fork cannot begin MPI anew"
    gc.collect()
    gc.freeze()


def serve(address):
    """Answer requests; returns (in a fork) what it is to run."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(128)
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    forks = {}  # process id -> connection
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(ended, selectors.EVENT_READ)
    parent = os.getppid()
    while os.getppid() == parent:
        for key, _ in waiting.select(timeout=1):
            if key.fileobj == ended:
                os.read(ended, 4096)
                _report_ends(forks, waiting)
            elif key.fileobj is listener:
                with contextlib.suppress(OSError):  # it may have ended meanwhile
                    connection, _ = listener.accept()
                    waiting.register(connection, selectors.EVENT_READ)
            elif key.fileobj in forks.values():  # the one that asked has ended
                _drop(key.fileobj, forks, waiting)
            else:
                request = _fork(key.fileobj, forks, waiting)
                if request is not None:
                    signal.set_wakeup_fd(-1)
                    for file in (listener, waiting, *forks.values(), key.fileobj):
                        file.close()
                    os.close(ended)
                    os.close(wakes)
                    return request
    return None


def _fork(connection, forks, waiting):
    """Fork for a request; returns it in the fork only."""
    text, files = b"", []
    with contextlib.suppress(OSError):  # the one that asked has been killed
        text, files, _, _ = socket.recv_fds(connection, 1 << 20, MOST_FILES)
    if not text:
        _drop(connection, forks, waiting)
        return None
    process = os.fork()
    if process == 0:
        return json.loads(text), files
    for file in files:
        os.close(file)
    forks[process] = connection
    with contextlib.suppress(OSError):
        connection.send(str(process).encode())
    return None


def _report_ends(forks, waiting):
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process == 0:
            return
        connection = forks.pop(process, None)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.send(str(status).encode())
            waiting.unregister(connection)
            connection.close()


def _drop(connection, forks, waiting):
    for process in [process for process, its in forks.items() if its is connection]:
        del forks[process]
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    if connection.fileno() >= 0:  # its fork has not ended meanwhile
        waiting.unregister(connection)
        connection.close()


def become(request, files):
    """Make this process the one that was asked for, and run its program."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the server
    _take_files(files, request["files"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for kind, limits in request["limits"]:
        resource.setrlimit(kind, limits)
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    sys.modules["numpy"].random.seed()
    words = request["words"]
    if words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    paths = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    is_module = words[0] == "-m"
    first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    sys.path[:] = [first, *paths, *_BASE]
    sys.argv[:] = words[1:] if is_module else words
    sys.path_importer_cache.clear()
    del sys.modules["__main__"].__file__
    code = 0
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code != error.code and code:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    end(code)


def end(code):
    """What Python does at its end, but for taking apart all modules: that copies the server's memory."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if threading.active_count() > 1:  # Python stops such threads before it takes anything apart
        raise SystemExit(code & 255)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    ctypes.PyDLL(None).exit(code & 255)  # MPI says goodbye to its launcher among what C does at exit


def _take_files(files, numbers):
    """Give passed files the numbers that they had."""
    high = [os.dup2(file, 1000 + position, inheritable=True) for position, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        buffering = 1 if name == "stderr" or os.isatty(number) else -1
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    load()
    asked = serve(sys.argv[1])
    if asked is not None:
        become(*asked)
