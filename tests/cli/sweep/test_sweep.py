"""Held-out training data, and the sweep that chooses settings by them."""

import contextlib
import csv
import fcntl
import importlib
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys

import pytest
import torch
import yaml
from helpers import LIMIT, ROOT, execute, hear_ctrl_c, train, wait_for
from test_report import make_run
from torch.nn import functional

from fedmpi.cli.sweep import local
from fedmpi.cli.sweep.choice import best_of_each_algorithm, ended_runs, rank
from fedmpi.cli.sweep.local import run_all
from fedmpi.cli.sweep.plan import make_plan
from fedmpi.comm.solo import SoloLink
from fedmpi.data.holdout import hold_out
from fedmpi.data.partitions import Even
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import write_mark
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.classification import Classification

TINY = ("--rounds", 6, "--local-steps", 2, "--clients", 2, "--algorithm", "fedavg", "--threads", 1)
GRID = ("--grid", "algorithm.step_size=0.001,0.1", "--grid", "seed=0,1")


def digits(holdout, seed=3):
    """The digits of three clients, loaded, with their model of random weights."""
    place = RankContext(3, range(3), 0, 1, seed, None, torch.device("cpu"), torch.float64, holdout)
    task = Classification().load(place, Even())
    task.synchronise(SoloLink())
    torch.manual_seed(0)
    return task, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).double().eval()


def inputs_of(task, client):
    return task.batch(client, torch.arange(task.num_samples(client)))


def test_held_out_samples_are_not_trained_on_and_are_evaluated():
    whole, net = digits(0.0)
    task, _ = digits(0.25)
    held = []
    for client in range(3):
        num = whole.num_samples(client)
        assert task.num_samples(client) == num - num // 4
        everything = {(*row.flatten().tolist(), int(y)): (row, y) for row, y in zip(*inputs_of(whole, client))}
        kept = {(*row.flatten().tolist(), int(y)) for row, y in zip(*inputs_of(task, client))}
        assert kept < set(everything) and len(everything) == num
        held.append([pair for key, pair in everything.items() if key not in kept])
    losses, hits = [], []
    with torch.no_grad():
        metrics = task.evaluate(net, SoloLink())
        for of_client in held:
            rows, labels = torch.stack([row for row, _ in of_client]), torch.stack([y for _, y in of_client])
            losses.append(functional.cross_entropy(net(rows), labels).item())
            hits.append((net(rows).argmax(1) == labels).double().mean().item())
    assert metrics["holdout_loss"] == pytest.approx(sum(losses) / 3, rel=1e-12)  # clients weigh the same by default
    assert metrics["holdout_accuracy"] == pytest.approx(sum(hits) / 3)
    assert "holdout_loss" not in whole.evaluate(net, SoloLink())


def test_what_is_held_out_depends_on_the_seed_and_the_client_only():
    def held(seed, client):
        return hold_out(600, 0.25, seed, client)[1].tolist()

    assert held(3, 1) == held(3, 1) and len(held(3, 1)) == 150
    assert held(3, 1) != held(4, 1) and held(3, 1) != held(3, 2)
    assert sorted([*hold_out(600, 0.25, 3, 1)[0], *held(3, 1)]) == list(range(600))  # none is trained on


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--holdout", 1), "holdout = 1"),
        (("--holdout", 0.0001), "too few"),
        (("--task", "quadratic", "--holdout", 0.1), "task quadratic has no data to hold out"),
    ],
)
def test_holdouts_that_cannot_be(tmp_path, words, message):
    ended = train(1, tmp_path, *words)
    assert ended.returncode == 2
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1


def sweep(*words):
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return execute([sys.executable, "-m", "fedmpi", "sweep", *words], env=variables)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A grid of two step sizes and two seeds: (its folder, what it printed)."""
    out = tmp_path_factory.mktemp("sweep") / "it"
    ended = sweep(*GRID, *TINY, "--out", out, "--at-a-time", 2)
    assert ended.returncode == 0, ended.stderr
    return out, ended.stdout


def last(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.always
def test_the_best_is_that_of_the_held_out_data(swept):
    out, printed = swept
    values = [last(out / f"step_size=0.1,seed={seed}")["holdout_accuracy"] for seed in (0, 1)]
    others = [last(out / f"step_size=0.001,seed={seed}")["holdout_accuracy"] for seed in (0, 1)]
    assert statistics.fmean(values) > statistics.fmean(others)
    assert "best: algorithm.step_size 0.1" in printed
    assert f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}" in printed
    with open(out / "sweep.csv") as file:
        lines = list(csv.DictReader(file))
    assert [line["algorithm.step_size"] for line in lines] == ["0.1", "0.001"]
    assert float(lines[0]["holdout_accuracy"]) == pytest.approx(statistics.fmean(values))
    assert yaml.safe_load((out / "step_size=0.1,seed=0" / "settings.yaml").read_text())["holdout"] == 0.1


def test_the_accuracy_decides_also_where_clients_have_unlike_numbers_of_samples(tmp_path):
    """Every metric has two averages there, over clients and over samples."""
    words = ("--rounds", 2, "--clients", 4, "--algorithm", "fedavg", "--threads", 1)  # one of the four has one more
    ended = sweep("--grid", "algorithm.step_size=0.1", *words, "--out", tmp_path / "it")
    assert ended.returncode == 0, ended.stderr
    measured = last(tmp_path / "it" / "step_size=0.1")
    assert measured["holdout_accuracy"] != measured["holdout_accuracy_samples"]
    assert f"holdout_accuracy {measured['holdout_accuracy']:.4f}" in ended.stdout, ended.stdout


def test_the_best_settings_train_on_all_data(swept, tmp_path):
    best = yaml.safe_load((swept[0] / "best.yaml").read_text())
    assert best["algorithm"]["step_size"] == 0.1 and best["holdout"] == 0
    assert not {"seed", "name", "out", "resume"} & best.keys()  # those of one of its runs
    ended = train(1, tmp_path, "--config", swept[0] / "best.yaml", "--name", "it", "--rounds", 1)
    assert ended.returncode == 0, ended.stderr
    assert "holdout" not in ended.stdout


@pytest.mark.always
def test_again_it_makes_only_what_is_not_there(swept):
    out, _ = swept
    broken = out / "step_size=0.001,seed=1"
    before, expected = (
        {run: (run / "model.safetensors").stat().st_mtime_ns for run in out.glob("step*=?")},
        last(broken),
    )
    (broken / "model.safetensors").unlink()
    shutil.rmtree(broken / "checkpoints")
    write_mark(broken, "run")  # as if it had been killed before its first checkpoint
    (broken / "metrics.jsonl").write_text('{"round": 1}\n')
    ended = sweep(*GRID, *TINY, "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert "1 of them still to do" in ended.stdout
    changed = [run for run, then in before.items() if (run / "model.safetensors").stat().st_mtime_ns != then]
    assert changed == [broken]
    assert (out / f"{broken.name}.old-1" / "metrics.jsonl").read_text() == '{"round": 1}\n'
    assert last(broken)["holdout_accuracy"] == expected["holdout_accuracy"]
    assert "0 of them" in sweep(*GRID, *TINY, "--out", out).stdout
    ended = sweep(*GRID, *TINY, "--out", out, "--batch-size", 3)
    assert ended.returncode == 2 and "batch_size was not set" in ended.stderr


def test_a_wrong_setting_ends_the_sweep_with_one_line(tmp_path):
    ended = sweep("--grid", "algorithm.step_sise=0.1,0.2", *TINY, "--out", tmp_path)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "did you mean 'step_size'" in line


@pytest.mark.parametrize(
    ("words", "progress", "message"),
    [
        (
            ("--metric", "holdout_nope"),
            "holdout_nope was not measured",
            "expected one of loss, train_loss, holdout_loss, holdout_accuracy",
        ),
        (("--holdout", 0), "no held-out data", "no run measured held-out data"),
    ],
)
def test_without_the_metric_all_runs_are_made_and_one_line_says_so(tmp_path, words, progress, message):
    ended = sweep("--grid", "seed=0,1", *TINY, "--rounds", 1, *words, "--out", tmp_path)
    assert f"[2/2] seed=1: {progress}" in ended.stdout
    assert ended.returncode == 2 and message in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--grid", "seed=0,x"), "run seed=x: seed = x: expected a whole number"),
        (("--grid", "algorithm.stepsize=1,2", "--emit-slurm", "job.sh"), "did you mean 'step_size'"),
        (("--grid", "seed=0,1", "--list", "tasks"), "list: is an option of fedmpi.train"),
        (("--grid", "seed=0,1", "--task", "quadratic"), "to choose by another metric: --holdout 0 --metric train_loss"),
    ],
)
def test_the_settings_of_all_runs_are_checked_before_any_work(tmp_path, words, message):
    ended = sweep(*words, "--out", tmp_path / "sweep")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "sweep").exists() and not pathlib.Path("job.sh").exists()


def test_a_folder_without_runs_takes_other_settings(tmp_path):
    words = ("--grid", "seed=0", *TINY, "--out", tmp_path)
    assert "cannot be started" in sweep(*words, "--launch", "no-such-launcher").stderr
    assert sweep(*words, "--rounds", 1).returncode == 0
    assert "rounds was 1" in sweep(*words, "--rounds", 2).stderr


def test_ctrl_c_ends_the_runs_too(tmp_path):
    words = ["--grid", "seed=0,1", "--rounds", "1000000", "--ranks", "2", "--threads", "1", "--out", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "fedmpi", "sweep", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=hear_ctrl_c,
    ) as job:  # fmt: skip
        try:
            records = tmp_path / "seed=0" / "metrics.jsonl"
            wait_for(lambda: records.is_file() and records.stat().st_size)
            assert len(processes_of(tmp_path)) >= 3
            job.send_signal(signal.SIGINT)
            _, errors = job.communicate(timeout=LIMIT)
        finally:
            job.kill()
    assert (job.returncode, errors) == (130, "fedmpi: interrupted\n")
    wait_for(lambda: not processes_of(tmp_path))


def test_an_unfinished_run_goes_on_from_its_checkpoint(tmp_path):
    words = [sys.executable, "-m", "fedmpi", "sweep", "--grid", "seed=0", *TINY, "--out", tmp_path]
    assert execute(words, env={"PYTHONPATH": str(ROOT)}).returncode == 0
    (tmp_path / "seed=0" / "model.safetensors").unlink()  # as if it had been killed at its end
    ended = execute(words, env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0 and "1 of them still to do" in ended.stdout, ended.stderr
    assert "continuing after round 6" in (tmp_path / "seed=0.log").read_text()
    assert (tmp_path / "seed=0" / "model.safetensors").exists()


def test_killed_and_started_again_it_waits_for_what_still_runs(tmp_path):
    """The jobs of a sweep that was killed go on; none is made a second time at the same place."""
    words = ["--grid", "seed=0,1", "--rounds", 12, "--local-steps", 200, *TINY[4:], "--ranks", 2, "--out", tmp_path]
    command = [sys.executable, "-u", "-m", "fedmpi", "sweep", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    records = tmp_path / "seed=0" / "metrics.jsonl"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as job:
        wait_for(lambda: records.is_file() and records.stat().st_size)
        signal_all(tmp_path, signal.SIGSTOP)  # the run must not end before the second sweep looks at it
        job.kill()
    assert not (tmp_path / "seed=0" / "model.safetensors").exists()
    inode = records.stat().st_ino
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as job:
        try:
            assert "2 of them still to do" in job.stdout.readline()
            signal_all(tmp_path, signal.SIGCONT)
            printed, _ = job.communicate(timeout=LIMIT)
        finally:
            job.kill()
            signal_all(tmp_path, signal.SIGKILL)
    assert job.returncode == 0 and "seed=0: holdout_accuracy" in printed
    assert records.stat().st_ino == inode and len(records.read_text().splitlines()) == 12


def test_a_run_that_ended_since_the_sweep_began_is_kept(tmp_path):
    plan = make_plan(tmp_path, None, ["seed=0,1"], [])
    for run, accuracy in zip(plan.runs, (0.5, None)):
        made(plan.folder(run), "fedavg", 0, accuracy)
    ended = []
    run_all(plan, plan.runs, 1, 1, "false", lambda run, code, *_: ended.append((run.name, code)))
    assert ended == [("seed=0", 0), ("seed=1", 0)]
    assert all((plan.folder(run) / "metrics.jsonl").is_file() for run in plan.runs)


class FakeJob:
    """Ends when it was asked for three times; the run with seed 2 has wrong settings."""

    begun, cpu_seconds, running, most, began = 0.0, 1.5, 0, 0, []

    def __init__(self, plan, run, ranks, launcher):
        self.run, self.polls = run, 0
        FakeJob.began.append(run.name)
        FakeJob.running += 1
        FakeJob.most = max(FakeJob.most, FakeJob.running)

    def poll(self):
        self.polls += 1
        if self.polls == 3:
            FakeJob.running -= 1
        return None if self.polls < 3 else 2 if self.run.name == "seed=2" else 1

    def last_line(self):
        return f"fedmpi: error: of {self.run.name}"

    def end(self):
        FakeJob.began.append(f"end {self.run.name}")


@pytest.mark.parametrize("at_a_time", [1, 2, 3])
def test_as_many_runs_at_a_time_as_asked_for(tmp_path, monkeypatch, at_a_time):
    monkeypatch.setattr(local, "start_job", FakeJob)
    FakeJob.running, FakeJob.most, FakeJob.began, ended = 0, 0, [], []
    plan = make_plan(tmp_path, None, ["seed=3,4,5,6,7"], [])
    local.run_all(plan, plan.runs, 1, at_a_time, "", lambda *how: ended.append(how))
    assert FakeJob.most == at_a_time and FakeJob.began == [run.name for run in plan.runs]
    assert [(run.name, code, last) for run, code, _, last, _ in ended] == [
        (run.name, 1, f"fedmpi: error: of {run.name}") for run in plan.runs
    ]


def test_a_run_with_wrong_settings_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "start_job", FakeJob)
    FakeJob.running, FakeJob.began = 0, []
    plan = make_plan(tmp_path, None, ["seed=2,3,4"], [])
    with pytest.raises(UserError, match="^run seed=2: of seed=2$"):
        local.run_all(plan, plan.runs, 1, 2, "", lambda *how: None)
    assert FakeJob.began == ["seed=2", "seed=3", "end seed=3"]


def test_a_run_keeps_its_cpu_time_when_the_start_of_another_reaps_it(tmp_path):
    program = (
        "import os, pathlib, sys\n"
        "from fedmpi.cli.sweep.local import start_job\n"
        "from fedmpi.cli.sweep.plan import make_plan\n"
        "common = ['--task=quadratic', '--clients=2', '--rounds=2']\n"
        "plan = make_plan(pathlib.Path(sys.argv[1]), None, ['seed=0,1'], common)\n"
        "first = start_job(plan, plan.runs[0], 1, '')\n"
        "os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked it\n"
        "second = start_job(plan, plan.runs[1], 1, '')\n"
        "print(first.poll(), first.cpu_seconds > 0)\n"
        "second.end()\n"
    )
    assert execute([sys.executable, "-c", program, tmp_path]).stdout == "0 True\n"


def processes_of(folder):
    """Process ids of the jobs that write into a folder."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"--out={folder}" in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
    return found


def signal_all(folder, number):
    """Send a signal to the jobs that write into a folder."""
    for process in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@pytest.mark.alone
def test_a_run_that_is_a_copy_of_the_process_hears_signals_as_a_program_does(tmp_path, monkeypatch):
    """Its words, session and output are its own, and no handler of the sweep's program; nohup stays."""

    def main(words):
        handlers = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)]
        kinds = [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler]
        print(*words, *map(kinds.index, handlers), os.getsid(0) == os.getpid(), repr(sys.stdin.read()), flush=True)
        os.write(2, b"a warning")

    monkeypatch.setattr(importlib.import_module("fedmpi.cli.train"), "main", main)
    monkeypatch.setattr(sys, "stdin", open(0, closefd=False))  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))  # noqa: SIM115
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, heard in ((lambda *given: None, 0), (signal.SIG_DFL, 0), (signal.SIG_IGN, 1)):
            signal.signal(signal.SIGHUP, handler)
            with open(tmp_path / "log", "w+") as log:
                job = local._Forked(target=local._train, args=(["--a", "b"], log.fileno()))
                job.start()
                job.wait(60)
                log.seek(0)
                assert (job.poll(), log.read()) == (0, f"--a b {heard} 2 True ''\na warning")
    finally:
        signal.signal(signal.SIGHUP, before)


def made(folder, name, seed, accuracy):
    """A run that ended, or diverged (accuracy None)."""
    run = make_run(folder, name, seed, rounds=1, ended=accuracy is not None)
    if accuracy is None:
        (run / "diverged.txt").write_text("in round 3: nan\n")
    else:
        (run / "metrics.jsonl").write_text(json.dumps({"round": 1, "holdout_accuracy": accuracy}) + "\n")


def test_configurations_with_runs_that_diverged_come_last(tmp_path):
    plan = make_plan(tmp_path, None, ["algorithm=fafed,fedavg,scaffold", "seed=0,1"], [])
    for name, values in {"fafed": (0.5, 0.7), "fedavg": (0.9, None), "scaffold": (0.6, 0.65)}.items():
        for seed, value in enumerate(values):
            made(tmp_path / f"algorithm={name},seed={seed}", name, seed, value)
    write_mark(tmp_path, "sweep")
    candidates = rank(plan, "holdout_accuracy", ended_runs(plan))
    assert [candidate.varied["algorithm"] for candidate in candidates] == ["scaffold", "fafed", "fedavg"]
    assert list(best_of_each_algorithm(candidates)) == ["scaffold", "fafed", "fedavg"]
    ended = sweep("--grid", "algorithm=fafed,fedavg,scaffold", "--grid", "seed=0,1", "--out", tmp_path)
    assert "0 of them" in ended.stdout and "1 of 2, 1 diverged" in ended.stdout  # it would diverge again
    assert (tmp_path / "best-fafed.yaml").is_file()


def test_plans(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(
        "settings: {rounds: 5}\ngrid: {algorithm.step_size: [0.1, 0.2], seed: [0]}\n"
        "list: [{algorithm: fafed}, {algorithm: fedavg, task.mean: [0.5]}]\n"
    )
    plan = make_plan(tmp_path, file, ["seed=1,2", "task.std=[0.5,1],[2]"], ["--rounds=7", "--local-steps", "3"])
    assert plan.common == {"rounds": "7", "local_steps": "3"}
    assert len(plan.runs) == len({run.name for run in plan.runs}) == 2 * 2 * 2 * 2
    assert plan.runs[0].varied == {
        "algorithm": "fafed", "algorithm.step_size": "0.1", "seed": "1", "task.std": "[0.5,1]"
    }  # fmt: skip
    assert plan.runs[-1].name == "algorithm=fedavg,mean=_0.5_,step_size=0.2,seed=2,std=_2_"
    assert f"--out={tmp_path}" in plan.arguments(plan.runs[0])


def test_plans_in_the_form_of_a_settings_file(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(
        "settings: {task: {name: quadratic, dim: 3}, rounds: 5}\ngrid: {algorithm: {momentum: [0.1, 0.2]}}\n"
        "list: [{algorithm: {name: fafed, step_size: 0.01}}]\n"
    )
    plan = make_plan(tmp_path, file, [], [])
    assert plan.common == {"task": "quadratic", "task.dim": "3", "rounds": "5"}
    assert [run.varied for run in plan.runs] == [
        {"algorithm": "fafed", "algorithm.step_size": "0.01", "algorithm.momentum": word} for word in ("0.1", "0.2")
    ]


@pytest.mark.always
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to vary"),
        (("--grid", "seed"), "expected a setting and its values"),
        (("--grid", "seed=1,,2"), "expected a setting and its values"),
        (("--grid", "name=a,b"), "name: is not a setting"),
        (("--grid", "seed=0,1", "--metric", "accuracy"), "never by the test set"),
        (("--grid", "seed=0,1", "--metric", "test_loss"), "never by the test set"),
        (("--grid", "seed=0,1", "--ranks", "0"), "--ranks: expected a whole number >= 1, not '0'"),
        (("--grid", "seed=0,1", "rounds"), "expected an option"),
        (("--plan", "missing.yaml"), "cannot be read"),
        (("--grid", "seed=0,1", "--table"), "no run is complete"),
        (("--grid", "seed=0,1", "--launch", "no-such-launcher"), "cannot be started"),
        (("--grid", "seed=0,1", "--emit-slurm", "job", "--template", "missing"), "--template names"),
    ],
)
def test_wrong_words_get_one_line(tmp_path, words, message):
    ended = sweep(*words, "--out", tmp_path / "sweep")
    assert ended.returncode == 2
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1


HUGE = f"grid: {{{', '.join(f'a{key}: {[*range(10)]}' for key in range(12))}}}"  # 10^12 runs


@pytest.mark.parametrize("point", ["settings: [1]", "runs: {}", "grid: {seed: 1}", "list: [1]", "[1]", HUGE])
def test_plans_that_cannot_be(tmp_path, point):
    (tmp_path / "plan.yaml").write_text(point)
    with pytest.raises(UserError):
        make_plan(tmp_path, tmp_path / "plan.yaml", [], [])


def test_a_job_array_is_the_template_with_the_sweep_in_it(tmp_path):
    """Each array task, with a launcher that only prints what it was asked to start."""
    made(tmp_path / "out" / "step_size=0.2,seed=0", "fedavg", 0, 0.5)
    write_mark(tmp_path / "out", "sweep")
    words = ("--grid", "algorithm.step_size=0.1,0.2", "--grid", "seed=0,1", *TINY, "--out", tmp_path / "out")
    ended = sweep(*words, "--emit-slurm", tmp_path / "job.sh", "--at-a-time", 2)
    assert ended.returncode == 0, ended.stderr
    script = (tmp_path / "job.sh").read_text().splitlines()
    assert "#SBATCH --array=0-1,3%2" in script  # one of the four is there already
    lines = iter(script)
    assert all(line in lines for line in (ROOT / "slurm" / "sweep.sbatch").read_text().splitlines())
    assert sweep(*words, "--todo").stdout == "0-1,3\n"

    def task(*more, **variables):
        variables |= {
            "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "SLURM_NTASKS": "1",
            "SLURM_SUBMIT_DIR": str(tmp_path), "FEDMPI_LAUNCH": "echo", "FEDMPI_DOCTOR": "0", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        return execute(["bash", tmp_path / "job.sh", *more], env=variables)

    names = []
    for number in (0, 1, 3):
        said = task("--rounds", "9", SLURM_ARRAY_TASK_ID=str(number)).stdout.split()
        assert "--rounds=9" in said and "--clients=2" in said
        names += [re.fullmatch("--name=(.*)", word)[1] for word in said if word.startswith("--name")]
    assert names == ["step_size=0.1,seed=0", "step_size=0.1,seed=1", "step_size=0.2,seed=1"]
    wrong = task(SLURM_ARRAY_TASK_ID="4")
    assert wrong.returncode == 2 and "--words 4: expected the number of a run, 0 to 3" in wrong.stderr
    assert [word for word in task().stdout.split() if word.startswith("--name")] == [f"--name={name}" for name in names]
    made(tmp_path / "out" / names[0], "fedavg", 0, 0.5)
    assert "run 0 is complete" in task(SLURM_ARRAY_TASK_ID="0").stderr
    with open(tmp_path / "out" / f"{names[1]}.log", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # as the process does that makes this run elsewhere
        there = task(SLURM_ARRAY_TASK_ID="1")
    assert (there.returncode, there.stdout) == (1, "")
    assert f"{tmp_path / 'out' / names[1]}: is being made elsewhere\n" in there.stderr


def test_ranks_of_a_job_array(tmp_path):
    """The template's, unless they are given: then SLURM finds the nodes."""
    words = (*GRID, *TINY, "--out", tmp_path / "out", "--emit-slurm", tmp_path / "job.sh")
    scripts = []
    for more in ((), ("--ranks", 3)):
        assert sweep(*words, *more).returncode == 0
        scripts.append(re.findall("^#SBATCH --(n.*)", (tmp_path / "job.sh").read_text(), re.MULTILINE))
    assert scripts == [["nodes=2", "ntasks-per-node=4"], ["ntasks=3"]]
