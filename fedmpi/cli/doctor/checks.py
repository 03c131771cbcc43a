"""What the ranks' facts say about machines and job. Not collective: every rank finds the same from the same facts.

Each `check_*` function returns a `Check`; its argument `ranks` is the list of all `RankFacts`, in rank order.
"""

import collections
import dataclasses
import os

from fedmpi.ground.text import format_bytes, format_ranges

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
MAX_CLOCK_SECONDS = 2.0  # between two nodes; file times and logs are hard to read beyond that


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was checked.

    Attributes:
        name: of it. state: "ok", "warning", "failed" or "skipped". text: what was found. advice: what to do, or "".
    """

    name: str
    state: str
    text: str
    advice: str = ""


def where(facts):
    """A rank and its node as text."""
    return f"rank {facts.rank} ({facts.node})"


def by_node(ranks):
    """Lists of the `RankFacts` of each node, in the order of their lowest rank."""
    nodes = collections.defaultdict(list)
    for facts in ranks:
        nodes[facts.leader].append(facts)
    return [nodes[leader] for leader in sorted(nodes)]


def check_ranks(ranks, sum_is_right, used):
    """Check that the ranks found each other and that their test sum is right; `used` says how it was made, as text."""
    nodes = by_node(ranks)
    sizes = sorted({len(node) for node in nodes})
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    text = f"{len(ranks)} on {len(nodes)} nodes ({each} on each)" if len(nodes) > 1 else f"{len(ranks)} on one node"
    if not sum_is_right:
        return Check("ranks", FAILED, f"{text}, but their sum by {used} is wrong", "use --transport allreduce")
    allocated = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if allocated.isdigit() and int(allocated) > len(nodes):
        advice = f"start ranks on all of them, or ask for {len(nodes)}: #SBATCH --nodes={len(nodes)}"
        return Check("ranks", WARNING, f"{text}, and SLURM gave {allocated} nodes", advice)
    return Check("ranks", OK, f"{text}; a test sum by {used} is right" if len(ranks) > 1 else text)


def check_hidden(ranks, hides):
    """Say what an aggregation hides (`Aggregation.hides`), and whether ranks share a node, where they can look."""
    if any(len(node) > 1 for node in by_node(ranks)):
        advice = "start each silo's rank on a machine, or as a user, of its own"
        text = f"{hides}; but processes of one user on one node can read each other's memory"
        return Check("hidden", WARNING, text, advice)
    return Check("hidden", OK, hides)


def check_cores(ranks):
    """Check that no two ranks are bound to the same core, and that binding leaves no cores unused."""
    for node in by_node(ranks):
        online = max(facts.cores_online for facts in node)
        pair = _sharing_pair(node, online)
        if pair is not None:
            a, b = pair
            common = format_ranges(sorted(set(a.cores) & set(b.cores)))
            advice = "mpirun --bind-to none, srun --cpu-bind=none, or ask for more cores (--cpus-per-task)"
            text = f"ranks {a.rank} and {b.rank} share core {common} of {online} on {a.node}"
            return Check("cores", FAILED, text, advice)
    for node in by_node(ranks):
        usable = {core for facts in node for core in facts.cores}
        online = max(facts.cores_online for facts in node)
        if len(node) > len(usable):
            text = f"{len(node)} ranks on {len(usable)} cores of {node[0].node}: they take turns"
            return Check("cores", WARNING, text, "start fewer ranks and give each several clients (--clients)")
        if len(node) < online and len(usable) == len(node) < online // 2:
            text = f"{where(node[0])} is bound to core {format_ranges(node[0].cores)} of {online}"
            advice = "mpirun --bind-to none, or --map-by slot:PE=CORES; under SLURM --cpus-per-task"
            return Check("cores", WARNING, text, advice)
    threads = sorted({facts.threads for facts in ranks})
    return Check(
        "cores", OK, f"{' or '.join(map(str, threads))} for each rank; no two ranks are bound to the same core"
    )


def _sharing_pair(node, num_online):
    """Two ranks of a node whose binding makes them share a core, or None.

    Ranks that may run on the same cores take turns, which is no mistake if there are enough of them, or if these are
    all cores of the node.
    """
    for position, a in enumerate(node):
        for b in node[position + 1 :]:
            common = set(a.cores) & set(b.cores)
            bound_apart = a.cores != b.cores
            too_few = len(common) < sum(1 for facts in node if facts.cores == a.cores) and len(a.cores) < num_online
            if common and (bound_apart or too_few):
                return a, b
    return None


def check_devices(ranks):
    """Check that each rank has a device, each GPU only one rank, and each rank cores near its GPU."""
    without = next((facts for facts in ranks if facts.device_error), None)
    if without is not None:
        return Check("device", FAILED, f"{where(without)}: {without.device_error}", "ask for GPUs: --gpus-per-node=N")
    owners = {}
    for facts in ranks:
        other = owners.setdefault((facts.leader, facts.device_key), facts) if facts.device_key else facts
        if other is not facts:
            text = f"ranks {other.rank} and {facts.rank} share {facts.device} on {facts.node}"
            advice = (
                "start as many ranks as there are GPUs: --ntasks-per-node = --gpus-per-node, and --clients for more"
            )
            return Check("device", FAILED, text, advice)
    kinds = collections.Counter(facts.device.partition(":")[0] for facts in ranks)
    if len(kinds) > 1:
        text = ", ".join(f"{number} ranks on {kind}" for kind, number in kinds.items())
        return Check("device", WARNING, text, "all ranks wait for the slowest: --device cpu, or nodes of one kind")
    for facts in ranks:
        if facts.near_cores and not set(facts.near_cores) & set(facts.cores):
            cores, near = format_ranges(facts.cores), format_ranges(facts.near_cores)
            text = f"{where(facts)} runs on core {cores}, and {facts.device} is near cores {near}"
            return Check("device", WARNING, text, "srun --gpu-bind=closest, or bind ranks to cores near their GPUs")
    return Check("device", OK, "one GPU for each rank" if owners else "all ranks use the CPU")


def check_versions(ranks):
    """Check that all ranks run the same versions of the software."""
    first = ranks[0]
    for facts in ranks[1:]:
        for name, version in first.versions.items():
            if facts.versions[name] != version:
                text = f"{name} {version} on {where(first)}, but {facts.versions[name]} on {where(facts)}"
                return Check("versions", FAILED, text, "install the same environment on all nodes, or share one folder")
    words = [f"{name} {first.versions[name]}" for name in ("fedmpi", "python", "torch", "MPI")]
    return Check("versions", OK, ", ".join(words).replace("MPI ", "", 1))


def check_settings(found):
    """Check that the ranks' settings are equal: nothing was `found` by `fedmpi.comm.agreement.difference`."""
    if not found:
        return Check("settings", OK, "the same on all ranks")
    return Check("settings", FAILED, f"the ranks differ: {found}", "give all ranks the same, but for what is per rank")


def check_clocks(ranks):
    """Check that the nodes' clocks agree; the times were taken just after a barrier."""
    times = [facts.time for facts in ranks]
    apart = max(times) - min(times)
    if apart <= MAX_CLOCK_SECONDS:
        return Check("clocks", OK, f"within {max(apart, 0.01):.2f} s")
    early, late = (ranks[times.index(end(times))] for end in (min, max))
    return Check(
        "clocks", WARNING, f"{where(late)} is {apart:.0f} s ahead of {where(early)}", "ask for time synchronisation"
    )


def check_data(error, described, num_ranks):
    """Check that every rank read its data: `error` is a run's own, "" if there is none; `described` names the data."""
    if not error:
        return Check("data", OK, f"{described}: read by all ranks" if num_ranks > 1 else f"{described}: read")
    advice = "copy it to every node or to a folder that all nodes share; --data-dir or FEDMPI_DATA names the folder"
    return Check("data", FAILED, error, advice)


def check_memory(ranks, needed, left):
    """Check that the rows fit into the memory of every node, besides the data that are already in it.

    `needed`: bytes of each rank. `left`: bytes that its node has, nan if the system does not say.
    """
    text = f"{format_bytes(max(needed))} for model and rows of a rank"
    for node in by_node(ranks):
        total, free = sum(needed[facts.rank] for facts in node), left[node[0].rank]
        if total > free:  # false for nan
            found = f"{len(node)} ranks of {node[0].node} need {format_bytes(total)}, and {format_bytes(free)} are left"
            return Check("memory", FAILED, found, "use more nodes, fewer ranks on each, or ask for more (--mem)")
    known = [nbytes for nbytes in left if nbytes == nbytes]
    return Check("memory", OK, f"{text}; at least {format_bytes(min(known))} left on a node" if known else text)
