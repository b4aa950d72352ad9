"""Findings of the tokens page: equal ones share a card, the worst first, and each says where else in the run it is."""

import re
from dataclasses import replace
from typing import Any

import pytest
from django.test import Client

from inspector.trajectories.tokens import findings
from rollout_inspector.diagnose.finding import Severity
from rollouts.store.models import Run
from rollouts.store.people.shares import create_share
from tests.web.samples import one_line
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db

HOSTILE = "[here](https://evil.example) `code` <b>bold</b> **loud**"


@pytest.fixture
def run(make: Maker) -> Run:
    """The first trajectory has two notes, an error, and two errors of another kind; the last has that kind too."""
    broken, (finding,) = make.broken("first")
    last, others = make.broken("last")
    note = replace(finding, kind="noncanonical_sampling", severity=Severity.INFO, evidence=HOSTILE)
    found = [
        replace(note, start=3), replace(note, start=5), replace(finding, kind="branch", start=8),
        replace(finding, start=20), replace(finding, start=30, evidence="At 30."),
    ]
    return make.run([broken, make.conversation("clean"), last], [found, [], others])


def page_of(client: Client, run: Run, name: str = "first", query: str = "") -> str:
    return one_line(client.get(f"/trajectories/{run.trajectories.get(external_id=name).code}{query}"))


def cards(html: str) -> list[str]:
    return html.split('<li class="finding ')[1:]


def test_equal_findings_share_a_card_and_the_worst_stands_first(web: Client, run: Run) -> None:
    html = page_of(web, run)
    assert [card.split('"')[0] for card in cards(html)] == ["error", "error", "info"]
    branch, breaks, notes = cards(html)
    assert "of these" not in branch and "2 of these" in breaks and "2 of these" in notes
    # Each is a link with its place and what differs, and each has the id that the tokens lead to.
    assert breaks.count("finding-jump") == 2 and "At 30." in breaks
    assert {f'id="finding-{number}"' in html for number in range(1, 6)} == {True}


def test_a_card_says_where_else_in_the_run_the_kind_is(
    web: Client, run: Run, monkeypatch: pytest.MonkeyPatch, django_assert_max_num_queries: Any
) -> None:
    branch, breaks, _ = cards(page_of(web, run))
    assert "Only this one of 3 trajectories in the run." in branch
    assert "2 of 3 trajectories</a> in this run" in breaks
    last = run.trajectories.get(external_id="last")
    (following,) = re.findall(r'class="in-run-next" href="([^"]+)"', breaks)
    assert following == f"/trajectories/{last.code}?finding=unclassified"
    # Behind the last one follows the first.
    (card,) = cards(page_of(web, run, "last"))
    assert f'href="/trajectories/{run.trajectories.get(external_id="first").code}?finding=unclassified"' in card
    trajectory = run.trajectories.select_related("run").get(external_id="first")
    with django_assert_max_num_queries(2):
        findings.kinds_in_run(trajectory, ["branch", "noncanonical_sampling", "unclassified"])
    # Of a large run the stored figures are asked, and the filter of the list leads on.
    monkeypatch.setattr(findings, "is_large", lambda run: True)
    assert 'class="in-run-next" href="/trajectories/' + trajectory.code in cards(page_of(web, run))[1]


def test_who_may_see_one_trajectory_learns_nothing_of_the_run(visitor: Client, member: Any, run: Run) -> None:
    _, token = create_share(member, run.trajectories.get(external_id="first"))
    visitor.get(f"/s/{token}")
    html = page_of(visitor, run)
    assert len(cards(html)) == 3 and "in-run" not in html


def test_model_output_makes_no_markup_in_the_markdown(web: Client, run: Run) -> None:
    (text,) = re.findall(r'<textarea id="markdown-1"[^>]*>(.*?)</textarea>', page_of(web, run))
    for markup in ("[here](", " `code`", "&lt;b&gt;bold", "**loud"):
        assert markup not in text
    assert r"\[here\](https" in text and "(info, `noncanonical_sampling`)" in text
    assert re.search(r"\[Open it\]\(/trajectories/\w+\?[^)]*t=3-", text)
