"""Predict classes with a trained model: ``python -m fedmpi.predict runs/NAME samples.csv``."""

import csv
import pathlib
import sys

import torch

from fedmpi.errors import UserError
from fedmpi.predict.reading import read_samples
from fedmpi.program.parser import Parser
from fedmpi.program.single import run_single
from fedmpi.runs.model_files import has_client_models, load_model, prepare_inputs

AT_ONCE = 1000  # samples
DESCRIPTION = """\
Write the class that the model of a run folder predicts for every sample of a file, and its probability, as CSV.

The file is HDF5 (test/images, or images), npz (x_test, or x) or a table (CSV or parquet) with the columns that the
model was trained on. If it has labels, they are written too, and the accuracy is printed."""


def main(arguments=None):
    """Entry point; `arguments` default to those of the process."""
    run_single(_run, sys.argv[1:] if arguments is None else arguments)


def make_parser():
    """The parser of the program's options."""
    parser = Parser(prog="python -m fedmpi.predict", description=DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", help="run folder")
    parser.add_argument("file", metavar="FILE", help="samples: a file that ends in .h5, .npz, .csv or .parquet")
    parser.add_argument("--out", metavar="FILE", default="predictions.csv", help="default: predictions.csv")
    parser.add_argument("--split", default="test", help="part of an HDF5 or npz file: test (the default) or train")
    parser.add_argument("--label", metavar="COLUMN", help="column of a table that has the labels")
    text = "number of the client whose own model predicts, if layers are personal (--private)"
    parser.add_argument("--client", type=int, metavar="N", help=text)
    return parser


def _run(arguments):
    options = make_parser().parse_args(arguments)
    folder = pathlib.Path(options.folder)
    if options.client is None and has_client_models(folder):
        raise UserError(f"{folder}: each client has a model of its own (--private): choose one, like --client 0")
    model = load_model(folder, client=options.client)
    samples, labels = read_samples(pathlib.Path(options.file), options.split, options.label, model.fedmpi)
    predicted, probability = predict(model, samples)
    names = model.fedmpi.get("class_names")
    _write(options.out, names, (predicted, probability, labels))
    accuracy = "" if labels is None else f"; accuracy {sum(labels == predicted) / len(labels):.4f}"
    print(f"{len(predicted)} predictions in {options.out}{accuracy}")


@torch.no_grad()
def predict(model, samples):
    """The likeliest class of every sample, and its probability.

    Args:
        model: what `fedmpi.load` gives. samples: [n, ...] array, see `prepare_inputs`.

    Returns:
        ([n] int64, [n] float32) arrays.

    Raises:
        UserError: if the model takes no such samples.
    """
    likeliest, probabilities = [], []
    for begin in range(0, len(samples), AT_ONCE):
        inputs = prepare_inputs(model.fedmpi, samples[begin : begin + AT_ONCE])
        scores = model(inputs.to(next(model.parameters()).dtype))
        if scores.dim() == 1:  # of the class 1 of two
            scores = torch.stack([torch.zeros_like(scores), scores], dim=1)
        best = scores.softmax(1).max(1)
        likeliest.append(best.indices)
        probabilities.append(best.values.float())
    return torch.cat(likeliest).numpy(), torch.cat(probabilities).numpy()


def _write(path, names, columns):
    """Write the table.

    Args:
        names: of the classes, or None. columns: predicted classes, their probabilities, and labels or None.
    """
    predicted, probability, labels = columns

    def name(number):
        return names[number] if names and 0 <= number < len(names) else int(number)

    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["sample", "predicted", "probability", *([] if labels is None else ["label"])])
            for number, (answer, sure) in enumerate(zip(predicted, probability)):
                label = [] if labels is None else [name(labels[number])]
                table.writerow([number, name(answer), f"{sure:.6f}", *label])
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    main()
