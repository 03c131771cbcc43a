"""A whole job in Flower, to compare its time with fedmpi's: python docs/comparison/flower_job.py fashion_mnist.h5

FedAvg on Fashion-MNIST with the network, the clients, rounds, local steps and tests of this job of fedmpi:

    mpirun -np 4 python -m fedmpi.train --algorithm fedavg --algorithm.step_size 0.1 --data fashion_mnist.h5 \\
        --model fashion_cnn --rounds 100 --local_steps 10 --batch_size 50 --eval_every 5 --evaluate_samples 10000

Needs an environment of its own: pip install torch==2.13.0 'flwr[simulation]==1.42.0' h5py. It is written to be fast in
Flower: clients keep their samples in memory and evaluate nothing, and the server tests every fifth round only. As many
clients compute at the same time as there are cores, with one thread each.
"""

import argparse
import functools
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, also by Ray's actors
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import h5py  # noqa: E402
import torch  # noqa: E402
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

LOCAL_STEPS, BATCH_SIZE, STEP_SIZE, EVALUATIONS = 10, 50, 0.1, 20


def network():
    """The FAFED paper's CNN for Fashion-MNIST: 26,620 parameters, fedmpi's `fashion_cnn`."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(5, 10, 3), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(250, 100), nn.Tanh(), nn.Linear(100, 10),
    )  # fmt: skip


@functools.cache
def samples(path, split, part=0, num_parts=1):
    """Every `num_parts`-th sample of a split, in memory: images of float32 [n, 1, 28, 28], labels [n]."""
    with h5py.File(path) as file:
        images, labels = file[f"{split}/images"][part::num_parts], file[f"{split}/labels"][part::num_parts]
    return torch.from_numpy(images).float().div(255).sub(0.286).div(0.353).unsqueeze(1), torch.from_numpy(labels).long()


def client_app(path):
    app = ClientApp()

    @app.train()
    def train(message, context):
        torch.set_num_threads(1)
        part, num_parts = context.node_config["partition-id"], context.node_config["num-partitions"]
        images, labels = samples(path, "train", part, num_parts)
        net = network()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=STEP_SIZE)
        loss = torch.tensor(0.0)
        for batch in torch.randint(len(labels), (LOCAL_STEPS, BATCH_SIZE)):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(labels)})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def server_app(path, rounds, times):
    app = ServerApp()

    def evaluate(number, arrays):
        times[number] = time.perf_counter()
        if number == 0 or number % max(1, rounds // EVALUATIONS):
            return None
        net = network()
        net.load_state_dict(arrays.to_torch_state_dict())
        images, labels = samples(path, "test")
        with torch.no_grad():
            correct = sum(
                (net(batch).argmax(1) == truth).sum().item()
                for batch, truth in zip(images.split(1000), labels.split(1000))
            )
        return MetricRecord({"accuracy": correct / len(labels)})

    @app.main()
    def main(grid, context):
        torch.manual_seed(0)
        start = ArrayRecord(network().state_dict())
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
        strategy.start(grid, start, num_rounds=rounds, evaluate_fn=evaluate)

    return app


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", help="Fashion-MNIST in HDF5: train/images, train/labels, test/images, test/labels")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=100)
    asked = parser.parse_args()
    path, times = os.path.abspath(asked.data), {}
    run_simulation(
        server_app(path, asked.rounds, times),
        client_app(path),
        asked.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    begin = min(10, asked.rounds - 1)  # the first rounds load the samples
    milliseconds = 1000 * (times[asked.rounds] - times[begin]) / (asked.rounds - begin)
    print(f"{asked.clients} clients: a round takes {milliseconds:.1f} ms, evaluations included")


if __name__ == "__main__":
    import flower_job  # by name: what the cache holds then stays in Ray's actors, which import this file

    flower_job.main()
