"""The wheel: what is in it, what it needs, and that it works where nothing else of the project is.

The environments hold links to the packages that the wheel says it needs, and no other: what it forgets is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rollouts.gallery import BUNDLE
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def by_name(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(one.name): one for one in map(Requirement, lines)}


def pins(name: str) -> dict[str, Requirement]:
    """The packages that a list of ours names itself: what those need in turn stands below a comment that says so."""
    text = (ROOT / name).read_text().partition("# What those need.")[0]
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return by_name([line for line in lines if line and not line.startswith("-")])


@pytest.mark.parametrize(("file", "extra"), [("requirements.txt", "server"), ("requirements-gpu.txt", "vllm")])
def test_an_extra_and_the_list_of_pins_name_the_same(file: str, extra: str) -> None:
    """A package of the base may stay out of a list whose packages bring it."""
    pinned, base, more = pins(file), by_name(PROJECT["dependencies"]), by_name(EXTRAS[extra])
    others = {name for one in ("ray", "mcp") for name in by_name(EXTRAS[one])}
    assert more.keys() <= pinned.keys() <= base.keys() | more.keys() | others
    if extra == "server":
        assert base.keys() <= pinned.keys() | needed_by(pinned)


def needed_by(pinned: dict[str, Requirement]) -> set[str]:
    """What stands below the comment: pinned because something of the list needs it."""
    text = (ROOT / "requirements.txt").read_text().partition("# What those need.")[2]
    return set(by_name([line for line in text.splitlines() if line.strip()]))


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-gpu.txt", "requirements-dev.txt"])
def test_every_pin_is_a_version_that_the_wheel_allows(file: str) -> None:
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    pinned = by_name([line for line in lines if line and not line.startswith("-")])
    for allowed in (PROJECT["dependencies"], *EXTRAS.values()):
        for name, requirement in by_name(allowed).items():
            if name in pinned:
                (pin,) = pinned[name].specifier
                assert requirement.specifier.contains(pin.version), f"{file}: {pinned[name]}, but {requirement}"
                assert pinned[name].extras == requirement.extras, f"{file}: {pinned[name]}, but {requirement}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_whole_product_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    places = {"rollouts": "rollouts", "inspector": "inspector"}
    places |= {name: f"inspector/shipped/{name}" for name in ("templates", "static")}
    wanted = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in places.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == wanted
    assert {"rollouts/py.typed", "inspector/py.typed"} <= found


def needed(names: list[str]) -> set[str]:
    """The installed distributions that these requirements need, and what those need in turn."""
    found, todo = set[str](), [Requirement(name) for name in names]
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        known = name in found
        found.add(name)
        for line in metadata.requires(name) or []:
            more = Requirement(line)
            wanted = [{"extra": ""}, *({"extra": extra} for extra in one.extras)]
            is_new = canonicalize_name(more.name) not in found or bool(more.extras and not known)
            if is_new and (more.marker is None or any(more.marker.evaluate(each) for each in wanted)):
                todo.append(more)
    return found


def link(names: set[str], site: Path) -> None:
    """Link the files of installed distributions into another folder of packages."""
    for name in names:
        files = metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            source = Path(str(files[0].locate())).parents[len(files[0].parts) - 1] / top
            if not (site / top).exists():
                (site / top).symlink_to(source)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel, as pip installs it, and the packages of its base."""
    home = tmp_path_factory.mktemp("installed") / "env"
    venv.create(home, with_pip=False, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*command, "--no-compile", "-q", str(wheel)], check=True, capture_output=True, timeout=120)
    (site,) = home.glob("lib/python*/site-packages")
    link(needed(PROJECT["dependencies"]), site)
    return home


def call(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [str(one) for one in command], cwd=cwd, env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )


def test_check_runs_from_the_wheel_with_a_real_tokenizer(installed: Path, tmp_path: Path) -> None:
    """Its base needs nothing of the server: tokenizer, chat template and diagnosis work without Django or torch."""
    (site,) = installed.glob("lib/python*/site-packages")
    policy = site / "rollouts" / "sampling" / "demo_policy" / "model"
    ended = call(installed / "bin/rollout-inspector", "check", BUNDLE, "--tokenizer", policy, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "Failed by" in ended.stdout and "tokenizer (on" not in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_other_commands_of_the_base_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Each does its work, or says in a sentence what it lacks: none needs a package of the server."""
    program = installed / "bin/rollout-inspector"
    (tmp_path / "calls.jsonl").write_bytes(BUNDLE.read_bytes())
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    for status, words, *arguments in (
        (0, "Locked chat.jinja", "lock", "chat.jinja", "-o", "templates.lock"),
        (0, "Passed", "template", "--lock", "templates.lock"),
        (0, "passes the check", "mend", "calls.jsonl", "-o", "mended.jsonl"),
        (0, "Passed", "check", "mended.jsonl"),
        (0, "Findings: ", "audit", "calls.jsonl", "--output", "audit", "--processes", "1"),
        (2, "--url", "push", "calls.jsonl"),
        (2, "--url", "watch", "."),
        (2, "rollout-inspector[mcp]", "mcp", "--url", "http://127.0.0.1:1", "--token", "t"),
        (0, "rollout-inspector 0.", "--version"),
    ):
        ended = call(program, *arguments, cwd=tmp_path)
        assert ended.returncode == status, (arguments, ended.stdout, ended.stderr)
        assert words in ended.stdout + ended.stderr and "Traceback" not in ended.stderr


_IMPORTS_THE_GUARD = """
import time
start = time.process_time()
import rollout_inspector.guard
print(time.process_time() - start)
"""


def test_the_guard_costs_a_trainer_no_time_to_import(installed: Path, tmp_path: Path) -> None:
    """Processor seconds: the clock says little on a machine that others use too."""
    ended = call(installed / "bin/python", "-c", _IMPORTS_THE_GUARD, cwd=tmp_path)
    assert float(ended.stdout) < 0.3


def test_serve_without_its_extra_says_which_one_in_one_sentence(installed: Path, tmp_path: Path) -> None:
    ended = call(installed / "bin/rollout-inspector", "serve", cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert "pip install 'rollout-inspector[server]'" in ended.stderr


_READS_EVERY_MODULE = """
import importlib, pathlib, pkgutil, sys
import rollouts, rollout_inspector.guard
heavy = {"django", "torch", "transformers", "numpy", "pyarrow", "jinja2"} & set(sys.modules)
assert not heavy, heavy
for package in ("chat_templates", "command_line", "formats", "guard", "replies", "tito", "tokenizers"):
    folder = importlib.import_module(f"rollouts.{package}")
    for one in pkgutil.walk_packages(folder.__path__, f"rollouts.{package}."):
        # pytest alone imports its plugin, by the entry point.
        if not one.name.endswith(("__main__", "pytest_plugin")) and ".worker" not in one.name:
            importlib.import_module(one.name)
assert not {"django", "torch", "transformers"} & set(sys.modules)
from importlib.metadata import entry_points
assert "rollout_inspector.guard.pytest_plugin" in {one.value for one in entry_points(group="pytest11")}
import rollout_inspector.client.client
print(rollout_inspector.client.client.__file__)
"""


def test_every_module_without_storage_is_imported_with_the_base_alone(installed: Path, tmp_path: Path) -> None:
    ended = call(installed / "bin/python", "-c", _READS_EVERY_MODULE, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert Path(ended.stdout.strip()).is_relative_to(installed)


_READS_THE_PAGES = """
import django
from django.conf import settings
django.setup()
from django.contrib.staticfiles import finders
from django.template.loader import get_template
from inspector.server.machines import code_version
get_template("base.html")
print(finders.find("css/base.css"), settings.INSPECTOR_DATA, settings.INSPECTOR_MODELS["demo"]["path"], code_version())
"""


def test_the_pages_of_the_wheel_find_their_files_and_write_where_they_were_started(
    installed: Path, tmp_path: Path
) -> None:
    """With the packages of the extra `server`; the program counts as the same as the checkout's."""
    (site,) = installed.glob("lib/python*/site-packages")
    more = tmp_path / "server"
    more.mkdir()
    link(needed([*PROJECT["dependencies"], *EXTRAS["server"]]), more)
    where = tmp_path / "somewhere"
    where.mkdir()
    path = os.pathsep.join([str(site), str(more)])
    ended = call(
        installed / "bin/python", "-c", _READS_THE_PAGES,
        cwd=where, PYTHONPATH=path, DJANGO_SETTINGS_MODULE="inspector.settings",
    )
    assert ended.returncode == 0, ended.stderr
    style, data, policy, code = ended.stdout.split()
    assert Path(style).is_relative_to(site) and Path(policy).is_relative_to(site)
    assert (Path(policy) / "model.safetensors").is_file()
    assert Path(data) == where / "data"
    from inspector.server.machines import code_version

    assert code == code_version()
