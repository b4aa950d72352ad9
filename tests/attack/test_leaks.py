"""What pages, scripts and logs tell a stranger: no path of the server, no token, no cookie."""

import logging
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.test import Client

from inspector.server.logs import JsonLineFormatter, TextLineFormatter, without_secrets
from inspector.web.login import make_token
from rollout_inspector import diagnose as tito_diagnose
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs import diagnosis
from rollouts.jobs.exports.reproduce import script
from rollouts.store.chat_templates.tokenizers import files_of
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.people.accounts import local_user
from rollouts.store.people.shares import create_api_key, create_share
from rollouts.store.runs.runs import create_run, end_active_run, end_run, fail_run
from rollouts.store.text import without_paths
from tests.samples.credentials import API, LOGIN, PASSWORD, RECORDER, SESSION, SHARE, TOKENS
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db


@pytest.fixture
def shared(tiny_tokenizer: Path) -> tuple[Run, Client]:
    """A run with a finding, and a browser that opened a share link of it."""
    make = Maker(tiny_tokenizer)
    trajectory, (finding,) = make.broken("x")
    run = make.run([trajectory], [[finding]])
    _, token = create_share(local_user(), run, query="", note="", days=1)
    visitor = Client()
    assert visitor.get(f"/s/{token}").status_code == 302
    return run, visitor


@pytest.mark.sqlite_only  # what a script says does not come from the database
def test_l12_the_script_of_a_finding_names_the_tokenizer_and_no_path(
    shared: tuple[Run, Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run, visitor = shared
    assert run.tokenizer is not None
    text = visitor.get(f"/trajectories/{run.trajectories.get().code}/findings/1.py").content.decode()
    assert run.tokenizer.sha256 in text and str(files_of(run.tokenizer.files_sha256)) not in text
    path = tmp_path / "finding.py"
    path.write_text(text)

    def ran(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path))

    ran(str(files_of(run.tokenizer.files_sha256)))
    assert "Reproduced:" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="Name the folder of the tokenizer"):
        ran()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit, match="is another one"):
        ran(str(tmp_path))


def test_a_hostile_name_of_a_tokenizer_stays_text(tiny_tokenizer: Path, tmp_path: Path) -> None:
    trajectory, (finding,) = Maker(tiny_tokenizer).broken("x")
    name = 'a"); import os; os.abort()\n"""\n{SHA256}'
    path = tmp_path / "finding.py"
    path.write_text(script(finding, trajectory, named=(name, "0" * 64)), encoding="ascii")
    with pytest.raises(SystemExit) as ended:
        sys.argv, kept = [str(path)], sys.argv
        try:
            runpy.run_path(str(path))
        finally:
            sys.argv = kept
    assert "import os; os.abort()" in str(ended.value)


def test_l12_no_page_names_the_folder_of_a_tokenizer_that_is_gone(
    shared: tuple[Run, Client], admin_client: Client, settings: Any
) -> None:
    run, visitor = shared
    assert run.tokenizer is not None
    place = files_of(run.tokenizer.files_sha256)
    moved = place.rename(place.with_name("moved-away"))
    code = run.trajectories.get().code
    try:
        for page in ("", "/compare", "/deltas", "/mask", "/record", "/strategies"):
            for client in (visitor, admin_client):
                for address in (f"/trajectories/{code}{page}", f"/trajectories/{code}{page}.json?step=0"):
                    answer = client.get(address)
                    assert answer.status_code < 500
                    assert str(settings.INSPECTOR_DATA) not in answer.content.decode(), address
    finally:
        moved.rename(place)


def test_l12_errors_of_work_are_stored_without_paths(
    shared: tuple[Run, Client], monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    run, visitor = shared

    def fail(*_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", f"{settings.INSPECTOR_DATA}/uploads/abc/a.jsonl")

    monkeypatch.setattr(tito_diagnose, "examine", fail)
    (finding,) = diagnosis.diagnosis_for(Trajectory("a", ()), run).findings
    assert "a.jsonl" in finding.evidence and str(settings.INSPECTOR_DATA) not in finding.evidence
    for end in (end_run, end_active_run):
        Run.objects.filter(pk=run.pk).update(status=Run.Status.RUNNING)
        end(run, Run.Status.FAILED, f"It broke off: {settings.INSPECTOR_DATA}/uploads/abc/a.jsonl is gone.")
        assert "a.jsonl is gone" in visitor.get(f"/runs/{run.code}").content.decode()
        assert str(settings.INSPECTOR_DATA) not in visitor.get(f"/runs/{run.code}.json").content.decode()
    Run.objects.filter(pk=run.pk).update(status=Run.Status.RUNNING)
    StoredTrajectory.objects.filter(run=run).update(status=StoredTrajectory.Status.RUNNING)
    fail_run(run, f"The engine cannot read {settings.INSPECTOR_DATA}/model/config.json.")
    assert run.trajectories.get().error == "The engine cannot read config.json."


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("[Errno 2] No such file: '/srv/data/a b.json'", "[Errno 2] No such file: 'a b.json'"),
        ("/srv/data/a.json: cut off", "a.json: cut off"),
        ("The server at http://10.0.0.7:8000/v1/models does not answer.",) * 2,
        ("Write 1/2/3 or application/json, see docs/push.md and </a/b>.",) * 2,
        ("unix:///srv/data/run/redis.sock",) * 2,
    ],
)
def test_paths_and_addresses_are_told_apart(said: str, shown: str) -> None:
    assert without_paths(said) == shown


@pytest.mark.parametrize("said", [
    f"Not Found: /s/{SHARE}", f"GET /s/{SHARE}.json HTTP/1.1", f"http://x/login?next=/&token={LOGIN}",
    f"/login?token={LOGIN}", f"Authorization: Bearer {API}", f"{{'HTTP_AUTHORIZATION': 'bearer {API}'}}",
    f"KeyError: '{API}'", f"token={API[3:]}",
    f"Cookie: inspector_session={SESSION}; csrftoken={SESSION}", f"{{'inspector_session': '{SESSION}'}}",
    f"X-CSRFToken: {SESSION}", f"csrfmiddlewaretoken={SESSION}&a=b", f"/token/{RECORDER}/v1/chat/completions",
    f"X-Recorder-Token: {RECORDER}", f"redis://:{PASSWORD}@10.0.0.1:6379/0", f"postgres://me:{PASSWORD}@db/x",
])
def test_no_line_of_a_log_holds_a_secret(said: str) -> None:
    for formatter in (TextLineFormatter(), JsonLineFormatter()):
        try:
            raise ValueError(said)
        except ValueError:
            record = logging.LogRecord("x", logging.ERROR, "x", 1, "event %s", (said,), sys.exc_info())
        record.request_id, record.path = "", said
        line = formatter.format(record)
        assert not any(secret in line for secret in TOKENS.values()), line
        assert "..." in line and "ValueError" in line
    assert without_secrets("path=/runs/k7m2c9x4ph3q status=200 tokens=12 token 5") == (
        "path=/runs/k7m2c9x4ph3q status=200 tokens=12 token 5"
    )


def test_the_cache_holds_no_token(admin_client: Client) -> None:
    """M1 in Redis: its keys and values are what somebody on its network reads."""
    cache.clear()
    run = create_run(Run.Kind.IMPORT, "a", status=Run.Status.DONE)
    _, share = create_share(local_user(), run, query="", note="", days=1)
    _, token = create_api_key(local_user(), "trainer")
    login = make_token()
    visitor = Client()
    visitor.post("/login", {"username": "ada", "password": PASSWORD})
    visitor.get(f"/s/{share}")
    visitor.get(f"/runs/{run.code}")
    Client().post(f"/api/runs/{run.code}/trajectories", b"{}", "text/plain", HTTP_AUTHORIZATION=f"Bearer {token}")
    Client().get(f"/login?token={login}")
    for address in ("/", "/runs.json", "/health", "/workers", f"/runs/{run.code}"):
        admin_client.get(address)
    held = repr(cache._cache)  # type: ignore[attr-defined]
    secrets = [PASSWORD, share, token, login, *(cookie.value for cookie in visitor.cookies.values())]
    assert len(held) > 10 and not [one for one in secrets if one in held]
    cache.clear()


def test_after_a_logout_the_browser_keeps_no_page(admin_client: Client) -> None:
    assert admin_client.get("/runs.json").status_code == 200
    answer = admin_client.post("/logout")
    assert answer["Clear-Site-Data"] == '"cache"' and admin_client.get("/runs.json").status_code == 401
