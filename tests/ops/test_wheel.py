"""The wheel: what is in it, what it needs, and that it works where nothing else of the project is.

The environments hold links to the packages that the wheel says it needs, and no other: what it forgets is missing.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rollouts.gallery import BUNDLE
from tests.conftest import ROOT, missing, wait_until
from tests.samples.product import HOUSES

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
    more |= by_name(EXTRAS["demo"]) if extra == "server" else {}
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


def hatchling(target: str, folder: Path) -> Path:
    """What `pip install .` or `python -m build` makes, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hatchling("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_whole_product_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    places = {house: house for house in HOUSES}
    places |= {name: f"inspector/shipped/{name}" for name in ("templates", "static", "docs")}
    wanted = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in places.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == wanted
    assert {f"{house}/py.typed" for house in HOUSES} <= found


def test_the_source_archive_makes_the_same_wheel_and_holds_no_tool(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(hatchling("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.removeprefix("inspector/shipped/") for name in files} <= names
    assert not {name.partition("/")[0] for name in names} & {"tools", "tests", "benchmarks", "data"}


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
    (tmp_path / "rows.parquet").write_bytes(b"PAR1" + bytes(64) + b"PAR1")
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    for status, words, *arguments in (
        (0, "Locked chat.jinja", "lock", "chat.jinja", "-o", "templates.lock"),
        (0, "Passed", "template", "--lock", "templates.lock"),
        (0, "passes the check", "mend", "calls.jsonl", "-o", "mended.jsonl"),
        (0, "Passed", "check", "mended.jsonl"),
        (2, "needs the package pyarrow", "audit", "calls.jsonl", "--output", "audit", "--processes", "1"),
        (2, "is a Parquet file; install pyarrow to read it", "check", "rows.parquet"),
        (2, "--url", "push", "calls.jsonl"),
        (2, "--url", "watch", "."),
        (2, "needs a checkout", "watch", ".", "--url", "http://127.0.0.1:1", "--token", "t", "--convert-pickles"),
        (2, "rollout-inspector[mcp]", "mcp", "--url", "http://127.0.0.1:1", "--token", "t"),
        (0, "rollout-inspector 1.", "--version"),
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
for module in pkgutil.walk_packages(rollout_inspector.__path__, "rollout_inspector."):
    # pytest alone imports its plugin, by the entry point.
    if not module.name.endswith(("__main__", "pytest_plugin")) and ".worker" not in module.name and "audit" not in (
        module.name.rpartition(".")[2]  # with the extra `parquet`
    ):
        importlib.import_module(module.name)
assert not {"django", "torch", "transformers"} & set(sys.modules)
from importlib.metadata import entry_points
assert "rollout_inspector.guard.pytest_plugin" in {point.value for point in entry_points(group="pytest11")}
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


def test_the_base_is_small(installed: Path) -> None:
    """Nothing of the server, of Parquet or of torch comes with it."""
    names = needed(PROJECT["dependencies"])
    assert not names & {"pyarrow", "django", "torch", "transformers", "pydantic"} and len(names) <= 26, sorted(names)
    assert not needed([*PROJECT["dependencies"], *EXTRAS["server"]]) & {"torch", "transformers"}


_SERVES_WITHOUT_TORCH = """
import django
django.setup()
import inspector.urls, inspector.wsgi
from rollouts.sampling.engines.registry import ENGINES
from django.test import Client
print(Client(headers={"host": "localhost"}).get("/robots.txt").status_code)
"""


def test_the_web_process_starts_without_torch(installed: Path, tmp_path: Path) -> None:
    more = linked(tmp_path / "server", [*PROJECT["dependencies"], *EXTRAS["server"]])
    (site,) = installed.glob("lib/python*/site-packages")
    assert not (more / "torch").exists() and not (more / "transformers").exists()
    for command in (["manage", "migrate", "--verbosity", "0"], ["manage", "check"]):
        ended = call(installed / "bin/rollout-inspector", *command, cwd=tmp_path,
                     PYTHONPATH=os.pathsep.join([str(site), str(more)]))
        assert ended.returncode == 0, ended.stderr
    ended = call(
        installed / "bin/python", "-c", _SERVES_WITHOUT_TORCH, cwd=tmp_path,
        PYTHONPATH=os.pathsep.join([str(site), str(more)]), DJANGO_SETTINGS_MODULE="inspector.settings",
    )
    assert ended.returncode == 0 and ended.stdout.split()[-1] == "200", ended.stderr


def test_the_archives_are_what_an_index_takes(wheel: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("twine") is None:
        missing("twine is not installed")
    archive = hatchling("sdist", tmp_path)
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(archive)], capture_output=True, text=True,
        timeout=120,
    )
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == 2, checked.stdout


# --- beside a project that has packages of our names ------------------------------------------------------------------

_ITS_TEST = """
import inspector, rollouts
from rollout_inspector.client import client
from rollout_inspector.guard import Guard, assert_tito

def test_its_own_packages_are_imported(pytestconfig):
    assert rollouts.OURS and inspector.OURS
    assert pytestconfig.pluginmanager.has_plugin("rollout-inspector")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project of a user, with packages of our names and of a name that everybody uses."""
    folder = tmp_path / "project"
    for package in ("rollouts", "inspector", "tests", "tools"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("OURS = True\n")
    (folder / "tests" / "test_it.py").write_text(_ITS_TEST)
    return folder


def linked(folder: Path, requirements: list[str]) -> Path:
    """A folder of packages that the environment of the wheel lacks."""
    folder.mkdir()
    link(needed(requirements), folder)
    return folder


def test_pytest_runs_in_a_project_with_packages_of_our_names(installed: Path, project: Path, tmp_path: Path) -> None:
    more = linked(tmp_path / "more", ["pytest"])
    for command in (["-m", "pytest"], ["-c", "import sys, pytest; sys.exit(pytest.main())", "-o", "pythonpath=."]):
        ended = call(installed / "bin/python", *command, "-q", cwd=project, PYTHONPATH=str(more))
        assert (ended.returncode, ended.stderr) == (0, "") and "1 passed" in ended.stdout, ended.stdout


def test_the_commands_run_in_a_project_with_packages_of_our_names(installed: Path, project: Path) -> None:
    (site,) = installed.glob("lib/python*/site-packages")
    policy = site / "rollouts" / "sampling" / "demo_policy" / "model"
    for program in ([installed / "bin/rollout-inspector"], [installed / "bin/python", "-m", "rollout_inspector"]):
        command = [*program, "check", BUNDLE, "--tokenizer", policy]
        ended = call(*command, cwd=project, PYTHONPATH=str(project))
        assert (ended.returncode, ended.stderr) == (1, "") and "Failed by" in ended.stdout


_EARLIER_NAMES = """
import rollout_inspector.client.adapters.trl, rollout_inspector.client.client, rollout_inspector.guard.trainer_guard
import rollouts.adapters.trl, rollouts.guard.trainer_guard
from rollouts.adapters import trl
from rollouts.client import Client
from rollouts.guard import Guard
assert Client is rollout_inspector.client.client.Client and Guard is rollout_inspector.guard.Guard
assert rollouts.adapters.trl is trl is rollout_inspector.client.adapters.trl
assert rollouts.guard.trainer_guard is rollout_inspector.guard.trainer_guard
"""


def test_the_earlier_names_are_the_same_modules_where_rollouts_is_ours(installed: Path, tmp_path: Path) -> None:
    ended = call(installed / "bin/python", "-c", _EARLIER_NAMES, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


_ASKS_THE_SERVER = """
import sys
import rollouts
from rollout_inspector.client.client import Client
assert rollouts.OURS
run = Client(sys.argv[1], sys.argv[2]).create_run("its run")
print(run)
"""
_READY = re.compile(r"Rollout Inspector is ready: (http://127\.0\.0\.1:\d+)/")


def test_the_server_runs_in_a_project_with_packages_of_our_names(
    installed: Path, project: Path, tmp_path: Path
) -> None:
    """Web server and both workers are ours, whatever the folder and PYTHONPATH say; the client reaches them."""
    more = linked(tmp_path / "more", [*PROJECT["dependencies"], *EXTRAS["server"]])
    data, output = tmp_path / "data", tmp_path / "output"
    environment = {"PYTHONPATH": os.pathsep.join([str(project), str(more)]), "INSPECTOR_DATA": str(data)}
    passed = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    program = installed / "bin/rollout-inspector"
    with output.open("w") as file:
        process = subprocess.Popen(
            [str(program), "serve", "--port", "18000"], cwd=project, stdout=file, stderr=subprocess.STDOUT,
            env={**passed, **environment, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
        )
    try:
        wait_until(
            lambda: bool(_READY.search(output.read_text())) or process.poll() is not None, 180, "the server is ready"
        )
        ready = _READY.search(output.read_text())
        assert ready, output.read_text()
        wait_until(lambda: status_of(f"{ready[1]}/health") == 200, 180, "both workers are well")
        made = call(program, "api_token", "trainer", cwd=project, **environment)
        token = made.stdout.split()[-1]
        ended = call(
            installed / "bin/python", "-c", _ASKS_THE_SERVER, ready[1], token, cwd=project, PYTHONPATH=str(project)
        )
        assert (ended.returncode, ended.stderr) == (0, ""), made.stderr
        assert ended.stdout.strip()
    finally:
        process.terminate()
        process.wait(60)
    assert {path.name for path in project.iterdir()} == {"rollouts", "inspector", "tests", "tools"}


def status_of(url: str) -> int:
    try:
        with urlopen(url, timeout=60) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
