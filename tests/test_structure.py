"""Structure of the package: which package may import which, unique names, and the amount of code.

`python -m tests.test_structure` prints the code lines and files of each folder.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter, defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (  # from lowest to highest; a package may import itself and packages of lower floors
    ("toml", "version"),
    ("errors",),
    ("hints",),
    ("system",),
    ("core",),
    ("processes",),
    ("delays",),
    ("data", "loggers", "models"),
    ("clients",),
    ("aggregation",),
    ("server",),
    ("byzantine",),
    ("integrations",),
    ("privacy",),
    ("processing",),
    ("asynchronous.policies",),
    ("config",),
    ("reference",),
    ("records",),
    ("training",),
    ("rounds",),
    ("engines",),
    ("asynchronous",),
    ("runs",),
    ("callbacks",),
    ("runs.run",),
    ("comparison",),
    ("report",),
    ("cli",),
)
PACKAGES = {package for packages in FLOORS for package in packages}


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "fedsim").rglob("*.py"))}


def test_packages_import_lower_packages_only():
    floor_of = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
    upwards = [
        f"{name} imports {target}"
        for name, targets in imports().items()
        for target in targets
        if (package := package_of(name)) in floor_of
        and (imported := package_of(target)) != package
        and floor_of[imported] >= floor_of[package]
    ]
    assert not upwards


def test_imports_have_no_cycles():
    TopologicalSorter(imports()).prepare()  # raises CycleError with the modules of a cycle


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules of fedsim that each module imports, also inside functions and for type checkers only."""
    trees = {name_of(path): tree for path, tree in modules().items()}
    imported = {
        name: {
            target if target in trees else target.rpartition(".")[0]
            for node in ast.walk(tree)
            for target in targets_of(node)
            if target.startswith("fedsim.")
        }
        for name, tree in trees.items()
    }
    return {name: targets - {name, "fedsim"} for name, targets in imported.items()}


def targets_of(node: ast.AST) -> list[str]:
    """Return the modules, or members of modules, that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    """Return the package in `FLOORS` that a module belongs to."""
    parts = module.split(".")[1:] or ["__init__"]
    return ".".join(parts[:2]) if ".".join(parts[:2]) in PACKAGES else parts[0]


def test_every_package_has_a_floor():
    unlisted = {package_of(name) for name in imports()} - PACKAGES
    assert unlisted == {"__init__", "__main__"}  # they import the public names and the command line


def test_processes_come_from_torch_multiprocessing():
    """Importing `torch.multiprocessing` lets contexts send tensors. Other modules of `multiprocessing` are helpers."""
    helpers = {"connection", "context", "process", "reduction", "resource_tracker", "util"}
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("multiprocessing") for alias in node.names), path
            elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "multiprocessing":
                names = [alias.name for alias in node.names]
                assert set(names if node.module == "multiprocessing" else [node.module.split(".")[1]]) <= helpers, path


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    repeated = {name for name, paths in places.items() if len(paths) > 1}
    assert repeated == {"Callback"}  # of runs and of comparisons


def test_an_init_module_lists_what_it_offers_or_offers_nothing():
    for path, tree in modules().items():
        if path.name == "__init__.py":
            targets = [
                ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
            ]
            assert len(tree.body) == 1 or "__all__" in targets, path


def test_no_class_is_long():
    """`Settings` consists of one key or property after another."""
    lengths = {
        node.name: lines_between(path, node.lineno, node.end_lineno)
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= 220
    }
    assert {name for name, lines in lengths.items() if lines > 220} <= {"Settings"}


@pytest.mark.parametrize(
    ("file", "name", "most"),
    [
        ("reference.py", None, 90),
        ("rounds/parameter_round.py", "ParameterRound", 40),
        ("core/training.py", "train_epoch", 15),
        ("training/local_training.py", "BatchGradients", 20),
        ("training/local_training.py", "LocalOptimizer", 15),
    ],
)
def test_what_a_newcomer_reads_first_is_short(file, name, most):
    path = ROOT / "fedsim" / file
    node = next((node for node in ast.walk(modules()[path]) if getattr(node, "name", None) == name), None)
    assert 0 < (lines_between(path, node.lineno, node.end_lineno) if name else code_lines(path)) <= most


def test_only_the_choice_of_a_kind_of_round_asks_for_the_mode():
    """A kind of round is a class of its own, so the rest of a round has no condition on what the kinds differ in."""
    modes, asking = {"streams", "clusters", "groups", "mode", "sync", "sync_in"}, set()
    for path, tree in modules().items():
        for function in ast.walk(tree) if path.parent.name == "rounds" else ():
            if isinstance(function, ast.FunctionDef):
                conditions = [node.test for node in ast.walk(function) if isinstance(node, (ast.If, ast.IfExp))]
                names = {node.attr for each in conditions for node in ast.walk(each) if isinstance(node, ast.Attribute)}
                asking |= {function.name} if names & modes else set()
    assert asking == {"kind_of", "clock_of"}


def test_workflows_install_the_versions_of_a_file():
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    lines = [line for text in texts for line in text.splitlines() if re.search(r"pip install (-e|dist)", line)]
    assert len(lines) >= 7
    free = [line for line in lines if not re.search(r" -c \w+\.txt ", line)]
    assert [line.partition("# ")[2] for line in free] == ["without constraints"]


def test_the_workflows_run_all_tests():
    """One runs the default tests with the tested, oldest and newest versions, the other one all else."""
    texts = [(ROOT / ".github" / "workflows" / name).read_text() for name in ("test.yml", "nightly.yml")]
    runs = [re.findall(r"(?:run|command): (?:python -m )(pytest(?: -m slow)?|tests\.\w+)", text) for text in texts]
    assert runs == [["pytest", "tests.declared", "pytest", "pytest"], ["pytest -m slow", "tests.fuzz", "tests.faults"]]


def lines_between(path: Path, first: int, last: int) -> int:
    return len([line for line in lines_with_code(path) if first <= line <= last])


def code_lines(path: Path) -> int:
    return len(lines_with_code(path))


@cache
def lines_with_code(path: Path) -> set[int]:
    """Return the numbers of the lines with code, without blank lines, comments and docstrings."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in (*layout, tokenize.ENCODING)]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                lines -= set(range(first.lineno, first.end_lineno + 1))
    return lines


if __name__ == "__main__":
    code, files = Counter(), Counter()
    for path in sorted([*(ROOT / "fedsim").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        for folder in {path.relative_to(ROOT).parts[0], str(path.relative_to(ROOT).parent)}:
            code[folder] += code_lines(path)
            files[folder] += 1
    for folder in sorted(code):
        print(f"{folder:40} {code[folder]:7,} code lines in {files[folder]:3} files")
