"""Whether gradients and local steps can be replayed from recordings (--cuda_graph), which is tried on minibatches."""

import sys
import textwrap

import torch

from fedmpi.errors import UserError
from fedmpi.federation.recorded import RecordedSteps
from fedmpi.oracles.autograd import Autograd
from fedmpi.oracles.base import noise_kept
from fedmpi.oracles.graphs import CudaTape, Recordings, cuda_graph

TOLERANCE = 1e-3  # of the norm of a gradient: some kernels do not always add in the same order


def record_gradients(config, task, flat, oracles, record=cuda_graph):
    """Let the oracles replay their gradients; returns why they do not, as text, or "". Not collective.

    Args:
        config: a `Config`. task: a `LoadedTask`. flat: a `FlatModule`. oracles: of this rank's clients.
        record: see `fedmpi.oracles.graphs.cuda_graph`.

    Raises:
        UserError: if the rank has no GPU.
    """
    if record is cuda_graph and flat.x.device.type != "cuda":
        raise UserError(f"cuda_graph = on: this rank computes on {flat.x.device}; leave cuda_graph out")
    reasons = {
        "only exact gradients are recorded (oracle autograd)": type(config.oracle) is not Autograd,
        "several clients take each local step at once (stack)": config.run.stack > 1,
        "the task keeps a state from one minibatch to the next": task.carries,
    }
    recordings = Recordings(flat, record)
    why_not = next((reason for reason, holds in reasons.items() if holds), "")
    why_not = why_not or _tried_reason(flat, oracles[0], recordings)
    for oracle in oracles if not why_not else ():
        oracle.recordings = recordings
    return why_not


def record_steps(federation, task, make_tape=CudaTape):
    """Let a federation replay whole local steps, once `record_gradients` has found nothing against it. Not collective.

    Where that turns out to be impossible in the first steps, rank 0 says why, and only gradients are replayed.
    """

    def say(why_not):
        if federation.link.rank == 0:
            line = f"fedmpi: cuda_graph = on: gradients are recorded, but not whole local steps, because {why_not}"
            print(line, file=sys.stderr, flush=True)

    federation.local_step = RecordedSteps(federation.algorithm, task.gathers, make_tape, say)


def _tried_reason(flat, oracle, recordings):
    """Compare replayed gradients with those that are computed as always, at two points on two minibatches."""
    state = (oracle.client.buffers, *oracle.client.counters)
    before = [value.clone() for value in state]

    def restore():
        for value, old in zip(state, before):
            value.copy_(old)

    def evaluate(source, point, sample):
        """[gradient, point, buffers, ...] after an evaluation."""
        restore()
        oracle.recordings, z = source, point.clone()
        _, g = oracle.evaluate(z, sample)
        return [value.clone() for value in (g, z, *state)]

    flat.train()
    try:
        with noise_kept(flat.x.device):
            samples = [oracle.sample(number) for number in (0, 1)]
            for turn in (0, 1, 0):
                point = flat.x * (1 + 0.1 * turn)
                computed, replayed = (evaluate(source, point, samples[turn]) for source in (None, recordings))
                if not torch.equal(computed[1], point):
                    return "a pass changes the parameters"
                if not all(map(_is_close, replayed, computed)):
                    return "a replay computes other gradients of this model"
    except Exception as error:  # noqa: BLE001  a user's module can raise anything
        line = textwrap.shorten(next(iter(str(error).strip().splitlines()), ""), 100, placeholder=" ...")
        return f"the evaluation of the model cannot be recorded ({type(error).__name__}: {line})"
    finally:
        oracle.recordings = None
        restore()
        flat.point_at(flat.x, flat.buffers)
    return "" if recordings.number else "a minibatch contains more than tensors and numbers"


def _is_close(one, other):
    one, other = one.double(), other.double()
    return bool((one - other).norm() <= TOLERANCE * other.norm())
