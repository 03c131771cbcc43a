"""Allreduce of flat buffers by size and transport, and of a model's tensors at once and one by one.

"shared" sums in the node's shared memory, "reproducible" is the aggregation of this name there, from float32 to
float32, "reproducible messages" the same by messages, as between nodes. "allreduce" is MPI's Allreduce in
pieces with fedmpi's way of waiting, "one call" is one MPI_Allreduce of the whole buffer, "copy" copies the buffer
in memory.
"""

import torch

from fedmpi.aggregation.layout import Layout, Moment
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.cli.bench.results import format_ms, format_rate, format_ratio
from fedmpi.cli.bench.timing import Case, time_cases
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.text import format_bytes, format_table

KIB = 1024
SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20]
QUICK_SIZES = [4 * KIB, 64 * KIB, 1 << 20, 8 << 20]
# name -> numbers of elements of the parameter tensors
MODELS = {
    "cnn, 8 tensors": [800, 32, 51200, 64, 1605632, 512, 5120, 10],
    "deep, 200 tensors": [4096, 64] * 100,
    "resnet18, 62 tensors": [
        1728, 64, 64, *[36864, 64, 64] * 4, 73728, 128, 128, 147456, 128, 128, 8192, 128, 128, *[147456, 128, 128] * 2,
        294912, 256, 256, 589824, 256, 256, 32768, 256, 256, *[589824, 256, 256] * 2,
        1179648, 512, 512, 2359296, 512, 512, 131072, 512, 512, *[2359296, 512, 512] * 2, 5120, 10,
    ],
}  # fmt: skip


def measure(bench):
    """Print both tables. Collective."""
    if bench.link.size == 1:
        bench.results.print("", "link: one rank has nothing to sum; start two or more: mpirun -np 2 ...")
        return
    _measure_sizes(bench)
    _measure_models(bench)


def _measure_sizes(bench):
    sizes = QUICK_SIZES if bench.quick else SIZES
    seconds = bench.seconds / len(sizes)
    rows, one_call = [], True
    for nbytes in sizes:
        times = time_sizes(bench.link, nbytes, seconds, one_call)
        # With more ranks than cores, spinning ranks take seconds for milliseconds of work: skip larger sizes.
        one_call = one_call and times["one call"].median < seconds
        for name, case_times in times.items():
            bench.results.record(f"link/{nbytes}/{name}", case_times)
        fastest = min(times["shared"].median, times["allreduce"].median)
        columns = (times.get(name) for name in ("shared", "reproducible", "allreduce", "one call", "copy"))
        rows.append(
            [
                format_bytes(nbytes),
                *(format_ms(column) if column else "-" for column in columns),
                format_rate(nbytes, fastest),
                format_rate(nbytes, times["copy"].median),
                format_ratio(times["allreduce"] / times["shared"]),
                format_ratio(times["reproducible"] / times["shared"]),
                format_ratio(times["reproducible messages"] / times["allreduce"]),
            ]
        )
    titles = ["bytes", "shared ms", "reproducible ms", "allreduce ms", "one call ms", "copy ms", "GB/s", "copy GB/s"]
    titles += ["allreduce/shared", "reproducible/shared", "by messages/allreduce"]
    bench.results.print("", f"link: float32 sums over {bench.link.size} ranks; median (quartiles)")
    bench.results.print(*format_table(titles, rows))


def _measure_models(bench):
    rows = []
    for model, sizes in MODELS.items():
        times = time_model(bench.link, sizes, bench.seconds / 5)
        for name, case_times in times.items():
            bench.results.record(f"link/{model}/{name}", case_times)
        ratios = [times["per tensor"] / times[flat] for flat in ("flat", "flat, plain")]
        rows.append([model, format_bytes(4 * sum(sizes)), *map(format_ms, times.values()), *map(format_ratio, ratios)])
    titles = ["model", "bytes", "flat ms", "flat, plain ms", "per tensor ms", "per tensor/flat", "../flat, plain"]
    bench.results.print("", *format_table(titles, rows))


def time_sizes(link, nbytes, seconds, one_call=True):
    """Time sums of float32 buffers of `nbytes`. Collective.

    Returns:
        dict of name -> `Times`: "shared", "reproducible", "reproducible messages", "allreduce", "copy" and,
            if `one_call`, "one call"; see above.
    """
    numel = nbytes // 4
    shared, allreduce = (MPILink(link.comm, transport=transport) for transport in ("shared", "allreduce"))
    in_window, block = shared.allocate(numel, torch.float32), allreduce.allocate(numel, torch.float32)
    plain, copy = torch.zeros(numel), torch.zeros(numel)
    in_words, by_messages = _reproducible(shared, numel), _reproducible(allreduce, numel)
    cases = [
        Case("shared", lambda: shared.allreduce(in_window)),
        Case("reproducible", lambda: in_words.average(in_words.block)),
        Case("reproducible messages", lambda: by_messages.average(by_messages.block)),
        Case("allreduce", lambda: allreduce.allreduce(block)),
        Case("copy", lambda: copy.copy_(plain)),
    ]
    if one_call:
        cases.append(Case("one call", lambda: link.comm.Allreduce(MPI.IN_PLACE, plain.numpy())))
    times = time_cases(link, cases, seconds, min_cycles=3)
    shared.close()
    allreduce.close()
    return times


def _reproducible(link, numel):
    """The aggregation before an average of one client of each rank."""
    aggregation = Reproducible()
    aggregation.open(link, Layout(("x",), numel, numel, torch.float32, "cpu"), [link.rank])
    aggregation.begin(Moment(0, 0, ("x",), slice(0, numel)), dict.fromkeys(range(link.size), 1))
    aggregation.take(link.rank, aggregation.block)
    aggregation.scale([(numel, 0)], [])
    return aggregation


def time_model(link, sizes, seconds):
    """Time one flat sum against a sum per tensor of `sizes` elements. Collective.

    Returns name -> `Times`: "flat" (by the transport "auto"), "flat, plain" (by "allreduce"), "per tensor".
    """
    auto, allreduce = MPILink(link.comm), MPILink(link.comm, transport="allreduce")
    block, plain = (mpi_link.allocate(sum(sizes), torch.float32) for mpi_link in (auto, allreduce))
    tensors = [torch.zeros(size) for size in sizes]

    def per_tensor():
        for tensor in tensors:
            allreduce.allreduce(tensor)

    cases = [
        Case("flat", lambda: auto.allreduce(block)),
        Case("flat, plain", lambda: allreduce.allreduce(plain)),
        Case("per tensor", per_tensor),
    ]
    times = time_cases(link, cases, seconds, min_cycles=3)
    auto.close()
    allreduce.close()
    return times
