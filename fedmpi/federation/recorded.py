"""Whole local steps that a GPU replays from a recording: gathering rows, gradients and the algorithm's arithmetic.

Recorded is what an algorithm's own `local_step` does on the device. What changes from step to step lies in memory that
is filled before a replay: the indices of the samples, step sizes and weights of fresh gradients (`eta`, `alpha`).
Random numbers are those of eager steps: the recording is cut where a seed is set, and a replay sets the seed there. All
other numbers that an algorithm reads of a client are conditions of the recording: if one differs, another one is made.

It has not run on a GPU. Tests replace `CudaTape` by a recording of torch's operators on the CPU.
"""

import collections
import copy

import torch
from torch.overrides import TorchFunctionMode

from fedmpi.errors import UserError
from fedmpi.oracles.base import Sample
from fedmpi.oracles.graphs import copy_batch, empty_like_batch, shape_of_batch

MOST = 16  # recordings for each client; further shapes and conditions are computed as usual
CHECKED = 2  # uses of a recording that are compared with the computed step: one step size could be right by chance
MOST_NUMBERS = 16  # step sizes and weights in a local step
TOLERANCE = 1e-3  # of a row's norm: some kernels of GPUs do not always add in the same order

# What an algorithm may read: these do not change within a run, or are conditions of a recording.
_FIXED = {"segments", "primal", "dual"}
_CONDITIONS = {
    "index", "num_steps", "step_index", "is_last_step", "was_absent", "num_clients", "num_participants", "participation"
}  # fmt: skip


class NotRecorded(Exception):
    """A local step cannot be recorded; the text says why."""


class RecordedSteps:
    """An algorithm's `local_step`, replayed from recordings where that can be done.

    The first uses of every recording are computed as well, and the results compared; what differs is not used.

    Args:
        algorithm: an `Algorithm`. gathers: whether the task's `batch` can be recorded (`LoadedTask.gathers`).
        make_tape: function without arguments, see `fedmpi.oracles.graphs.CudaTape`.
        say: called once with a text, why steps are not replayed.
    """

    def __init__(self, algorithm, gathers, make_tape, say):
        self._algorithm, self._gathers, self._make_tape, self._say = algorithm, gathers, make_tape, say
        self._known = collections.defaultdict(list)  # number of a client -> its recordings
        self.why_not, self.num_replays = "", 0

    def __call__(self, client, server, oracle):
        """What the algorithm's `local_step` does."""
        if not self.why_not:
            try:
                recording = self._find(client, server, oracle)
            except (NotRecorded, RuntimeError, AttributeError, TypeError, ValueError, UserError) as error:
                self._give_up(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
            else:
                if recording is not None and recording.num_checked == CHECKED:
                    recording.replay(client)
                    oracle.account(*recording.account())
                    self.num_replays += 1
                    return
                if recording is not None:
                    self._check(recording, client, server, oracle)
                    return
        self._algorithm.local_step(client, server, oracle)

    def _find(self, client, server, oracle):
        """A recording for this step, made if there is none yet, with its inputs; None if there are too many."""
        known = self._known[client.index]
        for recording in known:
            if recording.fill(client, server, oracle):
                return recording
        if len(known) == MOST:
            return None
        state = _State(client)
        try:
            known.append(Recording(self._algorithm, self._gathers, self._make_tape(), client, server, oracle))
        finally:
            state.restore()
        return known[-1] if known[-1].fill(client, server, oracle) else None

    def _check(self, recording, client, server, oracle):
        """Replay and compute a step, and compare the results; the computed ones count."""
        state = _State(client)
        recording.replay(client)
        (_, _, losses), replayed = recording.account(), state.now()
        state.restore()
        before = len(oracle.losses)
        self._algorithm.local_step(client, server, oracle)
        computed = [*state.now(), *oracle.losses[before:]]
        recording.num_checked += 1
        if len(computed) != len(replayed) + len(losses) or not all(map(_is_close, [*replayed, *losses], computed)):
            self._give_up("a replay computes something else")

    def _give_up(self, why_not):
        self.why_not = why_not
        self._known.clear()
        self._say(why_not)


class Recording:
    """One local step of one client, recorded.

    Args:
        tape: what records. The others: see `RecordedSteps`.

    Attributes:
        num_checked: how often it was compared with a computed step.

    Raises:
        NotRecorded: if it cannot be recorded.
    """

    def __init__(self, algorithm, gathers, tape, client, server, oracle):
        self.num_checked = 0
        self._algorithm, self._gathers, self._tape = algorithm, gathers, tape
        self._inputs, self._shapes = [], []  # of each draw: its indices or its minibatch, and their shape
        self._calls = []  # of each number: (method, "client" or "server", further arguments)
        self._numbers = client.buffers.new_zeros(MOST_NUMBERS, dtype=torch.float64)
        self._filled = None
        self._conditions = {}  # ("client" or "server", attribute) -> value
        self._seeds = []  # between two parts of the tape: (kind, number of the draw)
        self._counters = list(client.counters)
        self._is_rehearsal, self._losses, self._num_gradients = True, [], 0
        before = client.num_gradients, len(oracle.losses), oracle.seed, oracle.recordings
        oracle.recordings, oracle.draw = None, self._draw_for(client, oracle)
        oracle.seed = self._seed_for(client, oracle)
        twin = self._with_numbers_in_memory()
        watched = _Watched("client", client, self._conditions), _Watched("server", server, self._conditions)

        def step():
            self._num_draws = self._num_numbers = 0
            client.num_gradients = before[0]
            del oracle.losses[before[1] :]
            with _NumbersInMemory():
                twin.local_step(*watched, oracle)

        try:
            tape.rehearse(step)
            self._is_rehearsal = False
            tape.record(step)
            if any(found is not mine for found, mine in zip(client.counters, self._counters)):
                raise NotRecorded("the model puts another tensor in the place of an integer buffer")
            self._num_gradients = client.num_gradients - before[0]
            self._losses = oracle.losses[before[1] :]
        finally:
            client.num_gradients = before[0]
            del oracle.losses[before[1] :]
            client.counters = self._counters
            del oracle.draw  # the method of its class is back
            oracle.seed, oracle.recordings = before[2:]

    def fill(self, client, server, oracle):
        """Whether the recording is for this step; if it is, fill its inputs and numbers."""
        holders = {"client": client, "server": server}
        if any(getattr(holders[who], name) != value for (who, name), value in self._conditions.items()):
            return False
        if any(found is not mine for found, mine in zip(client.counters, self._counters)):
            return False
        self._oracle, self._first_draw = oracle, client.num_draws
        inputs = [self._input(oracle, client.num_draws + draw) for draw in range(len(self._inputs))]
        if [shape_of_batch(one) for one in inputs] != self._shapes:
            return False
        for one, mine in zip(inputs, self._inputs):
            copy_batch(one, mine)
        values = [getattr(self._algorithm, name)(holders[who], *args) for name, who, args in self._calls]
        if values and values != self._filled:
            # Pinned, and new each time: the CPU does not wait, and overwrites nothing that is not yet copied.
            pinned = torch.tensor(values, dtype=torch.float64, pin_memory=self._numbers.is_cuda)
            self._numbers[: len(values)].copy_(pinned, non_blocking=True)
            self._filled = values
        return True

    def replay(self, client):
        """Take the step that was filled in."""
        self._tape.replay(0)
        for part, (kind, draw) in enumerate(self._seeds, 1):
            self._oracle.seed(self._oracle.seed_of(kind, self._first_draw + draw))
            self._tape.replay(part)

    def account(self):
        """(number of draws, number of gradients, losses) of a step."""
        return len(self._inputs), self._num_gradients, [loss.clone() for loss in self._losses]

    def _input(self, oracle, number):
        return oracle.indices(number) if self._gathers else oracle.sample(number).batch

    def _draw_for(self, client, oracle):
        first = client.num_draws

        def draw():
            number = self._num_draws
            self._num_draws += 1
            if self._is_rehearsal and number == len(self._inputs):
                values = self._input(oracle, first + number)
                self._shapes.append(shape_of_batch(values))
                if self._shapes[-1] is None:
                    raise NotRecorded("a minibatch contains more than tensors and numbers")
                self._inputs.append(empty_like_batch(values))
                copy_batch(values, self._inputs[-1])
            batch = self._inputs[number]
            if self._gathers:
                if oracle.random_batches:
                    oracle.seed(("augmentation", number))
                batch = oracle.batch(batch)
            return Sample(number, batch, ("noise", number))

        return draw

    def _seed_for(self, client, oracle):
        first, really_seed = client.num_draws, oracle.seed

        def seed(what):
            if not isinstance(what, tuple):  # of a minibatch that is not recorded
                really_seed(what)
                return
            number = oracle.seed_of(what[0], first + what[1])
            if self._is_rehearsal:
                really_seed(number)
            else:
                self._seeds.append(what)
                self._tape.cut(lambda: really_seed(number))

        return seed

    def _with_numbers_in_memory(self):
        """The algorithm with `eta` and `alpha` that return 0-d tensors, which are filled before each replay."""
        recording, cls = self, type(self._algorithm)

        def number(name, clock, args):
            position = recording._num_numbers
            recording._num_numbers += 1
            call = name, clock.who, args
            if recording._is_rehearsal and position == len(recording._calls):
                if position == MOST_NUMBERS:
                    raise NotRecorded("its local step uses too many step sizes")
                recording._calls.append(call)
                recording._numbers[position] = getattr(recording._algorithm, name)(clock.holder, *args)
            if recording._calls[position] != call:
                raise NotRecorded("its local step uses other step sizes each time")
            return recording._numbers[position]

        class Twin(cls):
            stackable = False

            def eta(self, clock):
                return number("eta", clock, ())

            def alpha(self, clock, weight, scale):
                return weight if scale is None else number("alpha", clock, (weight, scale))

        twin = copy.copy(self._algorithm)
        object.__setattr__(twin, "__class__", Twin)
        return twin


class _Watched:
    """A client or server whose rows an algorithm may use; other things that it reads become conditions."""

    def __init__(self, who, holder, conditions):
        vars(self).update(who=who, holder=holder, _conditions=conditions)

    def __getattr__(self, name):
        value = getattr(self.holder, name)
        if name in self.holder.rows or name in _FIXED:
            return value
        if name not in _CONDITIONS:
            raise NotRecorded(f"its local step reads {self.who}.{name}")
        self._conditions[self.who, name] = value
        return value

    def __setattr__(self, name, value):
        if name not in self.holder.rows or value is not self.holder.rows[name]:  # row += ... assigns the row itself
            raise NotRecorded(f"its local step changes {self.who}.{name}")


class _NumbersInMemory(TorchFunctionMode):
    """Lets torch's functions take a 0-d tensor as `alpha`, `value` or `weight`, where they accept only numbers.

    Each is replaced by functions that round in the same way as it does with a number.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = function.__name__.rstrip("_")
        is_in_place = function.__name__.endswith("_")
        if name in ("add", "sub") and isinstance(kwargs.get("alpha"), torch.Tensor):
            scale = kwargs.pop("alpha")
            return _add_scaled(args[0], args[1], scale if name == "add" else -scale, is_in_place, **kwargs)
        if name == "addcdiv" and isinstance(kwargs.get("value"), torch.Tensor):
            scale, (x, above, below) = kwargs.pop("value"), args
            if x.device.type == "cpu":  # x + (value * above) / below; a GPU computes x + value * (above / below)
                return (x.add_ if is_in_place else x.add)((above * scale).div_(below), **kwargs)
            return _add_scaled(x, above / below, scale, is_in_place, **kwargs)
        if name == "lerp" and len(args) == 3 and isinstance(args[2], torch.Tensor) and args[2].dtype != args[0].dtype:
            args = (*args[:2], args[2].to(args[0].dtype))
        return function(*args, **kwargs)


def _add_scaled(x, direction, scale, is_in_place, **kwargs):
    return x.addcmul_(direction, scale) if is_in_place else torch.addcmul(x, direction, scale, **kwargs)


class _State:
    """What a local step of a client changes on the device."""

    def __init__(self, client):
        self._tensors = [*client.rows.values(), client.buffers, *client.counters]
        self._before = self.now()

    def now(self):
        """Copies of the tensors as they are."""
        return [tensor.clone() for tensor in self._tensors]

    def restore(self):
        """Give them the values from before."""
        for tensor, old in zip(self._tensors, self._before):
            tensor.copy_(old)


def _is_close(one, other):
    if torch.equal(one, other):
        return True
    one, other = one.double(), other.double()
    return bool((one - other).norm() <= TOLERANCE * other.norm())
