"""`/runs/new`: the launch form."""

from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.forms import ChoiceField
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from inspector.runs.launches.launch_form import NewRunForm, NewRunPage, filled_in, project_of_run
from inspector.runs.run_values import RunValues
from inspector.web.access import access, chosen_project
from inspector.web.twins import json_page, page, wants_json
from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs import launch
from rollouts.jobs.launch import LaunchSettings
from rollouts.store.models import Project, Run

COMPARED = tuple(
    LaunchSettings(strategy=strategy, prompts=16, group=2, seed=7) for strategy in ("tool_delta", "retokenize")
)
"""The prepared comparison: one strategy that keeps the sampled tokens, and one that encodes the text again."""


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def new(request: HttpRequest) -> HttpResponse:
    """The launch form, filled in by its address. A valid POST goes on to the page of the run."""
    notices: list[str] = []
    where = chosen_project(request, preferred=project_of_run(access(request), request.GET.get("again", "")))
    if request.method == "POST":
        form = NewRunForm(where.chosen, request.POST, request.FILES)
        run = _launch(form, request, where.chosen)
        if run is not None:
            return json_page(RunValues.of(run), 201) if wants_json(request) else redirect("run", run.code)
    else:
        initial, notices = filled_in(access(request), where.chosen, request.GET)
        form = NewRunForm(where.chosen, initial=initial)
    data = NewRunPage(where.chosen.code, form.sentences(), _describe(form), notices)
    return page(
        request, "runs/new.html", data, 422 if form.errors else 200, form=form, where=where,
        strategies=form.strategies_explained(), seeds=form.seeds_explained(),
        alternatives=form.alternatives_explained(),
    )


@require_POST
def demo(request: HttpRequest) -> HttpResponse:
    """Launch the bundled model with every setting as it is; with `compare`, the same seed under two strategies."""
    project = chosen_project(request).chosen
    try:
        if "compare" in request.POST:
            runs = [
                launch.launch(
                    settings, name=f"Same seed: {settings.strategy.replace('_', ' ')}", user=request.user,
                    project=project,
                )
                for settings in COMPARED
            ]
            return redirect(f"{reverse('run-compare')}?{urlencode([('run', run.code) for run in runs])}")
        return redirect("run", launch.launch(LaunchSettings(), user=request.user, project=project).code)
    except launch.LaunchRefused as refusal:
        for sentence in refusal.problems.values():
            messages.error(request, sentence, extra_tags="error")
        return redirect("run-new")


def _launch(form: NewRunForm, request: HttpRequest, project: Project) -> Run | None:
    """Launch what a form asks for. Returns None, and fills in the form's errors, when that is refused."""
    if not form.is_valid():
        return None
    try:
        cleaned = form.cleaned_data
        return launch.launch(
            form.launch_settings(), name=cleaned["name"].strip(), user=request.user, prompts=cleaned["prompts_file"],
            project=project,
        )
    except launch.LaunchRefused as refusal:
        form.add_problems(refusal.problems)
        return None


def _describe(form: NewRunForm) -> dict[str, Any]:
    """Each field with its default and its choices, so that a script can fill the form in."""
    return {
        name: {
            "default": form.get_initial_for_field(field, name),
            "help": str(field.help_text),
            **({"choices": _keys(field.choices)} if isinstance(field, ChoiceField) else {}),
            **(
                {"choices_help": {slug: strategy.about for slug, strategy in STRATEGIES.items()}}
                if name == "strategy"
                else {}
            ),
        }
        for name, field in form.fields.items()
    }


def _keys(choices: Any) -> list[str]:
    """The keys of choices, families flattened."""
    return [key for name, value in choices for key in (_keys(value) if isinstance(value, list) else [name])]
