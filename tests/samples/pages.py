"""What a browser reads from a page and sends to it."""

from typing import Any

from django.test import Client


def form_of(web: Client, path: str) -> dict[str, Any]:
    """What a browser sends when nothing is changed."""
    form = web.get(path).context["form"]
    values = {name: form.get_initial_for_field(field, name) for name, field in form.fields.items()}
    return {name: value for name, value in values.items() if value is not None}


def share(web: Client, target: str, code: str, **more: Any) -> str:
    """The path of a new link, made as the Share button makes it."""
    answer = web.post("/shares.json", {"target": target, "code": code, **more})
    assert answer.status_code == 201, answer.content
    return answer.json()["share"]["link"].removeprefix("http://testserver")
