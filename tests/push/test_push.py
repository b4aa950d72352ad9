"""The push API: what is stored, what is known already, what is refused and in which words."""

import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client, RequestFactory
from django.utils import timezone

from inspector.api import push_views as views
from rollout_inspector.formats import FORMATS, Rejected
from rollout_inspector.formats.containers.compression import zstd
from rollouts.jobs import pushes
from rollouts.store.models import ApiToken, Run
from rollouts.store.people.shares import find_api_key, revoke
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.worker.jobs import do_job
from tests.push.conftest import call, episodes

pytestmark = pytest.mark.django_db


def lines(records: Sequence[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in records)


def send(
    token: str | None, path: str, body: bytes, content_type: str = "application/x-ndjson", **headers: Any
) -> tuple[int, dict[str, Any]]:
    if token is not None:
        headers["HTTP_AUTHORIZATION"] = f"Bearer {token}"
    # With CSRF checks on: a trainer has no cookie.
    response = Client(enforce_csrf_checks=True).post(path, body, content_type=content_type, **headers)
    return response.status_code, response.json()


def push(token: str | None, run: Run, records: Sequence[Any], **more: Any) -> tuple[int, dict[str, Any]]:
    return send(token, f"/api/runs/{run.code}/trajectories", lines(records), **more)


def test_trajectories_are_stored_and_their_diagnosis_ordered(token: str, run: Run, diagnosed: list[int]) -> None:
    status, answer = push(token, run, episodes(3))
    assert status == 200
    assert answer == {"run": run.code, "trajectories": 3, "known": 0, "rejected": [], "n_rejected": 0}
    run.refresh_from_db()
    assert (run.status, run.format, run.n_trajectories, run.n_steps) == ("done", "recorded_calls", 3, 6)
    first = load_trajectory(run.trajectories.get(external_id="s0"))
    assert first.reward == 1.0 and first.steps[1].stream.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert diagnosed == [run.jobs.get().pk]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [(b"no json\n", "application/x-ndjson", 415), (b"\x80\x04.", "application/octet-stream", 415),
     (lines(episodes(1)), "text/html", 415)],
)
def test_a_run_goes_again_where_nothing_of_its_first_push_is_taken(
    token: str, run: Run, body: bytes, kind: str, status: int
) -> None:
    path = f"/api/runs/{run.code}/trajectories"
    assert send(token, path, body, kind)[0] == status and Run.objects.filter(pk=run.pk).exists()
    assert send(token, f"{path}?first=yes", body, kind)[0] == status
    assert not Run.objects.filter(pk=run.pk).exists()


def test_a_first_push_of_which_something_is_taken_keeps_its_run(token: str, run: Run) -> None:
    path = f"/api/runs/{run.code}/trajectories?first=yes"
    assert send(token, path, lines([*episodes(1), b"broken"]))[0] == 200
    assert send(token, path, b"x", "text/html")[0] == 415
    run.refresh_from_db()
    assert run.n_trajectories == 1


def test_what_is_there_already_is_known_and_unchanged(token: str, run: Run, diagnosed: list[int]) -> None:
    push(token, run, episodes(2))
    do_job(diagnosed[0])
    before = list(run.trajectories.values())
    _, answer = push(token, run, episodes(3))
    assert (answer["trajectories"], answer["known"]) == (1, 2)
    assert list(run.trajectories.order_by("index").values()[:2]) == before
    do_job(diagnosed[1])
    _, answer = push(token, run, episodes(3))
    assert (answer["trajectories"], answer["known"]) == (0, 3) and len(diagnosed) == 2
    run.refresh_from_db()
    assert run.n_trajectories == run.trajectories.count() == 3


def test_what_has_no_id_is_named_by_its_content(token: str, run: Run) -> None:
    """The first line of the next step is another trajectory; the same bytes again are the same one."""
    said = {"input": "2+2?", "output": "4", "score": 1.0, "step": 1}
    for step in (1, 2):
        assert push(token, run, [{**said, "step": step}] * 2)[1]["trajectories"] == 2
        _, again = push(token, run, [{**said, "step": step}] * 2)
        assert (again["trajectories"], again["known"]) == (0, 2) and "notice" not in again
    batch = {"prompt_token_ids": [[1]], "response_ids": [[2]], "loss_masks": [[1]], "rewards": [1.0]}
    for ids in ([2], [3]):
        assert push(token, run, [{**batch, "response_ids": [ids]}])[1]["trajectories"] == 1


def test_ids_that_repeat_are_said_and_a_prefix_keeps_them_apart(token: str, run: Run) -> None:
    push(token, run, episodes(2))
    _, answer = push(token, run, [call("s0", [1, 2, 3], [4, 5, 6]), *episodes(1, start=1)])
    assert (answer["trajectories"], answer["known"]) == (0, 2)
    assert "with other tokens, another reward or another training step, 1 in all, 's0' first" in answer["notice"]
    path = f"/api/runs/{run.code}/trajectories"
    status, answer = send(token, f"{path}?training_step=4", lines(episodes(1)))
    assert status == 200 and answer["known"] == 1 and "another training step" in answer["notice"]
    for step in ("-1", "x", "1.5", "9" * 30):
        status, answer = send(token, f"{path}?training_step={step}", lines(episodes(1)))
        assert status == 400 and "It is a whole number from 0" in answer["error"]
    for _ in range(2):
        status, answer = send(token, f"{path}?prefix=step-2/", lines(episodes(2)))
        assert status == 200 and answer["trajectories"] + answer["known"] == 2 and "notice" not in answer
    assert set(run.trajectories.values_list("external_id", flat=True)) == {"s0", "s1", "step-2/s0", "step-2/s1"}
    for prefix in ("x" * 61, "%00"):
        status, answer = send(token, f"{path}?prefix={prefix}", lines(episodes(1)))
        assert status == 400 and "prefix must be" in answer["error"]
    status, answer = send(token, f"{path}?prefix=step-2/", lines([call("s" * 195, [1], [2])]))
    assert (status, answer["n_rejected"]) == (200, 1) and "over 200 characters" in answer["rejected"][0]["reason"]


def test_two_runs_do_not_know_each_other(token: str, run: Run) -> None:
    push(token, run, episodes(1))
    other = create_run(Run.Kind.IMPORT, "other")
    assert push(token, other, episodes(1))[1]["trajectories"] == 1


def test_a_bad_line_is_rejected_with_its_number_and_nothing_else_is(token: str, run: Run) -> None:
    records = [*episodes(1), b"{not json", call("s7", [-1], [2]), *episodes(1, start=1)]
    status, answer = push(token, run, records)
    assert status == 200 and (answer["trajectories"], answer["n_rejected"]) == (2, 2)
    assert {one["line"] for one in answer["rejected"]} == {3, 4} and all(one["reason"] for one in answer["rejected"])
    run.refresh_from_db()
    assert run.n_rejected == 2 and run.rejections.count() == 2
    assert not run.trajectories.filter(external_id="s7").exists()


def test_a_reason_that_quotes_a_lone_surrogate_and_a_nul_is_stored(
    token: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database's text can hold neither of them."""
    reader = replace(FORMATS["own_jsonl"], read=lambda source: iter([Rejected(7, "The id 'a\ud800\0' is taken.")]))
    monkeypatch.setattr(pushes.formats, "read", lambda source, *_: (reader, reader.read(source)))
    status, answer = push(token, run, episodes(1))
    assert (status, answer["n_rejected"]) == (200, 1) and answer["rejected"][0]["line"] == 7
    run.refresh_from_db()
    assert run.n_rejected == 1
    assert list(run.rejections.values_list("file", "line", "reason")) == [("pushed", 7, "The id 'a?␀' is taken.")]


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_compressed_bodies(token: str, run: Run, pack: Any) -> None:
    status, answer = send(token, f"/api/runs/{run.code}/trajectories", pack(lines(episodes(2))))
    assert status == 200 and answer["trajectories"] == 2


def test_a_body_that_is_cut_off_stores_whole_trajectories_only(token: str, run: Run) -> None:
    packed = gzip.compress(lines([call(f"s{i}", [1], [hash(str(i)) % 1000] * 9) for i in range(20_000)]))
    status, answer = send(token, f"/api/runs/{run.code}/trajectories", packed[:-20])
    assert status == 400 and "cut off" in answer["error"]
    assert run.trajectories.count() == answer["trajectories"] == 0


def test_a_chunked_body(token: str, run: Run) -> None:
    headers = {"HTTP_AUTHORIZATION": f"Bearer {token}", "HTTP_TRANSFER_ENCODING": "chunked"}
    request = RequestFactory().post("/", b"", content_type="application/x-ndjson", **headers)
    request.META.pop("CONTENT_LENGTH", None)
    request.META |= {"wsgi.input": io.BytesIO(lines(episodes(2))), "wsgi.input_terminated": True}
    assert json.loads(views.push(request, code=run.code).content)["trajectories"] == 2
    # A server that cannot tell where such a body ends.
    request.META.pop("wsgi.input_terminated")
    assert views.push(request, code=run.code).status_code == 411


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"token": None}, 401, "Bearer"),
        ({"token": "ri_wrong"}, 401, "revoked"),
        ({"token": "x" * 10_000}, 401, "revoked"),
        ({"code": "zzzzzzzzzzzz"}, 404, "no run"), ({"code": "No-Code"}, 404, "nothing at this address"),
        ({"body": b"\x80\x04\x95pickle", }, 415, "pickle"),
        ({"body": b'{"some": "json"}\n'}, 415, "no format"),
        ({"body": b""}, 411, "how long"),
        ({"body": b"\n"}, 415, "no lines"),
        ({"content_type": "multipart/form-data"}, 415, "content type"),
        ({"query": "?format=nonsense"}, 415, "no format"),
    ],
)
def test_refusals_are_sentences(token: str, run: Run, change: dict[str, Any], status: int, word: str) -> None:
    path = f"/api/runs/{change.get('code', run.code)}/trajectories{change.get('query', '')}"
    body = change.get("body", lines(episodes(1)))
    found, answer = send(change.get("token", token), path, body, change.get("content_type", "application/x-ndjson"))
    assert found == status and word in answer["error"]
    assert run.trajectories.count() == 0


def test_too_large_is_413_before_and_while_reading(token: str, run: Run, settings: Any) -> None:
    settings.UPLOAD_MAX_BYTES = 100
    assert push(token, run, episodes(1))[0] == 413
    headers = {"HTTP_AUTHORIZATION": f"Bearer {token}", "HTTP_TRANSFER_ENCODING": "chunked"}
    request = RequestFactory().post("/", b"", content_type="text/plain", **headers)
    request.META.pop("CONTENT_LENGTH", None)
    request.META |= {"wsgi.input": io.BytesIO(lines(episodes(9))), "wsgi.input_terminated": True}
    assert views.push(request, code=run.code).status_code == 413
    assert run.trajectories.count() == 0


def test_a_get_is_405_and_a_launch_takes_no_push(token: str, run: Run) -> None:
    response = Client().get(f"/api/runs/{run.code}/trajectories")
    assert response.status_code == 405 and response["Allow"] == "POST"
    launched = create_run(Run.Kind.LAUNCH, "made here")
    status, answer = push(token, launched, episodes(1))
    assert status == 409 and "launched here" in answer["error"]


def test_a_revoked_token_and_a_dismissed_user_are_refused(token: str, run: Run) -> None:
    record = find_api_key(token)
    assert record is not None
    record.created_by.is_active = False
    record.created_by.save()
    assert push(token, run, episodes(1))[0] == 401
    record.created_by.is_active = True
    record.created_by.save()
    assert push(token, run, episodes(1))[0] == 200
    revoke(record)
    assert push(token, run, episodes(1))[0] == 401


def test_last_use_is_written_once_a_minute(token: str, django_assert_num_queries: Any) -> None:
    record = find_api_key(token)
    assert record is not None and ApiToken.objects.get().last_used_at is not None
    with django_assert_num_queries(1):
        find_api_key(token)
    ApiToken.objects.update(last_used_at=timezone.now() - timedelta(hours=1))
    with django_assert_num_queries(2):
        find_api_key(token)


def test_a_run_is_made(token: str) -> None:
    status, answer = send(token, "/api/runs", b'{"name": "grpo-7", "chat_template": "{{ x }}"}', "application/json")
    run = Run.objects.get(code=answer["run"])
    assert status == 201 and answer["url"].endswith(f"/runs/{run.code}")
    assert (run.name, run.kind, run.created_by and run.created_by.get_username()) == ("grpo-7", "import", "ann")
    assert run.chat_template is not None and run.chat_template.text == "{{ x }}"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"[]", "JSON object"), (b"{", "JSON object"), (b"[" * 100_000, "JSON object"), (b"\xff\xfe", "JSON object"),
        (b'{"name": 3}', "name must be a text"), (b'{"name": "\\u0000"}', "name must be a text"),
        (b'{"name": "\\ud800"}', "name must be a text"), (b'{"tokenizer": "none such"}', "Registered: none"),
    ],
)
def test_a_run_that_cannot_be_made_says_why(token: str, body: bytes, word: str) -> None:
    status, answer = send(token, "/api/runs", body, "application/json")
    assert status == 400 and word in answer["error"] and not Run.objects.exists()


def test_queries_do_not_grow_with_the_trajectories(token: str, run: Run, django_assert_max_num_queries: Any) -> None:
    with django_assert_max_num_queries(40):
        push(token, run, episodes(2))
    with django_assert_max_num_queries(40):
        push(token, run, episodes(40, start=2))


def test_no_worker_is_no_failure(token: str, run: Run, no_broker: None) -> None:
    status, answer = push(token, run, episodes(1))
    assert status == 200 and answer["trajectories"] == 1 and f"diagnose {run.code}" in answer["notice"]
