"""--stack K: K clients of a rank take each local step at once, and get what they would get in turn."""

import dataclasses
import functools

import h5py
import numpy as np
import odd_modules
import pytest
import torch
from helpers import train

import fedmpi.algorithms
from fedmpi.algorithms import Algorithm, FedAvg
from fedmpi.comm.link import SoloLink
from fedmpi.config.build import read_command_line
from fedmpi.errors import UserError
from fedmpi.federation.stack import StackedClient
from fedmpi.federation.uploads import Upload
from fedmpi.registry import known
from fedmpi.training.build import prepare

COMMON = "--clients 5 --participation 0.8 --local_steps 3 --batch_size 16 --threads 1 --dtype float64"
# The clients have different numbers of samples: 1 or 2 local steps, and smaller minibatches at the end of a pass.
UNEVEN = "--local_epochs 0.5 --batch_size 100 --partition uneven"
# Five directions in three passes; dividing differences of losses by the distance enlarges their rounding.
ESTIMATED = (
    "--oracle two_point --oracle.directions 5 --oracle.at_once 2 --oracle.smoothing 0.1 --algorithm.step_size 1e-3"
)
ENLARGED = 1e-8
ALGORITHMS = known(fedmpi.algorithms, Algorithm)
IN_TURN = {"diloco", "fed_lamb"}  # the number of a client's own draws; norms of its layers
MINMAX = {"local_sgda", "momentum_local_sgda", "fmgda", "coda", "codasca"}
CASES = [
    *((name, "--task auc --algorithm.step_size 0.01" if name in MINMAX else "") for name in ALGORITHMS),
    ("mimeadam", "--algorithm.lite false"),
    ("local_amsgrad", "--algorithm.refresh after"),
    ("fafed", "--algorithm.sync_order code"),
    ("fafed", "--clip_norm 0.1 --weight_decay 0.01 --weighting samples --model mlp"),
    ("coda", "--task auc --algorithm.prox closed --algorithm.stage_output average --algorithm.stage_rounds 2"),
    ("codasca", "--task auc --task.ascent_scale 0.5 --clip_norm 0.1"),
    (f"{__name__}.Counting", ""),
    *((name, UNEVEN) for name in ("fedavg", "fafed", "scaffold", "mb_storm", "stem")),
    *((name, options) for name in ("fedzo", "fafedzo") for options in (ESTIMATED, f"{ESTIMATED} {UNEVEN}")),
    ("fafedzo", f"{ESTIMATED} --model mlp --clip_norm 1 --weight_decay 0.01"),
]


class Recording:
    """Counts how many clients make a gradient at once."""

    def __init__(self, stack):
        self.sizes, self._join = set(), stack.join
        stack.join = self

    def __call__(self, clients):
        self.sizes.add(len(clients))
        return self._join(clients)


class Shrink(Upload):
    """Sends half of what has changed since the round's start."""

    needs_start, kept_rows = True, ("sent",)

    def apply(self, client, rows, start, kept):
        for name, row in rows.items():
            row.lerp_(start[name], 0.5)
            kept["sent"][name].copy_(row)


@dataclasses.dataclass(frozen=True)
class Counting(FedAvg):
    """What is sent depends on the number of the last local step."""

    stackable = True

    def upload(self, client, server, oracle):
        client.x.mul_(1 + 0.01 * client.iteration + client.is_last_step)


def prepared(*words):
    return prepare(read_command_line([*COMMON.split(), *words]), SoloLink())


def run(job, rounds=3):
    """(federation, its losses)."""
    job.federation.start()
    return job.federation, [job.federation.run_round() for _ in range(rounds)]


def assert_same(found, expected, tolerance=1e-12):
    """Two federations have the same losses, numbers of gradients, and rows of clients and server."""
    (one, losses), (other, other_losses) = found, expected
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(losses, other_losses, equal_nan=True)
    for name, value in one.state().items():
        if not name.startswith("federation/seconds"):
            close(value, other.state()[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda case: case or "default")
def test_every_algorithm_gives_what_it_gives_in_turn(name, options, capfd):
    """3 and 1 of the 4 participants at once, or 1 or 2 with equally many local steps."""
    words = ["--algorithm", name, "--oracle", "autograd", *options.split()]
    in_turn, job = prepared(*words), prepared(*words, "--stack", "3")
    if name in IN_TURN:
        assert job.federation.stack is None
        assert f"because the local step of {name}, as it is set, cannot be" in capfd.readouterr().err
        return
    assert capfd.readouterr().err == ""
    sizes = Recording(job.federation.stack).sizes
    assert_same(run(job), run(in_turn), ENLARGED if ESTIMATED in options else 1e-12)
    assert sizes >= {2} if UNEVEN in options else sizes == {1, 3}


@pytest.mark.parametrize("module", odd_modules.TRAIN, ids=lambda cls: cls.__name__)
def test_every_legal_module_is_stacked_rightly_or_not_at_all(module):
    words = ["--algorithm", "fedavg", "--model", f"odd_modules.{module.__name__}"]
    assert_same(run(prepared(*words, "--stack", "4")), run(prepared(*words)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--algorithm.adaptive_matrix global", "the local step of fafed, as it is set, cannot be"),
        ("--oracle two_point --oracle.evaluation one_by_one", "oracle two_point, as it is set, computes the gradient"),
        ("--oracle two_point --model odd_modules.Dropping", "the model or the loss draws random numbers"),
        ("--autocast bf16", "gradients of several clients are not computed with autocast"),
        ("--reduction reproducible", "the bits would depend on which clients share a rank"),
        ("--model odd_modules.Lazy", "the model has buffers"),
        ("--model odd_modules.Dropping", "the model or the loss draws random numbers"),
        ("--model odd_modules.MovingData", "torch.func cannot compute their gradients at once (RuntimeError: "),
        ("--clients 1", "this rank has one client"),
    ],
)
def test_what_cannot_be_stacked_is_stepped_in_turn(options, reason, capfd):
    job = prepared("--stack", "2", *options.split())
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"fedmpi: stack = 2: clients take turns, because {reason}")
    assert job.federation.stack is None


def test_a_recurrent_state_is_not_stacked(tmp_path, capfd):
    with h5py.File(tmp_path / "text.h5", "w") as file:
        for split in ("train", "test"):
            file[f"{split}/text"] = np.frombuffer(b"the cat sat on a mat\n" * 80, np.uint8)
    job = prepared("--stack", "2", "--task", "language", "--data", str(tmp_path / "text.h5"), "--model", "lstm")
    assert "because the task keeps a state from one minibatch to the next" in capfd.readouterr().err
    assert job.federation.stack is None


def test_private_layers_are_not_stacked():
    with pytest.raises(UserError, match=r"expected stack = 1, because each client has its own model"):
        prepared("--stack", "2", "--model", "mlp", "--private", "*.bias")


def test_a_new_local_step_must_declare_that_it_can_be_stacked():
    class Sign(FedAvg):
        def local_step(self, client, server, oracle):
            raise AssertionError

    class Renamed(FedAvg):
        pass

    assert FedAvg.stackable and Renamed.stackable and not Sign.stackable


def test_what_clients_do_not_share_is_an_error():
    job = prepared("--stack", "2")
    job.federation.start()
    client = job.federation.clients[0]
    stacked = StackedClient([client, client], {"x": torch.zeros(2, job.flat.dim)}, None)
    for name in ("index", "num_draws", "was_absent"):
        with pytest.raises(AttributeError, match=name):
            getattr(stacked, name)


def test_upload_stages_get_the_rows_of_each_client():
    jobs = [prepared(*words) for words in ([], ["--stack", "4"])]
    for job in jobs:
        job.federation.uploads = (Shrink(),)
        for client in job.federation.clients:
            client.kept["Shrink.sent"] = job.federation.store.new_rows()
    in_turn, stacked = map(run, jobs)
    assert_same(stacked, in_turn)


def test_a_restored_federation_goes_on_with_the_same_bits():
    """Whatever the stack held before; and one that steps in turn goes on from the state of one that stacks."""
    words = ["--algorithm", "scaffold"]
    whole = run(prepared(*words, "--stack", "3"), rounds=4)
    first, losses = run(prepared(*words, "--stack", "3"), rounds=2)
    for stack, tolerance in (("3", 0), ("1", 1e-12)):
        federation = prepared(*words, "--stack", stack).federation
        federation.restore(first.state())
        later = [federation.run_round() for _ in range(2)]
        assert_same((federation, losses + later), whole, tolerance)


def values(folder):
    with h5py.File(folder / "model.h5") as file:
        found = []
        file.visititems(lambda _, item: found.append(item[()].ravel()) if isinstance(item, h5py.Dataset) else None)
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("options", "tolerance"), [("", 1e-12), (f"--algorithm fafedzo {ESTIMATED}", ENLARGED)], ids=["exact", "estimated"]
)
def test_two_ranks_give_what_they_give_in_turn(options, tolerance, tmp_path):
    """Of 5 clients, one rank has 3 and the other 2."""
    for name, stack in (("in_turn", 1), ("stacked", 2)):
        words = [*COMMON.split(), "--rounds", 3, "--checkpoint_every", 2, "--name", name, "--stack", stack]
        words += options.split()
        ended = train(2, tmp_path, *words)
        assert ended.returncode == 0, ended.stderr
        assert "take turns" not in ended.stderr
    np.testing.assert_allclose(
        values(tmp_path / "stacked"), values(tmp_path / "in_turn"), rtol=tolerance, atol=tolerance
    )
