"""Every address of the site. A page made by `twins` has `.json` at the same address."""

from django.urls import path, register_converter

from inspector.api import twins
from inspector.cost_page import cost
from inspector.health import health
from inspector.reproduce_page import finding_script
from inspector.views import (
    api_tokens,
    chat_templates,
    imports,
    new_run,
    pages,
    push,
    run_work,
    runs,
    shares,
    template_matrix,
    tokenizers,
    trajectories,
    workers,
)
from inspector.views.login import login, logout


class CodeConverter:
    """An opaque code: small letters and digits, so that `.json` is never part of it."""

    regex = "[0-9a-z]{4,64}"

    def to_python(self, value: str) -> str:
        return value

    def to_url(self, value: str) -> str:
        return value


register_converter(CodeConverter, "code")

handler400 = pages.bad_request
handler403 = pages.forbidden
handler404 = pages.not_found
handler500 = pages.server_error

urlpatterns = [
    *twins("", runs.index, name="runs"),
    *twins("runs/new", new_run.new, name="run-new"),
    *twins("runs/<code:code>", runs.detail, name="run"),
    path("runs/<code:code>/cancel", runs.cancel, name="run-cancel"),
    path("runs/<code:code>/resume", runs.resume, name="run-resume"),
    *twins("runs/<code:code>/cost", cost, name="run-cost"),
    *twins("runs/<code:code>/replay", run_work.replay, name="run-replay"),
    *twins("runs/<code:code>/diagnose", run_work.diagnose, name="run-diagnose"),
    path("runs/<code:code>/export", run_work.export, name="run-export"),
    *twins("runs/<code:code>/exports", run_work.begin_export, name="run-exports"),
    *twins("runs/<code:code>/jobs/<code:job>/cancel", run_work.cancel_job, name="job-cancel"),
    path("runs/<code:code>/jobs/<code:job>/file", run_work.job_file, name="job-file"),
    path("runs/<code:code>/delete", runs.delete, name="run-delete"),
    *twins("trajectories/<code:code>", trajectories.trajectory, name="trajectory"),
    path("trajectories/<code:code>/findings/<int:number>.py", finding_script, name="finding-script"),
    *twins("trajectories/<code:code>/compare", trajectories.compare, name="trajectory-compare"),
    *twins("trajectories/<code:code>/deltas", trajectories.deltas, name="trajectory-deltas"),
    *twins("trajectories/<code:code>/mask", trajectories.mask, name="trajectory-mask"),
    *twins("trajectories/<code:code>/strategies", trajectories.strategies, name="trajectory-strategies"),
    *twins("trajectories/<code:code>/record", trajectories.record, name="trajectory-record"),
    path("trajectories/<code:code>/strategies/again", trajectories.strategies_again, name="trajectory-replay"),
    *twins("import", imports.new, name="import"),
    *twins("tokenizers", tokenizers.index, name="tokenizers"),
    *twins("templates", chat_templates.index, name="templates"),
    *twins("templates/matrix", template_matrix.matrix, name="templates-matrix"),
    path("templates/matrix.csv", template_matrix.matrix_csv, name="templates-csv"),
    *twins("templates/compare", template_matrix.compare, name="templates-compare"),
    *twins("templates/conversation", chat_templates.conversation, name="templates-conversation"),
    *twins("templates/checks/<code:code>", chat_templates.detail, name="check"),
    *twins("templates/checks/<code:code>/conversation", chat_templates.check_conversation, name="check-conversation"),
    path("templates/checks/<code:code>/marks.<str:kind>", chat_templates.marks_file, name="check-marks"),
    path("templates/checks/<code:code>/search", chat_templates.repair, name="check-search"),
    path("templates/checks/<code:code>/repair.<str:kind>", chat_templates.repair_file, name="check-repair"),
    *twins("workers", workers.index, name="workers"),
    *twins("shares", shares.index, name="shares"),
    path("shares/<int:pk>/revoke", shares.revoke, name="share-revoke"),
    path("s/<str:token>", shares.open_link, name="share-open"),
    *twins("tokens", api_tokens.index, name="api-tokens"),
    path("tokens/<int:pk>/revoke", api_tokens.revoke, name="api-token-revoke"),
    path("api/runs", push.create_run, name="api-runs"),
    path("api/runs/<code:code>/trajectories", push.push, name="api-trajectories"),
    path("help", pages.help_page, name="help"),
    path("health", health, name="health"),
    path("login", login, name="login"),
    path("logout", logout, name="logout"),
]
