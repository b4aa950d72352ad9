"""The forms of importing, registering and sharing. Uploads go to the disk as they arrive, up to the limit."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django import forms
from django.conf import settings
from django.core.exceptions import NON_FIELD_ERRORS, PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import TemporaryFileUploadHandler

from rollout_inspector.formats import FORMATS, FileRefused, Source
from rollout_inspector.formats.training_step import MAX_PATTERN, MAX_STEP, checked_rule
from rollout_inspector.text.chat_templates import cannot_render, is_renderer, renderer
from rollouts.store.chat_templates.tokenizers import tokenizers_of
from rollouts.store.models import Project
from rollouts.store.outages import disk_fault

MAX_TEMPLATE_BYTES = 2_000_000
HEAD_BYTES = 4096


SENTENCES = {
    "required": "Fill this in.",
    "min_value": "Choose a number of at least %(limit_value)s.",
    "max_value": "Choose a number of at most %(limit_value)s.",
    "max_length": "Write at most %(limit_value)s characters; these are %(show_value)s.",
    "invalid_choice": "“%(value)s” is not offered here; choose one of the list.",
    "empty": "This file is empty.",
}
NUMBER_SENTENCES: dict[type[forms.Field], dict[str, str]] = {
    forms.IntegerField: {"invalid": "Write a whole number, such as 16."},
    forms.FloatField: {"invalid": "Write a number, such as 0.7."},
}


class PlainForm(forms.Form):
    """A form whose fields are drawn by `partials/field.html`, errors beside each field."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            plain = {**SENTENCES, **NUMBER_SENTENCES.get(type(field), {})}
            # Only the sentences of Django are replaced. A sentence of the field itself stays.
            ours = {
                code: plain[code]
                for code in (*field.error_messages, "min_value", "max_value", "max_length")
                if code in plain
            }
            field.error_messages = {**field.error_messages, **ours}

    def sentences(self) -> dict[str, list[str]]:
        """Field -> its errors, for the JSON twin. `form` holds the errors of the whole form."""
        return {
            "form" if name == NON_FIELD_ERRORS else name: [str(error) for error in errors]
            for name, errors in self.errors.items()
        }


class ManyFilesInput(forms.ClearableFileInput):
    """A file input for several files."""

    allow_multiple_selected = True


class ManyFilesField(forms.FileField):
    """At least one file. Each file must be of a readable kind: not empty, not a pickle, not unknown binary data."""

    widget = ManyFilesInput

    def clean(self, data: Any, initial: Any = None) -> list[UploadedFile]:
        files = data if isinstance(data, list | tuple) else [data] if data else []
        if not files:
            raise forms.ValidationError("Choose at least one file, or drop some onto the box.")
        for file in files:
            head = file.read(HEAD_BYTES)
            file.seek(0)
            try:
                Source.of_bytes(head, file.name).kind()
            except FileRefused as refusal:
                raise forms.ValidationError(str(refusal)) from refusal
        return list(files)


class TemplateFileField(forms.FileField):
    """An optional upload of a chat template. Its value is the text. ``must_render``: refuse what is no template."""

    def __init__(self, max_bytes: int = MAX_TEMPLATE_BYTES, must_render: bool = True, **kwargs: Any) -> None:
        super().__init__(required=False, **kwargs)
        self.max_bytes, self.must_render = max_bytes, must_render

    def clean(self, data: Any, initial: Any = None) -> str | None:
        upload = super().clean(data, initial)
        if not upload:
            return None
        if upload.size > self.max_bytes:
            limit = f"{self.max_bytes // 1_000_000} MB"
            raise forms.ValidationError(f"This file is larger than {limit}; a chat template is not.")
        try:
            text: str = upload.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise forms.ValidationError("This file is not UTF-8 text, so it is no chat template.") from error
        if not self.must_render:
            return text
        if "\0" in text or not text.strip():
            raise forms.ValidationError("This file holds no template text.")
        if not is_renderer(text) and (problem := cannot_render(renderer(None, text))):
            raise forms.ValidationError(f"{problem} Correct it, or choose another file.")
        return text


def code_area(rows: int) -> forms.Textarea:
    """A field for code or JSON."""
    return forms.Textarea(attrs={"rows": rows, "spellcheck": "false", "class": "code"})


NO_TOKENIZER = "none"
RECORDED = ""


class ImportForm(PlainForm):
    """Files of trajectories, and the tokenizer of their ids."""

    files = ManyFilesField(label="Files")  # type: ignore[assignment]  # a declared field, not the attribute
    tokenizer = forms.ChoiceField(
        required=False,
        help_text="Folders and hub ids are registered on the page Tokenizers. Without one, ids are shown as ids.",
    )
    tokenizer_file = forms.FileField(
        required=False,
        label="… or upload one",
        help_text="tokenizer.json, or a zip of the tokenizer's folder. Nothing in it is ever executed.",
    )
    chat_template = TemplateFileField(
        label="Chat template", help_text="Optional: a .jinja file, when it is not the tokenizer's own."
    )
    format = forms.ChoiceField(required=False, help_text="Recognised from the first lines when left unset.")
    name = forms.CharField(
        max_length=200, required=False, label="Run name", help_text="Optional; else the first file's name."
    )
    training_step = forms.IntegerField(
        required=False, min_value=0, max_value=MAX_STEP, label="Training step",
        help_text="Optional: one step for all files. Otherwise it is read from each record or from the file name.",
    )
    training_step_from = forms.CharField(
        max_length=MAX_PATTERN, required=False, strip=False, label="Training step in the file names",
        widget=forms.TextInput(attrs={"class": "code", "spellcheck": "false", "autocapitalize": "off"}),
        help_text="Optional: a regular expression with one group that finds it, such as epoch_([0-9]+).",
    )

    def __init__(self, project: Project, data: Any = None, files: Any = None) -> None:
        super().__init__(data, files)
        self.registered = {f"id:{item.pk}": item for item in tokenizers_of(project)}
        tokenizer, chosen = self.fields["tokenizer"], self.fields["format"]
        assert isinstance(tokenizer, forms.ChoiceField) and isinstance(chosen, forms.ChoiceField)
        tokenizer.choices = [
            (RECORDED, "The one the files name, if it is registered"),
            (NO_TOKENIZER, "None: show ids"),
            *((key, item.name) for key, item in self.registered.items()),
        ]
        chosen.choices = [("auto", "Detect automatically"), *((item.name, item.title) for item in FORMATS.values())]

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        try:
            cleaned["rule"] = checked_rule(cleaned.get("training_step"), cleaned.get("training_step_from", ""))
        except ValueError as error:
            self.add_error("training_step_from", str(error))
        return cleaned

    @property
    def files_field(self) -> forms.BoundField:
        """The field `files`. A template cannot reach it as `form.files`, which is an attribute of Django."""
        return self["files"]


class TokenizerForm(PlainForm):
    """A tokenizer from a folder of the server, from an upload, or from the hub, where each is allowed: exactly one."""

    name = forms.CharField(max_length=200, required=False, help_text="Optional; else the folder's or file's.")
    folder = forms.CharField(
        max_length=1000, required=False, label="Folder on the server",
        help_text="The whole path of a folder with tokenizer.json, below a folder of INSPECTOR_TOKENIZER_FOLDERS.",
        widget=forms.TextInput(attrs={"class": "code", "spellcheck": "false", "autocapitalize": "off"}),
    )
    upload = forms.FileField(required=False, label="Upload", help_text="tokenizer.json, or a zip of its folder.")
    hub_id = forms.CharField(max_length=200, required=False, label="Hub id", help_text="For example Qwen/Qwen3-4B.")
    revision = forms.CharField(max_length=100, required=False, help_text="A commit, a tag, or a branch such as main.")
    chat_template = TemplateFileField(label="Chat template", help_text="Optional: a .jinja file that replaces its own.")

    def __init__(self, data: Any = None, files: Any = None) -> None:
        super().__init__(data, files)
        if not settings.HUB_ALLOWED:
            del self.fields["hub_id"], self.fields["revision"]
        if not settings.TOKENIZER_FOLDERS:
            del self.fields["folder"]

    def clean_folder(self) -> str:
        text: str = self.cleaned_data["folder"].strip()
        if text and ("\0" in text or not Path(text).is_absolute()):
            raise forms.ValidationError("Write the whole path, from the root: /home/me/models/qwen3.")
        return text

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        if self.errors:
            return cleaned
        sources = [name for name in ("folder", "upload", "hub_id") if cleaned.get(name)]
        if not sources:
            raise forms.ValidationError(
                "Choose a file to upload, or name a tokenizer in another field; there is nothing to register yet."
            )
        if len(sources) > 1:
            raise forms.ValidationError("Use one way at a time: a folder, an upload, or a hub id.")
        if cleaned.get("hub_id") and not cleaned.get("revision"):
            self.add_error(
                "revision", "Name a revision, so that the tokenizer cannot change under the run: a commit, or main."
            )
        return cleaned


class ShareForm(PlainForm):
    """The target of a share link, the days that it works, and a note."""

    KINDS = ("run", "trajectory", "check")

    target = forms.ChoiceField(choices=[(kind, kind) for kind in KINDS], widget=forms.HiddenInput)
    code = forms.RegexField(r"^[0-9a-z]{4,64}$", widget=forms.HiddenInput)
    query = forms.CharField(max_length=500, required=False, widget=forms.HiddenInput)
    only = forms.BooleanField(required=False, label="Only the marked tokens")
    note = forms.CharField(max_length=500, required=False, help_text="Shown to everybody who opens the link.")
    days = forms.IntegerField(min_value=1, max_value=365, initial=30, required=False, label="Days it works")

    def clean_days(self) -> int:
        return self.cleaned_data["days"] or 30


MAX_SUFFIX = 20  # How many characters of a file name's suffix are kept. The name of the temporary file holds them.


class DiskFull(SuspiciousOperation):
    """The disk takes no file, for a reason that is a sentence. The page of the error has status 507."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} Nothing of the file was kept; try again when there is room.")


class LimitedUploadHandler(TemporaryFileUploadHandler):
    """Streams each file of a request to a temporary file; refuses a request with more than `UPLOAD_MAX_BYTES`."""

    received = 0

    def new_file(self, field_name: str, file_name: str, *arguments: Any, **named: Any) -> None:
        user = getattr(self.request, "user", None)
        if user is None or not user.is_authenticated:
            raise PermissionDenied("Log in before you send a file. Nothing of it was kept.")
        name = Path(file_name)
        super().new_file(field_name, f"{name.stem}{name.suffix[:MAX_SUFFIX]}", *arguments, **named)

    def receive_data_chunk(self, raw_data: bytes, start: int) -> Any:
        self.received += len(raw_data)
        if self.received > settings.UPLOAD_MAX_BYTES:
            raise RequestDataTooBig(
                f"The upload is larger than {settings.UPLOAD_MAX_BYTES >> 20} MB. Import it from the command line with "
                "`manage.py import_rollouts`, or raise INSPECTOR_UPLOAD_MAX_MB."
            )
        with self._writing():
            return super().receive_data_chunk(raw_data, start)

    def file_complete(self, file_size: int) -> Any:
        with self._writing():  # the last bytes of the file are written here
            return super().file_complete(file_size)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):  # what is still in memory cannot be written either
                self.upload_interrupted()  # the part of the file would keep the disk full
            if sentence := disk_fault(error):
                raise DiskFull(sentence) from None
            raise
