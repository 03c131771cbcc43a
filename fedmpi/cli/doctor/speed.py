"""How fast two ranks pass messages: inside a node and between nodes. Collective on the link."""

import time

import numpy as np

from fedmpi.cli.doctor.checks import by_node

SECONDS = 0.2  # for the bandwidth of one pair
MESSAGE = 4 << 20  # bytes
PINGS = 100
MOST_PAIRS = 3  # nodes beyond the first that the first is measured with


def measure(link, ranks):
    """Name of the link -> {"latency": seconds, "bandwidth": bytes/s} of the slowest pair of ranks that was measured.

    The links are "inside nodes" and "between nodes", if the ranks are placed so.
    """
    nodes = by_node(ranks)
    inside = [(node[0].rank, node[1].rank) for node in nodes if len(node) > 1][:1]
    between = [(nodes[0][0].rank, node[0].rank) for node in nodes[1 : 1 + MOST_PAIRS]]
    found = {}
    for name, pairs in (("inside nodes", inside), ("between nodes", between)):
        speeds = [_measure_pair(link, *pair) for pair in pairs]
        if speeds:
            found[name] = {"latency": max(speed[0] for speed in speeds), "bandwidth": min(speed[1] for speed in speeds)}
    return found


def _measure_pair(link, a, b):
    """(latency, bandwidth) between ranks a and b, the same numbers on all ranks."""
    link.barrier()
    result = [0.0, 0.0]
    if link.rank in (a, b):
        latency = np.median(_ping(link, a, b, 1, PINGS, SECONDS))
        transfer = np.median(_ping(link, a, b, MESSAGE, 20, SECONDS))
        result = [latency, MESSAGE / transfer]
    return link.allgather(result, "machines")[a]


def _ping(link, a, b, nbytes, most, seconds):
    """Seconds of one way of each message that goes there and back, on both ranks; rank a decides when to stop."""
    comm, other = link.comm, b if link.rank == a else a
    message, goes_on, times = np.zeros(nbytes, np.uint8), np.ones(1, np.uint8), []
    began = time.perf_counter()
    while goes_on[0]:
        before = time.perf_counter()
        if link.rank == a:
            comm.Send(message, other)
            comm.Recv(message, other)
        else:
            comm.Recv(message, other)
            comm.Send(message, other)
        times.append((time.perf_counter() - before) / 2)
        if link.rank == a:
            goes_on[0] = len(times) < most and time.perf_counter() - began < seconds
            comm.Send(goes_on, other)
        else:
            comm.Recv(goes_on, other)
    return times[1:] or times  # the first one also opens the connection
