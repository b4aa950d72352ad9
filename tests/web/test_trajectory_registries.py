"""A lens and a page of a trajectory are added by an entry in their registries alone."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from django.http import HttpRequest
from django.test import Client

import inspector.urls
from inspector.trajectories import tabs
from inspector.trajectories.frame import Tab, TrajectoryHead, head_of
from inspector.trajectories.tokens import lenses
from inspector.trajectories.tokens.lenses import LensSpec
from inspector.trajectories.urls import tab_urls
from inspector.web.twins import fields_of
from rollout_inspector.streams.trajectory import Tokens
from rollouts.store.models import StoredTrajectory
from tests.web.samples import one_line, stored_run

pytestmark = pytest.mark.django_db


@pytest.fixture
def trajectory() -> StoredTrajectory:
    return stored_run(1).trajectories.get()


def even_ids(tokens: Tokens) -> np.ndarray:
    return np.where(tokens.ids % 2 == 0, 8, 0)


def test_a_lens_is_one_entry(web: Client, trajectory: StoredTrajectory, monkeypatch: pytest.MonkeyPatch) -> None:
    legend = ((("key-q0", "odd", ""), ("key-q8", "even", "")), ("least", "most"))
    parity = LensSpec("parity", "parity of ids", legend, lambda tokens, here: f"No even id {here}.", even_ids)
    monkeypatch.setattr(lenses, "LENSES", (*lenses.LENSES, parity))
    url = f"/trajectories/{trajectory.code}"
    assert web.get(f"{url}.json").json()["lenses"] == ["mask", "origin", "logprob", "parity"]
    page = one_line(web.get(f"{url}?view=tokens&lens=parity"))
    assert "has no lens" not in page and 'data-lens="value"' in page
    assert 'data-lens-choice="parity" data-lens-request="always" aria-current="true">parity of ids</a>' in page
    assert '<ul data-for="parity"> <li class="scale"> <span>least</span>' in page
    assert '<ul data-for="mask" hidden>' in page
    assert '<p class="lens-note" data-for="parity">No even id in this window.</p>' in page
    pane = page.split('id="pane"')[1]
    # The ids of the row are 1 to 5 and 9 or so: each has the class of its parity.
    drawn = {int(text): "q8" in names for names, text in _tokens(pane)}
    assert len(drawn) >= 5 and all(even == (number % 2 == 0) for number, even in drawn.items())


def _tokens(pane: str) -> list[tuple[str, str]]:
    """Classes and text of each token; without a tokenizer the text is the id."""
    parts = [part.partition(">") for part in pane.split("<i")[1:] if part.startswith(" class")]
    return [(names, rest.partition("<")[0]) for names, _, rest in parts]


def test_the_json_of_each_page_has_the_fields_of_its_dataclass(
    web: Client, trajectory: StoredTrajectory, rf, admin_user
) -> None:
    for tab in tabs.TABS[1:]:
        request = rf.get("/")
        request.user = admin_user
        value, _ = tab.build(request, trajectory)
        keys = web.get(f"/trajectories/{trajectory.code}/{tab.slug}.json").json().keys()
        assert list(keys) == list(fields_of(value)), tab.slug
        assert isinstance(value, TrajectoryHead)


@dataclass(frozen=True)
class LengthPage(TrajectoryHead):
    length: int
    """Tokens of the trajectory."""


def length_page(request: HttpRequest, trajectory: StoredTrajectory) -> tuple[LengthPage, dict[str, str]]:
    return LengthPage(**head_of(trajectory), length=trajectory.n_tokens), {"words": f"{trajectory.n_tokens} tokens"}


def test_a_page_is_one_entry_and_a_template(
    web: Client, trajectory: StoredTrajectory, monkeypatch: pytest.MonkeyPatch, settings, tmp_path: Path
) -> None:
    length = Tab("length", "How long", "length", length_page, is_offered=lambda one: one.n_tokens > 0)
    template = '{% extends "trajectories/frame.html" %}{% block page %}<p>{{ words }}, {{ length }}</p>{% endblock %}'
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "length.html").write_text(template)
    settings.TEMPLATES = [{**engine, "DIRS": [*engine["DIRS"], tmp_path]} for engine in settings.TEMPLATES]
    monkeypatch.setattr(tabs, "TABS", (*tabs.TABS, length))
    urls = ModuleType("urls_with_a_length")
    urls.urlpatterns = [*tab_urls([length]), *inspector.urls.urlpatterns]
    monkeypatch.setitem(sys.modules, urls.__name__, urls)
    settings.ROOT_URLCONF = urls.__name__

    url = f"/trajectories/{trajectory.code}"
    n = trajectory.n_tokens
    assert f'<a href="{url}/length">How long</a>' in one_line(web.get(url))
    answer = web.get(f"{url}/length")
    page = one_line(answer)
    assert f"<p>{n} tokens, {n}</p>" in page and f'<a href="{url}/length" aria-current="page">How long</a>' in page
    assert answer["ETag"]
    assert web.get(f"{url}/length.json").json()["length"] == n
    StoredTrajectory.objects.update(n_tokens=0)
    assert "How long" not in one_line(web.get(f"{url}/record"))


def test_values_do_not_import_what_draws_them() -> None:
    """A value of the tokens page is read and written as JSON without the modules that write HTML."""
    folder = Path(lenses.__file__).parent
    for name in ("page_queries", "findings", "turns", "token_view", "tokens_page", "lane_tree"):
        source = (folder / f"{name}.py").read_text()
        assert "inspector.html" not in source and "tokens.reader" not in source, name
