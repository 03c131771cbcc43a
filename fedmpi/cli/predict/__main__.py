"""Predict classes with a trained model: ``python -m fedmpi predict runs/NAME samples.csv``."""

import csv
import importlib
import io
import pathlib
import sys

import numpy as np
import torch

from fedmpi.cli.predict.reading import read_samples
from fedmpi.comm.job.parser import Parser
from fedmpi.comm.job.single import run_single
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.own_files import check_replaceable, replacing
from fedmpi.ground.text import Log, as_cell, short
from fedmpi.runs.model_files import has_client_models, load_model, model_file, prepare_inputs

AT_ONCE = 1000  # samples
TOLERANCE = 1e-3  # of a sum of probabilities
FAR, FLAT = 10, 0.05  # standard deviations of the training samples: from their mean; that all pixels have
log = Log(__name__)
HEADER = b"sample,predicted"  # of the table
MASKS = "predicted"  # array of an npz file
DESCRIPTION = """\
Write the class that the model of a run folder predicts for every sample of a file, and its probability, as CSV.

The file is HDF5 (test/images, or images), npz (x_test, or x), a table with the columns that the model was trained on,
or a folder of images. Columns that --id named are written, too. If it has labels, they are written, and the accuracy is
printed. If the model of the user's own task computes values, these are written. The classes of pixels (--task
segmentation) are written as the array "predicted" of an npz file, for which --out stands with the ending .npz."""


def main(arguments=None):
    """Entry point; `arguments` default to those of the process."""
    run_single(_run, sys.argv[1:] if arguments is None else arguments)


def make_parser():
    """The parser of the program's options."""
    parser = Parser(prog="fedmpi predict", description=DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", help="run folder")
    parser.add_argument("file", metavar="FILE", help="samples: a .h5 or .npz file, a table, or a folder of images")
    parser.add_argument("--out", metavar="FILE", default="predictions.csv", help="default: predictions.csv")
    parser.add_argument("--split", default="test", help="part of an HDF5 or npz file: test (the default) or train")
    parser.add_argument("--label", metavar="COLUMN", help="column of a table that has the labels")
    text = "also write the probability of every class, a column each"
    parser.add_argument("--probabilities", action="store_true", help=text)
    text = "number of the client whose own model predicts, if layers are personal (--private)"
    parser.add_argument("--client", type=int, metavar="N", help=text)
    text = "read images outside of the folder, where symbolic links lead to"
    parser.add_argument("--follow-links", action="store_true", help=text)
    text = "module with the model's class or function, which is trusted, like mymodel; may be repeated"
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=text)
    return parser


def _run(arguments):
    options = make_parser().parse_args(arguments)
    folder = pathlib.Path(options.folder)
    check_replaceable(pathlib.Path(options.out), HEADER)
    if options.client is None and has_client_models(folder):
        raise UserError(f"{folder}: each client has a model of its own (--private): choose one, like --client 0")
    for name in options.modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  a user's module can raise anything
            raise UserError(f"--import {name}: {type(error).__name__}: {short(error)}") from error
    model = load_model(folder, client=options.client, trusted=options.modules)
    _check_weights(model_file(folder, options.client), model)
    file, follow = pathlib.Path(options.file), options.follow_links
    samples, labels, ids = read_samples(file, options.split, options.label, model.fedmpi, follow)
    try:
        if model.fedmpi.get("outputs") == "pixels":
            path = pathlib.Path(options.out).with_suffix(".npz")
            facts = {"class_name": model.fedmpi.get("class_names", ()), **ids}
            arrays = {
                MASKS: outputs(model, samples),
                **{f"{name}s": np.array(words, str) for name, words in facts.items()},
            }
            with attempt("write", f"--out {path}", OSError, ValueError), replacing(path, MASKS.encode()) as part:
                np.savez(part, **arrays)
            print(f"{len(samples)} predictions in {path}")
            return
        if model.fedmpi.get("outputs") in ("values", "labels"):
            values, header = _numbers(model, samples)
            _write_rows(options.out, [header, *values.tolist()], ids)
            print(f"{len(values)} predictions in {options.out}")
            return
        probabilities = predict(model, samples)
    except UserError as error:
        raise UserError(f"{options.file} with the model of {folder}: {error}") from None
    (predicted, probability), num_classes = (probabilities.argmax(1), probabilities.max(1)), probabilities.shape[1]
    if labels is not None and len(outside := labels[(labels < 0) | (labels >= num_classes)]):
        expected = f"expected 0 to {num_classes - 1}, the classes of the model, or a file without labels"
        raise UserError(f"{options.file}: label {outside[0]}: {expected}")
    accuracy = "" if labels is None else f"; accuracy {(labels == predicted).mean():.4f}"
    further = probabilities if options.probabilities else None
    _write(options.out, model.fedmpi.get("class_names"), (predicted, probability, labels), ids, further)
    print(f"{len(predicted)} predictions in {options.out}{accuracy}")


def _check_weights(path, model):
    """Check that no weight is infinite or nan, and no other tensor of the model nan."""
    right = {name: value.double().isfinite() for name, value in model.named_parameters()}
    right |= {name: ~value.double().isnan() for name, value in model.named_buffers()}  # a mask may contain -inf
    for name, is_right in right.items():
        if not is_right.all():
            place = (~is_right).nonzero()[0].tolist()
            raise UserError(f"{path}: {name}{place or ''} is not finite: expected a run that did not diverge")


@torch.no_grad()
def predict(model, samples):
    """[n, classes] float32 array: the probability of every class for every sample.

    Args:
        model: what `fedmpi.load` gives. samples: [n, ...] array of at least one sample, see `prepare_inputs`.

    Raises:
        UserError: if the model takes no such samples, or a value or score of one is not finite.
    """
    scores = torch.from_numpy(outputs(model, samples))
    if model.fedmpi.get("outputs_are") == "probabilities":
        shares = torch.cat([1 - scores, scores], dim=1) if scores.shape[1] == 1 else scores
        _check_probabilities(shares, shares.sum(1))
        return shares.float().numpy()
    if scores.shape[1] == 1:  # of the class 1 of two
        scores = torch.cat([torch.zeros_like(scores), scores], dim=1)
    return scores.softmax(1).float().numpy()


def _numbers(model, samples):
    """([n, k] values, or the probability of each of k labels; the names of these columns)."""
    values = torch.from_numpy(outputs(model, samples))
    columns = range(values.shape[1])
    if model.fedmpi["outputs"] == "values":
        return values.numpy(), [f"predicted {number}" for number in columns]
    if model.fedmpi.get("outputs_are") == "probabilities":
        _check_probabilities(values, torch.ones(len(values)))
    else:
        values = values.sigmoid()
    names = model.fedmpi.get("class_names", ())
    names = names if len(names) == len(columns) else columns
    return values.numpy(), [f"probability of {as_cell(name)}" for name in names]


def _check_probabilities(shares, sums):
    """Check that outputs which the task calls probabilities are from 0 to 1, and their `sums` [n] 1."""
    is_right = ((shares >= 0) & (shares <= 1 + TOLERANCE)).all(1) & ((sums - 1).abs() <= TOLERANCE)
    if not is_right.all():
        number = int(is_right.int().argmin())
        found = short([float(f"{share:.4g}") for share in shares[number].tolist()], 80)
        raise UserError(f"sample {number} (from 0) has the outputs {found}: expected probabilities, as the task says")


@torch.no_grad()
def outputs(model, samples):
    """[n, k] float64 array: what the model computes for every sample; see `predict`.

    Of a model that gives each pixel scores of classes, [n, ...] uint8: the best class of each pixel.
    """
    found = []
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    for begin in range(0, len(samples), AT_ONCE):
        inputs = prepare_inputs(model.fedmpi, samples[begin : begin + AT_ONCE]).to(dtype)
        _check_finite(begin, inputs, f"a value that is not finite, or too large for {dtype}")
        if begin == 0 and not _are_alike(model.fedmpi, inputs):
            log.warning("the samples are unlike those of the training: do they have the same units and the same depth?")
        scores = _scores(model, inputs)
        _check_finite(begin, scores, "a score that is not finite: the model cannot classify it")
        found.append(scores.double() if scores.dim() == 2 else scores.argmax(1).to(torch.uint8))
    return torch.cat(found).numpy()


def _are_alike(description, inputs):
    """Whether the first inputs are about as the training samples were, which had mean 0 and standard deviation 1."""
    if [np.unique(description["input"][name]).tolist() for name in ("mean", "std")] == [[0], [1]]:  # none were measured
        return True
    means = inputs.double().transpose(0, 1).flatten(1).mean(1)
    is_flat = inputs.dim() > 2 and inputs[0].numel() > 1 and inputs.double().std() < FLAT
    return not is_flat and bool((means.abs() <= FAR).all())


def _scores(model, inputs):
    """[n, k] what the model computes from inputs."""
    try:
        scores = model(inputs)
    except Exception as error:  # noqa: BLE001  a user's module can raise anything
        reason = f"{type(error).__name__}: {short(error)}"
        raise UserError(f"the model does not work on inputs {list(inputs.shape)}: {reason}") from None
    is_float = isinstance(scores, torch.Tensor) and scores.is_floating_point()
    scores = scores[:, None] if is_float and scores.dim() == 1 else scores
    is_pixels = is_float and model.fedmpi.get("outputs") == "pixels" and scores.shape[2:] == inputs.shape[2:]
    if not is_float or not (scores.dim() == 2 or is_pixels) or len(scores) != len(inputs) or not scores.numel():
        found = list(scores.shape) if is_float else type(scores).__name__
        raise UserError(f"the model computes {found} from inputs {list(inputs.shape)}: expected scores of classes")
    return scores


def _check_finite(begin, values, problem):
    """Check the values of some samples, the first of which is number `begin`."""
    is_finite = values.float().isfinite().flatten(1).all(1)
    if not is_finite.all():
        raise UserError(f"sample {begin + int(is_finite.int().argmin())} (from 0) has {problem}")


def _write(path, names, columns, ids, further=None):
    """Write the table.

    Args:
        names: of the classes, or None. columns: predicted classes, their probabilities, and labels or None.
        ids: name -> values of further columns. further: [n, classes] probabilities of all classes, or None.
    """
    predicted, probability, labels = columns

    def name(number):
        return as_cell(names[number]) if names and 0 <= number < len(names) else int(number)

    rows = [["predicted", "probability"]]
    rows += [[name(best), f"{sure:.6f}"] for best, sure in zip(predicted, probability)]
    if labels is not None:
        rows = [[*row, label] for row, label in zip(rows, ["label", *map(name, labels)])]
    if further is not None:
        titles = [f"probability of {name(k)}" for k in range(further.shape[1])]
        rows = [[*row, *more] for row, more in zip(rows, [titles, *([f"{p:.6f}" for p in each] for each in further)])]
    _write_rows(path, rows, ids)


def _write_rows(path, rows, ids):
    """Write the table: the number of each sample, `rows` with a header, and further columns."""
    rows = [[number, *row] for number, row in zip(["sample", *range(len(rows))], rows)]
    for column, values in ids.items():
        rows = [[*row, value] for row, value in zip(rows, [as_cell(column), *map(as_cell, values)])]
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    with attempt("write", f"--out {path}", OSError, ValueError), replacing(path, HEADER) as part:
        part.write_bytes(text.getvalue().encode())


if __name__ == "__main__":
    main()
