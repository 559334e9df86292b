"""Data sets in files: each format gives the samples that were written, and bad files give one line."""

from __future__ import annotations

import json
import shutil
from decimal import Decimal

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import fedsim
from fedsim.errors import FedsimWarning
from tests.data.loading import load, refused

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(20, 3)).astype(np.float32)
LABELS = np.arange(20) % 4
USERS = np.array(["ann", "bob", "cy", "di"]).repeat(5)


def write_table(path, inputs=INPUTS, targets=LABELS, users=USERS):
    rows = [f"{a},{b},{c},{user},{y}" for (a, b, c), user, y in zip(inputs.tolist(), users, targets, strict=True)]
    path.write_text("\n".join(["a,b,c,user,y", *rows]) + "\n")
    return str(path)


def in_both_parts(train, test):
    """All samples of a data set whose test part was drawn: inputs, targets and users, in the order of the inputs."""
    inputs = torch.cat([train.inputs, test.inputs]).numpy()
    targets = torch.cat([train.targets, test.targets]).numpy()
    users = np.concatenate([train.ids["user"], test.ids["user"]])
    order = np.lexsort(inputs.reshape(len(inputs), -1).T)
    return inputs[order], targets[order], users[order]


def assert_same_samples(train, test, owners=USERS):
    order = np.lexsort(INPUTS.T)
    inputs, targets, users = in_both_parts(train, test)
    assert np.allclose(inputs, INPUTS[order])
    assert (targets == LABELS[order]).all()
    assert (users == owners[order]).all()
    assert len(test) == 5


class TestTables:
    def test_csv(self, tmp_path):
        train, test = fedsim.load_dataset("csv", path=write_table(tmp_path / "t.csv"), ids=["user"], test_fraction=0.25)
        assert_same_samples(train, test)

    def test_parquet_with_a_test_file(self, tmp_path):
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        table = pyarrow.table({"x": INPUTS.tolist(), "label": np.array(["dog", "cat", "owl", "cat"])[LABELS]})
        parquet.write_table(table, tmp_path / "train.parquet")
        parquet.write_table(table.slice(0, 3), tmp_path / "test.parquet")
        paths = {"path": str(tmp_path / "train.parquet"), "test_path": str(tmp_path / "test.parquet")}
        train, test = fedsim.load_dataset("parquet", **paths)
        assert np.allclose(train.inputs, INPUTS)
        assert train.inputs.dtype == torch.float32
        assert train.targets.tolist() == np.array([1, 0, 2, 0])[LABELS].tolist()
        assert len(test) == 3

    @pytest.mark.parametrize(
        ("change", "params", "match"),
        [
            ({"targets": [""] * 20}, {"ids": ["user"]}, r'"y": has no value in line 2 \(20 such values\); remove'),
            ({}, {"ids": ["usr"]}, 'has no column "usr"; did you mean "user"'),
            ({}, {"target": "z", "ids": ["user"]}, 'has no column "z"'),
            (
                {"inputs": np.where(INPUTS[7, 1] == INPUTS, np.nan, INPUTS)},
                {"ids": ["user"]},
                'column "b": contains NaN or no value in line 9; remove such rows',
            ),
        ],
    )
    def test_bad_columns(self, change, params, match, tmp_path):
        refused("csv", match, path=write_table(tmp_path / "t.csv", **change), **params)

    def test_tabs_separate_the_columns_of_a_tsv_file(self, tmp_path):
        pytest.importorskip("pyarrow")
        (tmp_path / "t.tsv").write_text("a\tb\ty\n" + "1,5\t2\t0\n".replace(",", ".") * 5)
        train, _ = fedsim.load_dataset("csv", path=str(tmp_path / "t.tsv"))
        assert train.inputs.tolist() == [[1.5, 2.0]] * 4

    def test_bad_files(self, tmp_path):
        pytest.importorskip("pyarrow")
        refused("csv", "t.csv: cannot be read", path=str(tmp_path / "t.csv"))
        (tmp_path / "t.csv").write_text("")
        refused("csv", "t.csv: cannot be read: .*Empty CSV file", path=str(tmp_path / "t.csv"))
        (tmp_path / "t.csv").write_text("a,y\n1,2\n1,2,3\n")
        refused("csv", "t.csv: cannot be read: .* got 3: 1,2,3", path=str(tmp_path / "t.csv"))
        (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
        refused("parquet", "t.parquet: cannot be read", path=str(tmp_path / "t.parquet"))
        for text, match in [
            ("a,a,y\n1,2,0\n", 'has two columns "a"'),
            ("a,y\n", "has no samples"),
            (
                "a,y\n" + "1e300,0\n1,0\n2,0\n",
                r'column "a": contains 1e\+300, which float32 cannot hold, in line 2; remove',
            ),
            ("\u00e4,y\n1,0\n", r'line 1 is not UTF-8 \("ä" in Latin-1\); save the file as UTF-8, .* iconv'),
            ("a,y\n\u00e4,0\n", r'line 2 is not UTF-8 \("ä" in Latin-1\); save'),
        ]:
            (tmp_path / "t.csv").write_text(text, encoding="latin-1")
            refused("csv", f"t.csv: .*{match}", path=str(tmp_path / "t.csv"))

    def test_an_empty_cell_is_no_owner_and_no_class(self, tmp_path):
        pytest.importorskip("pyarrow")
        for lines, column in [("1,ann,u\n2,,v\n", "user"), ("1,ann,u\n2,bob,\n", "y")]:
            (tmp_path / "t.csv").write_text(f"a,user,y\n{lines}")
            match = f'column "{column}": has no value in line 3; remove such rows or fill in'
            refused("csv", match, path=str(tmp_path / "t.csv"), ids=["user"])

    def test_classes_of_the_test_file_must_have_training_samples(self, tmp_path):
        pytest.importorskip("pyarrow")
        (tmp_path / "train.csv").write_text("a,y\n1,u\n2,v\n")
        for label in ("w", "0"):
            (tmp_path / "test.csv").write_text(f"a,y\n1,{label}\n")
            match = f'test.csv: column "y": the class "{label}" has no training samples'
            refused("csv", match, path=str(tmp_path / "train.csv"), test_path=str(tmp_path / "test.csv"))


FRAME = {"a": INPUTS[:, 0], "b": INPUTS[:, 1], "label": np.array(["no", "yes", "no", "maybe"])[LABELS]}


class TestFrames:
    def assert_samples(self, train, test):
        assert np.array_equal(train.inputs, INPUTS[:15, :2])
        assert train.targets.tolist() == np.array([1, 2, 1, 0])[LABELS[:15]].tolist()
        assert len(test) == 5

    def test_data_frames_with_owners_in_a_named_index(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({**FRAME, "user": USERS}).set_index("user")
        train, test = fedsim.load_dataset((frame[:15], frame[15:]))
        self.assert_samples(train, test)
        assert train.ids["user"].tolist() == USERS[:15].tolist()

    def test_a_single_frame_has_test_samples_drawn_at_random(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"a": INPUTS[:, 0], "b": INPUTS[:, 1], "label": LABELS, "user": USERS})
        tables = {"data": frame.set_index("user"), "model": {"name": "logistic", "inputs": 2, "classes": 4}}
        result = fedsim.run({**tables, "partition": "natural", "rounds": 1, "engine": "serial"})
        assert result.experiment.workers == 4
        assert sum(result.history[0].samples) == 16

    def test_hugging_face_data_sets(self):
        datasets = pytest.importorskip("datasets")
        split = datasets.Dataset.from_dict(FRAME)
        self.assert_samples(*fedsim.load_dataset((split.select(range(15)), split.select(range(15, 20)))))

    def test_decimals_are_numbers(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"x": [1.0, 2.0], "y": [Decimal("0.5"), Decimal("1.5")]})
        assert fedsim.load_dataset((frame, frame))[0].targets.tolist() == [0.5, 1.5]

    @pytest.mark.parametrize(
        ("targets", "match"),
        [
            (["a", None], 'column "y": has no value in row 1'),
            (["a", float("nan")], 'column "y": has no value in row 1'),
            (["a", 1], 'column "y": must contain only text, or only numbers of one shape'),
        ],
    )
    def test_bad_targets(self, targets, match):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"x": [1.0, 2.0], "y": np.array(targets, dtype=object)})
        refused((frame, frame), match)

    def test_a_frame_without_targets_gives_one_line(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"a": [1.0], "b": [2.0]})
        refused((frame, frame), "the training data: must have exactly one column with one of the names label")


class TestArrays:
    def write(self, folder, suffix=".npz", **arrays):
        path = str(folder / f"data{suffix}")
        (np.savez(path, **arrays) if suffix == ".npz" else save_file(arrays, path))
        return path

    @pytest.mark.parametrize(("suffix", "users"), [(".npz", USERS), (".safetensors", np.arange(20) // 5)])
    def test_arrays_are_samples(self, suffix, users, tmp_path):
        path = self.write(tmp_path, suffix, inputs=INPUTS, targets=LABELS, user=users)
        assert_same_samples(*fedsim.load_dataset(suffix[1:], path=path, test_fraction=0.25), users)

    def test_images_stay_uint8_until_a_batch_is_made(self, tmp_path):
        images = RNG.integers(0, 256, (6, 3, 6, 6)).astype(np.uint8)
        path = self.write(tmp_path, x_train=images, y_train=np.arange(6), x_test=images[:2], y_test=np.arange(2))
        train, test = fedsim.load_dataset("npz", path=path)
        assert train.inputs.dtype == torch.uint8
        assert len(test) == 2
        assert torch.allclose(train.gather(torch.arange(6))[0], torch.from_numpy(images) / 255)

    @pytest.mark.parametrize(
        ("arrays", "match"),
        [
            ({"inputs": INPUTS}, "has no array targets, only inputs"),
            ({"inputs": INPUTS, "targets": LABELS[:19]}, "there are 20 inputs, but 19 targets"),
            ({"inputs": INPUTS, "targets": LABELS, "user": USERS[:4]}, r'"user" has shape \[4\]; .* \[20\]'),
            (
                {"x_train": INPUTS, "y_train": LABELS, "x_more": INPUTS[:5]},
                r'"x_more" has shape \[5, 3\]; must be one of inputs, x_train, x, .*, test_labels, .*, or',
            ),
            ({"x_train": INPUTS, "y_train": LABELS, "x_val": INPUTS[:5]}, "has no array test_targets, only"),
            ({"inputs": np.full((2, 2), np.inf), "targets": LABELS[:2]}, r"inputs: contains inf, .* in row 0 \(2 such"),
            ({"inputs": INPUTS, "targets": np.full(20, np.nan)}, "targets: contains NaN or no value in row 0"),
            ({"inputs": INPUTS, "targets": LABELS, "test_inputs": INPUTS}, "has no array test_targets"),
            ({"inputs": INPUTS, "targets": LABELS, "test_targets": LABELS}, "has no array test_inputs"),
            (
                {"inputs": np.array([{}, {}]), "targets": LABELS[:2]},
                "an array contains Python objects, whose reading could run code; write text as",
            ),
        ],
    )
    def test_bad_arrays(self, arrays, match, tmp_path):
        refused("npz", match, path=self.write(tmp_path, **arrays))

    @pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
    def test_truncated_files(self, suffix, tmp_path):
        path = self.write(tmp_path, suffix, inputs=INPUTS, targets=LABELS)
        content = (tmp_path / f"data{suffix}").read_bytes()
        (tmp_path / f"data{suffix}").write_bytes(content[:-30])
        refused(suffix[1:], f"data{suffix}: cannot be read", path=path)
        refused(suffix[1:], f"none{suffix}: cannot be read", path=str(tmp_path / f"none{suffix}"))

    def test_pickles_are_refused(self, tmp_path):
        torch.save({"inputs": 1}, tmp_path / "data.pt")
        refused(
            "npz",
            r"\.pt files are not read, because reading a pickle can run code; write",
            path=str(tmp_path / "data.pt"),
        )


class TestImageFolder:
    @staticmethod
    def write(folder, parts=("train", "test"), owners=("",), size=(6, 4)):
        image = pytest.importorskip("PIL.Image")
        for number, (part, name, owner) in enumerate((p, n, o) for p in parts for n in ("cat", "dog") for o in owners):
            file = folder / part / name / owner / "one.png"
            file.parent.mkdir(parents=True)
            image.fromarray(np.full((*size, 3), number, dtype=np.uint8)).save(file)
        return str(folder)

    def test_parts_and_classes_are_folders(self, tmp_path):
        train, test = fedsim.load_dataset("image_folder", path=self.write(tmp_path))
        assert train.inputs.shape == (2, 3, 6, 4)
        assert train.targets.tolist() == [0, 1] == test.targets.tolist()
        assert train.inputs[:, 0, 0, 0].tolist() == [0, 1]
        assert test.inputs[:, 0, 0, 0].tolist() == [2, 3]
        assert not train.ids

    def test_owners_are_folders_below_the_class(self, tmp_path):
        train, _ = fedsim.load_dataset("image_folder", path=self.write(tmp_path, owners=("ann", "bob")))
        assert train.ids["owner"].tolist() == ["ann", "bob"] * 2

    def test_parts_may_be_folders_below_the_owner(self, tmp_path):
        for owner, parts in (("cy", ("test",)), ("bob", ("train",)), ("ann", ("train", "test", "notes"))):
            self.write(tmp_path / owner, parts)
        train, test = load("image_folder", "parts that are not used: notes", path=str(tmp_path))
        assert (train.ids["owner"].tolist(), train.targets.tolist()) == (["ann", "ann", "bob", "bob"], [0, 1] * 2)
        assert (test.ids["owner"].tolist(), test.targets.tolist()) == (["ann", "ann", "cy", "cy"], [0, 1] * 2)
        assert (test.inputs[:, 0, 0, 0].tolist(), train.drawn_by) == ([2, 3, 0, 1], None)
        run = {"data": {"name": "image_folder", "path": str(tmp_path)}, "partition": "natural", "rounds": 1}
        with pytest.warns(FedsimWarning, match="notes"):
            result = fedsim.run(run, model="logistic", engine="serial")
        assert result.worker_accuracy is not None
        assert "unseen_worker_accuracy_mean" in result.history[-1].metrics

    def test_folders_below_the_owner_that_do_not_fit(self, tmp_path):
        self.write(tmp_path / "ann", ("train",))
        (tmp_path / "ann" / "test").mkdir()
        refused("image_folder", "1 of 2 samples would be drawn for tests", path=str(tmp_path), test_fraction=0.5)
        self.write(tmp_path / "bob", ("Train",))
        refused("image_folder", "Train and train are names of the same part", path=str(tmp_path))
        (tmp_path / "bob").rename(tmp_path / "ann" / "test" / "bob")
        refused("image_folder", "folder of one of the classes cat, dog", path=str(tmp_path))
        shutil.rmtree(tmp_path / "ann" / "test")
        (tmp_path / "ann/train/cat/one.png").rename(tmp_path / "ann/train/one.png")
        refused("image_folder", "is not at .*/OWNER/train/CLASS/IMAGE, .* to .*/train/CLASS/IMAGE", path=str(tmp_path))

    def test_images_are_resized_and_converted(self, tmp_path):
        self.write(tmp_path, parts=("train",))
        self.write(tmp_path, parts=("test",), size=(8, 8))
        train, test = fedsim.load_dataset("image_folder", path=str(tmp_path), size=5, grey=True)
        assert train.inputs.shape[1:] == test.inputs.shape[1:] == (1, 5, 5)

    def test_hidden_folders_are_no_classes(self, tmp_path):
        train, _ = fedsim.load_dataset("image_folder", path=self.write(tmp_path / "shown"))
        path = self.write(tmp_path / "hidden")
        for part in ("train", "test"):
            (tmp_path / "hidden" / part / "cat").rename(tmp_path / "hidden" / part / ".cache")
        hidden, _ = fedsim.load_dataset("image_folder", path=path)
        assert (train.classes, hidden.classes, len(hidden)) == (2, 1, 1)

    def test_bad_folders(self, tmp_path):
        refused("image_folder", "none: no such folder", path=str(tmp_path / "none"))
        refused("image_folder", "has no images", path=str(tmp_path))
        self.write(tmp_path, parts=("train",))
        (tmp_path / "train/dog/two.png").write_bytes(b"no image")
        refused("image_folder", "two.png: cannot be read", path=str(tmp_path))
        (tmp_path / "train/dog/two.png").unlink()
        self.write(tmp_path, parts=("other",), size=(3, 3))
        (tmp_path / "other/cat").rename(tmp_path / "train/eel")
        shutil.rmtree(tmp_path / "other")
        refused("image_folder", "has 3 x 3 pixels, but one.png has 4 x 6; set data.size", path=str(tmp_path))
        (tmp_path / "train").rename(tmp_path / "val")
        refused("image_folder", "has a folder val, but no folder train", path=str(tmp_path))

    def test_more_than_8_bits_are_refused_and_not_cut_off(self, tmp_path):
        image = pytest.importorskip("PIL.Image")
        path = self.write(tmp_path, parts=("train",))
        image.fromarray(np.full((6, 4), 40_000, dtype=np.uint16)).save(tmp_path / "train/cat/one.png")
        refused("image_folder", "one.png: cannot be read: .*convert it to 8 bits per channel", path=path)

    def test_links_to_folders_are_followed(self, tmp_path):
        self.write(tmp_path / "real")
        (tmp_path / "links").mkdir()
        for part in ("train", "test"):
            (tmp_path / "links" / part).mkdir()
            for name in ("cat", "dog"):
                (tmp_path / "links" / part / name).symlink_to(tmp_path / "real" / part / name)
        train, test = fedsim.load_dataset("image_folder", path=str(tmp_path / "links"))
        assert (len(train), len(test)) == (2, 2)


class TestLeaf:
    @staticmethod
    def write(folder, data, parts=("train", "test")):
        for part in parts:
            (folder / part).mkdir(exist_ok=True)
            content = {"users": list(data), "num_samples": [len(d["y"]) for d in data.values()], "user_data": data}
            (folder / part / "all_data_0.json").write_text(json.dumps(content))
        return str(folder)

    def test_femnist(self, tmp_path):
        data = {"f1": {"x": [[0.5] * 4, [1.0] * 4], "y": [3, 1]}, "f2": {"x": [[0.25] * 4], "y": [0]}}
        train, test = fedsim.load_dataset("leaf", path=self.write(tmp_path, data), shape=[1, 2, 2], channels="first")
        assert train.inputs.shape == (3, 1, 2, 2)
        assert train.inputs[:, 0, 0, 0].tolist() == [0.5, 1.0, 0.25]
        assert train.targets.tolist() == [3, 1, 0]
        assert train.ids["user"].tolist() == ["f1", "f1", "f2"]
        assert len(test) == 3

    def test_shakespeare_has_the_numbers_of_leaf(self, tmp_path):
        data = {"HAMLET": {"x": ["To be", " be, "], "y": [",", "o"]}}
        train, _ = fedsim.load_dataset("leaf", path=self.write(tmp_path, data))
        assert train.inputs.tolist() == [[44, 67, 1, 54, 57], [1, 54, 57, 8, 1]]
        assert train.targets.tolist() == [8, 67]

    def test_celeba_reads_images(self, tmp_path):
        image = pytest.importorskip("PIL.Image")
        image.fromarray(np.full((9, 7, 3), 5, dtype=np.uint8)).save(tmp_path / "a.png")
        data = {"1": {"x": ["a.png"], "y": [1]}}
        train, _ = fedsim.load_dataset("leaf", path=self.write(tmp_path, data), images=str(tmp_path), size=8)
        assert train.inputs.shape == (1, 3, 8, 8)
        assert train.inputs.unique().tolist() == [5]

    @pytest.mark.parametrize(
        ("user_data", "params", "match"),
        [
            ({"x": [[1.0]], "y": []}, {}, 'user "u": has 1 inputs and 0 targets'),
            ({"x": [[1.0], [1.0, 2.0]], "y": [0, 0]}, {}, "inputs of different shapes"),
            ({"x": [[1.0]], "y": [0]}, {"shape": [2]}, r"data.shape = \[2\]: must have as many .* has 1 values"),
            ({"x": ["é"], "y": ["a"]}, {}, "is not one of LEAF's 80 characters"),
            ({"x": [[None]], "y": [0]}, {}, "numbers|must be"),
            ({"x": ["a.png"], "y": [0]}, {"images": "nowhere"}, "nowhere/a.png: cannot be read"),
        ],
    )
    def test_bad_users(self, user_data, params, match, tmp_path):
        refused("leaf", match, path=self.write(tmp_path, {"u": user_data}), **params)

    def test_a_folder_without_files(self, tmp_path):
        refused("leaf", "train: has no .json files", path=str(tmp_path))

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            ('{"users": ["u"], ', "all_data_0.json: cannot be read: JSONDecodeError: Expecting"),
            ('{"users": ["u"]}', "all_data_0.json: has no key 'user_data'"),
            ('{"users": ["u"], "user_data": {}}', 'user "u": must have the keys x and y'),
            ('{"users": [], "user_data": {}}', "test: has no samples"),
            ("[" * 100_000, "all_data_0.json: cannot be read: RecursionError"),
            ('{"users": ["u", "u"], "user_data": {"u": {"x": [[1.0]], "y": [0]}}}', 'names the user "u" twice'),
            ('{"users": [], "user_data": {"u": {"x": [[1.0]], "y": [0]}}}', 'of the user "u", who is not in its list'),
            ('{"users": ["u"], "user_data": {"u": {"x": [[1.0]], "y": ["3"]}}}', 'the target "3" is text, but the inp'),
        ],
    )
    def test_bad_files(self, content, match, tmp_path):
        path = self.write(tmp_path, {"u": {"x": [[1.0]], "y": [0]}})
        (tmp_path / "test/all_data_0.json").write_text(content)
        refused("leaf", f"test.*{match}", path=path)


class TestHuggingFace:
    def test_a_saved_data_set_with_pictures_and_writers(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        image = pytest.importorskip("PIL.Image")
        pictures = [image.fromarray(np.full((4, 5), k, dtype=np.uint8)) for k in range(6)]
        columns = {"image": pictures, "character": [0, 1] * 3, "writer_id": ["ann"] * 4 + ["bob"] * 2}
        split = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
        datasets.DatasetDict({"train": split, "test": split.select([0])}).save_to_disk(tmp_path / "saved")
        options = {"inputs": ["image"], "target": "character", "ids": ["writer_id"]}
        train, test = fedsim.load_dataset("huggingface", path=str(tmp_path / "saved"), **options)
        assert train.inputs.shape == (6, 1, 4, 5)
        assert train.inputs[:, 0, 0, 0].tolist() == list(range(6))
        assert train.ids["writer_id"].tolist() == ["ann"] * 4 + ["bob"] * 2
        assert len(test) == 1

    def test_bad_folders(self, tmp_path):
        pytest.importorskip("datasets")
        refused("huggingface", "cannot be read", path=str(tmp_path))


def test_synthetic_is_the_generator_of_fedprox():
    """Sizes, splits and the parts of the distribution that can be read off the samples."""
    train, test = fedsim.load_dataset("synthetic", alpha=0.0, beta=0.0, users=400)
    sizes = np.bincount(train.ids["user"]) + np.bincount(test.ids["user"])
    assert sizes.min() >= 50
    assert 4 - 0.4 < np.log(sizes - 49.5).mean() < 4 + 0.4
    assert all(np.bincount(train.ids["user"]) == (0.9 * sizes).astype(int))
    largest = train.ids["user"] == np.argmax(sizes)
    variances = train.inputs[torch.from_numpy(largest)].var(0).numpy()
    assert np.allclose(variances, np.arange(1, 61) ** -1.2, rtol=0.35)
    centers = np.array([train.inputs[torch.from_numpy(train.ids["user"] == k)].numpy().mean(0) for k in range(400)])
    assert abs(centers.mean()) < 0.05
    assert 0.9 < centers[:, 30:].std() < 1.1
    shifted, _ = fedsim.load_dataset("synthetic", alpha=0.0, beta=3.0, users=400)
    means = [shifted.inputs[torch.from_numpy(shifted.ids["user"] == k)].numpy().mean() for k in range(400)]
    assert 2.7 < np.std(means) < 3.3


def test_alpha_of_synthetic_changes_no_sample():
    (plain, _), (shifted, _) = (fedsim.load_dataset("synthetic", alpha=alpha, users=40) for alpha in (0.0, 2.0))
    assert torch.equal(plain.inputs, shifted.inputs)
    assert torch.equal(plain.targets, shifted.targets)


def test_synthetic_iid_has_one_model_for_all_users():
    train, test = fedsim.load_dataset("synthetic", iid=True, users=30)
    inputs, labels = train.inputs.double(), train.targets
    linear = torch.nn.Linear(60, 10).double()
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200)

    def loss():
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(linear(inputs), labels)
        value.backward()
        return value

    optimizer.step(loss)
    assert (linear(test.inputs.double()).argmax(1) == test.targets).double().mean() > 0.95
