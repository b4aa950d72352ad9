"""Registered tokenizers. A run and a check use tokenizers of their own project alone, so most functions ask in one
project."""

import hashlib
import shutil
import tempfile
import zipfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from rollout_inspector.refusal import Refusal
from rollout_inspector.text import tokenizers
from rollout_inspector.text.tokenizers import ByteTable, LoadedTokenizer, TokenizerUnusable
from rollout_inspector.text.tokenizers.byte_table import FORMAT, TABLE_FILES
from rollout_inspector.text.tokenizers.files import WANTED
from rollout_inspector.text.tokenizers.validate import check_file
from rollouts.store import files, models
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.models import Project, Tokenizer
from rollouts.store.people import activity_log
from rollouts.store.people.access import Access
from rollouts.store.people.activity_log import Action
from rollouts.store.people.members import key_of


def load_tokenizer(files_sha256: str) -> LoadedTokenizer:
    """A registered tokenizer, from this machine's copy of its files. Raises :class:`TokenizerUnusable` with a sentence,
    or :class:`StorageDown`."""
    return tokenizers.load(files_of(files_sha256))


def files_of(files_sha256: str) -> Path:
    """The folder of a registered tokenizer's files on this machine. Raises what :func:`load_tokenizer` raises."""
    try:
        return files.local_folder(_prefix(files_sha256), "tokenizer.json")
    except (FileNotFoundError, ValueError):  # ValueError: a tokenizer whose files were never found
        raise TokenizerUnusable(
            "The files of this tokenizer are not in the file storage. Register the same tokenizer again."
        ) from None


@lru_cache(maxsize=32)
def byte_table(files_sha256: str) -> ByteTable:
    """The bytes of a registered tokenizer's tokens, memory-mapped. Raises what :func:`load_tokenizer` raises."""
    try:
        folder = files.local_folder(_table_prefix(files_sha256), TABLE_FILES[-1])
    except FileNotFoundError:
        _keep_table(files_sha256, load_tokenizer(files_sha256).table)
        folder = files.local_folder(_table_prefix(files_sha256), TABLE_FILES[-1])
    return tokenizers.open_table(folder)


def byte_table_of(run: models.Run) -> ByteTable | None:
    """The bytes of the tokens of a run; None when the run has no tokenizer or the tokenizer's files are gone."""
    if run.tokenizer is not None:
        with suppress(OSError, ValueError):
            return byte_table(run.tokenizer.files_sha256)
    return None


def _prefix(files_sha256: str) -> str:
    return f"tokenizers/{files_sha256}/"


def _table_prefix(files_sha256: str) -> str:
    return f"byte_tables/{files_sha256}-{FORMAT}/"


def register_tokenizer(
    path: str | Path,
    name: str | None = None,
    source: str = "",
    revision: str = "",
    project: models.Project | None = None,
) -> models.Tokenizer:
    """Store a tokenizer's JSON and chat template and its byte table, and give it a name in a project.

    The files are named by their contents. Without a ``name`` it is the folder's name, with a suffix when another
    tokenizer of the project has it; a ``name`` that another one has raises ``ValueError``. If the same is registered
    there already, it is returned. ``project``: None = the default one.
    Raises :class:`TokenizerUnusable` (a ``ValueError``) when the folder holds no usable tokenizer.
    """
    path = Path(path).expanduser()
    with tempfile.TemporaryDirectory(prefix="inspector-tokenizer-") as scratch:
        if not path.is_file() or path.name == "tokenizer.json":
            folder = path.parent if path.is_file() else path
        elif zipfile.is_zipfile(path):
            folder = tokenizers.unpack_zip(path, Path(scratch) / "unpacked")
        elif problems := check_file(path):
            raise TokenizerUnusable(" ".join(problems))
        else:  # a tokenizer.json that was uploaded under another name
            folder = Path(scratch) / path.stem
            folder.mkdir()
            shutil.copyfile(path, folder / "tokenizer.json")
        loaded = tokenizers.examined(folder)
        files_sha256 = _keep(folder)
        loaded.close()  # the process of the copy is started when somebody asks for it
    if not files.exists(_table_prefix(files_sha256) + TABLE_FILES[-1]):
        _keep_table(files_sha256, loaded.table)
    place = (path.parent if path.name == "tokenizer.json" and path.is_file() else path).resolve()
    label = name or (place.stem if place.is_file() else place.name)
    template = register_chat_template(loaded.chat_template, label, project) if loaded.chat_template else None
    of_project = {"project_id": key_of(project)}
    fields = {
        "sha256": loaded.sha256,
        "files_sha256": files_sha256,
        "source": (source or place.name)[:500],
        "revision": revision[:100],
        "vocab_size": loaded.vocab_size,
        "encoder": loaded.fastest(),
        "chat_template": template,
    }
    own_name = (name or place.name).strip()[:180] or "tokenizer"
    for candidate in (own_name, f"{own_name} ({files_sha256[:8]})"):
        try:
            with transaction.atomic():
                record, created = models.Tokenizer.objects.get_or_create(name=candidate, **of_project, defaults=fields)
        except IntegrityError:
            record, created = models.Tokenizer.objects.get(name=candidate, **of_project), False
        if created:
            activity_log.record(Action.TOKENIZER_ADDED, record, detail=record.source)
        if record.files_sha256 == files_sha256:
            return record
        if name is not None:
            raise Refusal(f"Another tokenizer is registered as {name!r} already. Choose another name.")
    raise Refusal(f"Another tokenizer is registered as {own_name!r} already. Choose a name.")


def find_tokenizer(named: str, project: models.Project | None = None) -> models.Tokenizer:
    """A tokenizer by its registered name, a folder or file, or a hub id (``org/name@revision``) where that is allowed.
    What is not registered in the project yet is. For commands alone: who calls one may read any folder of this machine.
    ``project``: None = the default one. Raises :class:`Refusal`."""
    of_project = tokenizers_of(key_of(project))
    registered = of_project.filter(name=named).first()
    if registered is not None:
        return registered
    if Path(named).expanduser().exists():
        return register_tokenizer(named, project=project)
    hub_id, _, revision = named.partition("@")
    if hub_id.count("/") == 1 and not named.startswith((".", "/", "~")) and settings.HUB_ALLOWED:
        return hub_tokenizer(hub_id, revision or "main", project)
    names = ", ".join(of_project.values_list("name", flat=True)[:10]) or "none yet"
    raise Refusal(
        f"There is no tokenizer {named!r}. Name a registered one ({names}), or a folder that holds a tokenizer.json."
    )


def hub_tokenizer(hub_id: str, revision: str, project: models.Project | None = None) -> models.Tokenizer:
    """The tokenizer of a model on the hub at one revision. It is registered as ``org/name@revision``. ``project``: None
    = the default one. Raises :class:`Refusal`. The id is never taken for a path."""
    name = f"{hub_id}@{revision}"
    if (registered := tokenizers_of(key_of(project)).filter(name=name, source=hub_id).first()) is not None:
        return registered
    folder = tokenizers.from_hub(hub_id, revision, Path(settings.INSPECTOR_DATA) / "hub", settings.HUB_ALLOWED)
    return register_tokenizer(folder, name=name, source=hub_id, revision=revision, project=project)


def is_stored(tokenizer: models.Tokenizer, folder: Path) -> bool:
    """Whether the files of a folder are those of a registered tokenizer, and lie in the storage."""
    digest = _digest(folder)
    return tokenizer.files_sha256 == digest and files.exists(f"{_prefix(digest)}tokenizer.json")


def _digest(folder: Path) -> str:
    """A hash of the wanted files of a folder."""
    digest = hashlib.sha256()
    for name in WANTED:
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()


def _keep(folder: Path) -> str:
    """Store the wanted files under a hash of their contents, tokenizer.json last. Returns the hash."""
    digest = _digest(folder)
    if not files.exists(f"{_prefix(digest)}tokenizer.json"):
        names = [name for name in WANTED if (folder / name).is_file()]
        for name in sorted(names, key="tokenizer.json".__eq__):
            files.put(_prefix(digest) + name, folder / name)
    return digest


def _keep_table(files_sha256: str, table: ByteTable) -> None:
    with tempfile.TemporaryDirectory(prefix="inspector-table-") as scratch:
        tokenizers.write_table(table, Path(scratch))
        for name in TABLE_FILES:
            files.put(_table_prefix(files_sha256) + name, Path(scratch, name))


def list_tokenizers(access: Access, project_code: str = "") -> QuerySet[Tokenizer]:
    """The tokenizers that may be seen, by name, each with its project; with a code only those of that project."""
    tokenizers_of_all = access.limit(Tokenizer.objects.order_by("name", "pk")).select_related("project")
    return tokenizers_of_all.filter(project__code=project_code) if project_code else tokenizers_of_all


def tokenizers_of(project: Project | int | None, templates: bool = False) -> QuerySet[Tokenizer]:
    """The tokenizers of a project by name; ``templates``: each with its chat template. The query runs when the result
    is read, so a form can use it as choices."""
    of_project = Tokenizer.objects.filter(project=project).order_by("name")
    return of_project.select_related("chat_template") if templates else of_project


def tokenizer_names(project: Project | int | None, limit: int | None = None) -> list[str]:
    """The names of the first ``limit`` tokenizers of a project; None = of all."""
    return list(tokenizers_of(project).values_list("name", flat=True)[:limit])


def tokenizer_named(project: Project | int | None, name: str) -> Tokenizer | None:
    """The tokenizer of that name in a project, with its chat template."""
    return tokenizers_of(project, templates=True).filter(name=name).first()


def registered_from(source: str, project: Project | int | None = None) -> Tokenizer | None:
    """The tokenizer that was registered last from a source; with a project the last one there."""
    among = Tokenizer.objects.all() if project is None else tokenizers_of(project)
    return among.filter(source=source).order_by("-pk").first()


def tokenizers_with_template(registered: QuerySet[Tokenizer], texts: bool = False) -> list[Tokenizer]:
    """Those of ``found`` that have their own chat template. ``texts``: also load the templates."""
    registered = registered.exclude(chat_template=None)
    return list(registered.select_related("chat_template") if texts else registered)
