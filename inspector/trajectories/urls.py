"""Addresses of one trajectory: its pages, and its findings as scripts."""

from django.urls import path

from inspector.trajectories import reproduce_views, views
from inspector.web.twins import twins

urlpatterns = [
    *twins("trajectories/<code:code>", views.trajectory, name="trajectory"),
    path("trajectories/<code:code>/findings/<int:number>.py", reproduce_views.finding_script, name="finding-script"),
    *twins("trajectories/<code:code>/compare", views.compare, name="trajectory-compare"),
    *twins("trajectories/<code:code>/deltas", views.deltas, name="trajectory-deltas"),
    *twins("trajectories/<code:code>/mask", views.mask, name="trajectory-mask"),
    *twins("trajectories/<code:code>/strategies", views.strategies, name="trajectory-strategies"),
    *twins("trajectories/<code:code>/record", views.record, name="trajectory-record"),
    path("trajectories/<code:code>/strategies/again", views.strategies_again, name="trajectory-replay"),
]
