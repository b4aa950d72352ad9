"""Every input that is interpreted is in the table of docs/security.md, with its bounds and its test."""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from django import forms
from django.core.management import get_commands, load_command_class
from django.test import Client
from django.urls import get_resolver

from rollout_inspector.commands.main import groups
from tests.conftest import ROOT

PLAIN = {
    *("code", "project", "run", "trajectory", "group", "policy", "kind", "scope", "lens", "strategy", "format"),
    *("input_format", "environment", "user", "username", "email", "token", "columns", "also", "compare", "sampler"),
    *("trainer", "teacher", "target"),
    *("name", "label", "note", "comment", "reason", "prefix", "stop"),
    *("chat_template_label", "rows_chat_template_label"),
    *("host", "http", "allow_host", "ray_address", "output", "index", "state", "lock"),
}
"""Names and codes that are looked up; texts that are stored and shown, or compared; addresses and files that who starts
a command names for its own process."""
OF_DJANGO = {"settings", "pythonpath"}


@cache
def table() -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """The inputs of the table, and (file, test) of each test that it names."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    lines = text.split("## What is interpreted")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    assert len(rows) >= 10 and all(len(row) == 5 and all(row) for row in rows)
    names = frozenset(name for row in rows for name in re.findall(r"`(\w+)`", row[0]))
    tests = [pair for row in rows for pair in re.findall(r"`(tests/\S+\.py)`: `(\w+)`", row[4])]
    assert all("`tests/" in row[4] for row in rows)
    return names, tuple(tests)


def form_classes(of: type[forms.BaseForm]) -> Iterator[type[forms.BaseForm]]:
    for form in of.__subclasses__():
        yield form
        yield from form_classes(form)


def typed_fields(form: type[forms.BaseForm]) -> list[str]:
    """The fields of a form into which one types, or puts a file."""
    fields: Mapping[str, forms.Field] = getattr(form, "base_fields", {})
    return [name for name, field in fields.items() if isinstance(field, forms.CharField | forms.FileField)]


def of_forms() -> Iterator[str]:
    """The fields of all forms into which one types, or puts a file."""
    assert get_resolver().url_patterns  # every view, and so every form, is imported
    for form in form_classes(forms.BaseForm):
        if form.__module__.startswith("inspector."):
            yield from typed_fields(form)


def is_free(schema: dict[str, Any], components: dict[str, Any]) -> bool:
    """Whether a value of a schema may hold a text, a file or an object that the schema does not list."""
    while "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    if "enum" in schema or "const" in schema:
        return False
    if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return any(is_free(choice, components) for choice in choices)
    if schema.get("type") == "array":
        return is_free(schema.get("items", {}), components)
    return schema.get("type") in ("string", "object", None)


def of_schema(schema: dict[str, Any]) -> Iterator[str]:
    """The parameters and fields of bodies of the API that are free."""
    components = schema["components"]["schemas"]
    for operations in schema["paths"].values():
        for operation in operations.values():
            fields = {parameter["name"]: parameter["schema"] for parameter in operation.get("parameters", ())}
            for content in operation.get("requestBody", {}).get("content", {}).values():
                body = content["schema"]
                body = components[body["$ref"].rpartition("/")[2]] if "$ref" in body else body
                fields |= body.get("properties", {})
            yield from (name for name, field in fields.items() if is_free(field, components))


def arguments_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for parser_of in action.choices.values():
                yield from arguments_of(parser_of)
        else:
            yield action


def of_commands() -> Iterator[str]:
    """The arguments of all commands that take a text."""
    django = [(name, app) for name, app in get_commands().items() if app in ("rollouts", "inspector")]
    parsers = [(load_command_class(app, name).create_parser("manage.py", name), OF_DJANGO) for name, app in django]
    alone = [command for commands in groups().values() for command in commands if not command.needs_server]
    parsers += [(command.parser(), set()) for command in alone]
    for parser, left_out in parsers:
        for action in arguments_of(parser):
            takes_text = action.nargs != 0 and not action.choices and action.type not in (int, float)
            if takes_text and action.dest not in left_out:
                yield action.dest


@pytest.mark.django_db
def test_every_input_is_in_the_table_or_plain(member: Client) -> None:
    interpreted, _ = table()
    typed = {*of_forms()}, {*of_schema(member.get("/api/v1/openapi.json").json())}, {*of_commands()}
    assert all(len(names) > 20 for names in typed)
    names = set().union(*typed)
    assert names - interpreted - PLAIN == set(), "say in docs/security.md where it runs and what bounds it"
    assert interpreted - names == set(), "docs/security.md names inputs that are gone"
    assert not interpreted & PLAIN and names >= PLAIN


def test_every_test_of_the_table_exists() -> None:
    _, tests = table()
    assert len(tests) >= 10
    for file, name in tests:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), (file, name)


def test_a_new_input_is_seen() -> None:
    """A field of a form, of the schema, and an option that nobody has listed."""
    form = type("NewForm", (forms.Form,), {"jsonpath": forms.CharField(), "n": forms.IntegerField()})
    assert typed_fields(form) == ["jsonpath"]
    body = {"type": "object", "properties": {"jsonpath": {"type": "string"}, "n": {"type": "integer"}}}
    asked = {"requestBody": {"content": {"application/json": {"schema": body}}}}
    assert [*of_schema({"components": {"schemas": {}}, "paths": {"/x": {"post": asked}}})] == ["jsonpath"]
