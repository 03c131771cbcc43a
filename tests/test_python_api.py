"""fedmpi from a Python program: training, and the trained model with what a program needs to use it."""

import csv
import inspect
import json
import re
import sys
import textwrap

import h5py
import numpy as np
import pytest
import torch
from helpers import PROGRAMS, ROOT, execute, start, train
from mpi4py import MPI
from safetensors.torch import load_file

import fedmpi
from fedmpi.algorithms import FedAvg
from fedmpi.config.sections import GROUPS
from fedmpi.data.source import DigitsSource
from fedmpi.runs.model_files import prepare_inputs
from fedmpi.training.settings import RunSettings

# Ten lines of PyTorch that give the accuracy which a run printed, without fedmpi.
PLAIN = """
    import json, sys
    import sklearn.datasets, torch
    from safetensors.torch import load_file
    facts = json.load(open(f"{sys.argv[1]}/model.json"))["input"]
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    net.load_state_dict(load_file(f"{sys.argv[1]}/model.safetensors"))
    digits = sklearn.datasets.load_digits()
    images, labels = (torch.tensor(part[4::5]) for part in (digits.images, digits.target))
    inputs = (images * (255 / 16)).round().float() / facts["divide_by"]
    scores = net((inputs - torch.tensor(facts["mean"])) / torch.tensor(facts["std"]))
    print((scores.argmax(1) == labels).float().mean().item())
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of the default job on 2 ranks: (the accuracy that it printed, its run folder)."""
    out = tmp_path_factory.mktemp("runs")
    ended = train(2, out, "--rounds", 20, "--clients", 4, "--name", "it", "--model", "mlp")
    assert ended.returncode == 0, ended.stderr
    return float(re.search(r"^  accuracy +([0-9.]+)", ended.stdout, re.MULTILINE).group(1)), out / "it"


@pytest.mark.rarely("README.md", "docs", "fedmpi")
def test_plain_pytorch_gets_the_printed_accuracy(finished):
    accuracy, folder = finished
    ended = execute(["python", "-c", textwrap.dedent(PLAIN), folder], cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) == pytest.approx(accuracy, abs=1e-4)


def test_load_gives_a_model_that_is_ready_for_use(finished):
    accuracy, folder = finished
    model = fedmpi.load(folder)
    assert not model.training and isinstance(model, torch.nn.Module)
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], value)
    digits = DigitsSource()
    labels = torch.from_numpy(digits.labels["test"])
    inputs = prepare_inputs(model.fedmpi, digits.read("test", range(len(labels))))
    assert (model(inputs).argmax(1) == labels).float().mean().item() == pytest.approx(accuracy, abs=1e-4)


def test_load_says_what_is_wrong(finished, tmp_path):
    with pytest.raises(fedmpi.UserError, match=r"contains no model.safetensors \(no such folder\)"):
        fedmpi.load(tmp_path / "nothing")
    with pytest.raises(fedmpi.UserError, match="does not fit Linear"):
        fedmpi.load(finished[1], torch.nn.Linear(2, 3))
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(fedmpi.UserError, match="model.safetensors: cannot be read"):
        fedmpi.load(tmp_path)


@pytest.mark.parametrize("load", [fedmpi.load, fedmpi.load_run])
@pytest.mark.parametrize("folder", [None, 5, "x" * 9999, "a\0b"])
def test_what_is_no_path_of_a_run_folder_ends_with_a_line(load, folder):
    with pytest.raises(fedmpi.UserError):
        load(folder)


@pytest.mark.parametrize("client", [10**5000, -1, 0.5, "0"], ids=["huge", "negative", "half", "text"])
def test_what_is_no_number_of_a_client_ends_with_a_line(finished, client):
    with pytest.raises(fedmpi.UserError, match="client = .*: expected the number of a client"):
        fedmpi.load(finished[1], client=client)


class Odd(torch.utils.data.Dataset):
    """A Dataset whose length is no number of items."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.zeros(12), 0


@pytest.mark.parametrize("length", [-1, 2**70, "x"])
def test_a_dataset_without_a_length_ends_with_a_line(length):
    net = torch.nn.Linear(12, 3)
    with pytest.raises(fedmpi.UserError, match="has no length: "):
        fedmpi.train(model=net, algorithm="fedavg", threads=1, clients=1, data=[Odd(length)], rounds=1)


@pytest.mark.parametrize("task", ["auc", "saddle_quadratic", "attack"])
def test_models_of_other_tasks_load_too(finished, tmp_path, task):
    words = {
        "auc": ("--algorithm", "fmgda"),
        "saddle_quadratic": ("--algorithm", "fmgda"),
        "attack": ("--algorithm", "fafedzo", "--algorithm.step_size", 1e-4, "--task.classifier", finished[1]),
    }[task]
    ended = train(1, tmp_path, "--task", task, *words, "--rounds", 2, "--clients", 2, "--name", "it")
    assert ended.returncode == 0, ended.stderr
    model = fedmpi.load(tmp_path / "it")
    values = load_file(tmp_path / "it" / "model.safetensors")
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert json.loads((tmp_path / "it" / "model.json").read_text()) == model.fedmpi


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """Run folders are made in a new folder."""
    monkeypatch.chdir(tmp_path)


USUAL = {"algorithm": "fedavg", "clients": 4, "threads": 1, "local_steps": 2}


def datasets(number=3, size=40):
    """One Dataset per client: which third of the inputs is large says the class."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(number):
        labels = torch.randint(0, 3, (size,), generator=draw)
        inputs = torch.randn(size, 2, 6, generator=draw) + 2 * torch.eye(3)[labels].repeat_interleave(2, 1)[:, None]
        found.append(torch.utils.data.TensorDataset(inputs, labels))
    return found


def test_a_program_on_two_ranks_gets_what_the_command_line_gets(tmp_path):
    """One run after another in the same processes, whose ranks agree on everything."""
    ended = start(2, PROGRAMS / "python_api.py", tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert [len(records) for records in first["records"]] == [6, 6, 4, 6]
    assert first["records"][0][-1]["bytes"] == first["records"][1][-1]["bytes"]  # of one run only
    assert first["errors"] == ["fedavgg", "batch_size"]
    words = ("--algorithm", "fedavg", "--clients", 4, "--local-steps", 2, "--rounds", 6, "--name", "by-words")
    assert train(2, tmp_path, *words, "--evaluate-samples", 100).returncode == 0
    lines = (tmp_path / "by-words" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [record["loss"] for record in first["records"][0]]
    expected = load_file(tmp_path / "by-words" / "model.safetensors")
    for folder in first["folders"][:2]:
        for name, value in load_file(f"{folder}/model.safetensors").items():
            assert torch.equal(value, expected[name])
    # in one process with all clients the drawn samples are the same
    alone = fedmpi.train(**USUAL, rounds=6, evaluate_samples=100, eval_every=2)
    for ours, theirs in zip(alone.metrics, first["records"][1]):
        assert ours.get("accuracy") == theirs.get("accuracy")
        assert ours.get("train_loss") == pytest.approx(theirs.get("train_loss"), abs=1e-4)


def test_a_run_is_evaluated_on_a_part_of_the_data_and_at_its_end_on_all(capfd):
    part = fedmpi.train(**USUAL, rounds=20, eval_every=2, evaluate_samples=50, verbose=True)
    assert "50 training and test samples, drawn once; at the end all\n" in capfd.readouterr().out
    whole = fedmpi.train(**USUAL, rounds=20, eval_every=2, evaluate="full")
    assert part.metrics[1]["accuracy"] * 50 == pytest.approx(round(part.metrics[1]["accuracy"] * 50))
    assert part.metrics[1]["train_loss"] != whole.metrics[1]["train_loss"]
    assert part.metrics[1]["train_loss"] == pytest.approx(whole.metrics[1]["train_loss"], rel=0.2)
    assert part.final == whole.final == {name: part.metrics[-1][name] for name in part.final}
    short = fedmpi.train(**USUAL, rounds=2, evaluate_samples=50, verbose=True)
    assert "drawn once; at the end all test samples\n" in capfd.readouterr().out
    assert short.final["accuracy"] == whole.metrics[1]["accuracy"]
    assert short.final["train_loss"] == part.metrics[1]["train_loss"] != whole.metrics[1]["train_loss"]


def test_how_torch_computes_is_as_before_after_a_run(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # torch's own default; a run switches it off

    def ways():
        backends = torch.backends
        return (
            backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
        )  # fmt: skip

    before = ways()
    fedmpi.train(**USUAL, rounds=1, deterministic=True)
    assert ways() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x.byte(), y), "the inputs of some clients are bytes (uint8), those of others not"),
        (lambda x, y: (x, y + 7), "data: contains the labels 0, 1, 7, 8, but no client has the label 2, 3, 4, 5, 6"),
        (lambda x, y: (x / 0, y), "data of client 1, item 0 has an input that is not finite"),
    ],
)
def test_datasets_are_checked_as_files_are(change, message):
    x, y = torch.arange(1.0, 81.0).reshape(20, 4), torch.arange(20) % 2
    data = [torch.utils.data.TensorDataset(x, y), torch.utils.data.TensorDataset(*change(x, y))]
    settings = {"algorithm": "fedavg", "threads": 1, "clients": 2, "rounds": 1, "model": "mlp"}
    with pytest.raises(fedmpi.UserError, match=re.escape(message)):
        fedmpi.train(data=data, **settings)
    data[1].classes = data[0].classes = [*"abcdefghi"]
    if "labels" in message:
        fedmpi.train(data=data, **settings)


def test_bytes_of_datasets_are_scaled_as_those_of_files_are():
    x, y = torch.randint(0, 256, (20, 4)), torch.arange(20) % 2
    settings = {"algorithm": "fedavg", "threads": 1, "clients": 1, "rounds": 3, "model": "mlp"}
    runs = [fedmpi.train(data=[torch.utils.data.TensorDataset(one, y)], **settings) for one in (x.byte(), x / 255)]
    assert runs[0].final["train_loss"] == pytest.approx(runs[1].final["train_loss"])


def test_arrays_of_other_machines_are_those_of_this_one():
    x, settings = np.random.default_rng(0).standard_normal((20, 4)), {"algorithm": "fedavg", "clients": 1, "rounds": 3}
    runs = [
        fedmpi.train(data=[[(row, n % 2) for n, row in enumerate(x.astype(kind))]], model="mlp", threads=1, **settings)
        for kind in (">f4", "<f4")
    ]
    assert runs[0].final["train_loss"] == runs[1].final["train_loss"]


def test_datasets_of_clients_and_a_module():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    before = [p.clone() for p in net.parameters()]
    run = fedmpi.train(algorithm="fedavg", threads=1, data=datasets(), test_data=datasets()[0], model=net, rounds=10)
    assert run.final["accuracy"] > 0.9 and run.frame()["round"].tolist() == list(range(1, 11))
    of_clients = run.metrics[-1]["clients"]["train_loss"]
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(run.model(x), y).item() for x, y in (one.tensors for one in datasets())
        ]
    assert of_clients == pytest.approx(losses, rel=1e-5) and "clients" not in run.final
    assert run.frame()["train_loss/1"].iloc[-1] == of_clients[1] and "clients" not in run.frame()
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters()))
    inputs, labels = datasets()[0].tensors
    assert (run.model(inputs).argmax(1) == labels).float().mean().item() == pytest.approx(run.final["accuracy"])
    again = fedmpi.load(run.folder, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)))
    assert torch.equal(again(inputs), run.model(inputs))
    made = fedmpi.train(algorithm="fedavg", threads=1, clients=2, data=lambda client: datasets()[client], rounds=1)
    assert made.final.keys() == {"train_loss"} and isinstance(made.model[1], torch.nn.Linear)


def test_a_run_with_objects_is_resumed_to_the_same_bits():
    """It takes the same objects again, and says which of them has other settings."""
    algorithm = fedmpi.algorithms.FAFED(step_size=0.01)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    made = {"data": datasets(2), "model": net, "algorithm": algorithm, "checkpoint_every": 2, "threads": 1}
    first = fedmpi.train(**made, rounds=2)
    resumed, whole = fedmpi.train(**made, rounds=4, resume=first.folder), fedmpi.train(**made, rounds=4)
    assert resumed.folder == first.folder and len(resumed.metrics) == 4
    for found, expected in zip(resumed.model.parameters(), whole.model.parameters()):
        assert torch.equal(found, expected)
    for other, message in (
        ({"algorithm": fedmpi.algorithms.FAFED(step_size=0.02)}, "algorithm.step_size was 0.01, now 0.02"),
        ({"algorithm": FedAvg()}, "algorithm was fafed, now fedavg"),
    ):
        with pytest.raises(fedmpi.UserError, match=message):
            fedmpi.train(**{**made, **other}, rounds=6, resume=first.folder)


def test_a_metric_or_patience_or_a_callback_ends_a_run(capfd):
    run = fedmpi.train(**USUAL, rounds=50, eval_every=1, stop="accuracy >= 0.5", holdout=0.1, verbose=True)
    assert 1 < len(run.metrics) < 50 and run.metrics[-2]["accuracy"] < 0.5 <= run.metrics[-1]["accuracy"]
    assert "ended early" in capfd.readouterr().out
    still = {**USUAL, "algorithm": {"name": "fedavg", "step_size": 1e-9}}
    run = fedmpi.train(**still, rounds=50, eval_every=2, patience=3, holdout=0.1, verbose=True)
    assert len(run.metrics) == 8  # the first evaluation is the best
    assert "holdout_accuracy has not improved in 3 evaluations" in capfd.readouterr().out
    seen = []
    run = fedmpi.train(**USUAL, rounds=9, eval_every=3, on_round=seen.append, on_evaluation=lambda r: r["round"] == 6)
    assert [record["round"] for record in seen] == [1, 2, 3, 4, 5, 6] and len(run.metrics) == 6


def test_the_best_is_selected_on_held_out_data(capfd):
    run = fedmpi.train(**USUAL, rounds=6, eval_every=1, result="best", holdout=0.2, verbose=True)
    ended = capfd.readouterr()
    best = max(run.metrics, key=lambda record: record["holdout_accuracy"])
    assert f"iterate of round {best['round']} (best by holdout_accuracy)" in ended.out and "chosen" not in ended.err
    assert run.final["accuracy"] == best["accuracy"]
    fedmpi.train(**USUAL, rounds=2, result="best")
    assert "the best model is chosen by accuracy on the test set" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "fedavgg"}, "unknown algorithm 'fedavgg'; did you mean 'fedavg'?"),
        ({"rounds": 0}, "rounds = 0: expected a number >= 1"),
        ({"algorithm": 3}, "algorithm is a int: expected a name, a dict"),
        ({"partition": 10**5000}, "partition is a int: expected a name, a dict"),
        ({"seed": [{10**5000}]}, "seed is a set: expected a number, a text"),
        ({"algorithm": FedAvg(), "algorithm.step_size": 1}, "algorithm is given as an object"),
        (
            {"rounds": print},
            "rounds is a builtin_function_or_method: expected a number, a text",
        ),
        ({"lr": 0.1}, "unknown setting lr"),
        ({"stop": "accuracy"}, "stop = accuracy: expected a metric"),
        ({"stop": "f1>0.5", "rounds": 1}, "stop: there is no metric f1"),
        ({"data": [[(1.0, 0.5)]]}, "data of client 0, item 0 has the label 0.5"),
        ({"data": [[]]}, "data of client 0: has no items"),
        ({"data": [[("a", 0)]]}, "data of client 0, item 0: expected numbers as (input, label)"),
        ({"data": [[([1.0], 10**12)]]}, "data: contains the labels 1000000000000, but no client has the label 0, 1, 2"),
        ({"data": datasets(2), "clients": 3}, "data: 2 Datasets for 3 clients"),
        ({"test_data": datasets(1)[0]}, "test_data: expected only beside"),
        ({"data": {"a": datasets(1)[0]}}, "data is a dict: expected a name, a path, or one Dataset per client"),
        ({"on_round": {1, 2}}, "on_round is a set: expected a function of a round's record"),
        ({"help": True}, "help, list, print_config, traceback are options of python -m fedmpi.train"),
        ({"list": "tasks"}, "help, list, print_config, traceback are options of python -m fedmpi.train"),
        ({"verbose": "no"}, "verbose is a str: expected True or False"),
        (
            {"model": {"name": "math.sin"}},
            "model 'math.sin': expected a subclass of torch.nn.modules.module.Module, or",
        ),
        ({"comm": 3}, "comm is a int: expected an mpi4py Intracomm of this rank"),
        ({"comm": MPI.COMM_NULL}, "comm is a Comm: expected an mpi4py Intracomm of this rank"),
        ({"data": datasets(1), "partition": "even"}, "leave partition out"),
    ],
)
def test_wrong_arguments_are_errors_in_one_line(settings, message):
    with pytest.raises(fedmpi.UserError, match=re.escape(message)) as error:
        fedmpi.train(**{"threads": 1, **settings})
    assert "\n" not in str(error.value) and error.value.__cause__ is None  # nor in two tracebacks


def test_labels_that_no_sample_of_any_client_has_are_named(capfd):
    labels = [torch.tensor([0, 1, 0, 1]), torch.tensor([4, 4, 1, 0])]
    sets = [torch.utils.data.TensorDataset(torch.rand(4, 3), own) for own in labels]
    sets[0].classes = [*"abcde"]  # as torchvision's
    fedmpi.train(algorithm="fedavg", threads=1, rounds=1, data=sets)
    assert "fedmpi: data: no sample has label 2, 3, of 5 classes\n" in capfd.readouterr().err


FINALIZED = """
import fedmpi, torch
from mpi4py import MPI
MPI.Finalize()
net = torch.nn.Linear(2, 1)
for begin in (fedmpi.train, lambda: fedmpi.join(net, "fedavg", 5), lambda: fedmpi.average(net)):
    try:
        begin()
    except fedmpi.UserError as error:
        print(error)
fedmpi.train.main([])
"""


def test_after_mpi_is_finalized_a_line_says_so():
    ended = execute([sys.executable, "-c", FINALIZED], env={"PYTHONPATH": str(ROOT)})
    line = "MPI was finalized in this process (MPI.Finalize), and cannot begin again"
    assert ended.stdout.count(line) == 3 and ended.stderr.startswith(f"fedmpi: error: {line}")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1


def test_the_signature_is_that_of_the_settings():
    signature = inspect.signature(fedmpi.train)
    settings = {name: field.default for name, field in RunSettings.declared().items()}
    assert {name: signature.parameters[name].default for name in settings} == settings
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in signature.parameters.values())
    own = {
        "on_round",
        "on_evaluation",
        "parts",
        "verbose",
        "preset",
        "config",
        "data",
        "test_data",
        "cache",
        "comm",
        *GROUPS,
    }
    assert set(signature.parameters) == own | set(settings)


WAYS = (
    "import fedmpi; train = fedmpi.train; import fedmpi.train; assert fedmpi.train is train",
    "import fedmpi.train; train = fedmpi.train; from fedmpi.train import train as same; assert same is train",
    "from fedmpi import train; import fedmpi.train as same; assert same is train",
    "from fedmpi.train import train, main; import fedmpi; assert fedmpi.train is train; assert train.main is main",
    "import importlib, fedmpi; train = importlib.import_module('fedmpi.train'); assert fedmpi.train is train",
    "import fedmpi.training.build, pickle; from fedmpi import train; assert pickle.loads(pickle.dumps(train)) is train",
)


@pytest.mark.parametrize("way", WAYS)
def test_train_is_one_function_however_it_is_imported(way):
    program = f"{way}; import inspect; print(inspect.isfunction(train), callable(train.main), train.__name__)"
    ended = execute([sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT)})
    assert ended.stdout == "True True train\n", ended.stderr


def predictions(folder, file, *options):
    """(what `fedmpi predict` printed, the rows that it wrote)."""
    words = ["python", "-m", "fedmpi", "predict", folder, file, "--out", file.parent / "out.csv", *options]
    ended = execute(words, env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, list(csv.DictReader(open(file.parent / "out.csv", newline="")))


def test_predictions_for_an_hdf5_and_an_npz_file(finished, tmp_path):
    accuracy, folder = finished
    digits = DigitsSource()
    images, labels = digits.read("test", range(359)), digits.labels["test"]
    with h5py.File(tmp_path / "digits.h5", "w") as file:
        file["test/images"], file["test/labels"] = images, labels
    np.savez(tmp_path / "digits.npz", x=images)
    printed, rows = predictions(folder, tmp_path / "digits.h5")
    assert printed.startswith("359 predictions in ") and printed.endswith(f"; accuracy {accuracy:.4f}\n")
    right = [row["predicted"] == row["label"] for row in rows]
    assert sum(right) / len(right) == pytest.approx(accuracy, abs=1e-4)
    printed, without_labels = predictions(folder, tmp_path / "digits.npz")
    assert "accuracy" not in printed
    assert [row["predicted"] for row in without_labels] == [row["predicted"] for row in rows]
    model = fedmpi.load(folder)
    with torch.no_grad():
        shares = model(prepare_inputs(model.fedmpi, images)).softmax(1).max(1).values
    assert [float(row["probability"]) for row in rows] == pytest.approx(shares.tolist(), abs=1e-5)


def test_predictions_for_a_table_name_the_classes(tmp_path):
    """Its columns may stand in another order than those of the table that was trained on."""
    draw = np.random.default_rng(0)
    kinds = draw.choice(["healthy", "ill"], 80)
    with open(tmp_path / "patients.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "pressure", "diagnosis"])
        table.writerows([[draw.normal(), draw.normal() + 4 * (kind == "ill"), kind] for kind in kinds])
    prepare = ["prepare", "patients", "--from", tmp_path / "patients.csv", "--data-dir", tmp_path]
    ended = execute(["python", "-m", "fedmpi", "data", *prepare], env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    run = fedmpi.train(**USUAL, data=tmp_path / "patients.h5", rounds=30, batch_size=10)
    (tmp_path / "new.csv").write_text("pressure,age\n4.5,0\n-0.5,0\n")
    _, rows = predictions(run.folder, tmp_path / "new.csv")
    assert [row["predicted"] for row in rows] == ["ill", "healthy"]
    printed, _ = predictions(run.folder, tmp_path / "patients.csv", "--label", "diagnosis")
    assert float(printed.split()[-1]) > 0.85


def test_predict_says_what_is_wrong(finished, tmp_path):
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 9, 9), np.uint8))
    (tmp_path / "a.txt").touch()
    for file, message in (
        ("wide.npz", "samples are [9, 9]: the model takes inputs of shape [1, 8, 8]"),
        ("a.txt", "expected a file that ends in .h5"),
        ("none.csv", "none.csv: no such file"),
    ):
        words = ["python", "-m", "fedmpi", "predict", finished[1], tmp_path / file]
        ended = execute(words, env={"PYTHONPATH": str(ROOT)})
        assert ended.returncode == 2 and message in ended.stderr and len(ended.stderr.splitlines()) == 1
