"""Addresses of one trajectory: its pages, and its findings as scripts."""

from collections.abc import Iterable

from django.urls import URLPattern, path

from inspector.trajectories import discussion, offline_page, views
from inspector.trajectories.frame import Tab
from inspector.trajectories.record_page import media
from inspector.trajectories.tabs import TABS
from inspector.web.twins import twins


def tab_urls(tabs: Iterable[Tab]) -> list[URLPattern]:
    """The addresses of the tabs beside the tokens page."""
    return [url for tab in tabs if tab.build is not None
            for url in twins(f"trajectories/<code:code>/{tab.slug}", views.tab_view(tab), name=tab.url_name)]


urlpatterns = [
    *twins("trajectories/<code:code>", views.trajectory, name="trajectory"),
    path("trajectories/<code:code>/card.json", views.card, name="trajectory-card"),
    path("trajectories/<code:code>/alternatives.json", views.alternatives, name="trajectory-alternatives"),
    path("trajectories/<code:code>/find.json", views.find, name="trajectory-find"),
    path("trajectories/<code:code>/file.html", offline_page.offline_page, name="trajectory-file"),
    path("trajectories/<code:code>/findings/<int:number>.py", views.finding_script, name="finding-script"),
    path("trajectories/<code:code>/media/<int:step>/<int:number>", media, name="trajectory-media"),
    *twins("trajectories/<code:code>/seen", views.seen, name="seen"),
    *twins("trajectories/<code:code>/comments", discussion.comments, name="comments"),
    *twins("trajectories/<code:code>/comments/<code:comment>", discussion.comment, name="comment"),
    *tab_urls(TABS),
    *twins("trajectories/<code:code>/forks/new", views.new_fork, name="fork-new"),
    path("trajectories/<code:code>/parsers/again", views.parsers_again, name="trajectory-audit"),
    path("trajectories/<code:code>/strategies/again", views.strategies_again, name="trajectory-replay"),
]
