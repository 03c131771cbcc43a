"""The end of a job by one rank."""

import contextlib
import ctypes


def abort(comm, code):
    """End the whole job at once with an exit code, also ranks that wait inside a collective. Not collective.

    MPI_Abort ends with exit(code). What libraries do then can take so long that MPICH's launcher kills this rank like
    all others, and passes on 9, the signal's number, as the exit code of the job: exit must do nothing.
    """
    with contextlib.suppress(OSError, AttributeError):  # the C library is another one
        library = ctypes.CDLL(None)
        library.__cxa_atexit(library._exit, ctypes.c_void_p(code), None)  # what is named last is called first
    comm.Abort(code)
