"""Every kind of work, asked for on one machine and done on others that share no folder with it."""

import json
from pathlib import Path

import pytest
from django.apps import apps
from django.contrib.auth import get_user_model

from rollouts.store.models import Run
from rollouts.store.people.shares import create_api_key
from tests.machines.conftest import Browser, Machines, is_apart
from tests.samples.machine_work import has_ended, jobs_done, launched

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres_only]


def paths_in_database(folders: list[Path]) -> list[str]:
    """Texts in the database that hold a path of a machine."""
    names = [str(folder) for folder in folders]
    return [
        f"{model.__name__}.{field.name}: {value[:200]}"
        for model in apps.get_app_config("rollouts").get_models()
        for field in model._meta.concrete_fields
        if field.get_internal_type() in ("CharField", "TextField", "JSONField")
        for value in map(str, model.objects.values_list(field.name, flat=True))
        if any(name in value for name in names)
    ]


def test_every_kind_of_work_is_done_where_it_was_not_asked_for(
    machines: Machines, browser: Browser, tiny_tokenizer: Path
) -> None:
    if is_apart():
        assert not any(one.can_read(other) for one in machines.all for other in machines.all if one is not other)
    assert all(one.can_read(one) for one in machines.all)

    # A launch: the web server registers the tokenizer of the model, the machine of the engine fetches it.
    code = launched(browser)
    page = browser.wait(f"/runs/{code}.json", has_ended)
    assert page["run"]["status"] == "done" and page["progress"]["done"] == 4, page["run"]["error"]
    trajectory = page["trajectories"][0]["url"].partition("?")[0]
    assert page["tokenizer_note"] == "" and b"token" in browser.ask(trajectory)

    # A replay of one trajectory and of the run, a diagnosis, and an export that a worker writes.
    browser.press(f"{trajectory}/strategies/again")
    for path, asked in (("replay", {}), ("diagnose", {}), ("exports", {"format": "own_jsonl"})):
        browser.press(f"/runs/{code}/{path}.json", asked)
        page = browser.wait(f"/runs/{code}.json", jobs_done)
        assert {job["status"] for job in page["jobs"]} == {"done"}, page["jobs"]
    (export,) = [job for job in page["jobs"] if job["kind"] == "export"]
    lines = browser.ask(export["file"])
    assert len(lines.splitlines()) == 4

    # An import from the page, of what was exported, with a tokenizer that is uploaded.
    files = {
        "files": ("again.jsonl", lines),
        "tokenizer_file": ("tokenizer.json", (tiny_tokenizer / "tokenizer.json").read_bytes()),
    }
    again = browser.press("/import.json", {"name": "again", "format": "auto", "tokenizer": ""}, files=files).json()
    page = browser.wait(f"/runs/{again['code']}.json", has_ended)
    assert page["run"]["status"] == "done" and page["run"]["trajectories"] == 4, page["run"]["error"]

    # A check of a template that breaks, and the search for its repair.
    breaking = (tiny_tokenizer / "chat_template.jinja").read_text()
    name = browser.ask("/tokenizers.json")["tokenizers"][0]["name"]
    found = browser.press("/templates", {"tokenizer": name, "chat_template": breaking + "{# other #}"})
    check = found.headers["Location"].partition("#")[0]
    answer = browser.wait(f"{check}.json", lambda one: not one["under_way"] and not one["progress"])
    assert answer["status"] == "done" and answer["report"], answer

    # A push with an API key, and the diagnosis of what was pushed.
    _, token = create_api_key(get_user_model().objects.get(username="ada"), "machines")
    from rollout_inspector.client.client import Client

    client = Client(machines.url, token)
    client.create_run("pushed")
    assert client.push(lines.splitlines(), prefix="")["trajectories"] == 4
    page = browser.wait(f"/runs/{client.run}.json", jobs_done)
    assert page["run"]["trajectories"] == 4

    assert not paths_in_database([one.folder for one in machines.all])
    assert {run.status for run in Run.objects.exclude(code=client.run)} == {"done"}
    assert json.dumps(sorted(run.n_trajectories for run in Run.objects.all())) == "[4, 4, 4]"
