"""The benchmark: its arithmetic, its baselines, its command line. Nothing here asserts a speed."""

import json
import time

import numpy as np
import pytest
from helpers import ROOT, start

from fedmpi.cli.bench import breakdown, cost_model, timing
from fedmpi.cli.bench.__main__ import read_arguments
from fedmpi.cli.bench.breakdown import break_down
from fedmpi.cli.bench.results import BenchResults, read_results
from fedmpi.cli.bench.rounds import Rounds
from fedmpi.cli.bench.timing import Case, Times, time_cases
from fedmpi.cli.bench.workloads import WORKLOADS, arguments_of
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.errors import UserError


def bench(ranks, *arguments):
    return start(ranks, "-m", "fedmpi", "bench", *arguments)


def test_times_are_medians_and_ratios_within_a_cycle():
    slow, fast = Times([2.0, 8.0, 4.0]), Times([1.0, 4.0, 2.0])
    assert slow.median == 4
    assert slow.quartiles == (3, 6)
    assert (slow / fast).quartiles == (2, 2)


def test_cases_take_turns(monkeypatch):
    """A warm-up, runs to find how many fit into a turn, then A B A B ..."""
    link, calls = MPILink(), []
    cases = [Case(name, lambda name=name: calls.append(name)) for name in "ab"]
    monkeypatch.setattr(timing, "MIN_TURN_SECONDS", 10)  # seconds: so that a turn has 64 runs on a busy machine, too
    times = time_cases(link, cases, seconds=10, min_cycles=3, max_cycles=3)
    assert set(times) == {"a", "b"}
    assert len(times["a"].seconds) == 3
    tries = 21 * "a" + 21 * "b"  # 1, 4 and 16 runs of each
    assert "".join(calls) == "ab" + tries + 3 * (64 * "a" + 64 * "b")
    link.close()


def test_a_turn_ends_when_the_gpu_has_computed(monkeypatch):
    """A clock that moves only while the GPU, which has all the work, is waited for."""
    link, clock, begun = MPILink(), [0.0], []

    def compute():
        clock[0] += 2.0 * len(begun)
        begun.clear()

    monkeypatch.setattr(timing, "wait_for_gpu", compute)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    begun.append("before the turn")
    assert timing._turn(link, Case("steps", lambda: begun.append(1)), 3) == 6.0
    link.close()


def test_a_case_that_takes_all_the_time_runs_once():
    link, calls = MPILink(), []
    cases = [Case("slow", lambda: (calls.append(1), time.sleep(0.5))), Case("fast", lambda: None)]
    times = time_cases(link, cases, seconds=0.4, min_cycles=3)
    assert len(calls) == 1
    assert times["slow"].median >= 0.5
    assert len((times["slow"] / times["fast"]).seconds) >= 3
    link.close()


def test_fit_finds_the_numbers_that_made_the_data():
    model = cost_model.CostModel(fixed=1e-3, client=2e-4, step=5e-3, alpha=2e-6, beta=1e-9)
    points = [(1, 1), (5, 1), (20, 2), (3, 4)]
    found = cost_model.fit_rounds(points, [model.local(*point) for point in points])
    np.testing.assert_allclose(found, [1e-3, 2e-4, 5e-3], rtol=1e-9)
    sizes = [1e3, 1e5, 1e7]
    found = cost_model.fit_link(6, sizes, [model.communication(6, size) for size in sizes])
    np.testing.assert_allclose(found, [2e-6, 1e-9], rtol=1e-9)


def test_fit_gives_no_negative_cost():
    assert (cost_model.fit([[1, 1], [1, 2], [1, 3]], [0.1, 1.1, 2.1]) >= 0).all()


def test_allreduce_costs():
    model = cost_model.CostModel(0, 0, 0, alpha=1e-6, beta=1e-9)
    assert model.communication(1, 1e9) == 0
    assert model.communication(1024, 0) == pytest.approx(20e-6)
    assert model.communication(2, 1e6) == pytest.approx(2e-6 + 1e-3)


def test_projection():
    projection = cost_model.read_projection("N=1024,bw=25GB/s, lat=2us,q=4,parameters=1e6")
    assert projection == cost_model.Projection(
        1024, bandwidth=25e9, latency=2e-6, local_steps=4, num_parameters=1000000
    )
    model = cost_model.CostModel(1e-3, 0, 1e-2, alpha=1, beta=1)
    local, communication = cost_model.project(model, projection, local_steps=4, nbytes=4e6)
    assert local == pytest.approx(1e-3 + 4e-2)
    assert communication == pytest.approx(20 * 2e-6 + 2 * 1023 / 1024 * 4e6 / 25e9)


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("bw=8Gb/s,lat=3ms", 1e9, 3e-3), ("bw=1GiB/s,lat=1ns", 2**30, 1e-9), ("bw=5KB/s,lat=2s", 5e3, 2),
        ("bw=1.5MB/s,lat=1.5us", 1.5e6, 1.5e-6), ("bw=7B/s", 7, None),
    ],
)  # fmt: skip
def test_units_of_a_projection(text, bandwidth, latency):
    found = cost_model.read_projection(f"N=2,{text}")
    assert (found.bandwidth, found.latency) == (pytest.approx(bandwidth), latency and pytest.approx(latency))


def test_projection_to_nodes_of_several_ranks():
    """The ranks of a node sum as measured, then the nodes over their links."""
    projection = cost_model.read_projection("N=8,per_node=2,bw=1GB/s,lat=1us")
    model = cost_model.CostModel(0, 0, 1, alpha=1e-3, beta=1e-7)
    _, communication = cost_model.project(model, projection, local_steps=1, nbytes=1e6)
    on_a_node = 2 * 1e-3 + 1e6 * 1e-7
    assert communication == pytest.approx(on_a_node + 4 * 1e-6 + 2 * 3 / 4 * 1e6 / 1e9)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "N",
        "bw=25GB/s",
        "N=0",
        "N=1e999",
        "N=4,bw=25GB",
        "N=4,lat=2",
        "N=4,size=3",
        "N=1.2.3",
        "N=0.5",
        "N=4,q=2.5",
        "N=4,per_node=3",
    ],
)
def test_projection_refuses(text):
    with pytest.raises(UserError, match="--project"):
        cost_model.read_projection(text)


def test_compare_prints_ratios(tmp_path):
    old, new = BenchResults({"cores": 2}, False), BenchResults({"cores": 4}, False)
    old.record("link/x", Times([1.0, 1.1, 1.2]))
    old.record("only then", Times([1.0]))
    old.record("memory", 1)
    new.record("link/x", Times([2.1, 2.2, 2.3]))
    new.record("memory", 2)
    for results, seconds in ((old, [2.1, 2.2, 2.3]), (new, [1.0, 1.1, 1.2])):
        results.record("link/faster", Times(seconds))
    for results, seconds in ((old, [1.0, 1.1, 1.2]), (new, [1.1, 1.15, 1.3])):
        results.record("link/as fast", Times(seconds))
    old.write(tmp_path / "old.json")
    lines = new.compare(read_results(tmp_path / "old.json"))
    assert len(lines) == 6
    assert "2.000" in lines[1]
    assert "quartiles do not overlap" in lines[1]
    assert "quartiles do not overlap" not in lines[2]  # one number has none
    assert "0.500" in lines[3] and "quartiles do not overlap" in lines[3]
    assert "quartiles do not overlap" not in lines[4]
    assert "cores: 2 then, 4 now" in lines[5]


def test_arguments_name_what_is_allowed():
    with pytest.raises(UserError, match="expected one or more of link, gpu_link"):
        read_arguments(["lnik"])
    with pytest.raises(UserError, match="--help"):
        read_arguments(["--quik"])
    with pytest.raises(UserError, match="> 0"):
        read_arguments(["--seconds", "0"])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_have_the_sizes_that_the_readme_says(workload):
    link = MPILink()
    rounds = Rounds(link, [*arguments_of(workload, quick=True), "--algorithm", "fafed", "--threads", "1"])
    sizes = {"fashion": 26620, "cnn": 1663370, "mlp": 11626506, "adapter": 837248, "many_clients": 21840}
    assert rounds.dim == sizes[workload]
    assert rounds.gradients_per_step == 2
    assert rounds.nbytes == 3 * 4 * rounds.dim
    rounds.close()
    link.close()


def test_the_breakdown_accounts_for_the_round_and_leaves_no_trace():
    link = MPILink()
    rounds = Rounds(link, [*arguments_of("fashion"), "--algorithm", "fafed", "--clients", "2", "--threads", "1"])
    federation = rounds.federation
    before = federation.algorithm, federation.reports, [client.oracle for client in federation.clients]
    begun, first = time.perf_counter(), federation.round_index
    parts = break_down(rounds, seconds=0.01)
    spent = time.perf_counter() - begun
    assert sum(parts.values()) * (federation.round_index - first) <= spent
    assert list(parts) == ["gradient", "update", "data", "communication", "waiting", "overhead"]
    assert all(seconds > 0 for seconds in parts.values())
    assert parts["gradient"] > parts["update"] and parts["gradient"] > parts["data"]
    assert before == (federation.algorithm, federation.reports, [client.oracle for client in federation.clients])
    x = federation.server.x.clone()
    rounds.communicate()
    rounds.evaluate_gradients()
    assert federation.server.x.equal(x)
    rounds.close()
    link.close()


def test_the_parts_of_a_round_are_read_when_the_gpu_has_computed_it(monkeypatch):
    """Moments that have a time only after the GPU was waited for, once per round; a part excludes those inside it."""
    times, waits = iter([0, 1, 2, 5, 7, 10] * 2), []

    class Moment:
        def __init__(self):
            self.time, self.after = next(times), len(waits)

    def seconds_between(first, second):
        assert len(waits) > second.after
        return second.time - first.time

    monkeypatch.setattr(breakdown, "moment", Moment)
    monkeypatch.setattr(breakdown, "seconds_between", seconds_between)
    monkeypatch.setattr(breakdown, "wait_for_gpu", lambda: waits.append(1))
    clock = breakdown._Clock()
    for _ in range(2):
        clock.round(clock.timed("update", clock.timed("gradient", lambda: None)))
    spent = {name: seconds for name, seconds in clock.seconds.items() if seconds}
    assert spent == {"gradient": 6, "update": 6, "overhead": 8} and len(waits) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "missing/x.json"], "--json missing/x.json: cannot be written"),
        (["--algorithms", ","], "--algorithms: expected names like fedavg,fafed"),
        (["--project", "N=4"], "--project N=4: one rank has no link to measure: add bw=... and lat=..."),
    ],
)
def test_nothing_is_measured_if_the_end_is_known_to_fail(words, message):
    done = bench(1, "link", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "the link" not in done.stdout


def test_one_rank_has_no_link():
    assert "one rank has nothing to sum" in bench(1, "link", "--quick", "--algorithms", "fedavg, fafed").stdout


def test_settings_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = bench(1, "settings", "--quick", "--seconds", 0.2, "--set", "--local_steps 1")
    assert done.returncode == 0, done.stderr
    assert "compile default: not possible here" in done.stdout
    assert "plain Allreduce" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_baselines_are_fedavg(ranks):
    """The loops that fedmpi is compared with do the same work: they give the same model."""
    done = start(ranks, "-m", "baselines_agree")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


def test_command_line(tmp_path):
    words = ["--quick", "--seconds", "0.05", "--traceback", "--set", "--batch_size 5"]
    first = bench(2, "link", "round", "--json", tmp_path / "a.json", *words)
    assert first.returncode == 0, first.stderr
    measured = json.loads((tmp_path / "a.json").read_text())
    assert measured["machine"]["ranks"] == 2
    assert measured["measures"]["round/fashion/fafed/ratio"]["median"] > 0
    assert measured["measures"]["link/1048576/shared"]["unit"] == "s"
    again = bench(2, "round", "--compare", tmp_path / "a.json", *words)
    assert again.returncode == 0, again.stderr
    assert "now/then" in again.stdout
    assert "round/fashion/fedavg/floor" in again.stdout.split("now/then")[1]
    scaled = bench(2, "scaling", "--project", "N=1024,bw=25GB/s,lat=2us", *words)
    assert scaled.returncode == 0, scaled.stderr
    assert "projected to N=1024" in scaled.stdout
    assert "held out, q = 10 and 3 clients per rank" in scaled.stdout


def test_directions(tmp_path):
    done = bench(1, "directions", "--quick", "--seconds", "0.05", "--json", tmp_path / "d.json", "--traceback")
    assert done.returncode == 0, done.stderr
    measures = json.loads((tmp_path / "d.json").read_text())["measures"]
    kept = {name.removeprefix("directions/fashion/"): measure for name, measure in measures.items()}
    calls = "20 calls of one direction"
    others = [calls, f"{calls}, without vmap", "one by one", "20 bare forward passes"]
    assert list(kept) == ["all at once", *(key for name in others for key in (name, f"all at once to {name}"))]
    assert all(measure["median"] > 0 for measure in kept.values())
    assert "26,620 parameters" in done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["everything"], "part everything: expected one or more of link, gpu_link"),
        (["--workload", "cn"], "did you mean 'cnn'?"),
        (["--project", "N=x"], "--project N=x: expected like"),
        (["--compare", "/nonexistent.json"], "cannot be read"),
        (["round", "--set", "--model nobody"], "unknown model 'nobody'"),
    ],
)
def test_wrong_arguments_end_in_one_line(words, line):
    done = bench(2, *words)
    assert done.returncode == 2
    errors = [text for text in done.stderr.splitlines() if text.startswith("fedmpi: error")]
    assert len(errors) == 1, done.stderr
    assert line in errors[0]


def test_whole_jobs(tmp_path):
    done = bench(2, "jobs", "--quick", "--json", tmp_path / "jobs.json", "--traceback")
    assert done.returncode == 0, done.stderr
    measures = json.loads((tmp_path / "jobs.json").read_text())["measures"]
    ratio = measures["jobs/fedmpi"]["median"] / measures["jobs/loop"]["median"]
    assert measures["jobs/fedmpi to loop"]["median"] == pytest.approx(ratio)
    assert "fedmpi, its default evaluations" in done.stdout


def test_gpu_link(tmp_path):
    """On the CPU, where an MPI that reads GPU memory has nothing to read."""
    done = bench(2, "gpu_link", "--quick", "--seconds", 0.1, "--json", tmp_path / "gpu_link.json")
    assert done.returncode == 0, done.stderr
    assert "gpu_link: float32 sums over 2 ranks, vectors on the cpu" in done.stdout
    assert "no GPU is here: copies, gloo and files in shared memory stand in for it" in done.stdout
    assert "cuda_aware: transport = cuda_aware: it needs rows on a GPU" in done.stdout
    names = {f"gpu_link/cpu/{n}/{name}" for n in (65536, 1 << 20) for name in ("copies", "allreduce", "staged", "nccl")}
    assert names <= json.loads((tmp_path / "gpu_link.json").read_text())["measures"].keys()


def test_stages(tmp_path):
    done = bench(1, "stages", "--quick", "--seconds", "0.05", "--json", tmp_path / "u.json", "--traceback")
    assert done.returncode == 0, done.stderr
    measures = json.loads((tmp_path / "u.json").read_text())["measures"]
    bounds = ("norm_bound, no move is longer", "norm_bound, all are")
    assert set(measures) == {f"stages/fashion/{name}" for name in ("no stage", "a stage", "with the start", *bounds)}
    assert all(measure["median"] > 0 for measure in measures.values())


def test_checkpoint(tmp_path):
    words = ("checkpoint", "--quick", "--seconds", "0.05", "--algorithms", "scaffold", "--set", "--local_steps 1")
    done = bench(2, *words, "--json", tmp_path / "c.json", "--traceback")
    assert done.returncode == 0, done.stderr
    measures = json.loads((tmp_path / "c.json").read_text())["measures"]
    for name in ("a checkpoint beside them", "a checkpoint at once", "state file", "plain file"):
        assert measures[f"checkpoint/fashion/{name}"]["median"] > 0
    assert "share of plain" in done.stdout and not list(ROOT.glob("bench-checkpoint-*"))
