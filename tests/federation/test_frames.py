"""The way from the command to a gradient is short."""

import pathlib
import traceback

import fedmpi.train
from fedmpi.oracles.autograd import AutogradOracle

MOST = 11
PACKAGE = str(pathlib.Path(fedmpi.__file__).parent)  # a clone may be called fedmpi, too, and have all packages in it


def test_few_frames_lie_between_the_command_and_a_gradient(monkeypatch, tmp_path):
    found, evaluate = [], AutogradOracle._evaluate

    def noting(self, z, xi, out):
        found.append([frame.name for frame in traceback.extract_stack() if frame.filename.startswith(f"{PACKAGE}/")])
        return evaluate(self, z, xi, out)

    monkeypatch.setattr(AutogradOracle, "_evaluate", noting)
    fedmpi.train.main(["--rounds", "1", "--algorithm", "fedavg", "--out", str(tmp_path)])
    of_gradients = [names for names in found if "local_step" in names]
    assert len(of_gradients) == 10 and {len(names) + 1 for names in of_gradients} <= set(
        range(MOST + 1)
    )  # its own, too
