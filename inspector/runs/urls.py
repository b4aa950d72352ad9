"""Addresses of runs: list, launch, import, one run, its jobs."""

from django.urls import path

from inspector.runs import change_page, compare_page, cost_page, group_page, loss_weights, muted, views
from inspector.runs.jobs import job_views
from inspector.runs.launches import import_views, launch_views
from inspector.runs.training import alarms_page, columns_page, gap_page, training_page
from inspector.web.twins import twins

urlpatterns = [
    *twins("", views.index, name="runs"),
    *twins("import", import_views.new, name="import"),
    *twins("runs/new", launch_views.new, name="run-new"),
    path("runs/demo", launch_views.demo, name="run-demo"),
    *twins("runs/compare", compare_page.compare, name="run-compare"),
    *twins("runs/change", change_page.change, name="runs-change"),
    *twins("runs/<code:code>", views.detail, name="run"),
    path("runs/<code:code>/check-files", import_views.begin_opened, {"what": "check"}, name="opened-check"),
    path("runs/<code:code>/import-files", import_views.begin_opened, {"what": "import"}, name="opened-import"),
    path("runs/<code:code>/cancel", views.cancel, name="run-cancel"),
    path("runs/<code:code>/resume", views.resume, name="run-resume"),
    path("runs/<code:code>/delete", views.delete, name="run-delete"),
    *twins("runs/<code:code>/cost", cost_page.cost, name="run-cost"),
    *twins("runs/<code:code>/damage", cost_page.measure, name="run-damage"),
    *twins("runs/<code:code>/training", training_page.training, name="run-training"),
    *twins("runs/<code:code>/weights", loss_weights.weights, name="run-weights"),
    *twins("runs/<code:code>/weigh", loss_weights.weigh, name="run-weigh"),
    *twins("runs/<code:code>/alarms", alarms_page.alarms, name="run-alarms"),
    *twins("runs/<code:code>/alarms/set", alarms_page.set_alarm, name="run-alarm-set"),
    *twins("alarms/<int:pk>/drop", alarms_page.drop_alarm, name="alarm-drop"),
    *twins("runs/<code:code>/gap", gap_page.gap, name="run-gap"),
    *twins("runs/<code:code>/gap/read", gap_page.ask, name="run-gap-read"),
    # The twin first: the name of a group may hold anything.
    *reversed(twins("runs/<code:code>/groups/<path:key>", group_page.group, name="run-group")),
    *twins("runs/<code:code>/mute", muted.mute_kind, name="run-mute"),
    *twins("muted/<int:pk>/unmute", muted.unmute_kind, name="unmute"),
    *twins("runs/<code:code>/replay", job_views.replay, name="run-replay"),
    *twins("runs/<code:code>/columns", columns_page.columns, name="run-columns"),
    *twins("runs/<code:code>/columns/<code:column>/delete", columns_page.delete_scores, name="scores-delete"),
    *twins("runs/<code:code>/rescore", columns_page.begin, name="run-rescore"),
    *twins("runs/<code:code>/diagnose", job_views.diagnose, name="run-diagnose"),
    path("runs/<code:code>/export", job_views.export, name="run-export"),
    *twins("runs/<code:code>/exports", job_views.begin_export, name="run-exports"),
    *twins("runs/<code:code>/jobs/<code:job>/cancel", job_views.cancel_job, name="job-cancel"),
    path("runs/<code:code>/jobs/<code:job>/file", job_views.job_file, name="job-file"),
]
