"""What if: the forks of a trajectory, the breaks whose two sides were continued, and the form that asks for more."""

from dataclasses import dataclass, fields
from typing import Any

from django import forms
from django.http import HttpRequest, QueryDict
from django.urls import reverse

from inspector.runs.launches.launch_form import setting_field, strategy_choices
from inspector.trajectories.frame import TrajectoryHead, head_of
from inspector.trajectories.place import PagePlace, View
from inspector.trajectories.tokens.page_queries import table_of
from inspector.web.access import may_write, reader_of
from inspector.web.forms import PlainForm, code_area
from inspector.web.twins import whole_number
from rollout_inspector.streams.trajectory import FORKED, ids_array
from rollout_inspector.text.html.text import bytes_text
from rollout_inspector.text.html.tokens import TokenPainter, painter_of
from rollouts.jobs.forks import MAX_TEXT, ForkSettings
from rollouts.jobs.launch import served_models
from rollouts.sampling.engines import offered_engines
from rollouts.store.chat_templates.chat_templates import newest_chat_templates
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.forks import BreakEffect, ForkBranch, ForkFigures, effects_of, fork_figures, forks_of

MAX_TEMPLATES = 50
FIRST_SETTINGS = ("row", "at", "samples", "temperature")


@dataclass(frozen=True)
class ForksPage(TrajectoryHead):
    """What the policy would have done otherwise."""

    forked_from: dict[str, Any] | None
    """Of a continuation: ``trajectory``, ``row`` and ``offset`` of the place where it begins."""
    effects: list[BreakEffect]
    """Breaks whose two sides were continued, the newest first."""
    forks: list[ForkFigures]
    """The newest forks, those of breaks included."""
    errors: dict[str, list[str]]
    """Of a form that was sent: field -> its errors."""


class ForkForm(PlainForm):
    """From where a trajectory is continued, and how."""

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
            choice.help_text = "The same: " + str(choice.help_text).partition("Empty: ")[2]

    def first(self) -> list[forms.BoundField]:
        """The settings that most forks differ in."""
        return [self[name] for name in FIRST_SETTINGS]

    def more(self) -> list[forms.BoundField]:
        """All others, which are folded."""
        return [field for field in self if field.name not in FIRST_SETTINGS]

    def opens_more(self) -> bool:
        """A folded field has an error or a value."""
        return any(field.errors or field.value() for field in self.more())

    def settings(self) -> ForkSettings:
        """The settings of a valid form. An empty input is the usual value."""
        cleaned = self.cleaned_data
        return ForkSettings(**{
            setting.name: cleaned[setting.name]
            for setting in fields(ForkSettings)
            if cleaned.get(setting.name) not in (None, "")
        })


ForkForm.base_fields |= {setting.name: setting_field(setting) for setting in fields(ForkSettings)} | {
    "text": forms.CharField(
        required=False, strip=False, max_length=MAX_TEXT, widget=code_area(2), label="Another text of this observation",
        help_text="In place of what the environment answered.",
    )
}


def forks_page(
    request: HttpRequest, trajectory: StoredTrajectory, form: ForkForm | None = None
) -> tuple[ForksPage, dict[str, Any]]:
    """The forks of a trajectory. A visitor of a share link sees none: they are other runs. At most 12 queries."""
    is_open = reader_of(request) is not None
    figures = fork_figures(forks_of(trajectory)) if is_open else []
    origin = trajectory.run.settings.get(FORKED) if is_open else None
    painter = painter_of(table_of(trajectory.run.tokenizer)[0])
    page = ForksPage(
        **head_of(trajectory), forked_from=origin, effects=effects_of(figures), forks=figures,
        errors=form.sentences() if form is not None else {},
    )
    html = {
        "drawn_forks": [
            (fork, _place_url(trajectory.code, fork.row, fork.offset), *_drawn_samples(trajectory, fork, painter))
            for fork in figures
        ],
        "parent_url": _place_url(origin["trajectory"], origin["row"], origin["offset"]) if origin else "",
        "compare_parent_url": _urls(trajectory.code, origin["trajectory"])[1] if origin else "",
        "is_pending": any(fork.status in ("queued", "running") for fork in figures),
        "is_open": is_open,
        "form": (form or ForkForm(trajectory.run, initial=_initial(request))) if may_write(request) else None,
    }
    return page, html


def _drawn_samples(
    trajectory: StoredTrajectory, fork: ForkFigures, painter: TokenPainter
) -> tuple[dict[str, Any] | None, list[Any]]:
    """The tree of the continuations, with what its leaves draw; and the continuations that have no token yet."""
    samples = {sample.code: (sample, *_urls(trajectory.code, sample.code)) for sample in fork.samples}

    def drawn(branch: ForkBranch) -> dict[str, Any]:
        text = bytes_text(b"".join(piece or b"?" for piece in painter.pieces(ids_array(branch.ids))))
        return {
            "branch": branch, "text": text, "is_cut": branch.stop - branch.start > len(branch.ids),
            "branches": [drawn(part) for part in branch.branches],
            "samples": [] if branch.branches else [samples[code] for code in branch.samples if code in samples],
        }

    replied = fork.tree.samples if fork.tree else []
    waiting = [sample for code, sample in samples.items() if code not in replied]
    return drawn(fork.tree) if fork.tree else None, waiting


def _initial(request: HttpRequest) -> dict[str, Any]:
    """The place from which one came: ``row`` and ``at``, or the place of the tokens page; else the usual one."""
    place = QueryDict(request.GET.get("place", "")[:500])
    row = whole_number(request.GET.get("row") or place.get("row"))
    at = whole_number(request.GET.get("at") or place.get("t", "").partition("-")[0])
    usual = ForkSettings()
    return {"row": usual.row if row is None else row, "at": usual.at if at is None else at, "samples": usual.samples}


def _place_url(code: str, row: int, offset: int) -> str:
    return reverse("trajectory", args=[code]) + PagePlace(row=row, view=View.TOKENS).marked(offset, offset + 1)


def _urls(code: str, other: str) -> tuple[str, str]:
    """The page of another trajectory, and the page that puts it beside this one."""
    return reverse("trajectory", args=[other]), f"{reverse('trajectory-compare', args=[code])}?with={other}"
