"""Makes a checked folder from an uploaded tokenizer.json or zip."""

import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from django import forms
from django.core.files.uploadedfile import UploadedFile

from rollout_inspector.text import tokenizers
from rollout_inspector.text.tokenizers.files import copy_wanted
from rollout_inspector.text.tokenizers.validate import MAX_ZIP_BYTES, ZIP_TOO_LARGE, check_file
from rollouts.store import files
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.models import Project, Tokenizer
from rollouts.store.outages import disk_fault
from rollouts.store.text import tidy_name, without_paths


def keep_upload(upload: UploadedFile, scratch: Path) -> Path:
    """Write an upload as a tokenizer's folder under `scratch`. Raises `TokenizerUnusable` with a sentence for another
    kind of file, and for a zip without a usable tokenizer. What a tokenizer.json holds is checked when it is
    registered."""
    if (upload.size or 0) > MAX_ZIP_BYTES:
        raise tokenizers.TokenizerUnusable(ZIP_TOO_LARGE)
    arrived = scratch / ("upload.zip" if upload.read(4) == b"PK\x03\x04" else "upload.json")
    upload.seek(0)
    with arrived.open("wb") as file:
        for chunk in upload.chunks():
            file.write(chunk)
    folder = scratch / "tokenizer" / tidy_name(upload.name or "")
    if zipfile.is_zipfile(arrived):
        return tokenizers.unpack_zip(arrived, folder)
    if problems := check_file(arrived):
        raise tokenizers.TokenizerUnusable(" ".join(problems).replace(arrived.name, upload.name or "The file"))
    folder.mkdir(parents=True)
    arrived.rename(folder / "tokenizer.json")
    return folder


def register_upload(form: forms.Form, field: str, upload: UploadedFile, project: Project) -> Tokenizer | None:
    """Register an uploaded tokenizer in a project. Returns None, and adds an error to the field, when the upload is no
    tokenizer."""
    try:
        with TemporaryDirectory(dir=files.scratch_folder()) as scratch:
            source = f"upload of {upload.name}"
            return register_tokenizer(keep_upload(upload, Path(scratch)), source=source, project=project)
    except (ValueError, OSError) as error:
        if disk_fault(error):
            raise
        form.add_error(field, unreadable(error))
        return None


def unreadable(error: Exception) -> str:
    """Why a tokenizer cannot be read, as a sentence."""
    # TokenizerUnusable is a ValueError whose message is the sentence.
    return without_paths(str(error)) or f"The tokenizer cannot be read ({type(error).__name__})."


def with_template(folder: Path, text: str, scratch: Path) -> Path:
    """A copy of a tokenizer's files under `scratch` whose chat template is `text`."""
    target = scratch / "with-template" / folder.name
    copy_wanted(folder, target)
    (target / "chat_template.jinja").write_text(text, encoding="utf-8")
    return target
