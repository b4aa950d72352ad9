"""Alarms from stored figures, and their delivery to a webhook: once, signed, tried again, and never waited for long."""

import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from django.utils import timezone

from rollout_inspector.refusal import Refusal
from rollouts.jobs import alarm_delivery
from rollouts.jobs.alarm_delivery import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, pause_after, send_due
from rollouts.store.models import Alarm, AlarmRule, AuditEvent, Job, ProjectAlarms, Run
from rollouts.store.runs.alarms import GIVE_UP, drop_limit, limits_in, set_limit, set_webhook, take_alarms, webhook_key
from rollouts.store.runs.runs import create_run
from rollouts.store.runs.training_steps import take_training_steps
from rollouts.worker.jobs import do_job
from tests.people import make_member
from tests.samples.training_steps import save, store_steps, world

pytestmark = pytest.mark.django_db


@pytest.fixture
def member() -> Any:
    return make_member("ada")


def alarm(run: Run, figure: str = "broken") -> Alarm:
    return Alarm.objects.get(run=run, figure=figure)


def test_counting_raises_an_alarm_by_the_defaults_and_one_that_goes_no_longer_holds(run: Run) -> None:
    store_steps(run, [0, 0, 3, 5])
    take_alarms(run)
    raised = alarm(run)
    assert (raised.holds, raised.first_step, raised.worst_step, raised.worst) == (True, 2, 3, 0.5)
    store_steps(run, [0, 0, 3, 5, 9])
    take_alarms(run)
    assert (alarm(run).pk, alarm(run).last_step, alarm(run).raised_at) == (raised.pk, 4, raised.raised_at)
    store_steps(run, [0, 0, 0])
    take_alarms(run)
    assert not alarm(run).holds and Alarm.objects.count() == 1


def test_the_figures_of_stored_trajectories_are_checked_when_they_are_counted(run: Run, member: Any) -> None:
    set_limit(run, "finding", "unclassified", "0", "project", member)
    made = world(4) + [one for one in world(4) if one.training_step is not None]
    made = [type(one)(**{**vars(one), "external_id": f"{n}"}) for n, one in enumerate(made)]
    save(run, made)
    take_training_steps(run)
    assert alarm(run, "finding").first_step == 2
    run.trajectories.all().delete()
    take_training_steps(run)
    assert not alarm(run, "finding").holds


def test_a_run_overrides_its_project_and_this_the_default(run: Run, member: Any) -> None:
    def held() -> list[tuple[str, float | None]]:
        return [(one.scope, one.limit) for one in limits_in(run) if one.figure == "broken"]

    assert held() == [("default", 0.1)]
    of_project = set_limit(run, "broken", "ignored", "40 %", "project", member)
    assert held() == [("project", 0.4)] and of_project.kind == ""
    of_run = set_limit(run, "broken", "", "", "run", member)
    assert held() == [("run", None)]
    assert set_limit(run, "broken", "", "60", "run", member).pk == of_run.pk and held() == [("run", 0.6)]
    other = create_run(Run.Kind.IMPORT, "other")
    assert [one.limit for one in limits_in(other) if one.figure == "broken"] == [0.4]
    drop_limit(of_run)
    drop_limit(of_run)
    assert held() == [("project", 0.4)]
    said = [one.detail.split(": ", 1)[1] for one in AuditEvent.objects.filter(action="alarm changed")]
    assert said == ["broken 40 %", "broken off", "broken 60 %", "broken taken back"]


@pytest.mark.parametrize(
    ("form", "field", "said"),
    [
        (("nothing", "", "1", "run"), "figure", "There is no alarm for"),
        (("finding", "no_such", "1", "run"), "kind", "/help/findings"),
        (("broken", "", "much", "run"), "limit", "percentage"),
        (("broken", "", "nan", "run"), "limit", "percentage"),
        (("broken", "", "-1", "run"), "limit", "percentage"),
        (("broken", "", "100", "run"), "limit", "percentage"),
        (("gap", "", "0.5", "run"), "limit", "times its first steps"),
        (("gap", "", "inf", "run"), "limit", "times its first steps"),
        (("broken", "", "1", "world"), "scope", "run or project"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_with_a_sentence(
    run: Run, member: Any, form: tuple[str, str, str, str], field: str, said: str
) -> None:
    with pytest.raises(Refusal, match=said) as refusal:
        set_limit(run, *form, member)
    assert refusal.value.field == field and not AlarmRule.objects.exists()


def test_a_worker_checks_the_runs_of_a_project_after_its_limits_changed(run: Run, member: Any) -> None:
    store_steps(run, [0, 3])
    take_alarms(run)
    assert alarm(run).holds
    rule = set_limit(run, "broken", "", "", "project", member)
    assert alarm(run).holds  # no request checks
    send_due()
    assert not alarm(run).holds
    drop_limit(rule)
    send_due()
    assert alarm(run).holds
    checked = ProjectAlarms.objects.get().checked_at
    send_due()
    assert ProjectAlarms.objects.get().checked_at == checked


def test_alarms_go_with_their_run(run: Run, member: Any) -> None:
    store_steps(run, [9])
    set_limit(run, "broken", "", "20", "run", member)
    take_alarms(run)
    run.delete()
    assert not Alarm.objects.exists() and not AlarmRule.objects.exists()


# -- the webhook -------------------------------------------------------------------------------------------------------


class Hook:
    """A webhook on this machine that remembers what it was told."""

    def __init__(self) -> None:
        self.status, self.headers, self.told = 204, {}, []  # type: int, dict[str, str], list[tuple[Any, bytes]]
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.told.append((dict(self.headers), body))
                self.send_response(hook.status)
                for name, value in hook.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def hook(settings: Any) -> Iterator[Hook]:
    made = Hook()
    settings.WEBHOOK_HOSTS = [made.host]
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs for which a worker is sent; the test is the worker."""
    found: list[Job] = []
    monkeypatch.setattr(alarm_delivery, "send_job", lambda job: found.append(job) or "")
    return found


def go_on(sent: list[Job]) -> Job | None:
    """One turn of the clock, and the job that it asks for, done."""
    sent.clear()
    send_due()
    if not sent:
        return None
    do_job(sent[0].pk)
    return Job.objects.get(pk=sent[0].pk)


def test_an_alarm_is_delivered_once_and_signed(run: Run, hook: Hook, sent: list[Job]) -> None:
    held = set_webhook(run.project, f"http://{hook.host}/alarms?to=us")
    store_steps(run, [0, 3])
    take_alarms(run)
    job = go_on(sent)
    assert job is not None and job.status == Job.Status.DONE and alarm(run).delivered_at is not None
    headers, body = hook.told[0]
    said = json.loads(body)
    assert (said["run"], said["figure"], said["first_step"], said["alarm"]) == (run.code, "broken", 1, alarm(run).code)
    assert said["sentence"].startswith("Since training step 1 the share of trajectories with an error is above 10 %")
    signature = hmac.new(
        webhook_key(held).encode(), headers["X-Inspector-Timestamp"].encode() + b"." + body, hashlib.sha256
    ).hexdigest()
    assert headers["X-Inspector-Signature"] == f"sha256={signature}"
    assert headers["X-Inspector-Delivery"] == alarm(run).code
    store_steps(run, [0, 3, 10])  # the alarm goes on, and is told once all the same
    take_alarms(run)
    assert go_on(sent) is None and len(hook.told) == 1


def test_a_webhook_that_fails_is_asked_again_later_and_then_told_once(run: Run, hook: Hook, sent: list[Job]) -> None:
    set_webhook(run.project, f"http://{hook.host}/")
    store_steps(run, [3])
    take_alarms(run)
    hook.status = 503
    job = go_on(sent)
    assert job is not None and (job.status, job.error) == (Job.Status.FAILED, "The webhook answered 503.")
    held = ProjectAlarms.objects.get()
    assert (held.n_failures, alarm(run).n_tries, alarm(run).error) == (1, 1, "The webhook answered 503.")
    assert held.next_try_at > timezone.now() and go_on(sent) is None and len(hook.told) == 1
    hook.status = 200
    ProjectAlarms.objects.update(next_try_at=timezone.now())
    assert go_on(sent) is not None and len(hook.told) == 2
    held = ProjectAlarms.objects.get()
    assert (held.n_failures, held.error, alarm(run).n_tries) == (0, "", 2) and alarm(run).delivered_at
    assert Job.objects.filter(kind="deliver_alarms").count() == 1


def test_a_redirect_is_not_followed(run: Run, hook: Hook, sent: list[Job]) -> None:
    set_webhook(run.project, f"http://{hook.host}/")
    hook.status, hook.headers = 307, {"Location": f"http://{hook.host}/inside"}
    store_steps(run, [3])
    take_alarms(run)
    job = go_on(sent)
    assert job is not None and "redirect" in job.error and len(hook.told) == 1


def test_a_webhook_that_hangs_holds_a_worker_for_a_moment_alone(
    run: Run, sent: list[Job], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm_delivery, "ANSWER_SECONDS", 0.2)
    other = create_run(Run.Kind.IMPORT, "other")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and never answers
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        settings.WEBHOOK_HOSTS = [host]
        set_webhook(run.project, f"http://{host}/")
        for one in (run, other):
            store_steps(one, [3])
            take_alarms(one)
        job = go_on(sent)
        assert job is not None and job.error == "The webhook did not answer within 0.2 seconds."
        assert go_on(sent) is None  # the other alarm of the project does not try it either


def test_what_is_not_allowed_any_more_is_not_asked(run: Run, hook: Hook, sent: list[Job], settings: Any) -> None:
    set_webhook(run.project, f"http://{hook.host}/")
    store_steps(run, [3])
    take_alarms(run)
    settings.WEBHOOK_HOSTS = []
    job = go_on(sent)
    assert job is not None and "INSPECTOR_WEBHOOK_HOSTS" in job.error and hook.told == []


def test_what_was_raised_before_the_webhook_or_long_ago_or_no_longer_holds_is_not_told(
    run: Run, hook: Hook, sent: list[Job]
) -> None:
    store_steps(run, [3])
    take_alarms(run)
    set_webhook(run.project, f"http://{hook.host}/")
    assert go_on(sent) is None
    ProjectAlarms.objects.update(since=timezone.now() - 3 * GIVE_UP)
    Alarm.objects.update(raised_at=timezone.now() - GIVE_UP - timedelta(seconds=1))
    assert go_on(sent) is None
    Alarm.objects.update(raised_at=timezone.now(), holds=False)
    assert go_on(sent) is None
    Alarm.objects.update(holds=True)
    assert go_on(sent) is not None and len(hook.told) == 1


@pytest.mark.parametrize(
    "address",
    [
        "http://evil.example/", "https://hooks.example.org/x", "http://hooks.example/x", "ftp://hooks.example/x",
        "https://hooks.example:8443/x", "https://user@hooks.example/x", "https://hooks.example@evil.example/",
        "https://hooks.example\\@evil.example/", "https://hooks.example/#x", "https://[::1/x", "hooks.example",
        "https://hooks.example:99999/", "https://hooks.example /x", "http://169.254.169.254/latest", "x" * 501,
        "http://only.example/x",
    ],
)
def test_an_address_that_is_not_allowed_is_refused_with_a_sentence(run: Run, settings: Any, address: str) -> None:
    settings.WEBHOOK_HOSTS = ["only.example:8080"]
    with pytest.raises(Refusal):
        set_webhook(run.project, address)
    settings.WEBHOOK_HOSTS = ["hooks.example", "only.example:8080"]
    if not address.startswith("http://hooks.example/"):
        with pytest.raises(Refusal):
            set_webhook(run.project, address)
    assert not ProjectAlarms.objects.exists()


def test_a_host_is_allowed_at_its_usual_port_or_at_the_port_that_is_named(run: Run, settings: Any) -> None:
    settings.WEBHOOK_HOSTS = ["Hooks.example", "only.example:8080", "::1"]
    keys = set()
    for address in (
        "https://hooks.example/x?y=1", "https://HOOKS.example:443/x", "http://only.example:8080/", "http://[::1]/",
    ):
        keys.add(webhook_key(set_webhook(run.project, address)))
    assert len(keys) == 4  # another address has another key
    set_webhook(run.project, "")
    assert ProjectAlarms.objects.get().since is None
    said = [one.detail.split(": ", 1)[1] for one in AuditEvent.objects.filter(action="webhook changed")]
    assert said == ["to hooks.example", "to hooks.example", "to only.example", "to ::1", "removed"]


def test_the_pause_grows_up_to_its_bound() -> None:
    pauses = [pause_after(n).total_seconds() for n in range(1, 12)]
    assert pauses[0] == FIRST_RETRY_SECONDS and pauses == sorted(pauses) and pauses[-1] == MAX_RETRY_SECONDS
    assert pause_after(10**6).total_seconds() == MAX_RETRY_SECONDS
