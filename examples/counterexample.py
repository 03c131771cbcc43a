"""Why adaptive methods need care in a federation: the counter-example of the FAFED paper, without MPI, model or data.

python counterexample.py
"""

import fedmpi
from fedmpi.algorithms import FAFED, FedAvg, NaiveAdaptiveFedAvg


def gradient(client, x, sample):
    """Of f_1 = 3x², f_2 = f_3 = -x² on [-1, 1], continued linearly; their mean has its minimum at 0."""
    return (6 if client == 0 else -2) * x.clamp(-1, 1)


for algorithm in (FedAvg(step_size=0.1), NaiveAdaptiveFedAvg(step_size=0.1), FAFED(step_size=0.1)):
    trace = fedmpi.simulate(algorithm, gradient, x0=[10.0], num_clients=3, rounds=200, local_steps=5)
    print(f"{type(algorithm).__name__:<20} ends at x = {trace[-1]['rows']['x'][0, 0]:8.4f}")
