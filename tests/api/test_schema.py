"""The schema holds: schemathesis asks a live server for what the schema allows, and for what it does not."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from inspector.api.app import schema
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job, Project, Run, TemplateCheck
from tests.api.conftest import Ask, member_of, token_for
from tests.web.trajectory_samples import Maker

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method", "allow_header_conformance",
)


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in json.loads(schema())["paths"].items():
        yield from ((path, method, operation) for method, operation in methods.items())


def test_every_operation_is_described() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(names) == len(set(names)) > 30
    for path, method, operation in operations():
        assert operation["description"].rstrip().endswith((".", "!")), path
        assert operation["security"], (method, path)
        assert {"400", "401", "403", "404", "429"} <= set(operation["responses"]), path


def test_values_are_described() -> None:
    """The fields of requests and answers have the docstrings of their classes, inherited ones too."""
    schemas = json.loads(schema())["components"]["schemas"]
    for name, held in schemas.items():
        bare = [field for field, said in held.get("properties", {}).items() if "description" not in said]
        assert not bare, (name, bare)


def test_generated_clients_get_every_operation() -> None:
    """What generators of clients do not take: names of modules, two models with one title, a default beside a model,
    a body or an answer of types that they do not know alone."""
    components = json.loads(schema())["components"]["schemas"]
    assert all(component["title"] == name for name, component in components.items())
    for name, component in components.items():
        for field, value in component.get("properties", {}).items():
            assert not ({"$ref", "allOf"} & value.keys() and "default" in value), (name, field)
    known = {"application/json", "application/octet-stream", "multipart/form-data", "text/html"}
    for path, _, operation in operations():
        assert not operation["operationId"].startswith("inspector"), path
        bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
        for content in (body["content"] for body in bodies if body.get("content")):
            assert known & content.keys() or "application/problem+json" in content, (path, content.keys())
        html = operation["responses"].get("200", {}).get("content", {}).get("text/html", {"schema": {}})
        assert "format" not in html["schema"], path


def test_the_schema_is_public_and_the_page_is_not(client: Client, ask: Ask) -> None:
    assert client.get("/api/v1/openapi.json").json()["openapi"] == "3.1.0"
    assert client.get("/api/docs").status_code == 302


@pytest.fixture
def codes(transactional_db: None, make: Maker, sent: list[int]) -> dict[str, str]:
    """Noun -> the code of one."""
    broken, findings = make.broken("broken")
    run = make.run([broken, make.conversation("whole")], [findings, []])
    check = TemplateCheck.objects.create(code="abcdabcdabcd", chat_template=make.record.chat_template)
    Job.objects.create(template_check=check, kind="check_template")
    job, _ = ask_job(run, "export", {})
    return {
        "runs": run.code,
        "trajectories": run.trajectories.get(external_id="broken").code,
        "jobs": job.code,
        "checks": check.code,
        "delete": make.run([]).code,
    }


@pytest.mark.sqlite_only
@pytest.mark.parametrize(
    "role, phases, examples", [("member", "coverage", 1), ("viewer", "fuzzing", 2), ("foreign", "fuzzing", 2)]
)
@pytest.mark.django_db(transaction=True)
def test_the_server_answers_as_the_schema_says(
    live_server: Any, codes: dict[str, str], role: str, phases: str, examples: int, tmp_path: Path, settings: Any
) -> None:
    settings.API_RATE = "1000000/m"
    project = Project.objects.create(name="Theirs") if role == "foreign" else Project.objects.get()
    token = token_for(member_of(project.pk, "someone", "admin" if role == "foreign" else role), project.pk)
    lines = [
        f'[[operations]]\ninclude-path-regex = "^/api/v1/{noun}/"\nparameters = {{ "path.code" = "{code}" }}'
        for noun, code in codes.items()
    ]
    config = tmp_path / "schemathesis.toml"
    config.write_text("\n\n".join(lines))
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run",
        f"{live_server.url}/api/v1/openapi.json", "-H", f"Authorization: Bearer {token}", "--seed", "1",
        "--max-examples", str(examples), "--checks", ",".join(CHECKS), "--phases", phases,
        "--no-shrink", "--suppress-health-check", "all", "--warnings", "off", "--no-color", "--continue-on-failure",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert ran.returncode == 0, ran.stdout[-12_000:] + ran.stderr[-3_000:]
    assert Run.objects.filter(code=codes["runs"]).exists()
