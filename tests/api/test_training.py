"""A run by training step: the API has the values of the pages, its findings have addresses, and lists come as Arrow."""

import json
from typing import Any

import polars
import pytest
from django.contrib.auth import get_user_model
from django.test import Client as Browser

from inspector.api.app import schema
from inspector.runs.training.training_charts import changes_of
from rollout_inspector.client.client import Client, ServerError
from rollouts.store.models import Run, StoredFinding, default_project
from rollouts.store.runs.runs import create_run
from rollouts.store.runs.training_steps import over_training, take_training_steps
from tests.api.conftest import Ask, member_of, token_for
from tests.samples.training_steps import save, store_steps, world
from tests.web.trajectory_samples import Maker


@pytest.fixture
def trained(db: None) -> Run:
    run = create_run(Run.Kind.IMPORT, "r")
    save(run, world())
    take_training_steps(run)
    return run


@pytest.fixture
def server(transactional_db: None, live_server: Any) -> Client:
    project = default_project()
    return Client(live_server.url, token_for(member_of(project, "eve", "member"), project), tries=1)


@pytest.fixture
def web(client: Browser, transactional_db: None) -> Browser:
    """The browser of the member whose keys the other callers have too."""
    user = get_user_model().objects.filter(username="ann").first() or member_of(default_project(), "ann", "member")
    client.force_login(user)
    return client


def page_of(web: Browser, path: str) -> dict[str, Any]:
    page: dict[str, Any] = web.get(path).json()
    return page


def test_the_api_has_the_values_of_the_pages(callers: Any, web: Browser, ask: Ask, trained: Run) -> None:
    here = f"/runs/{trained.code}"
    for query in ("", "?by=version", "?training_min=1&training_max=2"):
        path, _, values = f"{here}/training.json{query}".partition("?")
        assert ask(f"{here}/training{query}").json() == page_of(web, f"{path}?{values}")
    gap, alarms = page_of(web, f"{here}/gap.json"), page_of(web, f"{here}/alarms.json")
    weights = gap.pop("weights")
    assert ask(f"{here}/gap").json() == gap and ask(f"{here}/weights").json() == weights
    answer = ask(f"{here}/alarms").json()
    assert answer == {name: alarms[name] for name in ("alarms", "limits", "steps")} and answer["limits"]
    assert ask(f"{here}/columns").json()["items"] == page_of(web, f"{here}/columns.json")["columns"] != []


def test_tokenizers_and_shares_are_listed_for_who_may_see_them(callers: Any, web: Browser, ask: Ask, run: Run) -> None:
    assert [item["name"] for item in ask("/tokenizers").json()["items"]] == [
        item["name"] for item in page_of(web, "/tokenizers.json")["tokenizers"]
    ] != []
    assert ask("/tokenizers", "foreign").json()["items"] == []
    ours = run.project.code
    assert ask(f"/tokenizers?project={ours}").json()["items"] and not ask("/tokenizers?project=zz").json()["items"]
    web.post("/shares", {"target": "run", "code": run.code, "days": "7"})
    (link,) = ask("/shares").json()["items"]
    assert (link["kind"], link["name"], link["link"]) == ("run", run.name, None)
    assert ask(f"/shares?target=run&code={run.code}").json()["items"] == [link]
    assert ask("/shares", "foreign").json()["items"] == []
    assert ask(f"/shares?target=run&code={run.code}", "foreign").status_code == 404


@pytest.mark.parametrize(
    "query",
    ["findings?kind=nonsense", "trajectories?finding=nonsense", "training?by=nonsense", "weights?rule=nonsense"],
)
def test_an_unknown_name_is_refused_with_the_known_ones(ask: Ask, run: Run, query: str) -> None:
    answer = ask(f"/runs/{run.code}/{query}")
    assert answer.status_code == 422 and "There is no 'nonsense' here. Known: " in answer.json()["detail"]
    path, _, name = query.partition("?")
    (field,) = (
        parameter["schema"]
        for parameter in json.loads(schema())["paths"][f"/api/v1/runs/{{code}}/{path}"]["get"]["parameters"]
        if parameter["name"] == name.partition("=")[0]
    )
    assert field["enum"][0] == "" and len(field["enum"]) > 2


def test_a_figure_that_changes_has_a_sentence_and_one_that_does_not_has_none(trained: Run) -> None:
    def said(broken: list[int]) -> list[str]:
        store_steps(trained, broken)
        lines = over_training(trained)[0]
        return changes_of(lines, [f"step {line.training_step}" for line in lines])

    assert said([0] * 10 + [9] * 10)[0] == "Broken trajectories: 0 before step 10, 0.9 from it on."
    assert said([1, 2] * 10) == [] and said([5] * 20) == [] and said([0, 0, 0, 9, 9, 9]) == []
    slope = said(list(range(10)))
    assert slope[0].startswith("Broken trajectories: 0.2 before step 5, 0.7 from it on.")



@pytest.mark.django_db(transaction=True)
def test_a_finding_of_a_list_leads_to_its_tokens(server: Client, web: Browser, make: Maker) -> None:
    broken, findings = make.broken("broken")
    run = make.run([make.conversation("whole"), broken], [[], [*findings, *findings]])
    listed = list(server.findings(run.code, kind="unclassified"))
    assert [finding["number"] for finding in listed] == [1, 2]
    first = listed[0]
    assert server.finding(first["trajectory"], 1)["finding"] | {"url": first["url"]} == dict(first)
    assert first["url"].startswith(server.url)
    shown = page_of(web, first["url"].removeprefix(server.url).replace("?", ".json?"))
    assert shown["findings"][0]["drawn_row"] == shown["row"]["index"]
    at, read = slice(first["start"], max(first["stop"], first["start"] + 1)), first.tokens()
    whole = server.tokens(first["trajectory"], step=first["step"])
    assert read["ids"] == whole["ids"][at] != []
    assert len(first.tokens(around=2, columns=["ids"])["ids"]) > len(read["ids"])


@pytest.mark.django_db(transaction=True)
def test_a_run_is_read_as_one_frame(server: Client, make: Maker) -> None:
    run = make.run([make.conversation("whole"), make.broken("broken")[0]])
    frame = server.frame(run.code, limit=1)
    values = list(server.trajectories(run.code))
    assert frame.num_rows == 2 and frame["code"].to_pylist() == [value["code"] for value in values]
    assert polars.from_arrow(frame)["tokens"].to_list() == [value["tokens"] for value in values]
    assert server.frame(make.run([]).code).num_rows == 0
    with pytest.raises(ServerError, match="There is no run"):
        server.frame("zzzzzzzzzzzz")


def test_the_list_of_findings_makes_as_many_queries_for_many(
    ask: Ask, make: Maker, django_assert_max_num_queries: Any
) -> None:
    broken, findings = make.broken("broken")
    run = make.run([make.conversation("whole"), broken], [[], findings * 40])
    with django_assert_max_num_queries(8):
        numbers = [item["number"] for item in ask(f"/runs/{run.code}/findings").json()["items"]]
    assert numbers == list(range(1, StoredFinding.objects.filter(run=run).count() + 1))
