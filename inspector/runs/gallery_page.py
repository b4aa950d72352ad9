"""`/gallery`: what each kind of finding looks like, and trees of calls; `/help/findings`: what each of them means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from inspector.html.token_diff import fault_strip
from inspector.web.access import access, chosen_project, form_project
from inspector.web.twins import Page, json_page, page, told, wants_json
from rollout_inspector.diagnose.finding import Axis, Severity
from rollout_inspector.diagnose.kinds import KINDS, FindingKind
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.html.tokens import painter_of
from rollouts.gallery import CLEAN, EXAMPLES, FIRST, MISSING, TRAINING_RUNS
from rollouts.jobs import gallery
from rollouts.jobs.imports.imports import send_import
from rollouts.store.chat_templates.tokenizers import byte_table_of
from rollouts.store.models import Run, StoredFinding
from rollouts.store.runs.gallery import find_gallery, gallery_findings, gallery_trajectories

AXES = {
    Axis.STREAM: "What was sampled is not what the next prompt holds",
    Axis.DELTA: "Between two answers stands what the chat template does not write",
    Axis.ROW: "The training row trains what it should not",
}
"""Axis -> what its findings have in common, in the order of pages."""
TREE = "tree"
BEGIN, BEGIN_WORDS = "first", "Five to begin with"
TREES = "The calls of the trajectory form a tree"


@dataclass(frozen=True)
class KindEntry:
    """A kind of finding in the gallery and in the help, or a tree of calls in the gallery."""

    kind: str  # Slug of the kind, or the name of the tree.
    title: str
    axis: str  # What it is about: ``stream``, ``delta``, ``row`` or ``tree``.
    severity: str  # The usual severity of the kind; of a tree that of the kind of its finding.
    meaning: str  # What happened.
    consequence: str  # What it does to training.
    evidence: str = ""
    """In the gallery: what the diagnosis says of this trajectory; empty while the gallery is not loaded."""
    url: str = ""
    """In the gallery: address of the trajectory, which opens at the finding; empty while the gallery is not loaded."""
    remedy: str = ""  # In the help: what to do about it.
    passes: str = ""  # In the help: the smallest input that has not this finding, in words.
    fails: str = ""  # In the help: the smallest input that has it, in words.
    gallery: str = ""  # In the help: address of the trajectory that shows it; empty when the gallery has none.
    not_in_gallery: str = ""  # In the help: why the gallery has none; else empty.

    @classmethod
    def of(cls, kind: FindingKind, **more: str) -> Self:
        """A kind, and what a page shows beside it."""
        return cls(kind.slug, kind.title, kind.axis, kind.severity, kind.meaning, kind.consequence, **more)


@dataclass(frozen=True)
class GalleryPage(Page):
    """What each kind of finding looks like."""

    run: str | None
    """The code of the run that holds the gallery; None while nobody has loaded it."""
    clean: str
    """Address of the trajectory with no fault; empty while the gallery is not loaded."""
    entries: list[KindEntry]
    """The kinds of the gallery, in its order, then the trees."""
    missing: list[tuple[str, str]]
    """Title of a kind that the gallery does not show, and why."""


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The kinds of findings, each with its trajectory. A POST loads the trajectories into a project, once. A POST with
    `training` has workers import the bundled runs of training, and leads to the list of runs."""
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
    findings = gallery_findings(run, EXAMPLES) if run else {}
    data = _page(run, findings)
    painter = painter_of(byte_table_of(run)) if run else None
    # Name of a trajectory that is called after a kind -> the picture of its fault.
    strips = {
        name: fault_strip(painter, in_gallery()[name], finding)
        for name, finding in findings.items() if painter is not None and name in KINDS
    }
    # Before the axes stand the entries that a newcomer looks at first.
    by_kind = {entry.kind: entry for entry in data.entries}
    others = _by_axis([entry for entry in data.entries if entry.kind not in FIRST])
    groups = [
        (axis, common, [(entry, strips.get(entry.kind)) for entry in entries])
        for axis, common, entries in [(BEGIN, BEGIN_WORDS, [by_kind[kind] for kind in FIRST]), *others]
    ]
    return page(
        request, "gallery.html", data, groups=groups, where=form_project(request), n_training=len(TRAINING_RUNS)
    )


def _load_training(request: HttpRequest) -> HttpResponse:
    """Send workers for the bundled runs of training that are not there yet. A program gets 202 with all of them."""
    project = chosen_project(request).chosen
    try:
        imports = gallery.import_training(project, request.user)
    except ValueError as error:  # the tokenizer of the demo policy cannot be registered
        sentence = f"The runs were not loaded: {error}"
        return told(request, sentence, "gallery", twin={"error": sentence}, status=422)
    for _, run, job in imports:
        if job is not None:
            send_import(run, job)
    twin = {"runs": {example.name: run.code for example, run, _ in imports}}
    return json_page(twin, 202) if wants_json(request) else redirect(f"{reverse('runs')}?text=GRPO")


@never_cache
@require_safe
def one(request: HttpRequest, kind: str) -> HttpResponse:
    """Leads to the trajectory of a kind; to the gallery while it is not loaded."""
    if kind not in in_gallery():
        raise Http404(f"The gallery has no trajectory for “{kind}”. Its page lists those that it has.")
    run = find_gallery(gallery.version(), access(request))
    example = (
        next((trajectory for trajectory in gallery_trajectories(run) if trajectory.external_id == kind), None)
        if run
        else None
    )
    return redirect("gallery") if example is None else redirect("trajectory", example.code)


@login_not_required
@require_safe
def findings(request: HttpRequest) -> HttpResponse:
    """Every kind of finding: what happened, what it does to training, the remedy, and a witness pair."""
    kinds = sorted(KINDS.values(), key=lambda kind: list(AXES).index(kind.axis))
    entries = [
        KindEntry.of(
            kind, remedy=kind.remedy, passes=kind.passes, fails=kind.fails,
            gallery=reverse("gallery-one", args=[kind.slug]) if kind.slug in in_gallery() else "",
            not_in_gallery=MISSING.get(kind.slug, ""),
        )
        for kind in kinds
    ]
    return page(request, "help_findings.html", {"kinds": entries}, groups=_by_axis(entries))


@cache
def in_gallery() -> dict[str, Trajectory]:
    """The trajectories of the gallery by their names."""
    return {trajectory.external_id: trajectory for trajectory in gallery.trajectories()}


def _page(run: Run | None, findings: Mapping[str, StoredFinding]) -> GalleryPage:
    urls = (
        {
            trajectory.external_id: reverse("trajectory", args=[trajectory.code])
            for trajectory in gallery_trajectories(run)
        }
        if run
        else {}
    )
    evidence = {name: finding.evidence for name, finding in findings.items()}
    entries = [
        KindEntry.of(kind, evidence=evidence.get(slug, ""), url=urls.get(slug, ""))
        for slug, kind in KINDS.items()
        if slug in in_gallery()
    ]
    entries += [
        KindEntry(
            name, tree.title, TREE, KINDS[tree.kind].severity, tree.meaning, tree.consequence, evidence.get(name, ""),
            urls.get(name, ""),
        )
        for name, tree in EXAMPLES.items()
        if tree.kind
    ]
    missing = [(KINDS[slug].title, why) for slug, why in MISSING.items()]
    return GalleryPage(run.code if run else None, urls.get(CLEAN, ""), entries, missing)


def _by_axis(entries: Sequence[KindEntry]) -> list[tuple[str, str, list[KindEntry]]]:
    """(axis, what its entries have in common, its entries, the gravest first), those without an entry left out"""
    headings = [*AXES.items(), (TREE, TREES)]
    grave_first = sorted(entries, key=lambda one: list(Severity).index(Severity(one.severity)))
    groups = [(axis, common, [entry for entry in grave_first if entry.axis == axis]) for axis, common in headings]
    return [group for group in groups if group[2]]
