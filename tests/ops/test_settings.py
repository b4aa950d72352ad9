"""Environment variables, system checks, logs: each with a case that passes and one that fails."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.checks import run_checks

from inspector.server import paths
from inspector.server.env import EnvironmentReader
from inspector.server.logs import JsonLineFormatter, TextLineFormatter
from tests.conftest import ROOT


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("No", False), ("", True), (" on ", True)])
def test_a_flag_is_read(value: str, expected: bool) -> None:
    environment = EnvironmentReader({"X": value})
    assert environment.flag("X", True) is expected
    assert environment.problems == []


@pytest.mark.parametrize(
    "read",
    [
        lambda env: env.flag("X", False),
        lambda env: env.whole("X", 0, least=0),
        lambda env: env.choice("X", "", ["a", ""]) or 0,
    ],
)
def test_a_wrong_value_is_a_sentence_and_the_default_stands_in(read) -> None:
    environment = EnvironmentReader({"X": "-maybe"})
    assert not read(environment)
    assert "X" in environment.problems[0].message
    assert environment.problems[0].hint


def test_whole_numbers_keep_their_bounds() -> None:
    environment = EnvironmentReader({"X": "7"})
    assert environment.whole("X", 1, least=1, most=7) == 7
    assert environment.problems == []
    assert environment.whole("X", 1, least=1, most=6) == 1
    assert len(environment.problems) == 1


def test_a_command_on_a_database_without_tables_says_what_to_do(tmp_path: Path) -> None:
    environment = {**os.environ, "INSPECTOR_DATA": str(tmp_path), "DATABASE_URL": ""}
    ended = subprocess.run(
        [sys.executable, "manage.py", "findings", "nothing"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Run `manage.py migrate`" in ended.stderr and "Traceback" not in ended.stderr


TEMPLATE = "tools/demo_policy/chat_template.jinja"


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        (["check"], ""), (["check_template", "--chat-template", TEMPLATE], "1"),
        (["check_template", "--chat-template", TEMPLATE, "--json"], ""),
    ],
)
def test_a_command_whose_reader_has_gone_ends_quietly(tmp_path: Path, command: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "INSPECTOR_DATA": str(tmp_path), "DATABASE_URL": "", "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writer) as pipe:
        ended = subprocess.run(
            [sys.executable, "manage.py", *command], cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.PIPE
        )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


_ITERATES = """
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
call_command("migrate", "contenttypes", verbosity=0)
rows = ContentType.objects.iterator(1)
for one in rows:
    print("x" * 100_000)
"""


def test_a_command_that_reads_the_database_when_its_reader_goes_ends_quietly(tmp_path: Path) -> None:
    """Its cursor is closed after its connection: `findings RUN | head -3`."""
    test_a_command_whose_reader_has_gone_ends_quietly(tmp_path, ["shell", "--no-imports", "-c", _ITERATES], "")


def test_a_command_without_a_standard_output_ends_as_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    import manage

    done: list[list[str]] = []
    monkeypatch.setattr("django.core.management.execute_from_command_line", done.append)
    monkeypatch.setattr(sys, "stdout", None)
    manage.main()
    assert len(done) == 1


def test_a_package_that_lacks_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from django.conf import settings

    from rollout_inspector.commands.main import run_on_server

    monkeypatch.setattr(settings, "INSTALLED_APPS", [*settings.INSTALLED_APPS, "no_such_package.apps.One"])
    assert run_on_server(["check"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("This command needs the package no_such_package, ") and "make run" in said


def test_another_broken_pipe_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import manage

    def breaks(_: list[str]) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("django.core.management.execute_from_command_line", breaks)
    with (ROOT / TEMPLATE).open() as file, pytest.raises(BrokenPipeError):
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)
        manage.main()


def test_the_settings_as_they_are_pass_every_check() -> None:
    assert [found for found in run_checks() if found.id.startswith("inspector.E")] == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"REDIS_URL": "amqp://somewhere"}, "inspector.E003"),
        ({"DATABASES": {"default": {"ENGINE": "django.db.backends.mysql"}}}, "inspector.E004"),
        ({"DEBUG": True, "ALLOWED_HOSTS": ["inspector.example"]}, "inspector.E006"),
        ({"SECRET_KEY": "short"}, "inspector.E007"),
        ({"ALLOWED_HOSTS": ["*"]}, "inspector.W006"),
        ({"ALLOWED_HOSTS": ["a.example"], "REDIS_URL": "redis://b.example:6379/0"}, "inspector.W007"),
        ({"INSPECTOR_DATA": Path(__file__) / "data"}, "inspector.E002"),
        ({"INSPECTOR_MODELS": {"far": {"engine": "vllm_server", "path": "/x"}}}, "inspector.E009"),
    ],
)
def test_a_misconfiguration_is_named_with_the_way_out(settings, change: dict, expected: str) -> None:
    from inspector.server import system_checks

    for name, value in change.items():
        setattr(settings, name, value)
    checks = [check for name, check in vars(system_checks).items() if name.startswith("check_")]
    found = {message.id: message for check in checks for message in check()}
    assert found[expected].hint


def test_a_wrong_variable_stops_a_command_with_its_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check"],
        cwd=ROOT,
        env={"PATH": "", "INSPECTOR_DATA": str(tmp_path), "DEBUG": "perhaps", "DATABASE_URL": "nonsense://"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "DEBUG is 'perhaps', which is neither yes nor no." in done.stderr
    assert "DATABASE_URL cannot be read." in done.stderr
    assert "Traceback" not in done.stderr


def test_the_secret_is_made_once_and_is_private(tmp_path: Path) -> None:
    first = paths.secret_key(tmp_path / "data")
    assert paths.secret_key(tmp_path / "data") == first
    assert len(first) >= 50
    assert (tmp_path / "data" / "secret_key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["secret_key"]


def test_a_deep_data_folder_still_has_a_socket_path_that_fits(tmp_path: Path) -> None:
    assert paths.embedded_redis_socket(Path("/srv/data")) == Path("/srv/data/run/redis.sock")
    assert len(str(paths.embedded_redis_socket(tmp_path / ("deep" * 40)))) <= paths.MAX_SOCKET_PATH


@pytest.mark.parametrize(
    ("url", "broker"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("unix:///run/redis.sock?db=3", "redis+socket:///run/redis.sock?virtual_host=3"),
    ],
)
def test_celery_is_told_the_same_redis(url: str, broker: str) -> None:
    assert paths.broker_url(url) == broker


def _record(**extra: object) -> logging.LogRecord:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "step %s done\nforged=1", "args": (3,)})
    record.__dict__.update(extra)
    return record


def test_an_event_is_one_line_of_text() -> None:
    line = TextLineFormatter().format(_record(run="r1", request_id="abc"))
    assert "\n" not in line
    assert 'event="step 3 done\\nforged=1"' in line
    assert line.endswith("request_id=abc run=r1")


def test_an_event_is_one_json_object() -> None:
    line = JsonLineFormatter().format(_record(tokens=7))
    assert "\n" not in line
    assert json.loads(line)["tokens"] == 7


def test_the_web_process_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import inspector.wsgi, sys, django.urls; django.urls.get_resolver().url_patterns;"
        "print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "", "INSPECTOR_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"
