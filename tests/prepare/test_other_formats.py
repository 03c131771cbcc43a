"""Formats of other communities, in files that their own libraries write."""

import io
import json

import h5py
import numpy as np
import pytest
from PIL import Image
from test_columns import prepared as prepare
from test_images import everything, pictures, refused

DRAW = np.random.default_rng(0)


def test_leaf_and_tensorflow_federated(tmp_path, capsys):
    x = DRAW.random((4, 5, 6)).round(3)
    for split, users in (("train", "abc"), ("test", "ad")):
        data = {user: {"x": x["abcd".index(user)].tolist(), "y": [0, 2, 10, 2, 0]} for user in users}
        (tmp_path / "leaf" / split).mkdir(parents=True)
        content = {"users": [*users], "num_samples": [5] * len(users), "user_data": data}
        (tmp_path / "leaf" / split / "all_data.json").write_text(json.dumps(content))
    names = ",".join(map(str, range(11)))
    source, account = prepare(tmp_path, tmp_path / "leaf", "--classes", names)
    assert np.allclose(source.read("train", np.arange(15)), x[:3].reshape(15, 6))
    assert source.column("user").tolist() == [user.encode() for user in "abc" for _ in range(5)]
    assert source.labels["test"].tolist() == [0, 2, 10, 2, 0] * 2 and account["test_rows"] == "those of the files"
    (tmp_path / "tff").mkdir()
    for split, users in (("train", {"f0": 3, "f1": 5}), ("test", {"f1": 5})):
        with h5py.File(tmp_path / "tff" / f"fed_emnist_{split}.h5", "w") as file:
            for user, number in users.items():
                file[f"examples/{user}/pixels"] = x[int(user[1])].astype(np.float32).reshape(5, 2, 3)[:number]
                file[f"examples/{user}/label"] = np.arange(number)
                file[f"examples/{user}/coarse_label"] = np.zeros(number)
    source, account = prepare(tmp_path, tmp_path / "tff")
    assert account["not_used"] == {"coarse_label": "neither the samples nor their labels"}
    assert source.shape == (2, 3) and source.column("user").tolist() == [b"f0"] * 3 + [b"f1"] * 5
    assert np.allclose(source.read("test", np.arange(5)), x[1].reshape(5, 2, 3))
    source, _ = prepare(tmp_path, tmp_path / "tff" / "fed_emnist_train.h5")
    assert len(source.labels["train"]) == 6
    with h5py.File(tmp_path / "tff" / "fed_emnist_test.h5", "w") as file:
        file["examples/f1/pixels"], file["examples/f1/number"] = np.ones((5, 2, 3)), np.arange(5)
    what = "fed_emnist_test.h5: f1 has number, pixels: expected label, and "
    assert what in refused(capsys, tmp_path, tmp_path / "tff")
    for labels, what in [([0, 2], "leaf: a has not as many samples as labels: expected a label for each"),
                         ([], "leaf: contains no samples to train on")]:  # fmt: skip
        odd = {"a": {"x": [[0.5]] * len(labels[1:]), "y": labels}}
        (tmp_path / "odd" / "leaf" / "train").mkdir(parents=True, exist_ok=True)
        text = json.dumps({"users": ["a"], "num_samples": [1], "user_data": odd})
        (tmp_path / "odd" / "leaf" / "train" / "x.json").write_text(text)
        assert what in refused(capsys, tmp_path, tmp_path / "odd" / "leaf")
    data["a"]["x"] = ["a text"] * 5
    (tmp_path / "leaf" / "test" / "all_data.json").write_text(json.dumps({**content, "user_data": data}))
    assert "x of a contains str" in refused(capsys, tmp_path, tmp_path / "leaf")


def test_dicom_keeps_its_units(tmp_path, capsys):
    pydicom = pytest.importorskip("pydicom")
    from pydicom.dataset import FileDataset, FileMetaDataset

    values = DRAW.integers(0, 4000, (10, 6, 5)).astype(np.uint16)
    for name in "AB":
        (tmp_path / "ct" / name).mkdir(parents=True)
        for number, pixels in enumerate(values):
            meta = FileMetaDataset()
            meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
            meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
            meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
            file = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
            file.SOPClassUID, file.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
            file.Rows, file.Columns, file.SamplesPerPixel = 6, 5, 1
            file.PhotometricInterpretation = "MONOCHROME1" if name == "B" else "MONOCHROME2"
            file.BitsAllocated = file.BitsStored = 16
            file.HighBit, file.PixelRepresentation = 15, 0
            file.RescaleSlope, file.RescaleIntercept = 1, -1024
            file.PixelData = pixels.tobytes()
            place = f"{number}.dcm" if number % 2 else f"P1/IM{number}" if number % 4 else f"1.2.840.{number}"
            (tmp_path / "ct" / name / "P1").mkdir(exist_ok=True)
            file.save_as(tmp_path / "ct" / name / place, enforce_file_format=True)
    source, account = prepare(tmp_path, tmp_path / "ct")
    assert source.dtype == np.float32 and source.shape == (6, 5)
    units = values - 1024.0
    negatives = units.max((1, 2), keepdims=True) + units.min((1, 2), keepdims=True) - units  # B's large values are dark
    assert np.array_equal(np.sort(everything(source), None), np.sort(np.concatenate([units, negatives]), None))
    assert "the mode DICOM MONOCHROME" in account["assumed"][0] and "like A/P1, are to train" in account["notes"][0]
    pictures(tmp_path / "more", values[:1].astype(np.uint8), classes="A")
    (tmp_path / "more" / "A" / "0.png").rename(tmp_path / "ct" / "A" / "x.png")
    assert "x.png: has the mode that of a picture: expected DICOM" in refused(capsys, tmp_path, tmp_path / "ct")


def test_nifti_volumes_have_one_orientation(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    volumes = DRAW.standard_normal((20, 5, 6, 7)).astype(np.float32)
    for number, volume in enumerate(volumes):
        (tmp_path / "mr" / "AB"[number % 2]).mkdir(parents=True, exist_ok=True)
        affine = np.eye(4)
        if number % 3:  # the same volume, stored from right to left
            volume, affine[0, 0] = volume[::-1], -1
        nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / "mr" / "AB"[number % 2] / f"{number}.nii.gz")
    source, account = prepare(tmp_path, tmp_path / "mr")
    assert source.shape == (5, 6, 7, 1) and "the mode NIfTI" in account["assumed"][0]
    found = everything(source)[..., 0]
    assert np.array_equal(found[np.argsort(found[:, 0, 0, 0])], volumes[np.argsort(volumes[:, 0, 0, 0])])


def test_folders_of_hugging_face(tmp_path, capsys):
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    x = DRAW.standard_normal(40).round(3)
    columns = {"x": x.tolist(), "text": ["words"] * 40, "label": [0, 1] * 20}
    whole = datasets.Dataset.from_dict(columns).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    whole.save_to_disk(tmp_path / "one")
    source, account = prepare(tmp_path, tmp_path / "one")
    assert np.allclose(np.sort(everything(source), None), np.sort(x)) and account["classes"] == {"no": 20, "yes": 20}
    assert list(account["not_used"]) == ["text"]
    splits = {"train": whole.select(range(30)), "test": whole.select(range(30, 40))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    source, account = prepare(tmp_path, tmp_path / "two")
    assert np.allclose(source.read("test", np.arange(10))[:, 0], x[30:]) and "two/test" in account["test_rows"]


def image_table(arrays, **columns):
    """An Arrow table with a column of PNG files, as Hugging Face's `Image` features are stored."""
    import pyarrow

    files = [io.BytesIO() for _ in arrays]
    for file, array in zip(files, arrays):
        Image.fromarray(array).save(file, "png")
    return pyarrow.table({"image": [{"bytes": file.getvalue(), "path": None} for file in files], **columns})


def test_tables_of_images(tmp_path, capsys):
    """They were refused: no column of numbers."""
    import pyarrow
    from pyarrow import parquet

    arrays = DRAW.integers(0, 256, (30, 6, 5)).astype(np.uint8)
    arrays[:, 0, 0] = np.arange(30)
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["no", "yes"]}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    whole = image_table(arrays, label=[0, 1] * 15, site=["s"] * 30)
    parquet.write_table(whole.replace_schema_metadata(metadata), tmp_path / "it.parquet")
    source, account = prepare(tmp_path, tmp_path / "it.parquet")
    assert account["classes"] == {"no": 15, "yes": 15} and account["not_used"] == {"site": "another column"}
    found, labels = everything(source), np.concatenate([*source.labels.values()])
    assert np.array_equal(found[np.argsort(found[:, 0, 0])], arrays) and np.array_equal(labels, found[:, 0, 0] % 2)
    for split, rows in (("train", slice(0, 20)), ("test", slice(20, 30))):
        (tmp_path / "two" / split).mkdir(parents=True)
        part = whole.slice(rows.start, rows.stop - rows.start)
        with pyarrow.ipc.new_stream(tmp_path / "two" / split / "data.arrow", part.schema) as file:
            file.write_table(part)
        (tmp_path / "two" / split / "dataset_info.json").write_text(json.dumps({"features": features}))
        (tmp_path / "two" / split / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    source, account = prepare(tmp_path, tmp_path / "two")
    assert np.array_equal(source.read("test", np.arange(10)), arrays[20:]) and "two/test" in account["test_rows"]
    source, account = prepare(tmp_path, tmp_path / "it.parquet", "--test-from", tmp_path / "two" / "test")
    assert len(source.labels["train"]) == 30 and len(source.labels["test"]) == 10
    parquet.write_table(pyarrow.table({"image": [{"bytes": None, "path": "x"}], "label": [0]}), tmp_path / "no.parquet")
    assert "row 1 contains no image: expected its bytes" in refused(capsys, tmp_path, tmp_path / "no.parquet")
    parquet.write_table(image_table(arrays[:2], label=["a", None]), tmp_path / "no.parquet")
    what = "no.parquet: row 2 has an empty field in column label"
    assert what in refused(capsys, tmp_path, tmp_path / "no.parquet")
    what = "it.parquet: expected columns image and kind; it has image, label, site"
    assert what in refused(capsys, tmp_path, tmp_path / "it.parquet", "--label", "kind")


def test_a_folder_of_hugging_faces_images(tmp_path):
    arrays = DRAW.integers(0, 256, (10, 6, 5)).astype(np.uint8)
    arrays[:, 0, 0] = np.arange(10)
    folder = pictures(tmp_path / "it", arrays, classes="x")
    lines = ["label,file_name", *(f"{'ab'[number % 2]},x/{number}.png" for number in range(10))]
    (folder / "metadata.csv").write_text("\n".join(lines))
    source, account = prepare(tmp_path, folder, "--label", "label")
    assert account["classes"] == {"a": 5, "b": 5}
    assert np.array_equal(np.concatenate([*source.labels.values()]), everything(source)[:, 0, 0] % 2)


def test_sparse_arff(tmp_path):
    """It was refused. What is left out is 0, or the first category."""
    head = "@relation r\n@attribute n numeric\n@attribute 'a b' numeric\n@attribute y {no,'a, 1 b'}\n@DATA\n"
    rows = [f"{{0 {number}, 2 'a, 1 b'}}" if number % 2 else f"{{ 1 {number}.5 }}" for number in range(1, 13)]
    (tmp_path / "it.arff").write_text(head + "% rows\n" + "\n".join(rows))
    source, account = prepare(tmp_path, tmp_path / "it.arff")
    found, labels = everything(source), np.concatenate([*source.labels.values()])
    expected = [[number, 0] if number % 2 else [0, number + 0.5] for number in range(1, 13)]
    assert sorted(found.tolist()) == sorted(expected) and np.array_equal(labels, found[:, 0] % 2 == 0)
    assert account["classes"] == {"a, 1 b": 6, "no": 6}


def test_a_folder_of_pictures_with_a_table_of_classes(tmp_path, capsys):
    arrays = DRAW.integers(0, 256, (12, 6, 5)).astype(np.uint8)
    arrays[:, 0, 0] = np.arange(12)
    folder = pictures(tmp_path / "it", arrays, classes="x")
    lines = ["file,age,class", *(f"x/{number}.png,7,{[2, 10][number % 2]}" for number in range(11))]
    (folder / "labels.csv").write_text("\n".join(lines))
    source, account = prepare(tmp_path, folder)
    assert account["classes"] == {"2": 6, "10": 5} and account["not_used"] == {
        "x": "1 images, not in labels.csv",
        "age": "another column of labels.csv",
    }
    labels = np.concatenate([*source.labels.values()])
    assert np.array_equal(labels, everything(source)[:, 0, 0] % 2)
    what = "labels.csv: expected a column of files and a column kind; it has file, age, class"
    assert what in refused(capsys, tmp_path, folder, "--label", "kind")
    what = f"--group site: {folder}/labels.csv has no such column; it has age, class"
    assert what in refused(capsys, tmp_path, folder, "--group", "site")
    (folder / "labels.csv").write_text("\n".join([*lines, "x/no.png,7,2"]))
    assert "line 13 has " in refused(capsys, tmp_path, folder)
