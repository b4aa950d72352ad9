"""What if: the forks of a trajectory, the breaks whose two sides were continued, and the forms that ask for more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.urls import reverse

from inspector.runs.launches.launch_form import setting_field, strategy_choices
from inspector.trajectories.frame import TrajectoryHead, head_of
from inspector.trajectories.place import PagePlace, View
from inspector.web.access import may_write, reader_of
from inspector.web.forms import PlainForm, code_area
from inspector.web.twins import json_page, wants_json, whole_number
from rollout_inspector.refusal import Refusal
from rollouts.jobs.forks import MAX_TEXT, ContinuationSettings, ForkSettings, break_effect, fork
from rollouts.jobs.launch import LaunchRefused, served_models
from rollouts.sampling.engines import offered_engines
from rollouts.store.chat_templates.chat_templates import newest_chat_templates
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.forks import BreakEffect, ForkFigures, effects_of, find_fork, fork_figures, forks_of

MAX_TEMPLATES = 50


@dataclass(frozen=True)
class ForkPlace:
    """Where a trajectory leaves the one that it continues."""

    trajectory: str
    """Code of that trajectory."""
    external_id: str
    """Its name in the source."""
    row: int
    """The row in which it leaves it."""
    offset: int
    """The first token that is not the parent's."""


@dataclass(frozen=True)
class ForksPage(TrajectoryHead):
    """What the policy would have done otherwise."""

    forked_from: ForkPlace | None
    """Of a continuation: where it begins."""
    effects: list[BreakEffect]
    """Breaks whose two sides were continued, the newest first."""
    forks: list[ForkFigures]
    """The newest forks, those of breaks included."""
    errors: dict[str, list[str]]
    """Of a form that was sent: field -> its errors."""


class ContinuationForm(PlainForm):
    """How a trajectory is continued. The fields are those of the settings ``kind``."""

    kind: type[ContinuationSettings] = ContinuationSettings

    def __init__(self, run: Run, data: Any = None, initial: Any = None) -> None:
        super().__init__(data, initial=initial)
        templates = newest_chat_templates(run.project, MAX_TEMPLATES)
        for name, choices in (
            ("model", [(model, model) for model in served_models()]),
            ("engine", [(engine, engine) for engine in offered_engines()]),
            ("strategy", strategy_choices()),
            ("chat_template", [(entry.chat_template_id, entry.label or "without a name") for entry in templates]),
        ):
            choice = self.fields[name]
            assert isinstance(choice, forms.ChoiceField)
            choice.choices = [("", "the same"), *choices]

    def settings(self) -> Any:
        """The settings of a valid form. An empty input is the usual value."""
        cleaned = self.cleaned_data
        return self.kind(**{
            setting.name: cleaned[setting.name]
            for setting in fields(self.kind)
            if cleaned.get(setting.name) not in (None, "")
        })


class ForkForm(ContinuationForm):
    """From where a trajectory is continued, and how."""

    kind = ForkSettings
    observed_text = forms.CharField(
        required=False, strip=False, max_length=MAX_TEXT, widget=code_area(3),
        label="Another text of this observation", help_text="In place of what the environment answered. Optional.",
    )

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        return {**cleaned, "text": cleaned.get("observed_text")}


class EffectForm(ContinuationForm):
    """The finding whose two sides are continued, and how."""

    finding = forms.IntegerField(min_value=1, max_value=2**31 - 1, label="Finding", help_text="Its number, from 1.")


_SHARED = {setting.name: setting_field(setting) for setting in fields(ContinuationSettings)}
EffectForm.base_fields |= _SHARED
ForkForm.base_fields |= _SHARED | {
    setting.name: setting_field(setting) for setting in fields(ForkSettings)
    if setting.name not in _SHARED and setting.name != "text"
}


def forks_page(
    request: HttpRequest, trajectory: StoredTrajectory, fork_form: ForkForm | None = None,
    effect_form: EffectForm | None = None,
) -> tuple[ForksPage, dict[str, Any]]:
    """The forks of a trajectory. A visitor of a share link sees none: they are other runs. At most 12 queries."""
    is_open = reader_of(request) is not None
    origin = find_fork(trajectory.run) if is_open else None
    parent = origin.parent if origin else None
    forks = forks_of(trajectory) if is_open else []
    figures = fork_figures(forks)
    samples = {fork.pk: of_fork.samples for fork, of_fork in zip(forks, figures, strict=True)}
    form = effect_form if effect_form is not None and effect_form.errors else fork_form
    at = (origin.row, origin.offset) if origin else (0, 0)
    page = ForksPage(
        **head_of(trajectory),
        forked_from=ForkPlace(parent.code, parent.external_id, *at) if parent else None,
        effects=effects_of(forks, samples),
        forks=figures,
        errors=form.sentences() if form is not None else {},
    )
    html = {
        "drawn_forks": [
            (
                of_fork, _place_url(trajectory, of_fork.row, of_fork.offset), reverse("run", args=[of_fork.run]),
                _compare_urls(trajectory, of_fork),
            )
            for of_fork in figures
        ],
        "parent_url": _place_url(parent, *at) if parent else "",
        "compare_parent_url": _compare_url(trajectory.code, parent.code) if parent else "",
        "is_pending": any(of_fork.status in ("queued", "running") for of_fork in figures),
        "is_open": is_open,
        "may_write": may_write(request),
    }
    if html["may_write"]:
        html |= {
            "fork_form": fork_form or ForkForm(trajectory.run, initial=_initial(request)),
            "effect_form": effect_form or EffectForm(trajectory.run),
        }
    return page, html


def _initial(request: HttpRequest) -> dict[str, Any]:
    """The place from which one came: ``row`` and ``at``, or the place of the tokens page."""
    place = QueryDict(request.GET.get("place", "")[:500])
    row, at = request.GET.get("row") or place.get("row"), request.GET.get("at") or place.get("t", "").partition("-")[0]
    values = {"row": whole_number(row), "at": whole_number(at)}
    return {name: number for name, number in values.items() if number is not None}


def _place_url(trajectory: StoredTrajectory, row: int, offset: int) -> str:
    place = PagePlace(row=row, view=View.TOKENS).marked(offset, offset + 1)
    return reverse("trajectory", args=[trajectory.code]) + place


def _compare_url(code: str, other: str) -> str:
    return f"{reverse('trajectory-compare', args=[code])}?with={other}"


def _compare_urls(trajectory: StoredTrajectory, of_fork: ForkFigures) -> list[tuple[Any, str, str]]:
    """Of each continuation: itself, its page, and the page that puts it beside the parent."""
    return [
        (sample, reverse("trajectory", args=[sample.code]), _compare_url(trajectory.code, sample.code))
        for sample in of_fork.samples
    ]


def launched(
    form: ContinuationForm, launch: Callable[[Any], Any], request: HttpRequest, trajectory: StoredTrajectory
) -> HttpResponse | None:
    """Launch what a form asks for, and lead to the forks. None where it is refused: the form has the errors."""
    if form.is_valid():
        try:
            value = launch(form.settings())
        except LaunchRefused as refusal:
            for name, sentence in refusal.problems.items():
                form.add_error(name if name in form.fields else None, sentence)
        except Refusal as refusal:
            form.add_error(None, refusal.sentence)
        else:
            if wants_json(request):
                return json_page(value, 201)
            return redirect(reverse("trajectory-forks", args=[trajectory.code]) + "#forks")
    return None


def continue_from_token(request: HttpRequest, trajectory: StoredTrajectory, form: ForkForm) -> HttpResponse | None:
    """Answers the form of a token."""
    return launched(
        form, lambda settings: {"run": fork(trajectory, settings, request.user).code}, request, trajectory
    )


def continue_both_break_starts(request: HttpRequest, trajectory: StoredTrajectory, form: EffectForm) -> HttpResponse | None:
    """Answers the form of a finding."""

    def launch(settings: Any) -> dict[str, str]:
        sampled, broken = break_effect(trajectory, form.cleaned_data["finding"], settings, request.user)
        return {"sampled": sampled.code, "broken": broken.code}

    return launched(form, launch, request, trajectory)
