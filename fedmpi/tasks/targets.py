"""Tasks of programs that give one Dataset per client, whose targets are numbers, or several yes-or-no labels each."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch.nn import functional

from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting
from fedmpi.ground.text import short
from fedmpi.tasks.custom import Task

LOSSES = {"squared": functional.mse_loss, "absolute": functional.l1_loss, "huber": functional.huber_loss}


@dataclasses.dataclass(frozen=True)
class _Targets(Task):
    """Base of both: the model has one output per target.

    Args:
        train_sets: a sequence with one Dataset per client (other ranks' may be None), or a function of a
            client's number that makes it; items are (input, target). test_set: a Dataset that all ranks have, or None.
    """

    train_sets: Any = None
    test_set: Any = None

    model = "mlp"

    def load(self, context, partition):
        if not callable(self.train_sets) and len(self.train_sets) != context.num_clients:
            raise UserError(
                f"data: {len(self.train_sets)} Datasets for {context.num_clients} clients: expected one for each"
            )
        clients = [(f"data of client {client}", self.train(client, context.num_clients)) for client in context.clients]
        targets = [
            self._first_target(*pair) for pair in [*clients, ("test_data", self.test_set)] if pair[1] is not None
        ]
        if len({target.shape for target in targets}) > 1:
            raise UserError(
                f"data: targets of the shapes {[list(target.shape) for target in targets]}: expected one shape"
            )
        object.__setattr__(self, "num_classes", targets[0].numel())  # the outputs of models that are chosen by name
        return super().load(context, partition)

    def train(self, client, num_clients):
        return self.train_sets(client) if callable(self.train_sets) else self.train_sets[client]

    def test(self):
        return self.test_set

    def predict(self, model, batch):
        """(outputs, targets), of one shape.

        Raises:
            UserError: if the model has more or fewer outputs than there are targets.
        """
        inputs, targets = batch
        outputs = model(inputs)
        if outputs.numel() != targets.numel():
            given, expected = list(outputs.shape), list(targets.shape)
            raise UserError(f"task {self.name}: the model's outputs are {given}: expected {expected}, as the targets")
        return outputs.reshape(targets.shape), targets.to(outputs.dtype)

    def loss(self, model, batch):
        return self.measure(*self.predict(model, batch))

    def _first_target(self, name, dataset):
        """The target of a Dataset's first item as a tensor."""
        try:
            inputs, target = dataset[0]
            target = torch.as_tensor(target)
            is_right = bool(target.isfinite().all()) and target.dim() <= 1
        except Exception as error:  # noqa: BLE001  the user's Dataset can raise anything
            raise UserError(f"{name}: item 0: expected (input, target): {short(error)}") from None
        if not is_right or not self.allows(target):
            raise UserError(f"{name}: item 0 has the target {short(target.tolist(), 80)}: expected {self.allowed}")
        if isinstance(inputs, torch.Tensor) and inputs.dtype == torch.uint8:
            raise UserError(f"{name}: the inputs are bytes (uint8): expected them divided by 255")
        return target


@dataclasses.dataclass(frozen=True)
class _Regression(_Targets):
    """Predict a number, or several, per input."""

    name = "regression"
    metrics: ClassVar[dict[str, str]] = {
        "r2": "sklearn.metrics.r2_score",
        "mean_absolute_error": "sklearn.metrics.mean_absolute_error",
    }
    outputs: ClassVar[str] = "values"
    allowed = "a finite number, or a vector of them"

    criterion: str = setting("squared", "the loss: mean difference, huber with delta = 1", among=LOSSES, role="problem")

    def measure(self, outputs, targets):
        return LOSSES[self.criterion](outputs, targets)

    def allows(self, target):
        return not target.is_complex()


@dataclasses.dataclass(frozen=True)
class _Multilabel(_Targets):
    """Say of several labels whether an input has them; the model's outputs are logits."""

    name = "multilabel"
    metrics: ClassVar[dict[str, Any]] = {
        "f1": ("sklearn.metrics.f1_score", {"average": "macro"}),
        "exact_matches": "sklearn.metrics.accuracy_score",
    }
    outputs: ClassVar[str] = "scores"
    allowed = "a vector of zeros and ones"

    def measure(self, outputs, targets):
        return functional.binary_cross_entropy_with_logits(outputs, targets)

    def allows(self, target):
        return target.dim() == 1 and bool(((target == 0) | (target == 1)).all())


KINDS = {cls.name: cls for cls in (_Regression, _Multilabel)}


def task_of(kind, settings, data, test_data):
    """The task of one of the `KINDS`; see `_Targets`.

    Raises:
        UserError: if it has no such setting, or not this value.
    """
    known = [field.name for field in dataclasses.fields(KINDS[kind]) if field.metadata]
    for name in settings:
        if name not in known:
            raise UserError(f"task {kind} has no setting {name}: expected {', '.join(known)}")
    return KINDS[kind](**settings, train_sets=data, test_set=test_data)
