"""`/gallery`: what each kind of finding looks like, and trees of calls; `/help/findings`: what each of them means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from inspector.web.access import access, chosen_project, form_project
from inspector.web.twins import Page, json_page, page, wants_json
from rollout_inspector.diagnose.finding import Axis, Severity
from rollout_inspector.diagnose.kinds import KINDS, FindingKind
from rollouts.gallery import CLEAN, EXAMPLES, MISSING
from rollouts.gallery.training_runs import TRAINING_RUNS
from rollouts.jobs import gallery
from rollouts.jobs.imports.imports import send_import
from rollouts.store.models import Run
from rollouts.store.runs.gallery import find_gallery, gallery_evidence, gallery_trajectories

AXES = {
    Axis.STREAM: "What was sampled is not what the next prompt holds",
    Axis.DELTA: "Between two answers stands what the chat template does not write",
    Axis.ROW: "The training row trains what it should not",
}
"""Axis -> what its findings have in common, in the order of pages."""
TREE = "tree"
TREES = "The calls of the trajectory form a tree"


@dataclass(frozen=True)
class GalleryEntry:
    """A trajectory of the gallery: a kind of finding, or a tree of calls."""

    kind: str
    """Slug of the kind, or the name of the tree."""
    title: str
    axis: str
    """What it is about: ``stream``, ``delta``, ``row`` or ``tree``."""
    severity: str
    """The usual severity of the kind; of a tree that of the kind of its finding."""
    meaning: str
    """What happened."""
    consequence: str
    """What it does to training."""
    evidence: str
    """What the diagnosis says of this trajectory; empty while the gallery is not loaded."""
    url: str
    """Address of the trajectory, which opens at the finding; empty while the gallery is not loaded."""


@dataclass(frozen=True)
class GalleryPage(Page):
    """What each kind of finding looks like."""

    run: str | None
    """The code of the run that holds the gallery; None while nobody has loaded it."""
    clean: str
    """Address of the trajectory with no fault; empty while the gallery is not loaded."""
    entries: list[GalleryEntry]
    """The kinds of the gallery, in its order, then the trees."""
    missing: list[tuple[str, str]]
    """Title of a kind that the gallery does not show, and why."""


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The kinds of findings, each with its trajectory. A POST loads the trajectories into a project, once.

    A POST with `training` has workers import the bundled runs of training, and leads to the list of runs.
    """
    if request.method == "POST" and "training" in request.POST:
        return _load_training(request)
    run = find_gallery(gallery.version(), access(request))
    if request.method == "POST":
        project = chosen_project(request).chosen
        if run is None or "project" in request.POST:
            try:
                run = gallery.load(project, request.user)
            except ValueError as error:  # the tokenizer of the demo policy cannot be registered
                messages.error(request, f"The gallery was not loaded: {error}", extra_tags="error")
        if not wants_json(request):
            return redirect("gallery")
    shown = _page(run)
    return page(
        request,
        "gallery.html",
        shown,
        groups=_by_axis(shown.entries),
        where=form_project(request),
        n_training=len(TRAINING_RUNS),
    )


def _load_training(request: HttpRequest) -> HttpResponse:
    """Send workers for the bundled runs of training that are not there yet. A program gets 202 with all of them."""
    project = chosen_project(request).chosen
    try:
        found = gallery.import_training(project, request.user)
    except ValueError as error:  # the tokenizer of the demo policy cannot be registered
        if wants_json(request):
            return json_page({"error": f"The runs were not loaded: {error}"}, 422)
        messages.error(request, f"The runs were not loaded: {error}", extra_tags="error")
        return redirect("gallery")
    for _, run, job in found:
        if job is not None:
            send_import(run, job)
    if wants_json(request):
        return json_page({"runs": {one.name: run.code for one, run, _ in found}}, 202)
    return redirect(f"{reverse('runs')}?text=GRPO")


@never_cache
@require_safe
def one(request: HttpRequest, kind: str) -> HttpResponse:
    """Leads to the trajectory of a kind; to the gallery while it is not loaded."""
    if kind not in in_gallery():
        raise Http404(f"The gallery has no trajectory for “{kind}”. Its page lists those that it has.")
    run = find_gallery(gallery.version(), access(request))
    found = next((one for one in gallery_trajectories(run) if one.external_id == kind), None) if run else None
    return redirect("gallery") if found is None else redirect("trajectory", found.code)


@login_not_required
@require_safe
def findings(request: HttpRequest) -> HttpResponse:
    """Every kind of finding: what happened, what it does to training, the remedy, and a witness pair."""
    kinds = sorted(KINDS.values(), key=lambda kind: list(AXES).index(kind.axis))
    shown = FindingsPage([_help_entry(kind) for kind in kinds])
    return page(request, "help_findings.html", shown, groups=_by_axis(shown.kinds))


@dataclass(frozen=True)
class HelpEntry:
    """A kind of finding in the help."""

    kind: str
    """Slug of the kind, and the fragment of its address."""
    title: str
    axis: str
    """What the kind is about: ``stream``, ``delta`` or ``row``."""
    severity: str
    """The usual severity of the kind."""
    meaning: str
    """What happened."""
    consequence: str
    """What it does to training."""
    remedy: str
    """What to do about it."""
    passes: str
    """The smallest input that has not this finding, in words."""
    fails: str
    """The smallest input that has it, in words."""
    gallery: str
    """Address of the trajectory that shows it; empty when the gallery has none."""
    not_in_gallery: str
    """Why the gallery has none; else empty."""


@dataclass(frozen=True)
class FindingsPage(Page):
    """Every kind of finding."""

    kinds: list[HelpEntry]
    """By what they are about, in the order of lists."""


Entry = TypeVar("Entry", GalleryEntry, HelpEntry)


@cache
def in_gallery() -> frozenset[str]:
    """The names of the trajectories of the gallery."""
    return frozenset(one.external_id for one in gallery.trajectories())


def _help_entry(kind: FindingKind) -> HelpEntry:
    return HelpEntry(
        kind.slug, kind.title, kind.axis, kind.severity, kind.meaning, kind.consequence, kind.remedy, kind.passes,
        kind.fails, reverse("gallery-one", args=[kind.slug]) if kind.slug in in_gallery() else "",
        MISSING.get(kind.slug, ""),
    )


def _page(run: Run | None) -> GalleryPage:
    urls = {one.external_id: reverse("trajectory", args=[one.code]) for one in gallery_trajectories(run)} if run else {}
    evidence = gallery_evidence(run, EXAMPLES) if run else {}
    entries = [
        GalleryEntry(
            slug, kind.title, kind.axis, kind.severity, kind.meaning, kind.consequence, evidence.get(slug, ""),
            urls.get(slug, ""),
        )
        for slug, kind in KINDS.items()
        if slug in in_gallery()
    ]
    entries += [
        GalleryEntry(
            name, one.title, TREE, KINDS[one.kind].severity, one.meaning, one.consequence, evidence.get(name, ""),
            urls.get(name, ""),
        )
        for name, one in EXAMPLES.items()
        if one.kind
    ]
    missing = [(KINDS[slug].title, why) for slug, why in MISSING.items()]
    return GalleryPage(run.code if run else None, urls.get(CLEAN, ""), entries, missing)


def _by_axis(entries: Sequence[Entry]) -> list[tuple[str, str, list[Entry]]]:
    """(axis, what its entries have in common, its entries, the gravest first), those without an entry left out"""
    headings = [*AXES.items(), (TREE, TREES)]
    grave_first = sorted(entries, key=lambda one: list(Severity).index(Severity(one.severity)))
    groups = [(axis, common, [one for one in grave_first if one.axis == axis]) for axis, common in headings]
    return [group for group in groups if group[2]]
