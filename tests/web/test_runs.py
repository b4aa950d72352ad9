"""The list of runs and the page of one: what it shows, what it asks the database, how it is filtered and paged."""

import re
from dataclasses import replace
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.db.models import F
from django.test import Client
from django.utils import timezone

from inspector.runs import live_parts, progress, views
from inspector.runs.filters import ListQuery
from inspector.runs.views import top_cause
from inspector.server.health import heartbeat_key
from rollout_inspector.diagnose.finding import Cost, Severity
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.jobs.jobs import JOB_SILENT_SECONDS
from rollouts.store.models import Job, Rejection, Run, StoredTrajectory
from rollouts.store.runs import figures
from rollouts.store.runs.runs import create_run, end_run, start_run, take_figures
from rollouts.store.trajectories.launched_trajectories import (
    add_queued_trajectories, cancel_remaining, finish_trajectories, resume_run
)
from rollouts.store.trajectories.save_trajectories import save_trajectories
from tests.web.samples import finding, one_line, stored_run, trajectory

pytestmark = pytest.mark.django_db


def ids(body: dict[str, Any]) -> list[str]:
    return [line["external_id"] for line in body["trajectories"]]


# --- the list of runs -----------------------------------------------------------------------------------------------


def test_the_empty_list_tells_a_newcomer_what_to_press(web: Client) -> None:
    page = web.get("/").content.decode()
    assert "No runs yet" in page and "Start the demo" in page and "Import" in page


def test_runs_are_listed_newest_first_with_their_mean_reward(web: Client) -> None:
    stored_run(2, "older")
    stored_run(4, "newer")
    runs = web.get("/runs.json").json()["runs"]
    assert [run["name"] for run in runs] == ["newer", "older"]
    assert runs[0]["reward_mean"] == 0.5 and runs[0]["findings"] == {"boundary_merge": 2}


def test_the_list_is_paged_by_key(web: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "RUNS_PER_PAGE", 2)
    for number in range(5):
        create_run("import", f"run {number}")
    seen, after = [], ""
    while True:
        body = web.get("/runs.json", {"after": after} if after else {}).json()
        seen += [run["name"] for run in body["runs"]]
        after = body["next"]
        if not after:
            break
    assert seen == [f"run {number}" for number in (4, 3, 2, 1, 0)]


def test_the_list_asks_as_many_queries_for_one_run_as_for_twenty(web: Client, django_assert_num_queries: Any) -> None:
    stored_run(2)
    # session, user, roles, runs, their severities, their tags, muted kinds, alarms, totals, the tags of the filter
    with django_assert_num_queries(11):
        web.get("/")
    for number in range(20):
        stored_run(2, f"run {number}")
    with django_assert_num_queries(11):
        web.get("/")


def test_the_list_says_which_runs_have_errors(web: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = stored_run(3, "bad", findings=[[finding()], [finding("branch", Severity.INFO)], [finding()]])
    stored_run(2, "noted", findings=[[finding("branch", Severity.INFO)], []])
    stored_run(2, "clean", findings=[[], []])
    assert [run["worst"] for run in web.get("/runs.json").json()["runs"]] == [None, ["info", 1], ["error", 2]]
    page = one_line(web.get("/"))
    assert f'href="/runs/{bad.code}?severity=error#trajectories"' in page and "with an error" in page
    assert page.count("with notes only") == 2
    monkeypatch.setattr(figures, "LARGE", 0)
    assert web.get("/runs.json?text=bad").json()["runs"][0]["worst"] is None
    take_figures(bad)
    assert web.get("/runs.json?text=bad").json()["runs"][0]["worst"] == ["error", 2]


def test_the_list_is_filtered_by_text_status_and_kind(web: Client) -> None:
    stored_run(1, "alpha")
    create_run("launch", "beta", model="demo")
    assert [run["name"] for run in web.get("/runs.json?text=ALPH").json()["runs"]] == ["alpha"]
    assert [run["name"] for run in web.get("/runs.json?status=queued").json()["runs"]] == ["beta"]
    assert [run["name"] for run in web.get("/runs.json?kind=launch").json()["runs"]] == ["beta"]
    odd = web.get("/runs.json?status=nonsense&kind=%00&after=nothing").json()
    assert len(odd["runs"]) == 2 and [said.split(";")[0] for said in odd["notices"]] == [
        "There is no status “nonsense”"
    ]
    page = one_line(web.get("/?status=nonsense"))
    assert (
        "There is no status “nonsense”; it was left out. Known: queued" in page and "that pass the filter" not in page
    )


# --- one run --------------------------------------------------------------------------------------------------------


def test_a_run_asks_as_many_queries_for_two_trajectories_as_for_sixty(
    web: Client, django_assert_max_num_queries: Any, django_assert_num_queries: Any
) -> None:
    small, large = stored_run(2), stored_run(60, "large")
    with django_assert_max_num_queries(24) as few:
        web.get(f"/runs/{small.code}")
    with django_assert_num_queries(len(few)):
        web.get(f"/runs/{large.code}")


def test_a_run_shows_counts_findings_rewards_and_stop_reasons(web: Client) -> None:
    run = stored_run(6)
    body = web.get(f"/runs/{run.code}.json").json()
    assert body["run"]["trajectories"] == 6 and body["run"]["steps"] == 12 and body["run"]["tokens"] == 54
    assert body["summary"]["finding_counts"] == {"boundary_merge": 3}
    assert body["summary"]["stop_reasons"] == {"answered": 4, "max_turns": 2}
    assert sum(one["n"] for one in body["summary"]["reward_bins"]) == 6
    page = web.get(f"/runs/{run.code}").content.decode()
    assert f'href="/runs/{run.code}?finding=boundary_merge#trajectories"' in page
    assert "<svg" in page and "As a table" in page


def test_a_run_says_its_findings_in_words_and_the_worst_first(web: Client) -> None:
    cost = Cost(trained_tokens_lost=3)
    found = [
        [finding("branch", Severity.INFO), finding("branch", Severity.INFO)],
        [replace(finding("bos_mismatch"), cost=cost), finding("branch", Severity.INFO)],
        [],
    ]
    run = stored_run(3, findings=found)
    page = web.get(f"/runs/{run.code}").content.decode()
    assert page.index("BOS doubled or missing") < page.index("Branch")
    assert "1 trajectory, 33.3 %" in page and "3 tokens lost or wrong" in page
    assert "1 trajectory with an error" in page and "1 without a finding" in page and "with a warning" not in page
    noted = stored_run(2, "noted", findings=[[finding("branch", Severity.INFO)], []])
    assert "1 trajectory with notes only" in web.get(f"/runs/{noted.code}").content.decode()
    lines = web.get(f"/runs/{run.code}.json").json()["trajectories"]
    assert [line["kinds"] for line in lines] == [{"branch": "info"}, {"bos_mismatch": "error", "branch": "info"}, {}]
    # The gravest cause stands first in the list of runs, though the other one is more frequent.
    assert web.get("/runs.json?text=sample").json()["runs"][0]["top_cause"] == "bos_mismatch"
    notes = {"noncanonical_sampling": 9, "logprobs_other_distribution": 3, "branch": 5}
    assert top_cause(notes, "warning") == "logprobs_other_distribution", "no finding is an error there"
    assert top_cause(notes | {"row_not_sampled": 1}, "error") == "row_not_sampled", (
        "the same tokens, and what they cost"
    )
    assert top_cause({"noncanonical_sampling": 2}, "info") == "noncanonical_sampling" and top_cause({}, "") is None


def test_a_run_that_holds_nothing_and_a_finding_that_it_has_not(web: Client) -> None:
    run = create_run("import", "grpo-7")
    end_run(run, Run.Status.DONE)
    assert "No trajectory yet" in web.get(f"/runs/{run.code}").content.decode()
    assert "This run holds no trajectory." in web.get(f"/runs/{run.code}/cost").content.decode()
    held = f"/runs/{stored_run(2).code}"
    assert "No trajectory yet" not in web.get(held).content.decode()
    unknown = web.get(f"{held}/cost?finding=branch").content.decode()
    assert "No trajectory of this run has the finding “Branch”" in unknown
    assert "has the finding" not in web.get(f"{held}/cost?finding=boundary_merge").content.decode()


def test_the_share_of_a_finding_is_of_those_that_were_judged(web: Client) -> None:
    run = stored_run(4, findings=[[finding()], [], [], []])
    assert "1 trajectory, 25.0 %" in web.get(f"/runs/{run.code}").content.decode()
    Run.objects.filter(pk=run.pk).update(status="running", n_finished=2)
    run.trajectories.filter(index__gt=1).update(status="queued")
    assert "1 trajectory, 50.0 %" in web.get(f"/runs/{run.code}").content.decode()
    assert [line["share"] for line in web.get(f"/runs/{run.code}/cost.json").json()["kinds"]] == [0.5]


def test_the_list_of_runs_names_one_cause_and_counts_the_others(web: Client) -> None:
    stored_run(1, findings=[[finding(kind) for kind in sorted(KINDS)[:7]]])
    page = one_line(web.get("/"))
    assert page.count("?finding=") == 1 and "and 6 more" in page and 'class="is-error"' in page
    others = re.search(r'title="([^"]*)" aria-label="and 6 more"', page)
    assert others is not None and others[1].count("; ") == 5 and others[1].endswith(" 1")
    assert "1 run, 1 trajectory, 9 tokens" in page


def test_five_causes_are_shown_by_cost_and_the_others_are_folded(web: Client) -> None:
    kinds = sorted(kind for kind, held in KINDS.items() if held.severity == Severity.ERROR)[:7]
    costs = [replace(finding(kind), cost=Cost(trained_tokens_lost=n)) for n, kind in enumerate(kinds)]
    here = f"/runs/{stored_run(1, findings=[costs]).code}"
    page = one_line(web.get(here))
    shown, folded = page.split('id="more-kinds"')
    assert [kind for kind in kinds if f'id="kind-{kind}"' in shown] == kinds[2:] and "2 more kinds" in folded
    assert shown.index(f'id="kind-{kinds[6]}"') < shown.index(f'id="kind-{kinds[5]}"')
    assert 'id="more-kinds" open' in one_line(web.get(f"{here}?finding={kinds[0]}"))
    costly = web.get(f"{here}/cost.json").json()["kinds"]
    assert [line["kind"] for line in costly] == kinds[::-1] and costly[0]["severity"] == "error"
    assert "All kinds, each token once" in one_line(web.get(f"{here}/cost"))


def test_rewards_of_two_values_are_two_bars(web: Client) -> None:
    def bins(*rewards: float) -> list[tuple[float, float, int]]:
        run = create_run("import", "rewards")
        save_trajectories(run, [trajectory(f"t{n}", reward) for n, reward in enumerate(rewards)])
        end_run(run, Run.Status.DONE)
        held = web.get(f"/runs/{run.code}.json").json()["summary"]["reward_bins"]
        page = one_line(web.get(f"/runs/{run.code}"))
        assert ("2 at 1" in page) == (len(held) == 2)
        return [(one["start"], one["stop"], one["n"]) for one in held]

    assert bins(0, 1, 1) == [(0, 0, 1), (1, 1, 2)]
    assert len(bins(0, 0.001, 1, 1)) == 20
    assert bins(1, 1, 1) == [(1, 1, 3)]


def test_one_reason_is_told_once(web: Client) -> None:
    run = stored_run(8)
    run.trajectories.filter(index__lt=5).update(status="failed", error="The engine refused.")
    run.trajectories.filter(index=5).update(status="failed", error="Another reason.")
    Run.objects.filter(pk=run.pk).update(n_failed=6)
    page = one_line(web.get(f"/runs/{run.code}"))
    assert "5 times:</b>" in page and "Once:</b>" in page
    assert page.count(">The engine refused.<") == 2 and page.count("same reason</span>") == 4
    Rejection.objects.bulk_create(Rejection(run=run, file="a.jsonl", line=n, reason="No ids.") for n in range(1, 33))
    Run.objects.filter(pk=run.pk).update(n_rejected=32)
    page = one_line(web.get(f"/runs/{run.code}"))
    assert page.count("No ids.") == 1 and "1; 2; 3; 4; 5; 6 and 26 more" in page
    assert page.index('id="rejected"') < page.index('id="run-list"')


def test_a_column_without_a_value_is_not_drawn(web: Client) -> None:
    run = create_run("import", "bare")
    save_trajectories(run, [trajectory("a", None, "")])
    assert ">Group</a>" not in (page := web.get(f"/runs/{run.code}").content.decode()) and ">Reward</a>" not in page
    save_trajectories(run, [trajectory("b", 0.0, "g")])
    assert ">Group</a>" in (page := web.get(f"/runs/{run.code}").content.decode()) and ">Reward</a>" in page


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("finding=boundary_merge", ["t001", "t003", "t005"]),
        ("finding=branch", []),
        ("severity=error", ["t001", "t003", "t005"]),
        ("min=0.5", ["t001", "t003", "t005"]),
        ("max=0.5", ["t000", "t002", "t004"]),
        ("stop=max_turns", ["t000", "t003"]),
        ("tokens_min=20", ["t002", "t003", "t004", "t005"]),
        ("tokens_min=20&tokens_max=30", ["t002", "t003"]),
        ("group=g1", ["t002", "t003"]),
        ("text=T00", ["t000", "t001", "t002", "t003", "t004", "t005"]),
        ("text=5", ["t005"]),
        ("finding=boundary_merge&group=g1", ["t003"]),
        ("sort=-reward&min=1", ["t001", "t003", "t005"]),
        ("sort=-index&group=g0", ["t001", "t000"]),
        ("status=done&sort=-n_findings&group=g2", ["t005", "t004"]),
        ("sort=-n_rows&group=g1", ["t003", "t002"]),
    ],
)
def test_the_list_of_trajectories_is_filtered_and_sorted_by_the_url(
    web: Client, query: str, expected: list[str]
) -> None:
    run = stored_run(6)
    run.trajectories.update(n_tokens=F("index") * 10, n_rows=F("index") + 1)
    assert ids(web.get(f"/runs/{run.code}.json?{query}").json()) == expected


@pytest.mark.parametrize(
    "query",
    [
        "min=abc",
        "max=nan",
        "sort=zzz",
        "status=zzz",
        "severity=%00",
        "after=%F0%9F",
        "after=AAAA",
        "finding=%00%00",
        "min=1e999",
        "tokens_min=-3",
        "tokens_max=99999999999999999999",
    ],
)
def test_parameters_that_make_no_sense_are_left_out(web: Client, query: str) -> None:
    run = stored_run(2)
    assert web.get(f"/runs/{run.code}?{query}").status_code == 200
    assert web.get(f"/?{query}").status_code == 200


def test_what_was_left_out_is_said(web: Client) -> None:
    run = stored_run(2)
    assert "is not a number" in web.get(f"/runs/{run.code}?min=abc").content.decode()
    assert "is not a number" not in web.get(f"/runs/{run.code}?min=0.5").content.decode()


@pytest.mark.parametrize("sort", ["index", "-reward", "n_tokens"])
def test_trajectories_are_paged_by_key_and_none_is_lost(
    web: Client, monkeypatch: pytest.MonkeyPatch, sort: str
) -> None:
    monkeypatch.setattr(live_parts, "TRAJECTORIES_PER_PAGE", 4)
    run = stored_run(11)
    seen, after = [], ""
    for _ in range(4):
        body = web.get(f"/runs/{run.code}.json", {"sort": sort, "after": after or ""}).json()
        seen += ids(body)
        after = body["next"]
        if not after:
            break
    assert sorted(seen) == [f"t{i:03}" for i in range(11)] and len(set(seen)) == 11


def test_a_group_whose_rewards_are_all_equal_is_flagged(web: Client) -> None:
    run = create_run("import", "groups")
    flat = [trajectory("a", 1.0, "flat"), trajectory("b", 1.0, "flat")]
    mixed = [trajectory("c", 1.0, "mixed"), trajectory("d", 0.0, "mixed")]
    save_trajectories(run, flat + mixed)
    body = web.get(f"/runs/{run.code}.json").json()
    assert [line["zero_variance"] for line in body["trajectories"]] == [True, True, False, False]
    assert "same reward" in web.get(f"/runs/{run.code}?group=flat").content.decode()
    assert "same reward" not in web.get(f"/runs/{run.code}?group=mixed").content.decode()


def test_a_group_is_not_flagged_while_a_reward_is_still_to_come(web: Client) -> None:
    run = create_run("launch", "live", model="demo", n_expected=3)
    save_trajectories(run, [trajectory(name, 1.0, "g") for name in "abc"])
    start_run(run)
    StoredTrajectory.objects.filter(external_id="c").update(reward=None, status="running")
    body = web.get(f"/runs/{run.code}.json").json()
    assert not body["trajectories"][0]["zero_variance"] and body["progress"]["running"] == 1
    StoredTrajectory.objects.filter(external_id="c").update(reward=1.0, status="done")
    body = web.get(f"/runs/{run.code}.json").json()
    assert body["trajectories"][0]["zero_variance"] and body["progress"]["running"] == 0


def test_the_links_of_the_list_keep_its_filter(web: Client) -> None:
    run = stored_run(4)
    code = StoredTrajectory.objects.get(external_id="t001").code
    page = web.get(f"/runs/{run.code}?finding=boundary_merge").content.decode()
    assert f'href="/trajectories/{code}?finding=boundary_merge"' in page


def test_rejected_lines_are_listed_with_number_and_reason(web: Client) -> None:
    run = stored_run(1)
    Rejection.objects.create(run=run, file="a<b>.jsonl", line=17, reason="The ids are no list.")
    Run.objects.filter(pk=run.pk).update(n_rejected=1)
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "1 rejected" in page and "17" in page and "The ids are no list." in page and "a&lt;b&gt;.jsonl" in page
    assert web.get(f"/runs/{run.code}.json").json()["rejections"][0]["line"] == 17


def test_a_failed_run_says_why(web: Client) -> None:
    run = create_run("launch", "broken", model="demo")
    end_run(run, Run.Status.FAILED, "The engine ran out of memory.")
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "Why it failed" in page and "The engine ran out of memory." in page


def test_a_failed_import_leads_back_to_the_form_and_says_its_reason_once(web: Client) -> None:
    run = create_run("import", "notes.txt")
    Rejection.objects.create(run=run, file="notes.txt", line=None, reason="notes.txt could not be recognised.")
    Run.objects.filter(pk=run.pk).update(n_rejected=1)
    end_run(run, Run.Status.FAILED, "Nothing was imported. notes.txt could not be recognised.")
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "Import again" in page and "the whole file" in page and page.count("notes.txt could not be recognised") == 1


def test_a_run_says_that_it_has_no_tokenizer_or_that_of_another_model(web: Client, tiny_tokenizer: Path) -> None:
    bare = stored_run(2, findings=[[], []])
    body = web.get(f"/runs/{bare.code}.json").json()
    assert (
        body["tokenizer_note"].startswith("No tokenizer")
        and 'id="diagnose"' in web.get(f"/runs/{bare.code}").content.decode()
    )
    demo = register_tokenizer(tiny_tokenizer, name="demo")
    missing = [finding("token_ids_missing")]
    right = stored_run(2, tokenizer=demo, findings=[missing, []])
    assert not web.get(f"/runs/{right.code}.json").json()["tokenizer_note"]
    wrong = stored_run(2, tokenizer=demo, findings=[missing, missing])
    assert "“demo”" in web.get(f"/runs/{wrong.code}.json").json()["tokenizer_note"]


# --- live -----------------------------------------------------------------------------------------------------------


def test_a_run_that_nobody_takes_says_so_after_a_while(web: Client) -> None:
    run = create_run("launch", "waiting", model="demo", n_expected=4)
    assert "No worker has taken" not in web.get(f"/runs/{run.code}").content.decode()
    Run.objects.filter(pk=run.pk).update(created_at=timezone.now() - timedelta(seconds=30))
    assert "No worker has taken this run yet" in web.get(f"/runs/{run.code}").content.decode()
    cache.set(heartbeat_key("engine.demo"), 1)
    try:
        assert "busy with another one" in web.get(f"/runs/{run.code}").content.decode()
    finally:
        cache.delete(heartbeat_key("engine.demo"))


def test_a_worker_that_went_silent_is_noticed(web: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run("launch", "silent", model="demo", n_expected=4)
    start_run(run)

    def said() -> str:
        return str(web.get(f"/runs/{run.code}.json").json()["progress"]["waiting"])

    assert said() == ""
    last = timezone.now() - timedelta(seconds=15)
    Run.objects.filter(pk=run.pk).update(heartbeat_at=last)
    assert said().startswith(f"No worker has reported on this run since {last:%H:%M:%S} UTC. None serves the queue")
    assert "celery -A inspector worker -Q engine.demo" in said() and "goes on by itself" in said()
    cache.set(heartbeat_key("engine.demo"), 1)
    try:
        assert "lives and takes it over" in said() and "none is sampled twice" in said()
    finally:
        cache.delete(heartbeat_key("engine.demo"))
    monkeypatch.setattr(progress, "has_worker", lambda queue: None)
    assert "Redis does not answer" in said()


def test_how_calls_are_read_is_shown_and_what_is_wrong_with_it(web: Client) -> None:
    run = create_run("launch", "calls", model="demo", settings={"tool_calls": "some way"})
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "some way" in page and "tool-calls-note" not in page
    Run.objects.filter(pk=run.pk).update(settings={"tool_calls": "some way", "tool_calls_note": "Not <so> good."})
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "Not &lt;so&gt; good." in page and "tool calls note" not in page


def test_progress_is_told_in_numbers(web: Client) -> None:
    run = create_run("launch", "live", model="demo", n_expected=40)
    start_run(run)
    Run.objects.filter(pk=run.pk).update(
        started_at=timezone.now() - timedelta(seconds=10), n_finished=9, n_failed=1, n_sampled=5000
    )
    state = web.get(f"/runs/{run.code}.json").json()["progress"]
    assert state["done"] == 10 and state["total"] == 40 and state["active"]
    assert state["tokens_per_second"] == pytest.approx(500, rel=0.2)
    assert state["remaining_seconds"] == pytest.approx(30, rel=0.2)
    Run.objects.filter(pk=run.pk).update(n_finished=1, n_failed=0)
    assert web.get(f"/runs/{run.code}.json").json()["progress"]["remaining_seconds"] is None


def test_a_pause_is_not_part_of_the_pace(web: Client) -> None:
    run = create_run("launch", "paused", model="demo", n_expected=1)
    add_queued_trajectories(run, [(StoredTrajectory(external_id="t0", group="0", seed=0), {})])
    ended = timezone.now() - timedelta(hours=1)
    Run.objects.filter(pk=run.pk).update(
        status="cancelled", started_at=ended - timedelta(seconds=10), finished_at=ended, n_sampled=5000
    )
    resume_run(run)
    state = web.get(f"/runs/{run.code}.json").json()["progress"]
    assert state["active"] and state["tokens_per_second"] == pytest.approx(500, rel=0.2)


def test_trajectories_that_failed_or_were_cancelled_count_as_that(web: Client) -> None:
    run = create_run("launch", "cut", model="demo", n_expected=3)
    add_queued_trajectories(run, [(StoredTrajectory(external_id=f"t{n}", group="0", seed=n), {}) for n in range(3)])
    start_run(run)
    run.trajectories.filter(index=0).update(status="failed", error="The engine died.")
    cancel_remaining(run)
    end_run(run, Run.Status.CANCELLED)
    html = web.get(f"/runs/{run.code}").content.decode()
    ended = html[html.index("Why trajectories ended") :]
    assert f'href="/runs/{run.code}?status=cancelled#trajectories"' in ended
    assert f'href="/runs/{run.code}?status=failed#trajectories"' in ended
    assert "not recorded" not in ended


def fragment(web: Client, url: str, target: str) -> str:
    return web.get(url, headers={"HX-Request": "true", "HX-Target": target}).content.decode()


def asks_again(html: str, part: str = "run-live") -> str:
    """Where the page asks for a part again."""
    found = re.search(f'<div id="{part}" hx-get="([^"]+)" hx-trigger="every 2s"', html)
    assert found
    return unescape(found[1])


def queued_run(n: int) -> Run:
    run = create_run("launch", "live", model="demo")
    add_queued_trajectories(run, [(StoredTrajectory(external_id=f"t{i}", group="g0", seed=i), {}) for i in range(n)])
    start_run(run)
    return run


def test_only_a_run_that_changes_is_polled(web: Client) -> None:
    run = queued_run(4)
    page = web.get(f"/runs/{run.code}").content.decode()
    assert page.count('hx-trigger="every') == 1
    live = fragment(web, f"/runs/{run.code}", "run-live")
    assert live.strip().startswith('<div id="run-live" hx-get=') and "<html" not in live
    end_run(run, Run.Status.DONE)
    ended = web.get(asks_again(page), headers={"HX-Request": "true", "HX-Target": "run-live"})
    assert ended["HX-Refresh"] == "true" and 'hx-trigger="every' not in web.get(f"/runs/{run.code}").content.decode()


def test_a_poll_gets_the_parts_that_changed_and_no_others(
    web: Client, monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any
) -> None:
    run = queued_run(4)
    address = asks_again(web.get(f"/runs/{run.code}").content.decode())

    def poll(queries: int) -> list[str]:
        nonlocal address
        with django_assert_num_queries(queries):
            answer = web.get(address, headers={"HX-Request": "true", "HX-Target": "run-live"})
        html = answer.content.decode()
        if answer.status_code == 204:
            assert not html
            return []
        address = asks_again(html)
        return re.findall(r'<div id="(run-[a-z]+)"', html)

    # Session, user, run, trajectories under way.
    assert poll(5) == []
    # Where the progress changed, figures and list are read with it, so that all three tell the same second.
    run.trajectories.filter(index=0).update(status=StoredTrajectory.Status.RUNNING)
    assert poll(10) == ["run-live", "run-list"]
    assert poll(5) == []
    finish_trajectories([TrajectoryEnd(run.trajectories.get(index=0).pk, 0, 1.0, {}, "final_answer")])
    assert sorted(poll(15)) == ["run-figures", "run-list", "run-live"]
    # Those of a large run are not looked at in each poll.
    with monkeypatch.context() as patch:
        patch.setattr(live_parts, "is_large", lambda run: True)
        run.trajectories.filter(index=1).update(status=StoredTrajectory.Status.RUNNING)
        assert poll(6) == ["run-live"]
    monkeypatch.setattr(live_parts, "LOOK_SECONDS", 0)
    assert poll(10) == ["run-live", "run-list"]
    assert poll(6) == []


@pytest.mark.parametrize("have", ["", "x", "a.b.c.d", "a.b.c.-1", "a.b.c.99999999999", "a.b.c.²", "....", "\0.%00.é.1"])
def test_a_poll_with_marks_that_make_no_sense_gets_every_part(web: Client, have: str) -> None:
    run = queued_run(1)
    headers = {"HX-Request": "true", "HX-Target": "run-live"}
    answer = web.get(f"/runs/{run.code}", {"have": have}, headers=headers)
    assert answer.status_code == 200
    assert re.findall(r'<div id="(run-[a-z]+)"', answer.content.decode()) == ["run-live", "run-figures", "run-list"]


def test_the_polled_parts_honour_filter_order_and_page(web: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_parts, "TRAJECTORIES_PER_PAGE", 1)
    run = stored_run(6)
    Run.objects.filter(pk=run.pk).update(status=Run.Status.RUNNING)
    second = web.get(f"/runs/{run.code}.json?finding=boundary_merge&sort=-index").json()["next"]
    page = web.get(f"/runs/{run.code}?finding=boundary_merge&sort=-index&after={second}").content.decode()
    address = re.sub(r"have=[^&]*", "have=", asks_again(page))
    part = fragment(web, address, "run-live")
    assert ">t003<" in part and ">t005<" not in part and ">t004<" not in part
    assert "have=" not in part.split('id="run-list"')[1]
    assert asks_again(part).split("have")[0] == asks_again(page).split("have")[0]


def test_the_list_of_runs_is_sent_again_only_when_a_run_changed(web: Client) -> None:
    run = queued_run(2)
    page = web.get("/?kind=launch").content.decode()
    address, headers = asks_again(page, "runs"), {"HX-Request": "true", "HX-Target": "runs"}
    assert "kind=launch" in address and web.get(address, headers=headers).status_code == 204
    Run.objects.filter(pk=run.pk).update(n_finished=1)
    answer = web.get(address, headers=headers)
    assert (
        answer.status_code == 200
        and web.get(asks_again(answer.content.decode(), "runs"), headers=headers).status_code == 204
    )


def test_the_queued_are_a_number_until_one_asks_for_them(web: Client) -> None:
    run = create_run("launch", "live", model="demo", n_expected=3)
    add_queued_trajectories(run, [(StoredTrajectory(external_id=f"t{i}", group="g0", seed=i), {}) for i in range(3)])
    start_run(run)
    StoredTrajectory.objects.filter(run=run, external_id="t1").update(status=StoredTrajectory.Status.RUNNING)
    body = web.get(f"/runs/{run.code}.json").json()
    assert ids(body) == ["t1"] and body["queued"] == 2
    part = fragment(web, f"/runs/{run.code}", "run-live")
    assert "2 queued" in part and ">t0<" not in part and ">t1<" in part
    assert ids(web.get(f"/runs/{run.code}.json?status=queued").json()) == ["t0", "t2"]
    # What a run that has ended never began is not hidden.
    end_run(run, Run.Status.FAILED, "out of memory")
    assert ids(web.get(f"/runs/{run.code}.json").json()) == ["t0", "t1", "t2"]


def test_how_it_was_made_names_the_engine_or_leaves_it_out(web: Client) -> None:
    def facts(run: Run) -> str:
        return web.get(f"/runs/{run.code}").content.decode().split("How it was made")[1]

    named = stored_run(1, "a", kind="launch", engine="transformers", settings={"engine": "", "seed": 3})
    assert "<dt>Engine</dt><dd>transformers</dd>" in facts(named) and "<dt>engine</dt>" not in facts(named)
    assert "ngine</dt>" not in facts(stored_run(1, "b", settings={"engine": "", "seed": 3}))


# --- cancel, delete -------------------------------------------------------------------------------------------------


def test_cancel_stops_a_queued_run_and_marks_a_running_one(web: Client) -> None:
    queued = create_run("launch", "queued", model="demo")
    assert web.post(f"/runs/{queued.code}/cancel").status_code == 302
    queued.refresh_from_db()
    assert queued.status == Run.Status.CANCELLED
    running = create_run("launch", "running", model="demo")
    start_run(running)
    web.post(f"/runs/{running.code}/cancel")
    running.refresh_from_db()
    assert running.cancel_requested and "Cancelling" in web.get(f"/runs/{running.code}").content.decode()


def test_cancel_and_delete_are_not_done_by_following_a_link(web: Client) -> None:
    run = stored_run(1)
    assert web.get(f"/runs/{run.code}/cancel").status_code == 405
    assert web.get(f"/runs/{run.code}/delete").status_code == 405
    assert web.post("/runs/zzzzzzzzzzzz/cancel").status_code == 404


def test_delete_wants_a_tick(web: Client) -> None:
    run = stored_run(2)
    page = web.post(f"/runs/{run.code}/delete", follow=True)
    assert "tick the box" in page.content.decode() and Run.objects.count() == 1
    live = create_run("launch", "live", model="demo")
    start_run(live)
    web.post(f"/runs/{run.code}/delete", {"sure": "yes"})
    assert list(Run.objects.all()) == [live] and not StoredTrajectory.objects.exists()
    web.post(f"/runs/{live.code}/delete", {"sure": "yes"})
    assert not Run.objects.exists()


# --- the filter as a value ------------------------------------------------------------------------------------------


def test_a_filter_survives_its_own_query() -> None:
    from django.http import QueryDict

    query = "finding=a_b&min=0.25&tokens_min=7&text=x%26y&comments=open&sort=-reward&after=abc"
    wanted = ListQuery.read(QueryDict(query), 1)
    again = ListQuery.read(QueryDict(wanted.query().removeprefix("?")), 1)
    assert again.pairs() == wanted.pairs() and again.after == ""
    assert wanted.query(finding="") == "?min=0.25&tokens_min=7&text=x%26y&comments=open&sort=-reward"
    assert not ListQuery.read(QueryDict("sort=reward"), None).is_set
    hidden = ListQuery.read(QueryDict("comments=open"), None)
    assert hidden.comments == "" and "comments" in hidden.notices[0]


def test_severities_are_shown_with_a_word_and_a_glyph(web: Client) -> None:
    run = create_run("import", "severities")
    save_trajectories(run, [trajectory("a")], [[finding(severity=Severity.WARNING)]])
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "◆" in page and "warning" in page


def test_before_the_first_turn_the_page_says_what_keeps_it(web: Client) -> None:
    run = create_run("launch", "young", model="demo", n_expected=4)
    start_run(run)
    assert "loads the engine" in web.get(f"/runs/{run.code}").content.decode()
    Run.objects.filter(pk=run.pk).update(n_steps=1)
    assert "loads the engine" not in web.get(f"/runs/{run.code}").content.decode()


def test_a_run_without_a_token_is_not_called_clean(web: Client) -> None:
    run = create_run("launch", "stopped", model="demo", n_expected=1)
    add_queued_trajectories(run, [(StoredTrajectory(external_id="a", group="g", seed=1), {})])
    end_run(run, Run.Status.CANCELLED)
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "There is nothing to diagnose" in page and "Every prompt starts with" not in page
    clean = web.get(f"/runs/{stored_run(1).code}").content.decode()
    assert "There is nothing to diagnose" not in clean and "not decidable: no tokenizer" in clean


def test_an_import_that_gave_nothing_shows_why_and_no_empty_list(web: Client) -> None:
    run = create_run("import", "nothing")
    assert "Search these trajectories" in web.get(f"/runs/{run.code}").content.decode()  # they may still come
    end_run(run, Run.Status.FAILED, "bad.jsonl could not be recognised.")
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "could not be recognised" in page and "Delete this run" in page
    assert '#work">Export' in web.get(f"/runs/{stored_run(1).code}").content.decode()  # the way down to the export
    for absent in ("Filter trajectories", "Why trajectories ended", "Export as", 'href="#work"'):
        assert absent not in page


def test_an_import_is_silent_when_its_job_is(web: Client) -> None:
    run = create_run("import", "grpo-8")
    start_run(run)
    long_ago = timezone.now() - timedelta(seconds=JOB_SILENT_SECONDS + 5)
    Run.objects.filter(pk=run.pk).update(heartbeat_at=long_ago)
    job = Job.objects.create(run=run, kind="import", status=Job.Status.RUNNING)
    for heartbeat, silent in ((timezone.now(), False), (long_ago, True)):
        Job.objects.filter(pk=job.pk).update(heartbeat_at=heartbeat)
        assert ("no sign of life" in web.get(f"/runs/{run.code}").content.decode()) == silent


def test_rows_per_engine_call_is_one_number_on_every_page(web: Client) -> None:
    run, other = stored_run(3), stored_run(2, "other")
    assert {one["rows_per_call"] for one in web.get("/runs.json").json()["runs"]} == {0.5}
    body = web.get(f"/runs/{run.code}.json").json()
    assert [body["run"]["rows_per_call"], *(one["rows_per_call"] for one in body["trajectories"])] == [0.5] * 4
    assert "rows per call</dt> <dd>0.5</dd>" in one_line(web.get(f"/runs/{run.code}"))
    compared = one_line(web.get(f"/runs/compare?run={run.code}&run={other.code}"))
    assert '<th scope="row">Rows per engine call</th> <td>0.5</td><td>0.5</td>' in compared
    run.n_steps = 0
    run.save()
    assert web.get(f"/runs/{run.code}.json").json()["run"]["rows_per_call"] is None
    assert "rows per call</dt>" not in one_line(web.get(f"/runs/{run.code}"))
