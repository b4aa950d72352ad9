"""`/runs/change`: rename, tag, untag or delete several runs. The page names each of them before anything goes."""


from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from inspector.html.inspector_tags import plural
from inspector.runs.run_values import RunValues
from inspector.web.access import access, may_delete, require
from inspector.web.twins import page, told, wants_json
from rollout_inspector.refusal import Refusal
from rollouts.jobs import run_actions
from rollouts.store.models import Role, Run
from rollouts.store.runs.runs import add_tags, read_tags, remove_tags, rename_run, runs_with_codes, tags_of

MAX_RUNS = 100  # Runs that are changed at once.


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def change(request: HttpRequest) -> HttpResponse:
    """`?run=CODE` for each run. POST with ``do``: ``rename``, ``tag``, ``untag`` or ``delete``; all or nothing."""
    params = request.POST if request.method == "POST" else request.GET
    codes = list(dict.fromkeys(params.getlist("run")))
    runs = runs_with_codes(access(request), codes[: MAX_RUNS + 1])
    visible = {run.code for run in runs}
    if missing := [code for code in codes[: MAX_RUNS + 1] if code not in visible]:
        raise Http404(f"There is no run with the code {missing[0][:64]}. It may have been deleted.")
    for run in runs:
        require(request, run, Role.MEMBER)
    error = done = ""
    if request.method == "POST":
        try:
            done = _do(request, runs, len(codes))
        except ValueError as refusal:
            error = str(refusal)
    if done and not wants_json(request):
        return told(request, done, "runs")
    deleted = done and request.POST.get("do") == "delete"
    runs = [] if deleted else runs
    tags = tags_of(runs) if runs else {}
    chosen = [
        {"run": RunValues.of(run), "tags": tags.get(run.pk, []), "may_delete": may_delete(request, run)}
        for run in runs
    ]
    data = {"runs": chosen, "error": error, "done": done}
    return page(request, "runs/change.html", data, 422 if error else 200)


def _do(request: HttpRequest, runs: list[Run], n: int) -> str:
    """Does what the form asks for. Raises :class:`Refusal`; then nothing was changed."""
    action, posted = request.POST.get("do", ""), request.POST
    if not runs:
        raise Refusal("No run is chosen. Tick some in the list of runs.")
    if n > MAX_RUNS:
        raise Refusal(f"{n:,} runs are chosen; at most {MAX_RUNS} are changed at once.")
    if action == "delete":
        return _delete(request, runs)
    with transaction.atomic():
        if action == "rename":
            for run in runs:
                rename_run(run, posted.get(f"name-{run.code}", run.name))
            return f"{plural(len(runs), 'run')} saved."
        if action in ("tag", "untag"):
            names = read_tags(posted.get("tags", ""))
            for run in runs:
                (add_tags if action == "tag" else remove_tags)(run, names)
            words = "tagged" if action == "tag" else "no longer tagged"
            return f"{plural(len(runs), 'run')} {words} “{', '.join(names)}”."
    raise Refusal("Say what is to be done: rename, tag, untag or delete.")


def _delete(request: HttpRequest, runs: list[Run]) -> str:
    if request.POST.get("sure") != "yes":
        raise Refusal("Nothing was deleted: tick the box beside the button first.")
    foreign = [run.name for run in runs if not may_delete(request, run)]
    if foreign:
        raise Refusal(
            f"Nothing was deleted: others made “{'”, “'.join(foreign[:5])}”, and only an admin of the project deletes "
            "these. Leave them out."
        )
    for run in runs:
        run_actions.delete(run)
    return f"{plural(len(runs), 'run')} deleted: {', '.join(run.name[:60] for run in runs[:5])}" + (
        f" and {len(runs) - 5:,} more." if len(runs) > 5 else "."
    )
