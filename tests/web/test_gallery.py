"""The gallery: the bundle, its run in a project, its pages, and the list of finding kinds."""

import json
import re
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils.html import escape

from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.formats import Source, read
from rollouts.gallery import BUNDLE, CLEAN, EXAMPLES, MISSING, TRAINING_RUNS
from rollouts.jobs import gallery, launch
from rollouts.store.models import Job, Project, Retokenized, Run, StoredTrajectory, Tokenizer
from rollouts.worker.jobs import do_job
from tests.web.samples import finding, stored_run

MAX_BUNDLE_BYTES = 1_000_000


def test_every_kind_says_what_happened_what_it_does_to_training_and_what_to_do() -> None:
    for kind in KINDS.values():
        for text in (kind.meaning, kind.consequence, kind.remedy):
            assert text[0].isupper() and text.endswith((".", ")")) and len(text) > 20, kind.slug
        assert kind.passes and kind.fails and kind.passes != kind.fails, kind.slug
        assert kind.consequence not in (kind.meaning, kind.remedy), kind.slug


def test_the_bundle_is_small_and_called_after_kinds() -> None:
    assert BUNDLE.stat().st_size < MAX_BUNDLE_BYTES
    names = [one.external_id for one in read(Source.of_path(BUNDLE))[1]]
    assert names[0] == CLEAN and len(set(names)) == len(names)
    kinds = [name for name in names if name not in EXAMPLES]
    assert set(kinds) == set(KINDS) - set(MISSING) and all(len(why) > 20 for why in MISSING.values())
    assert set(names) == {*kinds, *EXAMPLES}
    assert {KINDS[name].axis for name in kinds} == {"stream", "delta", "row"}
    assert sum(KINDS[name].severity == "error" for name in kinds) >= 8


def test_the_command_makes_what_is_bundled(tmp_path: Path) -> None:
    """One case of each way in which a fault is made; the whole takes half a minute."""
    names = {CLEAN, "duplicate_call", "empty_think_toggled", "special_tokens_dropped", "tokenizer_mismatch",
             "stop_string_misaligned", "delta_differs", "columns_shifted", "row_not_sampled", "compaction"}
    path = tmp_path / "made.jsonl"
    call_command("make_gallery", "--output", str(path), "--only", *names, stdout=StringIO())
    bundled = [one for one in BUNDLE.read_text().splitlines() if json.loads(one)["external_id"] in names]
    made = path.read_text().splitlines()
    assert len(made) == len(bundled) == len(names)
    for one, other in zip(made, bundled, strict=True):
        assert_alike(json.loads(one), json.loads(other))


def assert_alike(one: Any, other: Any, where: str = "") -> None:
    """Another processor may compute the last digits of a log-probability in another way. All else is the same."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_alike(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_alike(a, b, f"{where}/{n}")
    else:
        same = one == pytest.approx(other, abs=1e-4, nan_ok=True) if "logprobs" in where else one == other
        assert same, where


@pytest.mark.django_db
def test_the_gallery_is_loaded_once_in_a_project_and_each_trajectory_has_its_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = StringIO()
    call_command("load_gallery", "--json", stdout=out)
    said = json.loads(out.getvalue())
    run = Run.objects.get()
    assert said == {"run": run.code, "trajectories": said["trajectories"], "findings": run.finding_counts}
    by_name = {one.external_id: one for one in run.trajectories.order_by("index")}
    assert [by_name[name].code for name in by_name] == said["trajectories"]
    assert by_name[CLEAN].n_findings == 0 and by_name[CLEAN].checks
    for name in EXAMPLES:
        assert set(by_name[name].findings.values_list("kind", flat=True)) == {EXAMPLES[name].kind} - {""}, name
    for name in by_name.keys() - EXAMPLES.keys():
        severities = set(by_name[name].findings.filter(kind=name).values_list("severity", flat=True))
        assert KINDS[name].severity in severities or "error" in severities, name
        # A break has no known cause where nobody kept the request, and then its delta cannot be checked either.
        also = ["not_decidable"] if name == "unclassified" else []
        others = by_name[name].findings.exclude(kind__in=[name, "noncanonical_sampling", "row_not_sampled", *also])
        assert not others.exists(), name
    assert Retokenized.objects.filter(trajectory__run=run).exists()
    errors = {one.kind for one in run.findings.filter(severity="error")}
    assert len(errors) >= 8
    assert gallery.load() == run and Run.objects.count() == 1
    found = [None, run]  # another process loads it while this one diagnoses
    with monkeypatch.context() as patch:
        patch.setattr(gallery, "find_gallery", lambda *_: found.pop(0))
        assert gallery.load() == run and Run.objects.count() == 1 and not found
    other = gallery.load(Project.objects.create(name="another"))
    assert other != run and other.finding_counts == run.finding_counts


@pytest.mark.django_db
def test_a_newcomer_presses_once_and_sees_each_fault_with_what_it_does(
    web: Client, visitor: Client, django_assert_num_queries: Any
) -> None:
    first = web.get("/").content.decode()
    assert all(said in first for said in ("See what breaks", "Start the demo", "Start both", "Import", "422 ≠"))
    before = web.get("/gallery.json").json()
    assert (before["run"], before["clean"]) == (None, "") and not any(one["url"] for one in before["entries"])
    assert web.get("/gallery/boundary_merge").url == "/gallery"
    for _ in range(2):
        assert web.post("/gallery").url == "/gallery"
    run = Run.objects.get()
    with django_assert_num_queries(7):  # session, user, roles, the run, its trajectories, findings, projects
        page = web.get("/gallery").content.decode()
    after = web.get("/gallery.json").json()
    assert after["run"] == run.code and after["clean"]
    for one in after["entries"]:
        assert one["url"] in page and one["evidence"] and escape(one["consequence"]) in page, one["kind"]
    assert "they lose is not known of 1 trajectory" in web.get(f"/runs/{run.code}/cost").content.decode()
    assert page.index('id="boundary_merge"') < page.index('id="duplicate_call"'), "errors stand before warnings"
    for name in ("branch", "sub_agent", "compaction", "mixed_policy_versions"):  # a note too is opened at
        found = web.get(web.get(f"/gallery/{name}").url + ".json").json()
        assert found["mark"] and found["row"]["index"] == found["findings"][0]["drawn_row"], name
    shown = web.get("/gallery/boundary_merge", follow=True)
    kind = KINDS["boundary_merge"]
    text = shown.content.decode()
    assert text.count(kind.consequence) == 2, "above the tokens and on the card"
    assert kind.meaning in text and 'href="/help/findings#boundary_merge"' in text
    assert all(f"Not shown: {title}. {why}" in unescape(page) for title, why in after["missing"]) and after["missing"]
    assert "What is this?" in web.get("/").content.decode()
    assert web.get("/gallery/no_such_kind").status_code == 404
    assert visitor.get("/gallery").status_code == 302


def test_the_help_lists_every_kind(visitor: Client) -> None:
    page = visitor.get("/help/findings").content.decode()
    for slug, kind in KINDS.items():
        for text in (f'id="{slug}"', *map(escape, (kind.consequence, kind.remedy, kind.passes, kind.fails))):
            assert text in page, slug
    linked = {one["kind"] for one in visitor.get("/help/findings.json").json()["kinds"] if one["gallery"]}
    assert linked == set(KINDS) - set(MISSING)
    assert linked == {one.external_id for one in gallery.trajectories()} - EXAMPLES.keys()
    assert all(f"Not in the gallery. {escape(why)}" in page for why in MISSING.values())


@pytest.mark.sqlite_only  # lanes do not come from the database
@pytest.mark.django_db
def test_the_trees_of_the_gallery_say_what_their_lanes_are(web: Client) -> None:
    run = gallery.load()
    found = {}
    for name in ("sub_agent", "compaction"):
        code = run.trajectories.get(external_id=name).code
        tree = web.get(f"/trajectories/{code}.json").json()["lanes"]
        found[name] = [(one["kind"], one["steps"], one["read_by"], one["summary"]) for one in tree["items"]]
        page = web.get(f"/gallery/{name}", follow=True).content.decode()
        assert EXAMPLES[name].consequence in page and tree["sentence"] in " ".join(page.split())
    assert found["sub_agent"] == [("first", [0, 3], None, None), ("branch", [1, 2], 3, None)]
    summary = {"step": 1, "outcome": "accepted", "taken_by": 2}
    assert found["compaction"] == [("first", [0, 1], None, None), ("compaction", [2, 3], None, summary)]


@pytest.mark.django_db
def test_the_same_seed_under_two_strategies_is_started_by_one_button_and_compared(
    web: Client, monkeypatch: pytest.MonkeyPatch, django_assert_max_num_queries: Any
) -> None:
    monkeypatch.setattr(launch, "send_run", lambda run: None)
    one, other = stored_run(2, findings=[[finding("boundary_merge")], []]), stored_run(2, findings=[[], []])
    address = f"/runs/compare?run={one.code}&run={other.code}"
    with django_assert_max_num_queries(25):
        page = web.get(address).content.decode()
    assert f'href="{reverse("run", args=[one.code])}?finding=boundary_merge">1</a>' in page
    found = web.get(address.replace("compare", "compare.json")).json()
    assert [(kind["kind"], [one["trajectories"] for one in kind["counts"]]) for kind in found["kinds"]] == [
        ("boundary_merge", [1, 0])
    ]
    assert [question["sides"][0]["findings"] for question in found["questions"]] == [1, 0]
    codes = [run.trajectories.order_by("index").first().code for run in (one, other)]
    diff = f"/trajectories/{codes[0]}/compare?with={codes[1]}"
    assert page.count(f'href="{diff}"') == 1 and "Settings that differ" in page
    assert web.get(diff.replace("compare", "compare.json")).json()["with"] == codes[1]
    assert "of another run:" in web.get(diff).content.decode()
    assert web.get("/runs/compare").status_code == 200
    assert web.get(f"/runs/compare?run={one.code}&run=nothing").status_code == 404
    made = web.post("/runs/demo", {"compare": "1"})
    runs = Run.objects.order_by("-pk")[:2]
    assert {run.strategy for run in runs} == {"tool_delta", "retokenize"}
    assert {(run.settings["seed"], run.n_expected) for run in runs} == {(7, 32)}
    live = web.get(made.url).content.decode()
    assert 'hx-trigger="every 2s"' in live and "tool delta" in live
    assert "at most 20." in live and ">queued</a>" in live and "0 findings" not in live, "what has not ended says so"
    assert ">trajectories to make</dt>" in web.get(f"/runs/{runs[0].code}").content.decode()
    mark = re.search(r"have=(\w+)", live)
    assert mark is not None
    fragment = {"HX-Request": "true", "HX-Target": "compared"}
    assert web.get(f"{made.url}&have={mark[1]}", headers=fragment).status_code == 204
    StoredTrajectory.objects.filter(run=runs[1], index=0).update(prompt_line="How much is 2+2?")
    assert web.get(made.url).content.decode().count("How much is 2+2?") == 1
    assert web.post("/runs/demo").url == reverse("run", args=[Run.objects.latest("pk").code])


@pytest.mark.sqlite_only  # what a script says does not come from the database
@pytest.mark.django_db
def test_the_script_of_no_kind_names_a_path(web: Client) -> None:
    """A tokenizer that is not of the hub is named by its hash, and one of the hub by its id and revision."""
    run = gallery.load()
    assert run.tokenizer is not None
    Tokenizer.objects.update(source="/data/secret/tokenizers/ours")
    told: dict[str, set[str]] = {"hash": set(), "hub": set()}
    for how in told:
        if how == "hub":
            Tokenizer.objects.update(source="Qwen/Qwen3-0.6B", revision="abc123")
        for one in run.trajectories.all():
            for number, stored in enumerate(one.findings.order_by("step_index", "start", "pk"), start=1):
                answer = web.get(f"/trajectories/{one.code}/findings/{number}.py")
                text = answer.content.decode()
                assert answer.status_code in (200, 404), stored.kind
                assert "/data/" not in text and "secret" not in text and str(settings.INSPECTOR_DATA) not in text
                named = (
                    run.tokenizer.sha256 in text if how == "hash" else "Qwen/Qwen3-0.6B" in text and "abc123" in text
                )
                if answer.status_code == 200 and "from_pretrained" in text:
                    assert named, stored.kind
                    told[how].add(stored.kind)
    assert told["hash"] == told["hub"] and len(told["hub"]) > 5


@pytest.mark.django_db
def test_pages_name_the_command_for_the_runs_of_training(web: Client) -> None:
    assert 'href="/gallery#training"' in web.get("/").content.decode()
    assert 'id="training"' in web.get("/gallery").content.decode()
    faulty = [one for one in TRAINING_RUNS if one.name != "clean"]
    assert (len(TRAINING_RUNS), len(faulty)) == (5, 4)  # as the pages say
    assert 'href="/gallery#training"' in web.get("/help").content.decode()
    assert "manage.py load_gallery --training" in web.get("/gallery").content.decode()


@pytest.mark.django_db
def test_a_press_imports_the_runs_of_training_once(web: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    only = tuple(one for one in TRAINING_RUNS if one.name == "stale_cache")
    monkeypatch.setattr(gallery, "TRAINING_RUNS", only)
    sent: list[int] = []

    def send(job: Job) -> str:
        sent.append(job.pk)
        return ""

    monkeypatch.setattr("rollouts.jobs.imports.imports.send_job", send)
    assert web.post("/gallery", {"training": "1"}).headers["Location"] == "/?text=GRPO"
    run = Run.objects.get()
    do_job(sent[0])
    again = web.post("/gallery.json", {"training": "1"})
    assert (again.status_code, again.json()) == (202, {"runs": {"stale_cache": run.code}}) and len(sent) == 1
    run.refresh_from_db()
    assert (run.status, run.n_trajectories, run.n_rejected) == ("done", 240, 0)
    assert (
        web.get(f"/runs/{run.code}.json").json()["run"]["settings"] == {}
    )  # which bundle it is says nothing to a reader
    do_job(Job.objects.get(kind="gap").pk)
    assert [one["cause"] for one in web.get("/runs.json").json()["runs"][0]["gap_causes"]] == ["stale_cache"]
    Run.objects.update(status=Run.Status.FAILED)
    web.post("/gallery", {"training": "1"})
    assert len(sent) == 2 and Run.objects.count() == 2  # one that failed is loaded anew


@pytest.mark.django_db
def test_runs_of_training_that_no_worker_can_be_sent_for_fail_with_the_way_out(
    web: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "TRAINING_RUNS", TRAINING_RUNS[:1])
    monkeypatch.setattr("rollouts.jobs.imports.imports.send_job", lambda job: "Redis does not answer.")
    web.post("/gallery", {"training": "1"})
    run = Run.objects.get()
    assert run.status == "failed" and "Then resume the run" in run.error
