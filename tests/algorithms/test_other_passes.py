"""What docs/coming_from.md says about passes, weights and optimizers of the clients, run against other systems."""

import numpy as np
import other_clients
import pytest
import torch
from other_clients import LR, STEPS

import fedmpi
from fedmpi.algorithms import FedAvg

SAMPLES, ROUNDS, BATCH = [10, 6], 3, 4


class Noted(torch.nn.Linear):
    """A classifier that notes the minibatches that it is trained on."""

    seen: list[torch.Tensor] = []

    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            self.seen.append(inputs.detach().clone())
        return super().forward(inputs)


def labels_of(inputs):
    return (inputs.sum(1) > 1).long()


def data_of(client):
    drawn = torch.Generator().manual_seed(client)
    inputs = torch.randn(SAMPLES[client], 3, generator=drawn, dtype=torch.float64)
    inputs[:, 0] = client
    return torch.utils.data.TensorDataset(inputs, labels_of(inputs))


def test_a_pass_ends_with_a_short_minibatch_and_the_mean_is_flowers(tmp_path):
    """FedAvg's clients as in Flower's examples, with the minibatches that fedmpi drew, and Flower's strategy."""
    common = pytest.importorskip("flwr.common")
    strategies = pytest.importorskip("flwr.server.strategy")
    torch.manual_seed(1)
    model = Noted(3, 2, dtype=torch.float64)
    net = torch.nn.Linear(3, 2, dtype=torch.float64)
    net.load_state_dict(model.state_dict())
    Noted.seen.clear()
    run = fedmpi.train(
        algorithm={"name": "fedavg", "step_size": 0.5}, model=model, data=[data_of(0), data_of(1)], rounds=ROUNDS,
        local_epochs=1, batch_size=BATCH, weighting="samples", dtype="float64", threads=1, out=tmp_path,
    )  # fmt: skip
    in_a_pass = [[len(inputs) for inputs, _ in torch.utils.data.DataLoader(data_of(i), BATCH)] for i in range(2)]
    assert in_a_pass == [[4, 4, 2], [4, 2]]
    batches = [[batch for batch in Noted.seen if batch[0, 0] == client] for client in range(2)]
    batches[0].pop(0)  # a trial before the first round
    assert [[len(batch) for batch in found] for found in batches] == [sizes * ROUNDS for sizes in in_a_pass]
    strategy = strategies.FedAvg()
    x = [value.numpy().copy() for value in net.state_dict().values()]
    for r in range(ROUNDS):
        results = []
        for client, samples in enumerate(SAMPLES):
            net.load_state_dict({name: torch.tensor(value) for name, value in zip(net.state_dict(), x)})
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
            steps = len(in_a_pass[client])
            for inputs in batches[client][r * steps : (r + 1) * steps]:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(inputs), labels_of(inputs)).backward()
                optimizer.step()
            parameters = common.ndarrays_to_parameters([value.numpy().copy() for value in net.state_dict().values()])
            results.append((None, common.FitRes(common.Status(common.Code.OK, ""), parameters, samples, {})))
        x = common.parameters_to_ndarrays(strategy.aggregate_fit(r + 1, results, [])[0])
    for found, expected in zip(run.model.state_dict().values(), x):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_nvflares_mean_has_the_numbers_of_local_steps_as_weights():
    workflow = pytest.importorskip("nvflare.app_common.workflows.scaffold")
    from nvflare.apis.dxo import MetaKey
    from nvflare.app_common.abstract.fl_model import FLModel
    from nvflare.app_common.app_constant import AlgorithmConstants

    steps = [STEPS, 1]

    def gradient(client, x, sample):
        inputs, labels = other_clients.samples(client)
        return 2 * inputs.numpy().T @ (inputs.numpy() @ np.asarray(x) - labels[:, 0].numpy()) / len(inputs)

    trace = fedmpi.simulate(FedAvg(step_size=LR), gradient, np.zeros(4), 2, ROUNDS, steps.__getitem__, weights=steps)
    ours = [record["rows"]["x"][0] for record in trace if record["step"] is None][1:]
    x = np.zeros(4)
    for r, found in enumerate(ours):
        results = []
        for client, number in enumerate(steps):
            y = x
            for _ in range(number):
                y = y - LR * gradient(client, y, 0)
            meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: number, AlgorithmConstants.SCAFFOLD_CTRL_DIFF: {"x": y}}
            results.append(FLModel(params={"x": y - x}, params_type="DIFF", meta=meta, current_round=r))
        x = x + workflow.scaffold_aggregate_fn(results).params["x"]
        np.testing.assert_allclose(found, x, rtol=1e-12, atol=1e-12)


def test_a_cleared_optimizer_is_appfls_which_is_new_in_each_round():
    """In the user's own loop: `optim.state.clear()` after each average."""
    momentum = {"lr": LR, "momentum": 0.9}
    trainer = other_clients.appfl_trainer("vanilla_trainer", "VanillaTrainer", 0, {"optim_args": momentum})
    model, (inputs, labels) = other_clients.linear(), other_clients.samples(0)
    optim = torch.optim.SGD(model.parameters(), **momentum)
    fed = fedmpi.average(model, every=STEPS)
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            optim.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), labels).backward()
            optim.step()
            fed.step()
        optim.state.clear()
        trainer.train()
        np.testing.assert_allclose(
            other_clients.weight(model), other_clients.weight(trainer.model), rtol=1e-12, atol=1e-12
        )
    fed.finish()
