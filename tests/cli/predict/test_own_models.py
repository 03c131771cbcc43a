"""Predictions by models and tasks that users wrote, and of folders of images."""

import csv
import textwrap

import numpy as np
import pytest
import torch
from helpers import ROOT, execute, train

import fedmpi
from fedmpi.ground.errors import UserError
from fedmpi.prepare.__main__ import main as data

Image = pytest.importorskip("PIL.Image")
PROGRAM = """
    import torch
    from torch import nn
    import fedmpi


    def network(shape, num_classes, width: int = 32):
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.Tanh(), nn.Linear(width, num_classes))


    def line(shape):
        return nn.Linear(shape[0], 2)


    class Line(fedmpi.Task):
        def train(self, client, num_clients):
            x = torch.linspace(-1, 1, 60)[client::num_clients, None]
            return torch.utils.data.TensorDataset(x, torch.cat([3 * x, x - 1], 1))

        def loss(self, model, batch):
            return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.mark.rarely
def test_functions_as_models_and_folders_of_images(tmp_path, capsys):
    """A model by a function was refused with advice that did not help, and folders were no input."""
    (tmp_path / "ownmodel.py").write_text(textwrap.dedent(PROGRAM))
    draw = np.random.default_rng(0)
    for number in range(60):
        pixels = draw.integers(0, 256, (8, 6, 3)).astype(np.uint8)
        pixels[..., number % 2] = 255  # the class
        (tmp_path / "in" / f"class {number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "in" / f"class {number % 2}" / f"{number}.png")
    data(["prepare", "it", "--from", str(tmp_path / "in"), "--data-dir", str(tmp_path)])
    words = ["--data", tmp_path / "it.h5", "--model", "ownmodel.network", "--rounds", 30, "--name", "run"]
    ended = train(2, tmp_path, *words, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert ended.returncode == 0, ended.stderr
    Image.new("L", (5, 9)).save(tmp_path / "in" / "class 0" / "odd.png")
    words = ["-m", "fedmpi", "predict", tmp_path / "run", tmp_path / "in"]
    ended = execute(["python", *words, "--import", "ownmodel"], cwd=tmp_path)
    assert ended.returncode == 2 and "odd.png: is 5x9 pixels: expected 6x8" in ended.stderr
    (tmp_path / "in" / "class 0" / "odd.png").unlink()
    Image.new("L", (6, 8)).save(tmp_path / "in" / "class 0" / "0.png")
    ended = execute(["python", *words, "--import", "ownmodel"], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "1 of 60 images are converted to RGB" in ended.stderr
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    assert sum(row["predicted"] == row["label"] for row in rows) > 54
    assert rows[1]["file"] == "class 0/10.png" and rows[1]["label"] == "class 0"
    ended = execute(["python", *words], cwd=tmp_path)
    assert ended.returncode == 2 and "ownmodel.network, which is not imported" in ended.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import ownmodel

        with pytest.raises(UserError, match="is a function, and it is not called unasked: give the model"):
            fedmpi.load(tmp_path / "run")
        model = fedmpi.load(tmp_path / "run", lambda: ownmodel.network((3, 8, 6), 2))
        assert model(torch.zeros(1, 3, 8, 6)).shape == (1, 2)


def test_own_tasks_that_compute_values(tmp_path):
    """A model of an own task took no samples from a file."""
    (tmp_path / "ownmodel.py").write_text(textwrap.dedent(PROGRAM))
    words = ["--task", "ownmodel.Line", "--model", "ownmodel.line", "--rounds", 200, "--name", "run"]
    words += ["--algorithm", "fedavg", "--algorithm.step_size", 0.1]
    ended = train(2, tmp_path, *words, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert ended.returncode == 0, ended.stderr
    np.savez(tmp_path / "x.npz", x=np.array([[0.0], [0.5]]))
    words = ["python", "-m", "fedmpi", "predict", tmp_path / "run", tmp_path / "x.npz", "--import", "ownmodel"]
    ended = execute(words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    rows = list(csv.reader((tmp_path / "predictions.csv").read_text().splitlines()))
    assert rows[0] == ["sample", "predicted 0", "predicted 1"]
    assert np.allclose(np.array(rows[1:], float), [[0, 0, -1], [1, 1.5, -0.5]], atol=0.02)


@pytest.mark.always
@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "subprocess.run"])
def test_a_run_folder_cannot_name_a_function_to_call(tmp_path, name):
    (tmp_path / "model.json").write_text(f'{{"model": {{"class": "{name}", "arguments": {{"command": "touch x"}}}}}}')
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="which is (a function|no class of modules|not imported)"):
        fedmpi.load(tmp_path)
