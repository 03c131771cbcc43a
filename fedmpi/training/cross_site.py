"""Every silo's own model on every silo's data (`--cross_site`). Collective."""

import torch

from fedmpi.training.evaluation import by_client

SENT = "cross_site: after training, each silo's model is sent to all silos, which test it: they see each other's models"


@torch.no_grad()
def measure(job, own_results):
    """Metric of the test or held-out data -> {"matrix": [N][N], "all_tests": its mean}, by a job's `OwnResults`.

    Row i of the matrix has the results of client i's own model on each client's data; nan where there are none.
    """
    flat, task = job.flat, job.task.subset(1, tests=False)
    flat.module.eval()
    task.visit = lambda client: None
    rows = {}
    for number in range(job.context.num_clients):
        job.link.enter(f"the tests of client {number}'s model")
        own = [own_results.of(client) for client in job.federation.clients if client.index == number]
        own = own[0] if own else (flat.x[:0], flat.buffers[:0])
        whole = [job.link.allgatherv(part.double().cpu().numpy(), "silo models") for part in own]
        own = [torch.from_numpy(part).to(flat.x) for part in whole]
        flat.point_at(*own)
        for name, values in task.evaluate(flat.module, job.link).clients.items():
            if not name.startswith("train"):
                rows.setdefault(name, []).append(by_client(job, values))
    known = {name: [value for row in matrix for value in row if value == value] for name, matrix in rows.items()}
    return {name: {"matrix": matrix, "all_tests": sum(known[name]) / len(known[name])} for name, matrix in rows.items()}


def tables(job, found):
    """What `measure` found, in the layout of a record's tables."""
    names = job.task.client_names or [f"silo {number}" for number in range(job.context.num_clients)]
    return {f"cross_site_{name}": {"classes": names, "values": result["matrix"]} for name, result in found.items()}
