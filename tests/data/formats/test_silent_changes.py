"""Data in files that would quietly become something else: read as they are meant, named, or refused in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedsim
from tests.data.loading import load, refused


@pytest.fixture
def picture():
    image = pytest.importorskip("PIL.Image")

    def write(file, value=0, size=(6, 4), orientation=None):
        """Write an image [4, 6] whose pixels are numbers from `value` in the order of rows, and return the numbers."""
        pixels = (np.arange(size[0] * size[1]).reshape(size[1], size[0]) + value).astype(np.uint8)
        file.parent.mkdir(parents=True, exist_ok=True)
        saved = image.fromarray(pixels)
        exif = image.Exif()
        if orientation is not None:
            exif[0x0112] = orientation
        saved.save(file, exif=exif)
        return pixels

    return write


@pytest.fixture
def pictures(tmp_path, picture):
    """Return a function that writes one image of each of two classes in each folder."""

    def write(*folders, file="1.png"):
        for number, folder in enumerate(folders):
            for k, name in enumerate(("cat", "dog")):
                picture(tmp_path / folder / name / file, 100 * number + k)

    return write


# Each orientation of EXIF, as what must be done with the stored pixels (EXIF 2.3, table of the tag 274).
ORIENTATIONS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].T,
    8: lambda a: np.rot90(a),
}


class TestFolders:
    @pytest.mark.parametrize(
        ("train", "test"),
        [("Train", "Test"), ("training", "testing"), ("train", "Validation"), ("TRAINING", "valid"), ("train", "VAL")],
    )
    def test_names_of_parts_are_compared_without_case(self, train, test, tmp_path, pictures):
        pictures(train, test)
        train_data, test_data = load("image_folder", path=str(tmp_path), grey=True)
        assert train_data.inputs[:, 0, 0, 0].tolist() == [0, 1]
        assert test_data.inputs[:, 0, 0, 0].tolist() == [100, 101]
        assert train_data.targets.tolist() == test_data.targets.tolist() == [0, 1]

    def test_two_names_of_one_part_are_an_error(self, tmp_path, pictures):
        pictures("train", "Training", "test")
        refused("image_folder", "Training and train are names of the same part; keep only one", path=str(tmp_path))

    def test_a_validation_part_beside_a_test_part_is_named(self, tmp_path, pictures):
        pictures("train", "val", "Test")
        _, test = load("image_folder", "val is not used, because Test is the test part", path=str(tmp_path))
        assert test.inputs[:, 0, 0, 0].tolist() == [200, 201]

    def test_a_stray_image_beside_folders_of_owners_is_named(self, tmp_path, picture):
        for name in ("cat", "dog"):
            for owner in ("ann", "bob"):
                picture(tmp_path / "train" / name / owner / "1.png")
        picture(tmp_path / "test" / "cat" / "1.png")
        train, _ = load("image_folder", path=str(tmp_path))
        assert train.ids["owner"].tolist() == ["ann", "bob"] * 2
        (tmp_path / "train/dog/._1.png").write_bytes(b"of macOS")
        load("image_folder", path=str(tmp_path))
        picture(tmp_path / "train/dog/stray.png")
        refused(
            "image_folder", "train/dog/stray.png: is not in an owner's folder, but cat/ann/1.png is", path=str(tmp_path)
        )

    def test_other_files_and_empty_folders_are_named_and_are_no_classes(self, tmp_path, pictures):
        pictures("train", "test")
        (tmp_path / "train/__MACOSX").mkdir()
        (tmp_path / "train/cat/2.heic").write_bytes(b"")
        (tmp_path / "train/cat/3.GIF").write_bytes(b"")
        line = "train: files (.gif, .heic) and folders without images are ignored, such as __MACOSX (3 in total)"
        train, _ = load("image_folder", line, path=str(tmp_path))
        assert train.targets.tolist() == [0, 1]

    def test_files_and_folders_beside_the_parts_are_named(self, tmp_path, picture, pictures):
        pictures("Train", "test")
        (tmp_path / ".DS_Store").write_bytes(b"")
        load("image_folder", path=str(tmp_path))
        picture(tmp_path / "unlabeled/1.png")
        picture(tmp_path / "x.png")
        line = f"{tmp_path}: parts that are not used: unlabeled, x.png"
        train, test = load("image_folder", line, path=str(tmp_path))
        assert (len(train), len(test)) == (2, 2)
        for part in ("unlabeled", "test"):
            (tmp_path / part).rename(tmp_path / f".{part}")
        pictures("Train", file="2.png")
        line = "parts that are not used: x.png"
        assert len(load("image_folder", line, path=str(tmp_path), test_fraction=0.5)[1]) == 2

    @pytest.mark.parametrize(
        "names",
        [
            ("train_images", "test_images"),
            ("Training set", "TEST SET"),
            ("train-a", "val-a"),
            ("train2017", "val2017"),
            ("images_train", "images_validation"),
            ("train ", "test "),
            ("train_images",),
        ],
    )
    def test_parts_with_longer_names_are_no_classes(self, names, tmp_path, pictures):
        pictures(*names)
        match = f"such as {' and '.join(names)} may be classes, or a training part and a test part; for parts, use the "
        refused("image_folder", match, path=str(tmp_path))
        (tmp_path / "train").mkdir()
        for part in names:
            (tmp_path / part).rename(tmp_path / "train" / part)
        train, test = load("image_folder", path=str(tmp_path), test_fraction=0.5)
        assert len(train) == len(test) == len(names)

    def test_classes_with_the_name_of_a_part_in_theirs_are_classes(self, tmp_path, picture):
        for number, name in enumerate(("bullet_train", "testament", "trains", "validated id")):
            for k in range(2):
                picture(tmp_path / name / f"{k}.png", number)
        train, _ = load("image_folder", path=str(tmp_path))
        assert train.classes == 4

    @pytest.mark.parametrize("orientation", ORIENTATIONS)
    def test_images_are_rotated_as_exif_says(self, orientation, tmp_path, picture):
        pixels = picture(tmp_path / "cat" / "1.png", orientation=orientation)
        picture(tmp_path / "cat" / "2.png", size=ORIENTATIONS[orientation](pixels).shape[::-1])
        data = torch.cat(
            [part.inputs for part in load("image_folder", path=str(tmp_path), grey=True, test_fraction=0.4)]
        )
        expected = ORIENTATIONS[orientation](pixels)
        assert any(np.array_equal(image[0], expected) for image in data)


def test_pictures_of_data_sets_are_rotated_and_have_no_palette(tmp_path, picture):
    image = pytest.importorskip("PIL.Image")
    pixels = picture(tmp_path / "1.png", orientation=6)
    colours = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
    with image.open(tmp_path / "1.png") as turned:
        data = fedsim.data.as_tensor_data([(turned, 0)])
        assert np.array_equal(data.inputs[0, 0], np.rot90(pixels, -1))
    palette = image.fromarray(colours).quantize(256, method=image.Quantize.FASTOCTREE)
    data = fedsim.data.as_tensor_data([(palette, 0), (image.fromarray(colours), 1)])
    assert np.array_equal(data.inputs[1], colours.transpose(2, 0, 1))
    assert (data.inputs[0].int() - data.inputs[1].int()).abs().max() < 30
    bits = image.fromarray(np.array([[0, 255]], dtype=np.uint8)).convert("1")
    assert fedsim.data.as_tensor_data([(bits, 0)]).gather(torch.arange(1))[0].tolist() == [[[[0.0, 1.0]]]]


def test_pictures_of_leaf_are_rotated(tmp_path, picture):
    pixels = picture(tmp_path / "a.png", orientation=6)
    for part in ("Train", "TEST"):
        (tmp_path / part).mkdir()
        data = {"users": ["1"], "user_data": {"1": {"x": ["a.png"], "y": [0]}}}
        (tmp_path / part / "all.json").write_text(json.dumps(data))
    image = pytest.importorskip("PIL.Image")
    train, _ = load("leaf", path=str(tmp_path), images=str(tmp_path), size=5)
    upright = image.fromarray(np.rot90(pixels, -1).copy()).convert("RGB").resize((5, 5))
    assert np.array_equal(train.inputs[0], np.asarray(upright).transpose(2, 0, 1))


class TestTables:
    @pytest.fixture(autouse=True)
    def _needs_pyarrow(self):
        pytest.importorskip("pyarrow")

    def write(self, path, header, rows):
        path.write_text("\n".join([header, *rows]) + "\n")
        return str(path)

    @pytest.mark.parametrize("name", ["", "Unnamed: 0", "index", "Index", "level_0", "id", "ID"])
    @pytest.mark.parametrize(("step", "first"), [(1, 0), (7, 0), (1, 100)])
    def test_a_column_that_numbers_the_rows_is_not_an_input(self, name, step, first, tmp_path):
        rows = [f"{step * k % 15 + first},{k / 4},{k % 2}" for k in range(15)]
        path = self.write(tmp_path / "a.csv", f"{name},x,y", rows)
        line = f'a.csv: column "{name}" only numbers the rows, and is not an input'
        train, test = load("csv", line, path=path)
        assert sorted(torch.cat([train.inputs, test.inputs]).flatten().tolist()) == [k / 4 for k in range(15)]
        assert load("csv", path=path, inputs=[name, "x"], standardize=True)[0].inputs.shape == (12, 2)
        assert load("csv", path=path, ids=[name])[0].inputs.shape == (12, 1)

    def test_other_columns_without_a_name_are_an_error(self, tmp_path):
        path = self.write(tmp_path / "a.csv", ",x,y", [f"{k // 2},{k / 4},{k % 2}" for k in range(20)])
        refused("csv", 'a.csv: column "" has no name; give it a name', path=path)
        assert load("csv", path=path, inputs=["x"])[0].inputs.shape == (16, 1)
        path = self.write(tmp_path / "b.csv", "x,y,", [f"{k / 4},{k % 2}," for k in range(20)])
        refused("csv", 'column "" has no name; .* .such as a comma at line ends', path=path)

    def test_a_test_file_may_have_another_index(self, tmp_path):
        train_path = self.write(tmp_path / "a.csv", ",x,y", [f"{k},{k / 4},{k % 2}" for k in range(8)])
        test_path = self.write(tmp_path / "b.csv", ",x,y", [f"{k + 8},{k / 4},{k % 2}" for k in range(4)])
        _, test = load("csv", "only numbers the rows", path=train_path, test_path=test_path)
        assert test.inputs.flatten().tolist() == [0, 0.25, 0.5, 0.75]

    def test_the_index_of_a_frame_in_a_parquet_file_is_not_an_input(self, tmp_path):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"x": np.arange(10.0), "y": np.arange(10) % 2})
        frame.sample(frac=1, random_state=0).to_parquet(tmp_path / "a.parquet")
        line = 'column "__index_level_0__" only numbers the rows'
        assert load("parquet", line, path=str(tmp_path / "a.parquet"))[0].inputs.shape == (8, 1)
        frame.sample(frac=1, random_state=0).rename_axis("number").to_parquet(tmp_path / "b.parquet")
        train, _ = load("parquet", path=str(tmp_path / "b.parquet"))
        assert (train.inputs.shape, list(train.ids)) == ((8, 1), ["number"])
        frame[2:].sample(frac=1, random_state=0).rename_axis("index").to_parquet(tmp_path / "c.parquet")
        line = 'column "index" only numbers the rows'
        assert load("parquet", line, path=str(tmp_path / "c.parquet"), test_fraction=0.5)[0].inputs.shape == (4, 1)
        both = {"inputs": ["x", "number"], "ids": []}
        assert load("parquet", path=str(tmp_path / "b.parquet"), **both)[0].inputs.shape == (8, 2)

    def test_a_data_frame_that_was_read_with_its_index_is_meant_without(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"Unnamed: 0": np.arange(10), "x": np.arange(10.0), "y": np.arange(10) % 2})
        assert load((frame, frame), 'the training data: column "Unnamed: 0" only numbers')[0].inputs.shape == (10, 1)

    def test_other_columns_called_index_are_inputs(self, tmp_path):
        for value in ("0", "0.5"):
            path = self.write(tmp_path / "a.csv", "index,id,y", [f"{value},{value},{k % 2}" for k in range(20)])
            assert load("csv", path=path)[0].inputs.shape == (16, 2)

    def test_columns_of_data_frames_without_one_text_as_name(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({None: np.arange(10), "x": np.arange(10.0), "y": np.arange(10) % 2})
        assert load((frame, frame), "only numbers the rows")[0].inputs.shape == (10, 1)
        refused((frame / 2, frame), "the training data: column .* has no name; ")
        levels = pandas.DataFrame({("x", "mean"): [1.0, 2.0], ("y", ""): [0, 1]})
        refused((levels, levels), r"the training data: must have exactly one .* of the columns \('x', 'mean'\)")
        twice = pandas.DataFrame(np.ones((4, 3)), columns=["x", "x", "y"])
        refused((twice, twice), 'the training data: has two columns "x"; rename or remove one of the two')
        numbered = frame[["x", "y"]].rename(columns={"x": 7})
        assert load((numbered, numbered))[0].inputs.shape == (10, 1)
        refused((numbered, numbered[["y"]]), "the test data: has no column 7; ")
        refused((pandas.DataFrame(np.zeros((2, 3))),) * 2, "set data.target to one of the columns 0, 1, 2, or")

    def test_spaces_around_labels_and_owners_are_removed(self, tmp_path):
        rows = [f"{k / 4},{('ann', 'ann ', 'bob')[k % 3]},{('dog', ' dog', 'cat')[k % 3]}" for k in range(12)]
        path = self.write(tmp_path / "a.csv", "x,user,y", rows)
        lines = [
            'column "y": spaces around 4 of 12 values are removed, such as in " dog"',
            'column "user": spaces around 4',
        ]
        train, test = load("csv", *lines, path=path, ids=["user"], inputs=["x"])
        number = np.rint(torch.cat([train.inputs, test.inputs]).flatten().numpy() * 4).astype(int)
        assert torch.cat([train.targets, test.targets]).tolist() == [int(k % 3 != 2) for k in number]
        assert np.concatenate([train.ids["user"], test.ids["user"]]).tolist() == [
            "bob" if k % 3 == 2 else "ann" for k in number
        ]
        path = self.write(tmp_path / "b.csv", "x,y", ["1,a", "2, ", "3,b"])
        refused("csv", 'column "y": has no value in line 3', path=path)

    def test_an_image_beside_numbers_is_an_error(self):
        image, pandas = pytest.importorskip("PIL.Image"), pytest.importorskip("pandas")
        pictures = [image.fromarray(np.full((4, 5), k, dtype=np.uint8)) for k in range(4)]
        frame = pandas.DataFrame({"image": pictures, "age": [1.0, 2.0, 3.0, 4.0], "label": [0, 1, 0, 1]})
        refused((frame, frame), 'columns image, age are not joined to one input, because "image" has several numbers')
        shapes = r'column "image" has values of shape \[1, 4, 5\], .* set data.inputs to one of .* image, age'
        refused((frame, frame), shapes, inputs=["image", "age"])
        tokens = pandas.DataFrame({"input_ids": [[1, 2]] * 9, "mask": [[1, 0]] * 9, "label": [0, 1, 2] * 3})
        refused(tokens, "^the training data: the columns input_ids, mask are not joined to one input, because ")
        assert load((tokens, tokens), inputs="input_ids")[0].inputs.shape == (9, 2)
        assert load((tokens, tokens), inputs=["input_ids", "mask"])[0].inputs.shape == (9, 4)
        alone = frame.drop(columns="age")
        assert load((alone, alone))[0].inputs.shape == (4, 1, 4, 5)


class TestHuggingFace:
    @pytest.fixture(autouse=True)
    def _datasets(self, tmp_path):
        self.datasets = pytest.importorskip("datasets")

    def save(self, folder, names, **columns):
        columns = columns or {"x": [0.0, 1.0, 2.0, 3.0, 4.0], "label": [0, 1, 0, 1, 0]}
        parts = {
            name: self.datasets.Dataset.from_dict(
                {key: [value + 10 * k for value in values] if key == "x" else values for key, values in columns.items()}
            )
            for k, name in enumerate(names)
        }
        self.datasets.DatasetDict(parts).save_to_disk(folder)
        return str(folder)

    @pytest.mark.parametrize("names", [("train", "validation"), ("Train", "Test"), ("training", "val")])
    def test_names_of_splits_are_compared_without_case(self, names, tmp_path):
        train, test = load("huggingface", path=self.save(tmp_path / "saved", names))
        assert train.inputs.flatten().tolist() == [0, 1, 2, 3, 4]
        assert test.inputs.flatten().tolist() == [10, 11, 12, 13, 14]

    def test_a_split_that_is_named_is_taken(self, tmp_path):
        path = self.save(tmp_path / "saved", ("train", "validation", "test"))
        assert load("huggingface", "validation is not used", path=path)[1].inputs[0] == 20
        _, test = load("huggingface", path=path, train="train", test="validation")
        assert test.inputs[0] == 10
        refused("huggingface", 'data.train = "full": no such split', path=path, train="full", test="test")


def test_arrays_with_the_same_role_are_an_error(tmp_path):
    arrays = {"x": np.zeros((4, 2), np.float32), "y": np.arange(4), "targets": np.arange(4)[::-1].copy()}
    np.savez(tmp_path / "a.npz", **arrays)
    refused("npz", "has several arrays of targets: targets, y; keep only one", path=str(tmp_path / "a.npz"))


def test_spaces_around_owners_in_arrays_are_removed(tmp_path):
    owners = np.array(["ann", "ann ", "bob", "bob"])
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, int), user=owners)
    parts = load("npz", 'a.npz: "user": spaces around 1 of 4 values', path=str(tmp_path / "a.npz"), test_fraction=0.25)
    assert sorted(np.concatenate([part.ids["user"] for part in parts]).tolist()) == ["ann", "ann", "bob", "bob"]


def test_texts_are_read_once_and_with_every_ending(tmp_path):
    for name in ("a.txt", "B.TXT", ".hidden.txt", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name * 100)
    train, _ = load("text", path=str(tmp_path), length=8)
    read = sorted(set(train.ids["file"].tolist()))
    assert read == sorted(str(tmp_path / name) for name in ("a.txt", "B.TXT", "sub/c.txt"))
    refused("text", r'a.txt" is named twice', path=[str(tmp_path), str(tmp_path / "a.txt")], length=8)
