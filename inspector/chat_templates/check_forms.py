"""The form of a template check."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from django import forms
from django.conf import settings

from inspector.web.forms import PlainForm, TemplateFileField, code_area
from rollout_inspector.streams.messages import messages_problem, tools_problem
from rollout_inspector.text.chat_templates import is_renderer
from rollouts.store.chat_templates.tokenizers import tokenizers_of
from rollouts.store.models import Project, Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20
MAX_JSON_CHARACTERS = 200_000
MAX_DEPTH = 100
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # The escape of U+0000: its backslash is not escaped itself.


def numbered(text: str, line: int, around: int = 3) -> list[tuple[int, str, bool]]:
    """The lines around line ``line``: number (from 1), text, and whether it is that line."""
    lines = list(enumerate(text.splitlines(), start=1))
    return [(n, line_text[:160], n == line) for n, line_text in lines[max(0, line - 1 - around) : line + around]]


def _items(value: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _cannot_keep(text: str, parsed: Any) -> str:
    """What in a JSON value cannot be stored or read again, from its text and its value. Empty = nothing."""
    level, depth = [parsed], 0
    while level := [
        item for value_at_level in level if isinstance(value_at_level, list | dict) for item in _items(value_at_level)
    ]:
        depth += 1
        if depth > MAX_DEPTH:
            return f"lists or objects nested more than {MAX_DEPTH} deep"
    try:
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "half a character (a lone surrogate)"
    except ValueError:
        return "NaN or an infinite number"
    return "the character U+0000" if _NUL.search(text) else ""


class JsonField(forms.CharField):
    """JSON that a user types. An error names its line and column, and quotes the line."""

    wrong: Sequence[tuple[int, str, bool]] = ()
    """After an error, the lines around it, as :func:`numbered` returns them."""

    def __init__(self, kind: type, example: str, **kwargs: Any) -> None:
        super().__init__(required=False, max_length=MAX_JSON_CHARACTERS, **kwargs)
        self.kind, self.example = kind, example

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            where = "depth" if isinstance(error, RecursionError) else "a number that is too long"
            if isinstance(error, json.JSONDecodeError):
                wrong = error.doc.splitlines()[error.lineno - 1 : error.lineno]
                excerpt = f": {wrong[0].strip()[:80]!r}" if wrong else ""
                where = f"line {error.lineno}, column {error.colno}{excerpt}"
                self.wrong = numbered(error.doc, error.lineno)
            raise forms.ValidationError(f"This is not JSON ({where}). For example: {self.example}") from error
        if problem := _cannot_keep(text, parsed):
            raise forms.ValidationError(f"This holds {problem}, which cannot be stored. Remove it.")
        if not isinstance(parsed, self.kind):
            word = "list" if self.kind is list else "object"
            raise forms.ValidationError(f"This has to be a JSON {word}. For example: {self.example}")
        return parsed

    def clean(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > MAX_JSON_CHARACTERS:
            raise forms.ValidationError(f"Write at most {MAX_JSON_CHARACTERS:,} characters; these are {len(value):,}.")
        return super().clean(value)


EXAMPLE = """[
  {"role": "user", "content": "What is 2+2? Use the tool."},
  {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "calc", "arguments": {"expr": "2+2"}}}]},
  {"role": "tool", "name": "calc", "content": "4"},
  {"role": "assistant", "content": "It is 4."},
  {"role": "user", "content": "Thanks. And 3+3?"}
]"""
"""The conversation in an empty form."""


class TemplateCheckForm(PlainForm):
    """A tokenizer of a project, a template (its own, pasted or uploaded), and the other arguments of a render."""

    tokenizer: forms.ModelChoiceField = forms.ModelChoiceField(
        None, required=False, to_field_name="name", empty_label="None: compare characters",
        help_text="Without one, renders are compared character by character, and token-level faults stay unseen.",
    )
    tokenizer_file = forms.FileField(
        required=False, label="Upload a tokenizer",
        help_text="tokenizer.json, or a zip of its folder. Code that comes with it is not executed.",
    )
    hub_id = forms.CharField(
        max_length=200, required=False, label="… or a hub id", help_text="For example Qwen/Qwen3-4B."
    )
    revision = forms.CharField(max_length=100, required=False, help_text="A commit, a tag, or a branch such as main.")
    chat_template = forms.CharField(
        required=False, strip=False, label="Chat template", widget=code_area(10),
        help_text="Jinja text, or renderer:NAME. Leave it empty to check the tokenizer's own template.",
    )
    chat_template_file = TemplateFileField(
        MAX_TEMPLATE_BYTES, must_render=False, label="Chat template as a file",
        help_text="A .jinja file, instead of the text below.",
    )
    label = forms.CharField(required=False, widget=forms.HiddenInput)
    tools = JsonField(
        list, '[{"type": "function", "function": {"name": "f", "parameters": {}}}]', label="Tools", widget=code_area(3),
        help_text="Function schemas as JSON. Optional.",
    )
    kwargs = JsonField(
        dict, '{"enable_thinking": false}', label="Template arguments", widget=code_area(3),
        help_text="Passed to every render, as JSON. Optional.",
    )
    conversation = JsonField(
        list,
        '[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]',
        label="A conversation of your own",
        widget=code_area(8),
        help_text="Messages as JSON, OpenAI style. Each message that is appended becomes a probe, and the page shows "
        "what every strategy would put between the completions. Optional.",
    )

    def __init__(self, project: Project, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = self.fields["tokenizer"]
        assert isinstance(chosen, forms.ModelChoiceField)
        chosen.queryset = tokenizers_of(project)
        if not settings.HUB_ALLOWED:
            del self.fields["hub_id"], self.fields["revision"]

    def clean_conversation(self) -> list[dict[str, Any]] | None:
        messages: list[Any] | None = self.cleaned_data.get("conversation")
        if problem := messages_problem(messages or ()):
            raise forms.ValidationError(problem)
        return messages

    def clean_tools(self) -> list[dict[str, Any]] | None:
        tools: list[Any] | None = self.cleaned_data.get("tools")
        if problem := tools_problem(tools or ()):
            raise forms.ValidationError(problem)
        return tools

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        text = cleaned.get("chat_template") or ""
        sources = [name for name in ("tokenizer", "tokenizer_file", "hub_id") if cleaned.get(name)]
        if len(sources) > 1:
            self.add_error(sources[-1], "Choose, upload or name one tokenizer, not several.")
        if cleaned.get("hub_id") and not cleaned.get("revision"):
            cleaned["revision"] = "main"
        if uploaded := cleaned.get("chat_template_file"):
            if text.strip():
                self.add_error("chat_template_file", "Paste a template or upload one, not both.")
            text = uploaded
        if len(text.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            self.add_error("chat_template", "This text is larger than 1 MB; a chat template is not.")
        if not text.strip() and not sources and not self.errors:
            self.add_error("chat_template", "Paste a chat template, or choose a tokenizer that has one.")
        if is_renderer(text) and not sources:
            self.add_error("tokenizer", "A renderer writes ids: choose a tokenizer.")
        # A browser sends CRLF. The file of the template has LF, and the hash of its text names the template.
        cleaned["text"] = text.replace("\r\n", "\n")
        return cleaned

    def template_text(self, tokenizer: Tokenizer | None) -> str:
        """The template of the form, else the tokenizer's own. Empty, with an error in the form, when there is none."""
        text: str = self.cleaned_data["text"]
        if text.strip() or tokenizer is None:
            return text
        if tokenizer.chat_template is None:
            self.add_error("chat_template", f"{tokenizer.name} came without a chat template: paste one here.")
            return ""
        return tokenizer.chat_template.text


class ConversationForm(TemplateCheckForm):
    """The form of a check for its conversation. A conversation and a tokenizer are required."""

    def __init__(self, project: Project, *args: Any, **kwargs: Any) -> None:
        super().__init__(project, *args, **kwargs)
        chosen, written = self.fields["tokenizer"], self.fields["conversation"]
        assert isinstance(chosen, forms.ModelChoiceField)
        chosen.empty_label = "Choose one"
        chosen.help_text = "Strategies append tokens, so this needs one."
        written.label = "The conversation"
        written.help_text = "Messages as JSON, OpenAI style: at least one message, an assistant's, and one after it."
        written.widget.attrs["rows"] = 16

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        if not any(cleaned.get(name) for name in ("tokenizer", "tokenizer_file", "hub_id")):
            self.add_error("tokenizer", "Choose a tokenizer: strategies append tokens.")
        if not cleaned.get("conversation") and "conversation" not in self.errors:
            self.add_error("conversation", "Write the messages; there is nothing to replay yet.")
        return cleaned
