"""The gallery: the bundle, its run in a project, its pages, and the list of finding kinds."""

import json
from io import StringIO

import pytest
from django.core.management import call_command

from rollouts.formats import Source, read
from rollouts.gallery import BUNDLE, CLEAN
from rollouts.models import Project, Run
from rollouts.tito.diagnose.kinds import KINDS
from rollouts.work import gallery

MAX_BUNDLE_BYTES = 1_000_000


def test_every_kind_says_what_happened_what_it_does_to_training_and_what_to_do() -> None:
    for kind in KINDS.values():
        for text in (kind.meaning, kind.consequence, kind.remedy):
            assert text[0].isupper() and text.endswith((".", ")")) and len(text) > 20, kind.slug
        assert kind.passes and kind.fails and kind.passes != kind.fails, kind.slug
        assert kind.consequence not in (kind.meaning, kind.remedy), kind.slug


def test_the_bundle_is_small_and_called_after_kinds() -> None:
    assert BUNDLE.stat().st_size < MAX_BUNDLE_BYTES
    names = [one.external_id for one in read(Source.of_path(BUNDLE))[1]]
    assert names[0] == CLEAN and set(names[1:]) <= set(KINDS) and len(set(names)) == len(names)
    assert {KINDS[name].axis for name in names[1:]} == {"stream", "delta", "row"}
    assert sum(KINDS[name].severity == "error" for name in names[1:]) >= 8


@pytest.mark.django_db
def test_the_gallery_is_loaded_once_in_a_project_and_each_trajectory_has_its_finding() -> None:
    out = StringIO()
    call_command("load_gallery", "--json", stdout=out)
    said = json.loads(out.getvalue())
    run = Run.objects.get()
    assert said == {"run": run.code, "trajectories": said["trajectories"], "findings": run.finding_counts}
    by_name = {one.external_id: one for one in run.trajectories.all()}
    assert [by_name[name].code for name in by_name] == said["trajectories"]
    assert by_name[CLEAN].n_findings == 0 and by_name[CLEAN].checks
    for name in by_name.keys() - {CLEAN}:
        severities = set(by_name[name].findings.filter(kind=name).values_list("severity", flat=True))
        assert KINDS[name].severity in severities or "error" in severities, name
        others = by_name[name].findings.exclude(kind__in=(name, "noncanonical_sampling", "row_not_sampled"))
        assert not others.exists(), name
    errors = {one.kind for one in run.findings.filter(severity="error")}
    assert len(errors) >= 8
    assert gallery.load() == run and Run.objects.count() == 1
    other = gallery.load(Project.objects.create(name="another"))
    assert other != run and other.finding_counts == run.finding_counts
