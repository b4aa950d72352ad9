"""The registries hold every fact: a fake engine, format, strategy and finding kind, added there alone, are at work."""

import ast
import importlib
import importlib.util
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.test import Client
from django.urls import reverse

from inspector.runs.launches.launch_form import NewRunForm
from inspector.web.forms import ImportForm
from rollout_inspector import diagnose as diagnosis
from rollout_inspector.diagnose import BREAK_RULES, KINDS, Axis, Finding, FindingKind, Severity, diagnose, row_checks
from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.finding import Fault
from rollout_inspector.formats import FORMATS, Format, Rejected, Source, readers
from rollout_inspector.formats.registry import each_line, has_keys
from rollout_inspector.formats.writers import exports
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.strategies.appending import ToolDelta
from rollout_inspector.streams.strategies.replay import replay
from rollout_inspector.streams.trajectory import Row, Step, Trajectory, ids_array
from rollouts.jobs import warm_engines
from rollouts.jobs.diagnosis import diagnose_run
from rollouts.jobs.exports import reproduce_rows
from rollouts.jobs.exports.reproduce import script
from rollouts.jobs.imports import imports
from rollouts.jobs.launch import LaunchSettings, ServedModel
from rollouts.jobs.replays import replay_context, trajectory_replays
from rollouts.sampling.engines import (
    ENGINES, EngineSpec, GenerationRequest, Sampling, build_engine, engine_spec, offered_engines
)
from rollouts.sampling.engines.engine_thread import EngineThread
from rollouts.sampling.engines.scripted import ScriptedEngine
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.runs import create_run, end_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from tests.conftest import ROOT
from tests.people import make_member, the_default_project
from tests.samples.product import source_files
from tests.web.trajectory_samples import Maker

DIAGNOSE = ROOT / "rollout_inspector" / "diagnose"


@pytest.fixture
def member(client: Client, django_user_model: Any) -> Client:
    """A browser that is logged in."""
    client.force_login(make_member("ada", password="a long password"))
    return client


# --- engines ----------------------------------------------------------------------------------------------------------


class FakeEngine(ScriptedEngine):
    """An engine that a plug-in could bring."""

    name = "fake"


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch, settings: Any, tiny_tokenizer: Path) -> EngineSpec:
    spec = EngineSpec(
        "fake",
        f"{__name__}:FakeEngine",
        title="Fake",
        seed_note="A seed is worth nothing here.",
        is_light=True,
        temperature_range=(0.5, 1.5),
    )
    monkeypatch.setitem(ENGINES, "fake", spec)
    settings.INSPECTOR_MODELS = {"tiny": {"engine": "fake", "path": str(tiny_tokenizer)}}
    return spec


@pytest.mark.django_db
def test_an_engine_of_the_registry_is_offered_checked_and_built(fake_engine: EngineSpec) -> None:
    form = NewRunForm(the_default_project())
    assert form.fields["model"].choices == [("tiny", "tiny")]  # type: ignore[attr-defined]
    assert form.seeds_explained() == [("tiny", fake_engine.seed_note)]
    assert LaunchSettings(model="tiny", temperature=1.0).problems() == {}
    assert LaunchSettings(model="tiny", temperature=2.0).problems() == {
        "temperature": "Fake takes 0 (always the likeliest token) or a temperature from 0.5 to 1.5."
    }
    assert "fake" in LaunchSettings(model="tiny", engine="nobody's").problems()["engine"]
    owner = warm_engines.new_owner(ServedModel("tiny", "fake", ""), "fake")
    assert isinstance(owner, EngineThread)
    owner.close()
    engine = build_engine("fake", "")
    engine.add(GenerationRequest("a", ids_array([1, 2]), Sampling(max_tokens=3)))
    made = [one for _ in range(3) for one in engine.step()]
    assert [len(one.completion_ids) for one in made] == [3]


def test_an_engine_that_is_a_server_wants_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "fake", EngineSpec("fake", "nowhere:Nothing", is_server=True))
    assert "asks a server" in ServedModel("tiny", "fake", "").faults()
    assert ServedModel("tiny", "fake", "", {"url": "http://localhost:1"}).faults() == ""
    monkeypatch.setitem(ENGINES, "fake", EngineSpec("fake", "nowhere:Nothing", is_offered=False))
    assert "There is no engine named 'fake'" in ServedModel("tiny", "fake", "").faults()


def test_every_engine_is_found_where_its_entry_says() -> None:
    for name, spec in ENGINES.items():
        module, _, attribute = spec.build.partition(":")
        found = importlib.util.find_spec(module)
        assert name == spec.name and found is not None and found.origin is not None
        source = Path(found.origin).read_text(encoding="utf-8")
        assert f"class {attribute}" in source and f'name = "{name}"' in source
        assert not spec.is_server or spec.is_light
    for name in offered_engines():
        assert engine_spec(name).title and engine_spec(name).seed_note.endswith(".")


# --- formats ----------------------------------------------------------------------------------------------------------


def read_fake(source: Source) -> Iterator[Trajectory | Rejected]:
    def one(value: Any, number: int) -> Trajectory:
        steps = (Step(ids_array(value["fake_prompt"]), ids_array(value["fake_answer"])),)
        return Trajectory(f"line-{number}", steps)

    return each_line(source, one)


@pytest.mark.django_db
def test_a_format_of_the_registry_is_recognised_imported_and_explained(
    monkeypatch: pytest.MonkeyPatch, member: Client
) -> None:
    lacks = "A fake file tells no log-probabilities."
    fake = Format("fake", "Fakes", lambda values: has_keys(values[0], "fake_prompt"), read_fake, lacks)
    monkeypatch.setitem(FORMATS, "fake", fake)
    assert ("fake", "Fakes") in ImportForm(the_default_project()).fields["format"].choices  # type: ignore[attr-defined]
    run = create_run(Run.Kind.IMPORT, "fakes")
    data = json.dumps({"fake_prompt": [1, 2], "fake_answer": [3]}).encode()
    imports.import_files(run, [Source.of_bytes(data)])
    run.refresh_from_db()
    assert (run.status, run.format, run.n_trajectories, run.n_tokens) == ("done", "fake", 1, 3)
    assert lacks in member.get(reverse("run", args=[run.code])).content.decode()


def test_every_reader_is_in_the_registry() -> None:
    found: list[Format] = []
    for module in pkgutil.iter_modules(readers.__path__, f"{readers.__name__}."):
        reader = importlib.import_module(module.name)
        found += [*getattr(reader, "FORMATS", ()), *([reader.FORMAT] if hasattr(reader, "FORMAT") else ())]
    assert {one.name for one in found} == set(FORMATS) and len(found) == len(FORMATS)
    assert all(name == one.name and one.title for name, one in FORMATS.items())


# --- strategies -------------------------------------------------------------------------------------------------------


class FakeStrategy(ToolDelta):
    slug = "fake_strategy"
    about = "A strategy that a test brings."


@pytest.mark.django_db
def test_a_strategy_of_the_registry_is_offered_launched_and_replayed(
    monkeypatch: pytest.MonkeyPatch, member: Client, tiny_tokenizer: Path
) -> None:
    monkeypatch.setitem(STRATEGIES, FakeStrategy.slug, FakeStrategy)
    assert ("fake_strategy", "fake strategy") in NewRunForm(the_default_project()).fields["strategy"].choices  # type: ignore[attr-defined]
    assert FakeStrategy.about in member.get(reverse("run-new")).content.decode()
    assert LaunchSettings(strategy="fake_strategy").problems() == {}
    make = Maker(tiny_tokenizer)
    trajectory = make.conversation("a")
    context, _ = replay_context.context_of(make.run([trajectory]))
    made, other = (replay(trajectory, one, context) for one in (FakeStrategy, ToolDelta))
    assert made.slug == "fake_strategy" and not made.refused
    assert [row.ids.tolist() for row in made.rows] == [row.ids.tolist() for row in other.rows]
    monkeypatch.setattr(FakeStrategy, "package", "a_package_that_is_not_installed")
    choices = NewRunForm(the_default_project()).fields["strategy"].choices  # type: ignore[attr-defined]
    assert ("fake_strategy", "fake strategy (not installed)") in choices
    assert "a_package_that_is_not_installed" in LaunchSettings(strategy="fake_strategy").problems()["strategy"]
    assert not trajectory_replays.all_installed()


def test_every_strategy_says_what_it_is() -> None:
    for slug, one in STRATEGIES.items():
        assert slug == one.slug and one.about.endswith("."), slug


# --- finding kinds ----------------------------------------------------------------------------------------------------


def fake_kind(slug: str, axis: Axis, **more: Any) -> FindingKind:
    texts = ("It happened.", "It trains the wrong token.", "Mend it.", "Right.", "Wrong.")
    return FindingKind(slug, f"Title of {slug}", *texts, axis, Severity.ERROR, **more)


@pytest.mark.django_db
def test_a_kind_of_break_is_named_stored_shown_and_reproduced(
    monkeypatch: pytest.MonkeyPatch, member: Client, tiny_tokenizer: Path
) -> None:
    def fake_break(b: Break) -> Fault | None:
        return Fault("fake_break", f"Step {b.index} is broken by the test.")

    monkeypatch.setitem(KINDS, "fake_break", fake_kind("fake_break", Axis.STREAM, probe="seam"))
    monkeypatch.setattr(diagnosis, "BREAK_RULES", (fake_break, *BREAK_RULES))
    make = Maker(tiny_tokenizer)
    trajectory, _ = make.broken("a")
    run = make.run([trajectory])
    assert sum(map(len, diagnose_run(run))) == 1
    stored = StoredTrajectory.objects.get(run=run)
    assert stored.findings.get(kind="fake_break").evidence == "Step 1 is broken by the test."
    page = member.get(reverse("trajectory", args=[stored.code])).content.decode()
    assert "Title of fake_break" in page and "Mend it." in page and "probe=seam" in page
    finding = next(one for one in diagnose(trajectory, None) if one.kind == "fake_break")
    ran(script(finding, trajectory))


@pytest.mark.django_db
def test_a_kind_of_row_fault_is_named_shown_and_reproduced(monkeypatch: pytest.MonkeyPatch, member: Client) -> None:
    def fake_row(row: Row) -> Fault | None:
        return Fault("fake_row", "The row begins with 300.", 0, 1) if row.ids[0] == 300 else None

    def fake_script(finding: Finding, trajectory: Trajectory, row: Row, data: dict[str, Any]) -> Any:
        return [("IDS[0] == 300", "it begins with another id")], ""

    monkeypatch.setitem(KINDS, "fake_row", fake_kind("fake_row", Axis.ROW))
    monkeypatch.setattr(row_checks, "ROW_RULES", (*row_checks.ROW_RULES, fake_row))
    monkeypatch.setitem(reproduce_rows.ROW_SCRIPTS, "fake_row", fake_script)
    mask = np.arange(40) >= 20
    value = Trajectory("row", rows=(Row(ids_array(range(300, 340)), mask),))
    run = create_run(Run.Kind.IMPORT, "rows")
    save_trajectories(run, [value])
    end_run(run, Run.Status.DONE)
    assert sum(map(len, diagnose_run(run))) == 1
    address = reverse("trajectory-mask", args=[StoredTrajectory.objects.get(run=run).code])
    assert "Title of fake_row: The row begins with 300. Mend it." in member.get(address).content.decode()
    monkeypatch.setitem(KINDS, "fake_row", fake_kind("fake_row", Axis.ROW, said_by_turn=True))
    assert "Title of fake_row" in member.get(address).content.decode()  # no turn says anything here
    finding = next(one for one in diagnose(value, None) if one.kind == "fake_row")
    text = script(finding, value)
    ran(text)
    with pytest.raises(AssertionError, match="another id"):
        ran(text.replace("300, 301", "299, 301"))


def ran(text: str) -> None:
    exec(compile(text, "finding.py", "exec"), {"__name__": "__main__"})


def test_every_kind_has_a_rule_and_every_rule_a_kind() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in DIAGNOSE.rglob("*.py")}
    rules = "".join(text for name, text in sources.items() if name != "kinds.py")
    assert [slug for slug in KINDS if f'"{slug}"' not in rules] == []
    named = set(re.findall(r'\bFault\(\s*"(\w+)"', rules))
    assert len(named) > 30 and named <= set(KINDS)


KIND_OF = {"Fault": 0}
"""Which argument of these values is the kind."""


def test_the_tables_beside_the_kinds_name_kinds_alone() -> None:
    of_rows = {slug for slug, kind in KINDS.items() if kind.axis == Axis.ROW}
    assert {*reproduce_rows.ROW_SCRIPTS, *reproduce_rows.STEP_SCRIPTS} == of_rows | {"bos_mismatch"}
    assert of_rows >= {slug for slug, kind in KINDS.items() if kind.said_by_turn} != set()
    tree = ast.parse(Path(exports.__file__).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    kinds = [one.args[place] for one in calls for place in (KIND_OF.get(one.func.id, 9),) if len(one.args) > place]  # type: ignore[attr-defined]
    named = {node.value for node in kinds if isinstance(node, ast.Constant)}
    assert named and named <= of_rows


# --- nobody else knows an entry by its name ---------------------------------------------------------------------------

KNOWN_NAMES = {
    ("inspector/settings.py", "transformers"),  # the default of INSPECTOR_ENGINE
    ("rollouts/jobs/launch.py", "tool_delta"),  # the default of a launch
    ("inspector/server/machines.py", "transformers"),  # packages whose versions are compared
    ("inspector/server/machines.py", "vllm"),
    ("inspector/runs/launches/launch_views.py", "tool_delta"),  # the prepared comparison
    ("inspector/runs/launches/launch_views.py", "retokenize"),
    ("tools/gallery/make.py", "retokenize"),  # the strategy whose faults the gallery shows
    ("rollouts/gallery/__init__.py", "retokenize"),
    ("tools/demo_policy/grpo.py", "tool_delta"),  # the default of a training
}
REGISTRIES = ("rollouts/sampling/engines/", "rollout_inspector/streams/strategies/")
OTHER_NAMES = (
    "tools/gpu_proof/", "tools/management/", "rollouts/management/", "rollout_inspector/text/chat_templates/",
)
"""Where a name is also that of a package or of a probe."""


def test_no_engine_and_no_strategy_is_known_by_its_name_outside_its_registry() -> None:
    names = {*ENGINES, *STRATEGIES}
    found = set()
    for path in source_files():
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(REGISTRIES + OTHER_NAMES):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            found |= {(place, text) for text in texts if isinstance(text, str) and text in names}
    assert found == KNOWN_NAMES
