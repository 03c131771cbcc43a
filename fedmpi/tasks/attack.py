"""A black-box attack: one perturbation for all images of a class, found from a classifier's answers."""

import dataclasses
import pathlib

import numpy as np
import torch
from torch import nn

from fedmpi.data.partitions.base import write_partition
from fedmpi.data.samples import Samples, check_normalisation, input_shape
from fedmpi.data.source import find_file, names_silos, open_source
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import data_sets, files_of, readable
from fedmpi.ground.files.run_files import ATTACK_FIGURE, MODEL_AND_ROWS, PARTITION, SETTINGS
from fedmpi.ground.files.settings_files import read_settings_file
from fedmpi.ground.registry import command_name
from fedmpi.ground.settings import setting
from fedmpi.ground.text import say, short
from fedmpi.models import find_model
from fedmpi.tasks.base import BaseTask, LoadedTask, Metrics, constructor_of, sums_of_ranks
from fedmpi.tasks.classification import DEFAULT_MODELS

SHOWN = 8  # images in the figure


@dataclasses.dataclass(frozen=True)
class BlackBoxAttack(BaseTask):
    """Find one perturbation that makes a trained classifier mistake the images of a class, from its answers only.

    An image ϑ in [-½, ½]^d becomes ϑ' = ½ tanh(atanh(2ϑ) + Ξ), and the clients minimise the mean of
    max{φ_y(ϑ') - max_{j≠y} φ_j(ϑ'), 0} + c ‖ϑ' - ϑ‖² over Ξ, φ the classifier's logits. The data are
    the training images of the class that the classifier gets right. Metrics: attack_accuracy, the
    share of such test images that it mistakes after the attack; attack_loss and distortion, the two
    parts of the objective.

    Source: the FAFedZO paper, Eq. (8); class and classifier as in the public FedZO code.
    """

    name = "attack"
    has_model = False
    has_partition = True
    partition = "uneven"
    oracle = "two_point"

    classifier: str = setting(
        "", "run folder of the classifier, like runs/NAME; train it first with --task classification"
    )
    target_class: int = setting(4, "y, the class whose images are attacked", least=0)
    distortion_weight: float = setting(1.0, "c, weight of the squared change of an image", least=0)
    clip: float = setting(
        0.0,
        "move black and white pixels this far inwards, so that they can change, like 1e-6; with 0 they cannot",
        least=0,
        most=0.1,
    )

    def common_files(self, context):
        folder, _, data, data_dir = read_classifier_settings(self.classifier, context)
        path = [] if data == "digits" else [find_file(data, data_dir)]
        return {f"task.classifier = {folder}": [folder / MODEL_AND_ROWS], f"data of {folder}: {data}": path}

    def crosses(self, is_personal, scores="auto"):
        return {"recognised"}

    def load(self, context, partition):
        classifier, source = load_classifier(self.classifier, context)
        if partition.by_class:
            raise UserError(
                f"partition {command_name(type(partition))}: assigns samples by class, but the images of an attack are "
                "all of one class: expected even, iid, shared, stride, uneven or column (--partition.by brightness)"
            )
        if self.target_class >= source.num_classes:
            raise UserError(f"task.target_class = {self.target_class}: expected 0..{source.num_classes - 1}")
        return LoadedAttack(self, context, partition, classifier, source)


class Classifier(nn.Module):
    """A trained network in evaluation mode, for images in [-½, ½]; its parameters are frozen.

    Args:
        net: the network. mean, std: per channel, the normalisation that it was trained with.
    """

    def __init__(self, net, mean, std):
        super().__init__()
        self.net = net.eval().requires_grad_(False)
        self.register_buffer("_mean", torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1))
        self.register_buffer("_std", torch.tensor(std, dtype=torch.float64).view(-1, 1, 1))

    def forward(self, images):
        """[n, num_classes] logits."""
        return self.net((images + 0.5 - self._mean) / self._std)


def load_classifier(folder, context):
    """(`Classifier` that fedmpi trained, on the context's device, `Source` on which it did) of a run folder.

    Raises:
        UserError: if the folder is not that of a classification run on images.
    """
    folder, settings, data, data_dir = read_classifier_settings(folder, context)
    given, task = f"task.classifier = {folder}", settings["task"]
    source = open_source(data, data_dir)
    if len(source.shape) < 2:
        raise UserError(f"{given}: was trained on samples {list(source.shape)}: expected images")
    mean, std = task.get("mean") or source.mean, task.get("std") or source.std
    check_normalisation(mean, std, source.shape, f"{given}: ")
    net = _network(given, settings.get("model"), source)
    try:
        net.load_state_dict(_read_values(folder / MODEL_AND_ROWS))
    except (RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{given}: {MODEL_AND_ROWS} does not fit {type(net).__name__}: {short(error)}") from None
    classifier = Classifier(net, mean, std)
    return classifier.to(context.device, context.dtype), source


def read_classifier_settings(folder, context):
    """(path, settings as nested dict, name of its data set, folder of the data files or None) of a classifier's run.

    Raises:
        UserError: if the folder is not that of a classification run on one data file for all clients.
    """
    if not folder:
        raise UserError("task.classifier is missing: the run folder of a classifier, like runs/NAME")
    folder, given = pathlib.Path(folder), f"task.classifier = {folder}"
    if not (folder / SETTINGS).is_file():
        raise UserError(f"{given}: expected a run folder with {SETTINGS} and {MODEL_AND_ROWS}")
    settings = read_settings_file(folder / SETTINGS, f"{given}: {SETTINGS}")
    task = settings.get("task")
    if not isinstance(task, dict) or task.get("name") != "classification" or not isinstance(task.get("data"), str):
        name = short(task.get("name") if isinstance(task, dict) else task, 50)
        raise UserError(f"{given}: is a run of task {name}: expected classification")
    if names_silos(task["data"]) or task.get("own_files"):
        raise UserError(f"{given}: was trained on silo files {task['data']}: expected one data file for all clients")
    data_dir = context.data_dir or settings.get("data_dir")
    return folder, settings, task["data"], data_dir if isinstance(data_dir, str) else None


def _network(given, model, source):
    """The network that a run folder's settings name, one of fedmpi's: a folder may come from a stranger."""
    model = model or {"name": DEFAULT_MODELS.get(source.name, "mlp")}
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str) or "." in name:
        raise UserError(
            f"{given}: its model is {short(name, 100)}: expected one of fedmpi's models; a class that a run folder "
            "names is not imported"
        )
    settings = {key: value for key, value in model.items() if key != "name"}
    try:
        return find_model(name)(shape=input_shape(source.shape), num_classes=source.num_classes, **settings)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  settings of any type reach a model's constructor here
        raise UserError(f"{given}: model {short(name, 50)} does not take its settings: {short(error)}") from None


def _read_values(path):
    """Name -> tensor of the model in an HDF5 file of a run folder."""
    with readable(path) as file:
        return {
            name.removeprefix("model/"): torch.from_numpy(np.asarray(value[()]))
            for name, value in data_sets(file)
            if name.startswith("model/")
        }


class Perturbation(nn.Module):
    """Ξ, added to an image where tanh has not yet squeezed it into [-½, ½]; 0 at the start.

    Args:
        shape: [channels, height, width] of an image.
    """

    def __init__(self, shape):
        super().__init__()
        self.xi = nn.Parameter(torch.zeros(shape))

    def forward(self, images, clip=0.0):
        """ϑ' = ½ tanh(atanh(2ϑ) + Ξ); where ϑ = ±½ exactly, ϑ' = ϑ whatever Ξ is, unless clipped."""
        return 0.5 * torch.tanh(torch.atanh((2 * images).clamp(clip - 1, 1 - clip)) + self.xi)


class LoadedAttack(LoadedTask):
    """See `LoadedTask` and `BlackBoxAttack`."""

    goal = ("attack_accuracy", 1)

    def __init__(self, settings, context, partition, classifier, source):
        self._settings, self._context, self._partition = settings, context, partition
        self._classifier, self._shape = classifier, input_shape(source.shape)
        self._data = str(source.path or source.name)
        files = [*(files_of(source.path) if source.path else ()), pathlib.Path(settings.classifier) / MODEL_AND_ROWS]
        self._files = files if context.rank == 0 else []
        y = settings.target_class
        others = [j for j in range(source.num_classes) if j != y]
        self._others = torch.tensor(others, device=context.device)
        self._train, self._test = (np.flatnonzero(source.labels[split] == y) for split in ("train", "test"))
        self._column = source.column(partition.column)[self._train]  # that decides the split; labels are all y
        self._rows = {"train": source.read("train", self._train), "test": source.read("test", self._test)}
        # Each rank asks about its share of the images; `synchronise` collects the answers.
        self._right = {split: self._is_right(self._share(rows)) for split, rows in self._rows.items()}

    def _share(self, rows):
        edges = [len(rows) * rank // self._context.num_ranks for rank in (self._context.rank, self._context.rank + 1)]
        return rows[slice(*edges)]

    def _samples(self, rows):
        """Images in [-½, ½]; all labels are y."""
        labels = np.full(len(rows), self._settings.target_class)
        return Samples.from_arrays(rows, labels, (0.5,), (1.0,), self._context)

    @torch.no_grad()
    def _is_right(self, rows):
        """[n] whether the classifier answers with these images' class."""
        answers = [np.empty(0, dtype=bool)]
        for images, labels in self._samples(rows).all():
            answers.append((self._classifier(images).argmax(1) == labels).cpu().numpy())
        return np.concatenate(answers)

    def synchronise(self, link):
        """Split the images that the classifier gets right over the clients. Collective on the link."""
        right = link.allgatherv(self._right["train"], "recognised").astype(bool)
        num_tests = int(link.allgather([self._right["test"].sum()], "recognised").sum())
        if not right.any() or not num_tests:
            raise UserError(
                f"task.classifier = {self._settings.classifier}: recognises no image of class "
                f"{self._settings.target_class}: there is nothing to attack"
            )
        rows = self._rows["train"][right]
        parts = self._partition(self._column[right], self._context.num_clients, self._context.seed)
        self._parts = [self._train[right][part] for part in parts]
        self._clients = {client: self._samples(rows[parts[client]]) for client in self._context.clients}
        self._tests = self._samples(self._share(self._rows["test"])[self._right["test"]])
        self._rows = self._right = self._column = None

    def data_files(self):
        return self._files

    def write_split(self, folder):
        write_partition(folder / PARTITION, self._parts, self._data)

    def build_model(self, model_class, model_settings):
        return Perturbation(self._shape)

    def constructor(self, model_class, model_settings):
        return constructor_of(Perturbation, shape=self._shape)

    def try_out(self, module, client):
        """Nothing to check: the module is ours."""

    def num_samples(self, client):
        return self._clients[client].num

    def batch(self, client, indices):
        images, _ = self._clients[client].at(indices)
        return images

    def loss(self, module, batch):
        margin, distortion, _ = self._attack(module, batch)
        return (margin + self._settings.distortion_weight * distortion).mean()

    def _attack(self, module, images):
        """Per image: by how much the classifier still prefers y (or 0), ‖ϑ' - ϑ‖², whether it is mistaken."""
        attacked = module(images, self._settings.clip)
        logits = self._classifier(attacked)
        lead = logits[:, self._settings.target_class] - logits.index_select(1, self._others).amax(1)
        return lead.clamp(min=0), (attacked - images).square().flatten(1).sum(1), lead < 0

    def evaluate(self, module, link):
        margins, distortions, _ = np.transpose([self._means(module, samples) for samples in self._clients.values()])
        mistaken = self._means(module, self._tests)[2] * self._tests.num
        here = [margins.sum(), distortions.sum(), mistaken, self._tests.num]
        margin, distortion, mistaken, num = sums_of_ranks(link, here)
        num_clients, weight = link.num_present(self._context.num_clients), self._settings.distortion_weight
        margin, distortion = margin / num_clients, distortion / num_clients
        metrics = {"train_loss": margin + weight * distortion, "attack_loss": margin, "distortion": distortion}
        of_clients = {"train_loss": margins + weight * distortions, "attack_loss": margins, "distortion": distortions}
        metrics["attack_accuracy"] = mistaken / num
        if link.add_hidden is not None:
            return Metrics(metrics)
        clients = {name: link.allgatherv(values, "evaluation") for name, values in of_clients.items()}
        return Metrics(metrics, clients)

    def _means(self, module, samples):
        """[3] means over all samples of what `_attack` gives."""
        total = np.zeros(3)
        for images, _ in samples.all():
            total += [float(part.sum()) for part in self._attack(module, images)]
        return total / max(1, samples.num)

    @torch.no_grad()
    def write_result(self, module, folder):
        """Draw images before and after, each with the classifier's answer, and the perturbation: attack.png."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            say(f"no {ATTACK_FIGURE}: matplotlib is not installed (pip install 'fedmpi[plot]')")
            return
        images = self._to_show(module)
        figure = Figure(figsize=(1.2 * (len(images) + 2), 3), layout="constrained")
        axes = figure.subplots(2, len(images) + 1, squeeze=False)
        for row, shown in zip(axes, (images, module(images, self._settings.clip))):
            for axis, image, answer in zip(row, shown, self._classifier(shown).argmax(1)):
                axis.imshow(_drawable(image + 0.5), cmap="gray", vmin=0, vmax=1)
                axis.set_title(f"{int(answer)}", fontsize=9)
        change = module.xi.abs().max().item() or 1.0
        shown = axes[0, -1].imshow(_drawable(module.xi / (2 * change) + 0.5), cmap="seismic", vmin=0, vmax=1)
        axes[0, -1].set_title("perturbation Ξ", fontsize=9)
        if module.xi.shape[0] == 1:  # of several channels, the perturbation is shown in colour
            bar = figure.colorbar(shown, ax=axes[:, -1].tolist(), ticks=[0, 0.5, 1], shrink=0.8)
            bar.ax.set_yticklabels([f"{value:.2g}" for value in (-change, 0, change)], fontsize=8)
        for axis in axes.flat:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        axes[1, -1].set_visible(False)
        for axis, words in zip(axes[:, 0], ("before", "after")):
            axis.set_ylabel(f"{words}\n(answer above)", fontsize=9)
        figure.savefig(folder / ATTACK_FIGURE, dpi=150)

    def _to_show(self, module):
        """Up to `SHOWN` images of this rank, half of them images that the attack succeeds on, which come first."""
        samples = self._tests if self._tests.num else self._clients[self._context.clients[0]]
        images, _ = samples.at(torch.arange(samples.num, device=self._context.device))
        mistaken = self._attack(module, images)[2]
        failures, successes = (where.nonzero().flatten() for where in (~mistaken, mistaken))
        half = SHOWN // 2
        return images[torch.cat([successes[:half], failures, successes[half:]])[:SHOWN]]


def _drawable(image):
    """[height, width] or [height, width, 3] array from a [channels, height, width] tensor in [0, 1]."""
    array = image.clamp(0, 1).permute(1, 2, 0).float().cpu().numpy()
    return array[..., 0] if array.shape[-1] == 1 else array
