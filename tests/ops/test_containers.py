"""The image and compose.yaml. No container is started: the files are linted, and every command runs outside of one.

The commands run in a copy of what the image holds, with its environment, and write to the data folder alone.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inspector.server import alive
from tests.conftest import ROOT, database_url, wait_until
from tests.ports import HeldPort

BIN = Path(sys.executable).parent
SECRETS = ("SECRET_KEY", "POSTGRES_PASSWORD", "REDIS_PASSWORD", "S3_SECRET_KEY")


def instructions() -> list[tuple[str, str]]:
    """(instruction, argument) of the Dockerfile, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for line in text.splitlines() if line for word, _, rest in [line.partition(" ")]]


def last(name: str) -> str:
    return [argument for word, argument in instructions() if word == name][-1]


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return found


def ours() -> dict[str, dict[str, Any]]:
    """The services that run our image."""
    return {name: one for name, one in compose()["services"].items() if "rollout-inspector" in one["image"]}


def test_each_image_has_a_version_and_may_be_named_by_digest() -> None:
    images = {name: service["image"] for name, service in compose()["services"].items() if name not in ours()}
    sources = [argument.split()[0] for word, argument in instructions() if word == "FROM"]
    assert len(images) == 3 and set(sources) == {"${PYTHON}"}
    arguments = dict(argument.split("=", 1) for word, argument in instructions() if word == "ARG")
    defaults = [arguments["PYTHON"], *(re.fullmatch(r"\$\{\w+_IMAGE:-(.+)\}", image)[1] for image in images.values())]
    assert all(re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", image) for image in defaults), defaults


# --- lint


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", "Dockerfile"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", ".github/workflows/ci.yml"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-actions", ".github/actions/check/action.yml"],
    ],
    ids=lambda command: command[-1],
)
def test_a_linter_has_nothing_to_say(command: list[str]) -> None:
    ended = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_linter_finds_a_fault(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((ROOT / "compose.yaml").read_text().replace("read_only:", "readonly:"))
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", wrong]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


# --- what holds for each service


def test_no_service_may_do_more_than_it_must() -> None:
    for name, service in compose()["services"].items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["healthcheck"].get("test") or name == "migrate", name
        published = [port.rpartition(":")[0] for port in service.get("ports", [])]
        assert published == ([] if name != "web" else ["${INSPECTOR_ADDRESS:-127.0.0.1:8000}"]), name


def test_secrets_have_no_default_and_their_absence_is_a_sentence() -> None:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "compose.yaml").read_text(), flags=re.MULTILINE)
    for name in SECRETS:
        used = re.findall(r"\$\{" + name + r"([^}]*)\}", text)
        assert used and not [after for after in used if after.startswith((":-", "-"))], name
        assert any(after.startswith(":?") and "openssl rand" in after for after in used), name
    words = re.findall(r"(?:SECRET|PASSWORD)\w*: (\S+)", text)
    assert words and all(word.startswith(("${", '"')) for word in words), words


def test_each_service_of_ours_has_a_data_folder_of_its_own() -> None:
    folders = [one["volumes"] for one in ours().values()]
    assert len(folders) == 4 and all(len(one) == 1 and one[0].endswith(":/data") for one in folders)
    assert len({one[0] for one in folders}) == 4
    assert last("USER") == "10001:10001" and last("VOLUME") == "/data"


def test_the_image_holds_what_runs_and_nothing_else() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert all((ROOT / name).exists() for name in kept)
    needed = {"rollout_inspector", "inspector", "rollouts", "templates", "static", "docs", "tools", "manage.py"}
    assert needed <= set(kept)
    assert not {"tests", "benchmarks", ".git", "data"} & set(kept)


# --- the commands, outside of an image


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the image has in /app, which nobody may write to."""
    app = tmp_path_factory.mktemp("image") / "app"
    app.mkdir()
    for name in (line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, app / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, app / name)
    folders = [app, *(path for path in app.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield app
    for folder in folders:
        folder.chmod(0o755)


class Container:
    """Runs commands as in a container of the image, with a data folder of its own."""

    def __init__(self, app: Path, data: Path, environment: dict[str, str]) -> None:
        self.app, self.data = app, data
        data.mkdir()
        image = dict(re.findall(r"(\w+)=(\S+)", last("ENV").replace("/opt/venv/bin:$PATH", f"{BIN}:{os.defpath}")))
        self.environment = {name: value.replace("/data", str(data)) for name, value in image.items()} | environment
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        entrypoint = [str(self.app / part) if part.startswith("inspector/") else part for part in command]
        log = (self.data.parent / f"{self.data.name}-{len(self.started)}.log").open("wb")
        process = subprocess.Popen(
            entrypoint, cwd=self.app, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        log.close()
        self.started.append(process)
        return process

    def said(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.data.parent.glob(f"{self.data.name}-*.log"))

    def succeeds(self, command: list[str]) -> bool:
        return self.start(command).wait(120) == 0


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.sqlite_only  # what starts is the same on any database
@pytest.mark.django_db(transaction=True)
def test_every_role_starts_is_healthy_and_writes_to_its_data_alone(
    image: Path, live_redis: str, tmp_path: Path, port: HeldPort
) -> None:
    entrypoint = json.loads(last("ENTRYPOINT"))
    assert json.loads(last("CMD")) == ["web"]
    shared = {
        "DATABASE_URL": database_url(), "REDIS_URL": live_redis, "INSPECTOR_FILES": str(tmp_path / "bucket"),
        "SECRET_KEY": "x" * 50, "BIND": f"127.0.0.1:{port.number}", "HF_HUB_OFFLINE": "1",
    }
    before = tree(image)
    made = {name: Container(image, tmp_path / name, shared) for name in ours()}
    try:
        assert made["migrate"].succeeds([*entrypoint, *ours()["migrate"]["command"]]), made["migrate"].said()
        checks = {name: ours()[name]["healthcheck"]["test"] for name in made if name != "migrate"}
        assert all(check[:2] == ["CMD", "inspector/server/start"] for check in checks.values())
        for name in checks:
            assert not made[name].succeeds(checks[name][1:]), f"{name} is healthy before it runs"
            made[name].start([*entrypoint, *ours()[name]["command"]])
        for name, check in checks.items():
            role = made[name]
            wait_until(lambda: role.succeeds(check[1:]), 120, f"{name} is healthy")  # noqa: B023
        with urllib.request.urlopen(f"{port.url}/health") as answer:
            assert json.load(answer)["status"] == "ok"
        with urllib.request.urlopen(f"{port.url}/login") as answer:
            style = re.search(r'href="(/static/[^"]+\.css)"', answer.read().decode())
        assert style is not None
        with urllib.request.urlopen(f"{port.url}{style[1]}") as answer:
            assert answer.status == 200
        assert made["web"].succeeds([*entrypoint, "python", "manage.py", "check"]), made["web"].said()
        # As compose.yaml starts it, without a public name and HTTPS.
        with HeldPort() as other:
            made["web"].environment |= {"INSPECTOR_TEAM": "1", "BIND": f"0.0.0.0:{other.number}"}
            assert not made["web"].succeeds([*entrypoint, "web"]) and "(inspector.E022)" in made["web"].said()
    finally:
        for container in made.values():
            for process in container.started:
                process.terminate()
        for container in made.values():
            for process in container.started:
                process.wait(60)
    assert tree(image) == before
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name not in {*made, "bucket"}]


def test_the_health_check_of_the_image_knows_the_role_by_its_command_line() -> None:
    command = last("HEALTHCHECK").partition("CMD ")[2]
    assert json.loads(command) == ["inspector/server/start", "healthy"]
    assert alive.role_of("/opt/venv/bin/python\0/opt/venv/bin/gunicorn\0-c\0x\0") == "web"
    assert alive.role_of("python\0/opt/venv/bin/celery\0-A\0inspector\0worker\0") == "worker"
    assert alive.role_of("/sbin/docker-init\0--\0inspector/server/start\0engine\0demo\0") == "engine"
    assert alive.role_of("python\0manage.py\0migrate\0") == "" == alive.fault("")


def test_what_does_not_live_is_said(monkeypatch: pytest.MonkeyPatch, settings: Any, port: HeldPort) -> None:
    monkeypatch.setenv("BIND", f"0.0.0.0:{port.number}")
    assert "does not answer" in alive.fault("web")
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert "REDIS_URL" in alive.fault("worker")


def test_a_worker_of_another_role_or_machine_is_not_the_one_that_is_meant() -> None:
    here = socket.gethostname()
    assert alive.is_of("worker", f"worker@{here}", here) and alive.is_of("engine", f"engine.demo@{here}", here)
    assert not alive.is_of("engine", f"worker@{here}", here) and not alive.is_of("worker", "worker@elsewhere", here)
