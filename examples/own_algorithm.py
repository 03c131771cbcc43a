"""An algorithm of your own, beside FedAvg: local SGD whose server keeps a momentum.

mpirun -np 2 python own_algorithm.py
"""

import dataclasses

import fedmpi


@dataclasses.dataclass(frozen=True)
class ServerMomentum(fedmpi.Algorithm):
    """Local SGD; the server moves along a decaying sum of the averaged updates."""

    step_size: float = fedmpi.setting(0.1, "η of the local steps", above=0)
    momentum: float = fedmpi.setting(0.5, "weight of the old direction", least=0, below=1)

    server_rows = ("x_start", "m")  # besides x, which is exchanged

    def server_start(self, server):
        server.x_start.copy_(server.x)

    def local_step(self, client, server, oracle):
        g = oracle.gradient(client.x, oracle.draw())
        client.x.add_(g, alpha=-self.eta(client))

    def server_step(self, server):
        server.m.mul_(self.momentum).add_(server.x).sub_(server.x_start)  # m <- βm + mean(x_i) - x
        server.x.copy_(server.x_start.add_(server.m))


if __name__ == "__main__":
    for algorithm in ("fedavg", ServerMomentum(momentum=0.8)):
        run = fedmpi.train(algorithm=algorithm, clients=4, rounds=10, partition="halves")
        print(type(algorithm).__name__ if algorithm != "fedavg" else algorithm, run.final["accuracy"])
