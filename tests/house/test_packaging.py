"""The wheel has the whole tree under one import name, and the dashboard needs no torch."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from stepscope.kernels.cpu.library import LEVELS

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "kernels", "recordings", "tui")
# The folders that run models. What is torch-free in them may be imported without torch, too.
TORCH_SIDE = ("stepscope.engine.execution", "stepscope.engine.models", "stepscope.kernels")
BESIDE = ("ARCHITECTURE.md", "CHANGELOG.md", "Makefile", "constraints.txt")
SHIPPED_SUFFIXES = {".py", ".typed", ".mcap", ".md", ".json", ".c", ".cpp", ".h", ".pyi"}


def tree() -> set[str]:
    """The files that belong in a wheel, as `stepscope/...`."""
    return {
        f"stepscope/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix in SHIPPED_SUFFIXES and "__pycache__" not in path.parts
    }


def run_python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    options = {"cwd": cwd, "capture_output": True, "text": True, "timeout": 100}
    return subprocess.run([sys.executable, "-c", code], check=False, **options)


def build(kind: str, folder: Path, **environment: str) -> None:
    """Build it in a copy of the tree, because setuptools writes beside it.

    Compiled without optimisation, which would take most of the time and adds no file.
    """
    source = folder / "source"
    source.mkdir()
    for name in (*BESIDE, "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        text = (ROOT / name).read_text("utf-8")
        (source / name).write_text(re.sub(r'"-O[23]"', '"-O0"', text), "utf-8")
    for name in ("docs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in sorted(tree()):
        relative = file.removeprefix("stepscope/")
        (source / relative).parent.mkdir(parents=True, exist_ok=True)
        (source / relative).write_bytes((ROOT / relative).read_bytes())
    built = subprocess.run(
        [sys.executable, "-m", "build", kind, "--no-isolation", "-o", folder, source],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr


def build_wheel(folder: Path, **environment: str) -> set[str]:
    """The files of a wheel."""
    build("--wheel", folder, **environment)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_source_tree_and_the_extensions_compiled_for_this_python(
    tmp_path: Path,
) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    kernels = {f"stepscope/kernels/cpu/_{level}{suffix}" for level in LEVELS}
    if platform.machine() != "x86_64":
        kernels = {f"stepscope/kernels/cpu/_baseline{suffix}"}
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    names = ("protocol/_wire_rows", "telemetry/_sender") if has_headers else ()
    telemetry = {f"stepscope/engine/{name}{suffix}" for name in names}
    assert build_wheel(tmp_path) == tree() | kernels | telemetry


def test_the_wheel_is_built_without_a_compiler_too(tmp_path: Path) -> None:
    assert build_wheel(tmp_path, CC="no-such-compiler", CXX="no-such-compiler") == tree()


def test_the_source_archive_holds_what_its_readme_runs_and_links_to(tmp_path: Path) -> None:
    build("--sdist", tmp_path)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    beside = {
        str(path.relative_to(ROOT))
        for folder in ("docs", "tests")
        for path in (ROOT / folder).rglob("*")
        if "__pycache__" not in path.parts
    }
    sources = {file.removeprefix("stepscope/") for file in tree()}
    assert sources | beside | set(BESIDE) <= held


def make_demo(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """`make demo` in a folder without an environment, with this script as Python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "python").write_text(f"#!/bin/sh\n{python}\n", "utf-8")
    (folder / "python").chmod(0o755)
    arguments = ["make", "-C", folder, "demo", f"PYTHON={folder}/python"]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=False)


def test_make_refuses_an_older_python_before_it_makes_an_environment(tmp_path: Path) -> None:
    made = make_demo(tmp_path, "exit 1")  # as it answers the question for its version
    assert made.returncode == 2
    said = f"no Python 3.11 or newer at '{tmp_path}/python': set PYTHON=/path/to/python"
    assert said in made.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_completes_an_environment_that_was_left_without_pip(tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(
        "/bin/false", tmp_path / ".venv/bin/python"
    )  # as a failed `venv` of Debian leaves it
    make_demo(tmp_path, f"echo $* >> {tmp_path}/asked")
    assert "-m venv .venv" in (tmp_path / "asked").read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", PACKAGES)
def test_no_folder_is_importable_under_its_bare_name(name: str, tmp_path: Path) -> None:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
    assert run_python(code, cwd=tmp_path).returncode == 0


def test_transformers_run_from_the_root_loads_no_file_of_stepscope() -> None:
    # transformers probes for a package called `kernels`; from the root it sees our folder, which
    # has no __init__.py and so is an empty name to it. Tests run from the root.
    from transformers import Qwen3ForCausalLM

    assert {"", str(ROOT)} & set(sys.path)
    assert Qwen3ForCausalLM.__module__.startswith("transformers.")
    under_bare_names = [
        module.__file__
        for name, module in sys.modules.items()
        if name.partition(".")[0] in PACKAGES and getattr(module, "__file__", None)
    ]
    assert under_bare_names == []


def test_all_modules_but_those_that_run_models_import_without_torch_and_transformers() -> None:
    files = sorted(name.removesuffix(".py") for name in tree() if name.endswith(".py"))
    modules = [file.removesuffix("/__init__").replace("/", ".") for file in files]
    laptop = [name for name in modules if not name.startswith(TORCH_SIDE)]
    assert "stepscope.tui.app.app" in laptop
    assert "stepscope.engine.client.client" in laptop
    done = run_python(
        "import importlib, sys\n"
        "for name in ('torch', 'transformers', 'tokenizers', 'safetensors', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        f"for name in {laptop!r}:\n"
        "    importlib.import_module(name)\n"
    )
    assert done.returncode == 0, done.stderr
