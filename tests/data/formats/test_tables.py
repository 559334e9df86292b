"""Tables as people export them: text, scales and delimiters become what is documented, and bad cells are named."""

from __future__ import annotations

import gzip
import json
import re
import warnings

import numpy as np
import pytest
import torch

import fedsim
from fedsim.data.columns import DataColumn
from fedsim.data.encoding import DataTable, train_and_test
from fedsim.data.partitions.ids import NUMBER, owners_of
from fedsim.errors import DataError, FedsimError, FedsimWarning
from tests.data.loading import load, refused

pytest.importorskip("pyarrow")
SCALES = "for which SGD often diverges; data.standardize=true scales every column of numbers"


@pytest.fixture
def csv(tmp_path):
    """Return a function that writes a CSV file and returns its path."""

    def write(text, name="t.csv"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(tmp_path / name)

    return write


def lines(*columns, names=("x", "y"), separator=","):
    rows = [separator.join(map(str, row)) for row in zip(*columns, strict=True)]
    return "\n".join([separator.join(names), *rows]) + "\n"


HALVES, BITS = [k / 2 for k in range(10)], [k % 2 for k in range(10)]
CITIES = ["Rome", "Oslo"] * 5


@pytest.mark.parametrize("seed", range(5))
def test_standardized_columns_have_the_statistics_of_the_training_part(seed):
    """By definition: (x - mean) / std of the training part, and x - mean where it is constant."""
    rng = np.random.default_rng(seed)
    scale, shift = 10.0 ** rng.integers(-3, 6, 4), rng.normal(size=4) * 100
    parts = [rng.normal(size=(n, 4)) * scale + shift for n in (30, 7)]
    parts[0][:, 3], parts[1][:, 3] = 5, 7
    tables = [DataTable({**dict(zip("abcd", part.T, strict=True)), "y": part[:, 3]}, "table") for part in parts]
    train, test = train_and_test(*([table] for table in tables), standardize=True)
    mean, std = parts[0][:, :3].mean(0), parts[0][:, :3].std(0)
    assert np.allclose(train.inputs[:, :3], (parts[0][:, :3] - mean) / std, atol=1e-5)
    assert np.allclose(test.inputs[:, :3], (parts[1][:, :3] - mean) / std, atol=1e-5)
    assert (train.inputs[:, 3].unique().tolist(), test.inputs[:, 3].unique().tolist()) == ([0], [2])
    assert train.targets.numpy().tolist() == parts[0][:, 3].tolist()


def test_drawn_test_samples_do_not_change_the_statistics():
    values = np.random.default_rng(0).normal(size=50) * 9
    train, test = train_and_test([DataTable({"x": values, "y": values}, "table")], [], standardize=True)
    raw = train.targets.numpy()
    assert np.allclose(train.inputs[:, 0], (raw - raw.mean()) / raw.std(), atol=1e-5)
    assert np.allclose(test.inputs[:, 0], (test.targets.numpy() - raw.mean()) / raw.std(), atol=1e-5)


def test_text_becomes_one_input_per_text_of_the_training_part(csv):
    train_path = csv("size,city,y\n1,Rome,0\n2,Oslo,1\n3,Rome,0\n")
    test_path = csv("size,city,y\n4,Bonn,0\n5,Oslo,1\n", "test.csv")
    train, test = load("csv", path=train_path, test_path=test_path)
    assert train.inputs.tolist() == [[1, 0, 1], [2, 1, 0], [3, 0, 1]]  # size, Oslo, Rome
    assert test.inputs.tolist() == [[4, 0, 0], [5, 1, 0]]
    assert train.assumed == (
        "target y, inputs size, city (one-hot, 2 texts, all 0 in 1 test samples with other texts)",
    )
    scaled, _ = load("csv", path=train_path, test_path=test_path, standardize=True)
    assert scaled.inputs[:, 1:].tolist() == train.inputs[:, 1:].tolist()


@pytest.mark.parametrize("name", ["zip", " zip"])
def test_text_of_the_training_part_is_text_in_the_test_part(csv, name):
    """A test file in which all texts look like numbers has the same categories and classes."""
    train = csv(f"{name},x,y\nK1,0.5,u\n01,0.5,v\nK2,0.5,007\n", "train.csv")
    test = csv(f"{name},x,y\n01,0.5,007\n01,0.5,007\n", "test.csv")
    train, test = load("csv", path=train, test_path=test)
    assert (train.inputs[1].tolist(), train.targets.tolist()) == ([1, 0, 0, 0.5], [1, 2, 0])
    assert (test.inputs.tolist(), test.targets.tolist()) == ([[1, 0, 0, 0.5]] * 2, [0, 0])


OWNERS = ["01", "1", "001", "1e3", "1000", "10e2", "12345678901234567890", "12345678901234567891", "True", "1.0"]


def in_leaf(folder, owners):
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        content = {"users": owners, "user_data": {owner: {"x": [[0.5]], "y": [1]} for owner in owners}}
        (folder / part / "a.json").write_text(json.dumps(content))
    return {"name": "leaf", "path": str(folder)}, "user"


def in_table(folder, owners, kind):
    table = {"x": [0.5] * len(owners), "user": owners, "y": [k % 2 for k in range(len(owners))]}
    if kind == "npz":
        np.savez(folder / "t.npz", inputs=table["x"], targets=table["y"], user=np.array(owners))
        return {"name": str(folder / "t.npz")}
    if kind == "tensors":
        arrays = torch.tensor(table["x"])[:, None], torch.tensor(table["y"])
        return {"name": fedsim.TensorData(*arrays, ids={"user": owners})}
    if kind == "csv":
        quoted = [f'"{owner}"' if k % 2 else owner for k, owner in enumerate(owners)]
        (folder / "t.csv").write_text(lines(table["x"], quoted, table["y"], names=("x", "user", "y")))
        return {"name": str(folder / "t.csv"), "ids": "user"}
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(table)
    if kind == "parquet":
        frame.to_parquet(folder / "t.parquet")
    return {"name": str(folder / "t.parquet") if kind == "parquet" else frame, "ids": "user"}


class TestOwners:
    """An owner is the text that was written. Numbers that are written in two ways are two owners."""

    @pytest.mark.parametrize("kind", ["csv", "parquet", "frame", "npz", "tensors"])
    @pytest.mark.parametrize(
        ("owners", "expected"), [(OWNERS, OWNERS), ([10, 9, 2**62, 2**62 + 1], None), (["10", "9", "-1"], None)]
    )
    def test_are_never_converted(self, kind, owners, expected, tmp_path):
        train, test = load(**in_table(tmp_path, owners * 2, kind), stratify=False)
        found = np.concatenate([train.ids["user"], test.ids["user"]])
        assert sorted(map(str, found.tolist())) == sorted(map(str, owners * 2))
        names, _ = owners_of({"user": found}, None)
        assert len(names) == len(owners)
        if expected is None:  # in the order of their values
            assert names.astype(float).tolist() == sorted(map(float, owners))

    def test_of_json_files_are_never_converted(self, tmp_path):
        table, column = in_leaf(tmp_path, OWNERS[:6])
        assert load(**table)[0].ids[column].tolist() == OWNERS[:6]

    def test_meet_in_training_and_test_files(self, csv):
        train = csv(lines(HALVES, ["01", "2"] * 5, BITS, names=("x", "user", "y")))
        test = csv(lines([0.5] * 3, ['"01"', "2", "1"], [0, 1, 0], names=("x", "user", "y")), "test.csv")
        parts = load("csv", path=train, test_path=test, ids="user")
        assert [np.unique(part.ids["user"]).tolist() for part in parts] == [["01", "2"], ["01", "1", "2"]]

    @pytest.mark.parametrize("train", [[1, 2], ["1", "2"], [1.0, 2.0], np.array([1, 2], np.uint64)])
    @pytest.mark.parametrize("test", [[1, 2], ["1", "2"], [1.0, 2.0]])
    def test_of_two_types_are_compared_as_text_or_refused(self, train, test):
        parts = [DataTable({"x": HALVES[:2], "user": owners, "y": [0, 1]}, "t") for owners in (train, test)]
        if (type(train[0]) is float) is not (type(test[0]) is float):
            with pytest.raises(DataError, match='t: column "user": the owners are floating-point numbers in one part'):
                train_and_test([parts[0]], [parts[1]], ids="user")
            return
        first, second = train_and_test([parts[0]], [parts[1]], ids="user")
        assert first.ids["user"].tolist() == second.ids["user"].tolist()

    @pytest.mark.parametrize("missing", [None, "", float("nan")])
    @pytest.mark.parametrize("kind", ["csv", "frame", "tensors"])
    def test_that_are_missing_are_refused(self, missing, kind, tmp_path):
        owners = ["a", "b", "" if kind == "csv" else missing] * 4
        match = "has no value in (line 4|row 2)|sample 2 has no owner"
        refused(match=match, error=FedsimError, **in_table(tmp_path, owners, kind))

    def test_that_would_be_rounded_to_one_are_refused(self):
        table = DataTable({"x": HALVES[:2], "user": [1e16, 1.0], "y": [0, 1]}, "t")
        with pytest.raises(DataError, match=r'column "user": contains integers beyond 2\^53 as owners; write them as'):
            train_and_test([table], [table], ids="user")


def test_at_most_100_texts_become_inputs(csv):
    texts = [f"t{k}" for k in range(101)] * 2
    path = csv(lines(texts[:200], [0.5] * 200, [0, 1] * 100, names="txy"))
    assert load("csv", path=path, test_path=path, inputs="x")[0].inputs.shape == (200, 1)
    refused(
        "csv",
        r'"t" has 101 different texts, such as "t0"; at most 100 .* data.inputs, or name it in data.ids',
        path=path,
        test_path=path,
    )
    path = csv(lines(texts[:100], [0.5] * 100, [0, 1] * 50, names="txy"))
    assert load("csv", path=path, test_path=path)[0].inputs.shape == (100, 101)


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("?", 'contains "\\?", which is not a number, in line 4'),
        ("NA", 'contains "NA", which is not a number, in line 4'),
        ("2_5", 'contains "2_5", which is not a number, in line 4'),
        ("", "contains NaN or no value in line 4"),
        ("nan", "contains NaN or no value in line 4"),
        (" ", "has no value in line 4"),
        ("inf", "contains inf, which float32 cannot hold, in line 4"),
    ],
)
@pytest.mark.parametrize("column", ["x", "y"])
def test_a_bad_cell_is_named(csv, cell, problem, column):
    """The first sample has two lines, because its text has a newline."""
    rows = [f"{k},{k}.5,Rome" for k in range(9)]
    rows[0] = '0,0.5,"Ro\nme"'
    rows[1] = f"{cell},1.5,Rome" if column == "x" else f"1,{cell},Rome"
    refused("csv", f't.csv: column "{column}": {problem}(;| ).*', path=csv("\n".join(["x,y,city", *rows])))


def test_a_bad_cell_in_a_column_that_is_not_used_is_no_error(csv):
    path = csv(lines(["?", *range(9)], ["", *HALVES[1:]], HALVES, BITS, names="abxy"))
    assert load("csv", path=path, inputs="x")[0].inputs.shape == (8, 1)


def test_bad_cells_of_all_columns_are_named_at_once(csv):
    rows = ["1.5,?,,$5,1", *(f"{k / 9},{k / 7},u{k % 3},${k},{k % 2}" for k in range(8)), "?,1,u1,$7,x"]
    path = csv("\n".join(["a,b,user,c,y", *rows]))
    columns = [f'column "{name}": [^;]*; [^;]*' for name in ("y", "user", "a", "b", "c")]
    refused("csv", "^[^;]*t.csv: " + "; also ".join(columns) + "$", path=path, ids="user")


def test_bad_cells_of_the_test_file_are_named(csv):
    train_path, test_path = csv(lines(HALVES, BITS)), csv("x,y\n1,0\nabc,1\n", "test.csv")
    refused("csv", 'test.csv: column "x": contains "abc", .* in line 3', path=train_path, test_path=test_path)


@pytest.mark.parametrize("separator", ",;\t|")
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte-order mark"])
def test_delimiters_are_found_and_said(csv, separator, mark):
    path = csv(mark + lines(HALVES, CITIES, BITS, names=("x", "city", "y"), separator=separator))
    train, _ = load("csv", path=path)
    assert train.inputs.shape == (8, 3)
    said = [line for line in train.assumed if line.startswith("delimiter")]
    assert said == [f"delimiter {fedsim.errors.show(separator)}"] * (separator != ",")
    assert load("csv", path=path, delimiter=separator)[0].assumed[1:] == train.assumed[-1:]


def test_a_delimiter_is_one_character_of_a_csv_file(csv):
    refused("csv", 'data.delimiter = ";;": must be one character', path=csv(lines(HALVES, BITS)), delimiter=";;")
    refused("parquet", 'data.delimiter = ";": is only used for CSV files', path=csv("", "t.parquet"), delimiter=";")


def test_exports_of_excel_with_decimal_commas(csv):
    numbers = [str(half).replace(".", ",") for half in HALVES]
    text = "\ufeff" + lines(numbers, CITIES, BITS, names=("x", "city", "y"), separator=";")
    train, test = load("csv", path=csv(text.replace("\n", "\r\n")))
    assert sorted(torch.cat([train.inputs, test.inputs])[:, 0].tolist()) == HALVES
    assert "column x has decimal commas, such as 0,0" in train.assumed


SIGNED = [  # values, the sign that is named, and keys with which the values are numbers, with these numbers
    (["5,84", "6"], ",", {"decimal": ","}, [5.84, 6]),
    (["1,011,682", "54,031", "7"], ",", {"thousands": ","}, [1011682, 54031, 7]),
    (["54.031,00", "1.000"], ".", {"decimal": ",", "thousands": "."}, [54031, 1000]),
    (["1.011.682", "5.840"], ".", {"thousands": "."}, [1011682, 5840]),
    (["5.840", "966"], ".", {"thousands": "."}, [5840, 966]),
    (["5.840", "966"], ".", {"decimal": "."}, [5.84, 966]),
    (["1,011.5", "-5"], ",", {"thousands": ","}, [1011.5, -5]),
    (["1 011 682", "12 000", "5"], " ", {"thousands": " "}, [1011682, 12000, 5]),
    (["1'011,5", "12,25"], "'", {"thousands": "'", "decimal": ","}, [1011.5, 12.25]),
    (["1\u2019011.5", "12.25"], "'", {"thousands": "'"}, [1011.5, 12.25]),
    (["1\xa0011", "12\u202f500"], " ", {"thousands": " "}, [1011, 12500]),
    (["1,00,000", "-12,34,567", "7"], ",", {"thousands": ","}, [100000, -1234567, 7]),
    (["$12.00", "$1,000"], "$", {}, None),
    (["-5 %", "3 %"], "%", {}, None),
]
TEXTS = [
    ["2024-01", "2024-02"],
    ["01.02.2024", "31.12.2023"],
    ["555 123 456", "555 765 432"],
    ["1.2.3", "1.10.0"],
    ["10-20", "20-30"],
    ["12345-6789", "54321-0001"],
    ["192.168.0.1", "10.0.0.1"],
    ["3,5", "red", "blue"],
    ["5 kg", "7 kg"],
    ["1/2", "1/4"],
]


class TestSigns:
    """Values with separators, decimal commas, currencies or percent signs are read as numbers, or are refused."""

    @staticmethod
    def inputs(**options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedsimWarning)  # of large values
            return fedsim.load_dataset("csv", **options)[0].inputs[:, 0].tolist()

    @pytest.mark.parametrize(("values", "sign", "keys", "expected"), SIGNED)
    def test_are_read_as_the_keys_say_or_named(self, csv, values, sign, keys, expected):
        column = [f'"{value}"' for value in values]
        path = csv(lines([0.5] * len(values), column, BITS[: len(values)], names=("x", "z", "y")))
        options = {"path": path, "test_path": path, "inputs": "z"}
        shown = f'{sign}" from all' if expected is None else f'data.thousands="{sign}"|data.decimal="{sign}"'
        refused("csv", rf'column "z": contains .*({re.escape(shown) if expected is None else shown})', **options)
        if expected is not None:
            assert self.inputs(**options, **keys) == pytest.approx(expected)
        options["inputs"] = "x"
        assert self.inputs(**options) == [0.5] * len(values)
        frame = DataTable({"z": values, "y": BITS[: len(values)]}, "frame")
        if not all(NUMBER.fullmatch(value) for value in values):
            with pytest.raises(DataError, match='frame: column "z": .*(convert the column to numbers|from all values)'):
                train_and_test([frame], [frame])
            with pytest.raises(DataError, match='frame: column "z": .*(convert the column to numbers|from all values)'):
                train_and_test([frame], [frame], target="z", inputs="y")

    @pytest.mark.parametrize("values", TEXTS, ids=lambda values: values[0])
    def test_of_texts_are_no_false_alarm(self, csv, values):
        path = csv(lines([f'"{value}"' for value in values], BITS[: len(values)], names=("z", "y")))
        for keys in ({}, {"thousands": ","}, {"decimal": ","}):
            assert load("csv", path=path, test_path=path, **keys)[0].inputs.shape[1] == len(values)

    def test_that_contradict_the_keys_are_named(self, csv):
        path = csv("x;y\n1,5;0\n2.5;1\n3,25;0\n")
        problem = r'column "x": contains "2.5", which is not a number with decimal ",", in line 3; correct it'
        refused("csv", problem, path=path, test_path=path, decimal=",")
        refused("csv", 'column "x": contains "1,5", which is a number except for ","', path=path, test_path=path)
        mixed = csv("x;z;y\n1,5;5.840;0\n2,25;966;1\n")
        line = 'contains "5.840" beside decimal commas in column x, .* set data.thousands="." and data.decimal=","'
        refused("csv", line, path=mixed, test_path=mixed)
        assert self.inputs(path=mixed, test_path=mixed, thousands=".", inputs="z") == [5840, 966]
        path = csv("x;y\n1'011,5;0\n3'000,0;1\n")
        refused("csv", """contains "1'011,5", which is not a number with decimal ",",""", path=path, decimal=",")
        path = csv("x;y\n1 000;0\n3 000;1\nx;0\n")
        refused("csv", """contains "x", which is not a number with .* thousands " ",""", path=path, thousands=" ")
        with pytest.raises(fedsim.ExperimentError, match="""data.thousands = "_": must be ",", ".", " " or "'"$"""):
            load("csv", path=path, thousands="_")
        refused("csv", 'data.thousands = ",": is data.decimal too', path=mixed, decimal=",", thousands=",")
        refused("parquet", 'data.decimal = ",": is only used for CSV files', path="t.parquet", decimal=",")

    def test_of_classes_that_may_be_one_are_asked_about(self, csv):
        path = csv("x,y\n0.5,01\n1.5,1\n2.5,2\n")
        refused("csv", 'column "y": contains "01" and "1", which may be one class or two', path=path, test_path=path)
        path = csv("x,y\n0.5,00\n1.5,01\n2.5, 1\n".replace(", ", ",0"))
        assert load("csv", path=path, test_path=path)[0].targets.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("above", "said"),
    [
        ("sep=;\n", []),
        ('"sep=;"\r\n', []),
        ("# exported, 2024\n", ['1 line above the column names skipped, such as "# exported, 2024"']),
        ("\n# a\n\n#b;c\n", ['2 lines above the column names skipped, such as "# a"']),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte-order mark"])
def test_lines_above_the_column_names(csv, above, said, mark):
    path = csv(f"{mark}{above}x;y\n0.5;0\n1.5;1\n2.5;?\n")
    refused("csv", f'"y": contains "\\?", .* in line {above.count(chr(10)) + 4}', path=path, test_path=path)
    path = csv(f"{mark}{above}x;y\n0.5;0\n1.5;1\n")
    train, _ = load("csv", path=path, test_path=path)
    assert train.inputs.tolist() == [[0.5], [1.5]]
    assert [*train.assumed] == ["target y, inputs x", 'delimiter ";"', *said]


def test_column_names_may_start_with_a_number_sign(csv):
    path = csv("#x,y\n0.5,0\n1.5,1\n")
    assert load("csv", path=path, test_path=path)[0].assumed == ("target y, inputs #x",)
    refused("csv", "separate the columns by commas, for example with pandas.read_csv", path=csv("x y\n1  0\n2  1\n"))


def test_columns_of_large_numbers_are_named(csv):
    path = csv(lines(range(18, 78, 6), range(0, 10000, 1000), HALVES, BITS, names=("age", "income", "x", "y")))
    line = f't.csv: column "income" has values from 0 to 9,000 (and 1 other column), {SCALES}'
    load("csv", line, path=path)
    load("csv", path=path, standardize=True)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (lines(HALVES, BITS).encode("utf-16"), "the text is UTF-16, not UTF-8; save the file as UTF-8"),
        (lines(["é"] * 10, BITS).encode("latin-1"), r'line 2 is not UTF-8 \("é" in Latin-1\); save the file as UTF-8'),
        (b"PK\x03\x04\x99\0", "cannot be read: .*line 1 is not UTF-8"),
        (b"", "cannot be read: .*Empty CSV file"),
        (b"x\n1\n", r'has only one column, "x" \(delimiter ","\); set data.delimiter'),
        (b"1,0\n2,1\n", "if the first line of a file has values, write the names of the columns above it"),
        (b"x,y\n1,2,3\n", "cannot be read: .* Expected 2 columns, got 3: 1,2,3"),
        (b"d,y\n" + b"2026-11-27,1\n" * 9, 'column "d": contains dates or times, such as "2026-11-27"'),
        (b"x,y\n1,0\n2,1\n", "2 samples are too few to draw test samples .* use a larger data.test_fraction"),
    ],
)
def test_files_that_are_no_usable_csv(csv, content, match):
    refused("csv", match, path=csv(content))


def test_compressed_files_and_names_of_targets_in_any_case(csv):
    path = csv(gzip.compress(lines(HALVES, BITS, names=("x", "Label")).encode()), "t.csv.gz")
    assert load(path)[0].targets.tolist() == load(path, target="Label")[0].targets.tolist()
    refused("csv", r'data.inputs = \["x", "Label"\]: contains the target "Label"', path=path, inputs=["x", "Label"])


def test_text_of_numbers_is_numbers_where_it_must_be():
    column = DataColumn(["1", "2.5", "-3e1"], "table: column x")
    assert column.numbers_or_text().tolist() == [1, 2.5, -30]
    train, _ = train_and_test([DataTable({"x": HALVES, "y": [str(half) for half in HALVES]}, "table")], [])
    assert train.targets.is_floating_point()
    train, _ = train_and_test([DataTable({"x": HALVES, "y": [str(bit) for bit in BITS]}, "table")], [])
    assert train.has_labels


@pytest.mark.parametrize("last", ["tset", "test"])
def test_a_column_split_with_a_wrong_value_is_an_input_and_a_warning_says_so(last, csv):
    path = csv(lines(HALVES, ["train", "test", last] * 3 + ["train"], BITS, names=("x", "split", "y")))
    warned = ['column "split" becomes an input, as it has the values tset; correct them'] * (last == "tset")
    train, _ = load("csv", *warned, path=path)
    assert train.inputs.shape[1] == (4 if warned else 1)


class TestPaths:
    @pytest.mark.parametrize("name", ["t.csv", "../{}/t.csv", "{}/t.csv"])
    def test_a_path_names_its_data_set(self, csv, cli, tmp_path, monkeypatch, name):
        csv(lines(HALVES, CITIES, BITS, names=("x", "city", "y")))
        monkeypatch.chdir(tmp_path.parent if name.startswith("{") else tmp_path)
        name = name.format(tmp_path.name)
        words = [
            "data.split_by=samples",
            "model=logistic",
            "model.inputs=1",
            "model.classes=2",
            "workers=2",
            "rounds=1",
            "engine=serial",
            "records.figures=[]",
        ]
        result = cli("run", f"data={name}", "data.ids=city", "data.split_by=samples", *words)
        assert result.exit_code == 0, result.stderr
        drawn = "no test part: 2 of 10 samples are drawn at random for tests, the same fraction of each class"
        assert result.stdout.splitlines()[2] == f"data: target y, inputs x; {drawn}"

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("none.csv", "none.csv: cannot be read: no such file; check data.path"),
            ("data.json", 'data.name = "data.json": no data set reads this type of file; allowed: .csv, '),
            ("./sub", 'data.name = "./sub": is a folder; write data=image_folder data.path=./sub'),
            ("sub", 'data.name = "sub": is a folder; write data=image_folder data.path=sub'),
            ("weights.pt", "weights.pt: .pt files are not read, because reading a pickle can run code"),
            ("my_data.digits", "write my_data:digits (with a colon)"),
        ],
    )
    def test_other_paths_are_one_line(self, cli, tmp_path, monkeypatch, name, match):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "sub").mkdir()
        (tmp_path / "data.json").write_text("{}")
        result = cli("run", f"data={name}", "model=logistic", "engine=serial")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert match in result.stderr

    def test_a_path_beside_a_path_is_an_error(self):
        with pytest.raises(fedsim.ExperimentError, match='data.path = "b.csv": "a.csv" is a path too; omit one of the'):
            fedsim.Experiment(data={"name": "a.csv", "path": "b.csv"})


def test_whole_numbers_with_decimal_points_are_no_classes(csv):
    train, _ = load("csv", path=csv(lines(HALVES, [f"{bit}.0" for bit in BITS])))
    assert train.targets.is_floating_point()
    whole = "whole numbers, but stored as floating-point numbers: classes only with task=classification"
    assert train.assumed[0] == f"target y ({whole}), inputs x"


@pytest.mark.parametrize("task", ["classification", "binary"])
def test_whole_numbers_with_decimal_points_are_classes_if_the_task_needs_classes(csv, task):
    words = {"engine": "serial", "workers": 2, "rounds": 1, "model": "logistic", "task": task}
    targets = BITS if task == "binary" else [k % 3 for k in range(10)]
    results = [
        fedsim.run(data={"name": csv(lines(HALVES, [f"{k}{point}" for k in targets])), "stratify": False}, **words)
        for point in ("", ".0")
    ]
    assert results[0].history[-1].train_loss == results[1].history[-1].train_loss
    path = csv(lines(HALVES, [k / 3 for k in range(10)]))
    with pytest.raises(DataError, match=f"the task {task} needs one class label per sample"):
        fedsim.run(data=path, **{**words, "model": {"name": "logistic", "classes": 3}})


@pytest.mark.parametrize(
    ("text", "table"),
    [
        (lines(HALVES, BITS), True),
        (lines(HALVES, BITS, separator="  "), True),
        ("To be, or not to be,\nthat is, the question,\nwhether, it is,\nnobler\n" * 5, False),
        ("one two\nthree four\nfive six\n" * 9, False),
    ],
)
def test_a_table_in_a_text_file_is_asked_about(csv, text, table):
    path = csv(text, "t.txt")
    if table:
        match = "looks like a table; write data=csv data.path=.* for its columns, or data=text data.path=.* to"
        refused(path, match, error=FedsimError)
    assert load("text", path=path, length=8)[0].classes > 1
    assert table or load(path, length=8)[0].classes > 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_json_files_may_have_a_byte_order_mark_and_must_be_utf_8(tmp_path, encoding):
    users = {"users": ["é"], "user_data": {"é": {"x": [[0.5]], "y": [1]}}}
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        text = json.dumps(users, ensure_ascii=False)
        (tmp_path / part / "a.json").write_text(text, encoding=encoding)
    if encoding == "latin-1":
        refused("leaf", r'a.json: cannot be read: .*line 1 is not UTF-8 \("é" in Latin-1\)', path=str(tmp_path))
    else:
        assert load("leaf", path=str(tmp_path))[0].ids["user"].tolist() == ["é"]


def test_a_key_in_the_plural_is_answered_with_the_key_of_the_component(cli):
    line = 'data.splits = "fold": unknown key (the data set is csv); did you mean "split"?'
    assert line in cli("run", "data=csv", "data.path=t.csv", "data.splits=fold").stderr


def test_image_sizes_have_one_name(cli):
    result = cli("run", "data=torchvision:CIFAR10", "data.image_size=64")
    assert "data.image_size = 64: unknown key" in result.stderr
    assert "size" in result.stderr.partition(";")[2]


class TestFolderOfTables:
    """A folder with one table for each worker."""

    @pytest.fixture
    def folder(self, tmp_path):
        for part, names in (("train", ("h10", "h2", "H1")), ("test", ("h2", "new", "h10", "H1"))):
            (tmp_path / part).mkdir()
            for name in names:
                rows = [f"{len(name) + k / 10},{k % 2}" for k in range(10 if part == "train" else 5)]
                (tmp_path / part / f"{name}.csv").write_text("\n".join(["a,label", *rows]))
        return tmp_path

    def test_each_file_is_a_worker_in_the_order_of_names(self, folder):
        experiment = fedsim.Experiment(data=str(folder / "train"))
        assert (experiment.workers, experiment.partition.name, experiment.data.name) == (3, "natural", "csv")
        train, test = load(str(folder / "train"))
        assert train.worker_names == ("H1", "h2", "h10")
        assert (np.bincount(train.ids["worker"]).tolist(), np.bincount(test.ids["worker"]).tolist()) == (
            [8] * 3,
            [2] * 3,
        )
        assert train.assumed[0] == "each of 3 files is the data of one worker, in the order of their names"
        train, test = load("csv", path=str(folder / "train"), test_path=str(folder / "test" / "h2.csv"))
        assert (len(train), len(test), test.ids) == (30, 5, {})

    def test_parts_are_folders(self, folder):
        (whole, own), separate = (
            load(str(folder)),
            load("csv", path=str(folder / "train"), test_path=str(folder / "test")),
        )
        assert whole.worker_names == ("H1", "h2", "h10", "new") == separate[0].worker_names
        assert np.array_equal(whole.inputs, separate[0].inputs)
        assert np.array_equal(own.ids["worker"], np.repeat(range(4), 5))
        assert fedsim.Experiment(data=str(folder)).data.local_test_fraction == "own"

    def test_text_in_one_file_is_text_in_all(self, folder):
        for name, text in (("H1", "K1"), ("h2", "01"), ("h10", "K2")):
            (folder / "train" / f"{name}.csv").write_text("zip,label\n" + f"{text},0\n{text},1\n" * 5)
        train, _ = load(str(folder / "train"))
        assert train.inputs.unique(dim=0).tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]

    @pytest.mark.parametrize(
        ("file", "match"),
        [
            (
                "train/test.csv",
                "a file called test, which may be a part of the data instead of a worker; set data.path",
            ),
            ("train/h2.parquet", "has two tables with the same name"),
            ("train/other.csv", 'other.csv: has other columns than .*H1.csv, such as "a"'),
        ],
    )
    def test_other_files_are_refused(self, folder, file, match):
        (folder / file).write_text("b,label\n1,0\n2,1")
        refused(str(folder / "train"), match)

    def test_unused_files_are_named(self, folder):
        (folder / "train" / "README.md").write_text("")
        (folder / "train" / ".hidden.csv").write_text("")
        load(str(folder / "train"), "train: files that are not used: README.md")
