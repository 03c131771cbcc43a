"""Clients of other systems, each with local steps on a least-squares fit; see test_other_systems.py."""

import numpy as np
import pytest
import torch

from fedmpi import simulate
from fedmpi.training.config import read_command_line

ROUNDS, SAMPLES = 20, [30, 10]
STEPS, LR, MU = 3, 0.05, 0.5


def linear():
    """The model of the clients' problem, a least-squares fit."""
    model = torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    return model


def samples(client):
    drawn = torch.Generator().manual_seed(client)
    inputs = torch.randn(SAMPLES[client], 4, generator=drawn, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).sin() + client


def uneven(client):
    """Local steps of a client where they are not `STEPS` for both."""
    return STEPS * (1 + client)


def fit(words, participants=None, row="x", steps=STEPS):
    """x, or the server's own row c, after each round of `STEPS` local steps, each with all the client's data."""
    config = read_command_line([*words.split(), "--algorithm.step_size", str(LR)])
    weights = SAMPLES if config.data.weighting == "samples" else None

    def gradient(client, x, sample):
        inputs, labels = samples(client)
        return 2 * inputs.T @ (inputs @ x - labels[:, 0]) / len(inputs)

    trace = simulate(config.algorithm, gradient, np.zeros(4), 2, ROUNDS, steps, participants, weights=weights)
    found = [record["rows"][row] for record in trace if record["step"] is None][1:]
    return np.array([rows[0] if row == "x" else rows for rows in found])


def weight(model):
    return model.weight.detach().numpy().ravel().copy()


def nvflare_scaffold(participants=lambda r: [0, 1], c_too=False):
    """As in NVFlare's examples: its helper on the clients, the sums of its controller on the server."""
    helpers = pytest.importorskip("nvflare.app_opt.pt.scaffold")
    from nvflare.app_common.abstract.fl_model import FLModel
    from nvflare.app_common.app_constant import AlgorithmConstants
    from nvflare.app_common.workflows.scaffold import scaffold_aggregate_fn

    server, c, found = linear(), {"weight": torch.zeros(1, 4, dtype=torch.float64)}, []
    models, clients = [linear(), linear()], [helpers.PTScaffoldHelper(), helpers.PTScaffoldHelper()]
    for client, model in zip(clients, models):
        client.init(model)
    for r in range(ROUNDS):
        results = []
        for i in participants(r):
            model, client = models[i], clients[i]
            model.load_state_dict(server.state_dict())
            client.load_global_controls(c)
            c_global, c_local = client.get_params()
            for _ in range(STEPS):
                model.zero_grad()
                torch.nn.functional.mse_loss(model(samples(i)[0]), samples(i)[1]).backward()
                model.weight.data.sub_(model.weight.grad, alpha=LR)
                client.model_update(model, LR, c_global, c_local)
            client.terms_update(model, LR, c_global, c_local, server)
            move = {"weight": model.weight.detach() - server.weight.detach()}
            meta = {AlgorithmConstants.SCAFFOLD_CTRL_DIFF: client.get_delta_controls()}
            results.append(FLModel(params=move, params_type="DIFF", meta=meta, current_round=r))
        mean = scaffold_aggregate_fn(results)
        server.weight.data.add_(mean.params["weight"])
        c = {"weight": c["weight"] + torch.as_tensor(mean.meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF]["weight"])}
        found.append(c["weight"].numpy().ravel().copy() if c_too else weight(server))
    return np.array(found)


class FedLabData:
    """Each client's data as one batch, or, if `is_uneven`, twice in a pass of the second client."""

    def __init__(self, is_uneven=False):
        self.is_uneven = is_uneven

    def get_dataloader(self, client, batch_size):
        return [samples(client)] * (1 + client if self.is_uneven else 1)


def fedlab(handler, trainer):
    """As in FedLab's loop."""
    handler.num_clients = 2
    found = []
    for _ in range(ROUNDS):
        trainer.local_process(handler.downlink_package, [0, 1])
        for pack in trainer.uplink_package:
            handler.load(pack)
        found.append(weight(handler.model))
    return np.array(found)


def fedlab_scaffold():
    scaffold = pytest.importorskip("fedlab.contrib.algorithm.scaffold")
    handler = scaffold.ScaffoldServerHandler(linear(), ROUNDS, 1.0)
    trainer = scaffold.ScaffoldSerialClientTrainer(linear(), 2)
    handler.setup_optim(1.0)
    trainer.setup_dataset(FedLabData())
    trainer.setup_optim(STEPS, None, LR)
    trainer.criterion = torch.nn.MSELoss()
    return fedlab(handler, trainer)


def fedlab_feddyn():
    feddyn = pytest.importorskip("fedlab.contrib.algorithm.feddyn")
    handler, trainer = feddyn.FedDynServerHandler(linear(), ROUNDS, 1.0), feddyn.FedDynSerialClientTrainer(linear(), 2)
    handler.num_clients = 2
    handler.setup_optim(MU)
    trainer.setup_dataset(FedLabData())
    trainer.setup_optim(STEPS, None, LR, MU)
    trainer.criterion = torch.nn.MSELoss()
    return fedlab(handler, trainer)


def fedlab_fednova():
    fednova = pytest.importorskip("fedlab.contrib.algorithm.fednova")
    handler, trainer = (
        fednova.FedNovaServerHandler(linear(), ROUNDS, 1.0),
        fednova.FedNovaSerialClientTrainer(linear(), 2),
    )
    handler.setup_optim("uniform")
    trainer.setup_dataset(FedLabData(is_uneven=True))
    trainer.setup_optim(STEPS, None, LR)
    trainer.criterion = torch.nn.MSELoss()
    return fedlab(handler, trainer)


def pfl(cls, settings):
    """As in pfl-research's loop, with its algorithm `cls`; `settings` are of its parameters."""
    pytorch = pytest.importorskip("pfl.model.pytorch")
    from pfl.data.dataset import Dataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops, selector
    from pfl.metrics import Metrics

    selector.set_framework_module(pytorch_ops)
    module = linear()
    module.loss = lambda inputs, labels: torch.nn.functional.mse_loss(module(inputs), labels)
    module.metrics = None
    model = pytorch.PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    train = NNTrainHyperParams(local_batch_size=None, local_num_epochs=STEPS, local_learning_rate=LR)
    given = {"central_num_iterations": ROUNDS, "evaluation_frequency": 1, "train_cohort_size": 2, "val_cohort_size": 0}
    params, method, found = settings(**given), cls(), []
    for r in range(ROUNDS):
        (context, *_), _, _ = method.get_next_central_contexts(model, r, params, train)
        start, total = model.get_parameters(), None
        for client in range(2):
            model.set_parameters(start)
            data = Dataset(raw_data=list(samples(client)), user_id=str(client))
            payload, _ = method.train_one_user(start, model, data, context)
            payload = payload.apply_elementwise(lambda w: w.clone())
            total = payload if total is None else total + payload
        model.set_parameters(start)
        method.process_aggregated_statistics(context, Metrics(), model, total)
        found.append(weight(module))
    return np.array(found)


def pfl_scaffold():
    scaffold = pytest.importorskip("pfl.algorithm.scaffold")
    from pfl.data.user_state import InMemoryUserStateStorage

    more = {"use_gradient_as_control_variate": False, "user_state_storage": InMemoryUserStateStorage()}
    return pfl(scaffold.SCAFFOLD, lambda **given: scaffold.SCAFFOLDParams(**given, population=2, **more))


def pfl_fedprox():
    fedprox = pytest.importorskip("pfl.algorithm.fedprox")
    return pfl(fedprox.FedProx, lambda **given: fedprox.FedProxParams(**given, mu=MU))


def means(train):
    """The server's weights after each round, each the mean of what `train(client, server's model)` returns."""
    server, found = linear(), []
    for _ in range(ROUNDS):
        server.weight.data.copy_(sum(train(client, server) for client in range(2)) / 2)
        found.append(weight(server))
    return np.array(found)


def nvflare_fedprox():
    """Clients with NVFlare's loss beside their own."""
    criterion = pytest.importorskip("nvflare.app_opt.pt.fedproxloss").PTFedProxLoss(mu=MU)

    def train(client, server):
        model = linear()
        model.load_state_dict(server.state_dict())
        for _ in range(STEPS):
            model.zero_grad()
            own = torch.nn.functional.mse_loss(model(samples(client)[0]), samples(client)[1])
            (own + criterion(model, server)).backward()
            model.weight.data.sub_(model.weight.grad, alpha=LR)
        return model.weight.detach()

    return means(train)


def appfl_trainer(module, name, client, settings):
    trainers = pytest.importorskip(f"appfl.algorithm.trainer.{module}")
    from appfl.logger import ClientAgentFileLogger
    from omegaconf import DictConfig

    given = {"mode": "step", "num_local_steps": STEPS, "optim": "SGD", "optim_args": {"lr": LR}, "device": "cpu"}
    return getattr(trainers, name)(
        linear(), torch.nn.MSELoss(), lambda *_: 0.0, torch.utils.data.TensorDataset(*samples(client)),
        train_configs=DictConfig({**given, "train_batch_size": max(SAMPLES), **settings}),
        logger=ClientAgentFileLogger(),
    )  # fmt: skip


def appfl_fedprox():
    trainers = [appfl_trainer("fedprox_trainer", "FedProxTrainer", client, {"mu": MU}) for client in range(2)]

    def train(client, server):
        trainers[client].load_parameters(server.state_dict())
        trainers[client].train()
        state = trainers[client].get_parameters()
        return (state[0] if isinstance(state, tuple) else state)["weight"]

    return means(train)


def fedlab_fedprox():
    fedprox = pytest.importorskip("fedlab.contrib.algorithm.fedprox")
    trainer = fedprox.FedProxSerialClientTrainer(linear(), 2)
    trainer.setup_dataset(FedLabData())
    trainer.setup_optim(STEPS, None, LR, MU)
    trainer.criterion = torch.nn.MSELoss()
    return fedlab(fedprox.FedProxServerHandler(linear(), ROUNDS, 1.0), trainer)


def fluke(client_class, server_class, weighted, epochs=lambda client: STEPS, **settings):
    """As in fluke's loop."""
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader

    optimizer = OptimizerConfigurator({"name": "SGD", "lr": LR})
    clients = [
        client_class(
            index=i, train_set=FastDataLoader(*samples(i), num_labels=1, batch_size=0), test_set=None,
            optimizer_cfg=optimizer, loss_fn=torch.nn.MSELoss(), local_epochs=epochs(i), **settings,
        )
        for i in range(2)
    ]  # fmt: skip
    server, found = server_class(linear(), None, clients, weighted=weighted), []
    for client in clients:
        client.set_channel(server.channel)
    for r in range(ROUNDS):
        server.broadcast_model(clients)
        for client in clients:
            client.local_update(r + 1)
        server.aggregate(clients, server.receive_client_models(clients, state_dict=False))
        found.append(weight(server.model))
    return np.array(found)


def fluke_scaffold(weighted):
    scaffold = pytest.importorskip("fluke.algorithms.scaffold")
    return fluke(scaffold.SCAFFOLDClient, scaffold.SCAFFOLDServer, weighted)


def fluke_fedprox():
    fedprox = pytest.importorskip("fluke.algorithms.fedprox")
    from fluke.server import Server

    return fluke(fedprox.FedProxClient, Server, True, mu=MU)


def fluke_fedexp():
    fedexp = pytest.importorskip("fluke.algorithms.fedexp")
    from fluke.client import Client

    return fluke(Client, fedexp.FedExPServer, False)


def fluke_fednova():
    fednova = pytest.importorskip("fluke.algorithms.fednova")
    return fluke(fednova.FedNovaClient, fednova.FedNovaServer, False, epochs=uneven)
