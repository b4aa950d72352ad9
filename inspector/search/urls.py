"""Addresses of the search: all runs, one run, and one row."""

from django.urls import path

from inspector.search import views
from inspector.web.twins import twins

urlpatterns = [
    *twins("search", views.everywhere, name="search"),
    *twins("runs/<code:code>/search", views.in_run, name="run-search"),
    path("trajectories/<code:code>/find", views.in_row, name="row-find"),
]
