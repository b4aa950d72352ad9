"""Who is refused what, and how: roles, scopes, hidden projects, hostile values, methods; each as a problem document."""

import base64
import json
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import ApiToken, Job, Run, TemplateCheck
from tests.api.conftest import Ask
from tests.samples.problems import assert_problem


def test_without_a_login_or_a_live_token(ask: Ask, callers: dict[str, str], client: Client) -> None:
    answer = ask("/runs", "")
    assert_problem(answer, 401)
    assert answer["WWW-Authenticate"].startswith("Bearer")
    for header in ("Bearer ri_wrong", "Basic YTpi", "Bearer ", "Bearer \u00e9\u20ac".encode().decode("latin-1")):
        assert_problem(client.get("/api/v1/runs", headers={"authorization": header}), 401)
    ApiToken.objects.update(revoked_at=timezone.now())
    assert_problem(ask("/runs"), 401)


def test_a_token_needs_the_scope(run: Run, ask: Ask) -> None:
    assert ask("/runs", "reader").status_code == 200
    assert "scope launch" in assert_problem(ask(f"/runs/{run.code}/cancel", "reader", "post"), 403)["detail"]
    assert "scope read" in assert_problem(ask("/runs", "launcher"), 403)["detail"]
    assert ask(f"/runs/{run.code}/cancel", "launcher", "post").status_code == 200


def test_a_role_that_is_too_low(run: Run, ask: Ask, sent: list[int]) -> None:
    assert ask(f"/runs/{run.code}", "viewer").status_code == 200
    for path in ("cancel", "resume", "replay"):
        assert "member" in assert_problem(ask(f"/runs/{run.code}/{path}", "viewer", "post"), 403)["detail"]
    assert_problem(ask(f"/runs/{run.code}/exports", "viewer", "post", {}), 403)
    assert_problem(ask(f"/runs/{run.code}", "member", "delete"), 403)  # somebody else made it
    assert sent == [] and Run.objects.count() == 1
    assert ask(f"/runs/{run.code}", "admin", "delete").status_code == 204
    assert not Run.objects.exists()


def test_a_hidden_project_is_as_one_that_does_not_exist(run: Run, ask: Ask, sent: list[int]) -> None:
    trajectory = run.trajectories.get(external_id="broken")
    job, _ = ask_job(run, "export", {})
    addresses = [
        *[(f"/runs/{run.code}{path}", "get") for path in ("", "/summary", "/trajectories", "/findings", "/jobs")],
        *[(f"/runs/{run.code}/{path}", "post") for path in ("cancel", "resume", "replay", "exports", "diagnose")],
        (f"/runs/{run.code}", "delete"),
        (f"/runs/{run.code}/gap", "get"), (f"/compare?run={run.code}&run={run.code}", "get"),
        *[(f"/trajectories/{trajectory.code}{path}", "get") for path in (
            "", "/steps", "/steps/0", "/steps/0/tokens", "/rows", "/rows/0/tokens", "/findings", "/findings/1",
            "/strategies", "/strategies/tool_delta/rows", "/strategies/tool_delta/rows/0/tokens",
        )],
        (f"/trajectories/{trajectory.code}/replay", "post"),
        (f"/jobs/{job.code}", "get"), (f"/jobs/{job.code}/file", "get"), (f"/jobs/{job.code}/cancel", "post"),
    ]
    for address, method in addresses:
        body = {} if method == "post" else None
        hidden = assert_problem(ask(address, "foreign", method, body), 404)
        for code in (run.code, trajectory.code, job.code):
            address = address.replace(code, "zzzzzzzzzzzz")
            hidden["detail"] = hidden["detail"].replace(code, "zzzzzzzzzzzz")
        assert hidden == assert_problem(ask(address, "foreign", method, body), 404)
    for path in ("/runs", "/jobs", "/checks", f"/search?text={run.code}", "/search?text=broken", "/search?by=ids&q=*+1",
                 "/search?by=metadata&q=broken"):
        assert not any(value for value in ask(path, "foreign").json().values()), path
    assert sent == [] and Run.objects.filter(cancel_requested=False).count() == 1


def test_a_browser_reads_with_its_login_and_writes_with_its_csrf_token(run: Run, admin_user: Any) -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(admin_user)
    assert browser.get("/api/v1/runs").status_code == 200
    assert "X-CSRFToken" in assert_problem(browser.post(f"/api/v1/runs/{run.code}/cancel"), 403)["detail"]
    page = browser.get("/api/docs")
    token = page.content.decode().partition('data-csrf="')[2].partition('"')[0]
    answer = browser.post(f"/api/v1/runs/{run.code}/cancel", headers={"X-CSRFToken": token})
    assert answer.status_code == 200


def cursor(*values: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


HOSTILE = ["%00", "NaN", "-1", "1e999", "9" * 5000, "%ED%A0%80", "\u0663", "[]", "x" * 300, "'; --", "../../etc"]
PARAMETERS = {
    "/runs": ("cursor", "limit", "text", "status", "kind", "project"),
    "/runs/{run}/trajectories": (
        "cursor", "limit", "sort", "finding", "severity", "status", "stop", "group", "text", "min", "max", "at", "from",
        "to", "tokens_min", "tokens_max", "policy", "flawed",
    ),
    "/runs/{run}/findings": ("cursor", "limit", "kind", "severity"),
    "/compare": ("training_min", "training_max"),
    "/trajectories/{trajectory}/steps": ("cursor", "limit"),
    "/trajectories/{trajectory}/findings": ("cursor", "limit"),
    "/trajectories/{trajectory}/rows/0/tokens": ("start", "stop", "columns"),
    "/trajectories/{trajectory}/steps/0/tokens": ("start", "stop", "columns"),
    "/jobs": ("cursor", "limit", "status", "kind", "run"),
    "/checks": ("cursor", "limit"),
    "/search": ("cursor", "limit", "text", "kind", "by", "q", "run"),
}
CURSORS = [
    cursor("runs", "2026-01-01", 1), cursor("runs", "2026-01-01T00:00:00+00:00", 2**63), cursor("runs", True, True),
    cursor("jobs", 1e400), cursor("jobs", -1), cursor("findings", None), cursor("steps", "1"), cursor(["jobs"], 1),
    cursor("index", "nan", 1), cursor("index", 1, 2**40), "AAAA", "====", "\u0663", cursor("checks", 2**63 - 1),
]


@pytest.mark.parametrize("path", PARAMETERS)
def test_hostile_values_are_named(run: Run, ask: Ask, path: str) -> None:
    trajectory = run.trajectories.get(external_id="broken")
    here = path.format(run=run.code, trajectory=trajectory.code)
    also = {"/search": "text=a&", "/compare": f"run={run.code}&run={run.code}&"}.get(path, "")
    n_refused = 0
    for name in PARAMETERS[path]:
        for value in [*HOSTILE, *(CURSORS if name == "cursor" else [])]:
            answer = ask(f"{here}?{also}{name}={value}")
            assert answer.status_code in (200, 422), (name, value[:40], answer.content[:300])
            if answer.status_code == 422:
                n_refused += 1
                assert name in assert_problem(answer, 422)["errors"]
            else:
                answer.json()
    assert n_refused > len(PARAMETERS[path])


BODIES = [
    b"", b"[]", b"null", b"{", b"\xff", b'{"format": NaN}', b'{"format": "\\ud800"}', b'{"format": "\\u0000"}',
    b'{"pad_to": 1e400}', b'{"pad_to": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"unknown": 1}',
    b'{"format": "none"}', b'{"force": true, "leave_out": true}', b'{"strategy": "none"}',
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_bodies_that_make_no_sense(run: Run, ask: Ask, body: bytes, sent: list[int]) -> None:
    answer = ask(f"/runs/{run.code}/exports", "member", "post", body)
    assert answer.status_code in (400, 413, 422)
    assert_problem(answer, answer.status_code)
    assert sent == [] and not Job.objects.exists()


@pytest.mark.parametrize("code", ["%00" * 4, "a" * 5000, "%ED%A0%80aaaa", "UPPER", "..%2f..", "\u0663" * 8])
def test_codes_that_are_none(db: None, ask: Ask, code: str) -> None:
    for noun in ("runs", "trajectories", "jobs", "checks"):
        assert_problem(ask(f"/{noun}/{code}"), 404)


def test_unknown_addresses_and_methods(run: Run, ask: Ask) -> None:
    assert_problem(ask("/nothing"), 404)
    answer = ask("/search?text=a", "member", "post")
    assert_problem(answer, 405)
    assert answer["Allow"] == "GET"
    head = ask(f"/runs/{run.code}", "member", "head")
    assert head.status_code == 200 and head.content == b""
    assert_problem(ask(f"/trajectories/{run.trajectories.first().code}/steps/99999999999"), 422)


def test_too_many_requests(run: Run, ask: Ask, settings: Any) -> None:
    settings.API_RATE = "3/m"
    answers = [ask("/runs") for _ in range(5)]
    assert [one.status_code for one in answers] == [200, 200, 200, 429, 429]
    assert_problem(answers[-1], 429)
    assert 0 < int(answers[-1]["Retry-After"]) <= 60
    assert ask("/runs", "viewer").status_code == 200


def test_the_end_of_a_window_is_a_second_away(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inspector.api.callers.get_usage", lambda *_, **__: {"should_limit": True, "time_left": 0})
    assert ask("/runs")["Retry-After"] == "1"


def test_the_push_addresses_are_the_old_ones(run: Run, ask: Ask, client: Client, callers: dict[str, str]) -> None:
    made = ask("/runs", "member", "post", {"name": "pushed"})
    assert made.status_code == 201
    line = json.dumps({"prompt_ids": [1], "completion_ids": [2]})
    assert_problem(ask(f"/runs/{run.code}x/trajectories", "member", "post", line), 404)
    assert_problem(ask("/runs", "", "post", {"name": "a"}), 401)
    assert client.post("/api/runs", {"name": "a"}, content_type="application/json").json().keys() == {"error"}


def test_no_check_is_shown_to_others(run: Run, ask: Ask) -> None:
    assert run.chat_template is not None
    check = TemplateCheck.objects.create(code="abcdabcdabcd", chat_template=run.chat_template, project=run.project)
    Job.objects.create(template_check=check, kind="check_template")
    assert ask(f"/checks/{check.code}").json()["status"] == "queued"
    assert len(ask("/checks").json()["items"]) == 1 == len(ask("/jobs").json()["items"])
    assert_problem(ask(f"/checks/{check.code}", "foreign"), 404)
    assert ask("/checks", "foreign").json()["items"] == [] == ask("/jobs", "foreign").json()["items"]
