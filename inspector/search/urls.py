"""Addresses of the search: all runs, one run, and one row; what one goes to by name; the docs."""

from django.urls import path

from inspector.search import docs_page, views
from inspector.web.twins import twins

urlpatterns = [
    *twins("search", views.everywhere, name="search"),
    *twins("runs/<code:code>/search", views.in_run, name="run-search"),
    path("trajectories/<code:code>/find", views.in_row, name="row-find"),
    *twins("go", views.go, name="go"),
    path("docs", docs_page.docs),
    # The twins first: a name holds slashes and dots.
    path("docs.json", docs_page.docs, name="docs-index-json"),
    path("docs/", docs_page.docs, name="docs-index"),
    *reversed(twins("docs/<path:name>", docs_page.docs, name="docs")),
]
