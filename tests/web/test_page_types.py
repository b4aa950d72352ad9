"""Every page's value is a frozen dataclass whose fields are documented, and the JSON twin has those keys."""

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass

from django.http import HttpRequest

import inspector.urls
from inspector.web import twins
from inspector.web.twins import Page

assert inspector.urls.urlpatterns, "imports every view, and so every page"


def pages(base: type[Page] = Page) -> Iterator[type[Page]]:
    """Each page of the product."""
    for page in base.__subclasses__():
        if page.__module__.startswith("inspector."):
            yield page
        yield from pages(page)


def documented_fields(page: type) -> dict[str, bool]:
    """Each annotated name in the body of the class, and whether a docstring follows it."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(page)))
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == page.__name__)
    return {
        node.target.id: isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
        for node, after in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_each_field_of_each_page_has_a_docstring():
    for page in pages():
        name = f"{page.__module__}.{page.__name__}"
        assert dataclasses.is_dataclass(page), f"{name} is no dataclass"
        assert page.__dataclass_params__.frozen, f"{name} is not frozen"
        bare = [field for field, documented in documented_fields(page).items() if not documented]
        assert not bare, f"{name}: no docstring under {bare}"


@dataclass(frozen=True)
class ExamplePage(Page):
    first: int
    """A number."""
    second: list[str]


def test_a_field_without_a_docstring_is_found():
    assert documented_fields(ExamplePage) == {"first": True, "second": False}


def test_the_twin_has_the_keys_of_the_dataclass():
    request = HttpRequest()
    request.path = "/example.json"
    response = twins.page(request, "unused.html", ExamplePage(first=1, second=["a"]), only_html=2)
    assert json.loads(response.content) == {"first": 1, "second": ["a"]}


def test_some_fields_of_a_value_have_their_types_and_may_have_another_name():
    part = twins.some_fields(ExamplePage, "Part", "A part.", "number=first")
    assert twins.jsonable(part.of(ExamplePage(first=1, second=["a"]))) == {"number": 1}
    (field,) = dataclasses.fields(part)
    assert field.type.__metadata__[0].description == "A number."
    assert part.__name__ == "Part" and part.__doc__ == "A part."
