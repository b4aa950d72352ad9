"""Checks whether a tokenizer that was uploaded or fetched can be registered. All reasons against it are returned. What
the files hold is looked at in a limited process alone. The hub is asked only where the installation allows it."""

import io
import re
import stat
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from rollout_inspector.text.tokenizers import limited
from rollout_inspector.text.tokenizers.files import MAX_JSON_BYTES, WANTED, TokenizerUnusable, copy_wanted, size_limit
from rollout_inspector.text.tokenizers.loaded import LoadedTokenizer, load

REFUSED_SUFFIXES = (".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt", ".joblib", ".npy", ".npz", ".py", ".so")
MAX_FOLDER_BYTES = 300_000_000
MAX_ZIP_BYTES = 100_000_000
ZIP_TOO_LARGE = f"The file is larger than {MAX_ZIP_BYTES // 1_000_000} MB; the zip of a tokenizer has a few."
MAX_FILES = 200
MAX_DIRECTORY_BYTES = 128 << 10  # Bytes of a zip's table of contents: many times what 200 names take.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
MAX_RATIO = 200  # A zip that grows more than this many times is a bomb; tokenizer.json grows about five times.


def check_folder(path: str | Path) -> list[str]:
    """What is wrong with a folder, a tokenizer.json or a zip of either, as sentences. Empty = it can be registered."""
    path = Path(path)
    if not path.exists():
        return [f"There is no {path.name}."]
    if path.is_symlink():
        return [f"{path.name} is a link; upload the file itself."]
    if path.is_file() and zipfile.is_zipfile(path):
        return check_zip(path)
    if path.is_file():
        return check_file(path) or _check_single(path)
    problems = []
    files = [file for file in sorted(path.rglob("*")) if not file.is_dir() or file.is_symlink()]
    if len(files) > MAX_FILES:
        problems.append(f"The folder holds {len(files)} files; a tokenizer has a handful (at most {MAX_FILES}).")
    for file in files[:MAX_FILES]:
        name = file.relative_to(path).as_posix()
        if file.is_symlink():
            problems.append(f"{name} is a link; only files of the folder itself are read.")
        elif not file.is_file():
            problems.append(f"{name} is not a plain file.")
        elif file.suffix.lower() in REFUSED_SUFFIXES:
            problems.append(f"{name} can carry code and is never read; leave it out.")
    if problems:
        return problems
    for name in WANTED:
        file = path / name
        if file.is_file() and file.stat().st_size > size_limit(name):
            problems.append(f"{name} is larger than {size_limit(name) // 1_000_000} MB.")
    return problems or _check_content(path)


def check_file(path: Path) -> list[str]:
    """What is wrong with a tokenizer.json, without a look into it."""
    if path.suffix.lower() != ".json":
        return [f"{path.name} is neither a tokenizer.json nor a zip of a tokenizer's folder."]
    if path.stat().st_size > MAX_JSON_BYTES:
        return [f"{path.name} is larger than {MAX_JSON_BYTES // 1_000_000} MB."]
    return []


def _check_single(path: Path) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="inspector-tokenizer-") as scratch:
        (Path(scratch) / "tokenizer.json").symlink_to(path.resolve())
        return _check_content(Path(scratch))


def _check_content(folder: Path) -> list[str]:
    try:
        examined(folder)
    except TokenizerUnusable as error:
        return [str(error)]
    return []


def examined(folder: Path) -> LoadedTokenizer:
    """The tokenizer of a folder that nobody has checked yet, after it has encoded a word. Two are examined at a time.
    Raises :class:`TokenizerUnusable` with what is wrong with it."""
    with limited.VALIDATIONS.one():
        tokenizer = load(folder, limited.CHECKED_NICE)
        tokenizer.fastest()
        tokenizer.decode(tokenizer.encode("hello"))
        return tokenizer


class _Directory(io.FileIO):
    """A zip of which only the table of contents is read, whatever size its records claim, those of zip64 too."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_DIRECTORY_BYTES:
            size = MAX_DIRECTORY_BYTES + 1
        data = super().read(size)
        if len(data) > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its table of contents has more than {MAX_DIRECTORY_BYTES >> 10} kB.")
        return data


def check_zip(path: Path) -> list[str]:
    """What is wrong with a zip, by its table of contents alone. Nothing is unpacked."""
    if path.stat().st_size > MAX_ZIP_BYTES:
        return [ZIP_TOO_LARGE]
    try:
        with _Directory(path) as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        return [f"{path.name} is not a readable zip file: {error}"]
    problems = []
    if len(entries) > MAX_FILES:
        return [f"The zip holds {len(entries)} files; a tokenizer has a handful (at most {MAX_FILES})."]
    total = 0
    for entry in entries:
        name = PurePosixPath(entry.filename.replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or ":" in entry.filename:
            problems.append(f"{entry.filename!r} would be written outside its folder.")
        elif stat.S_ISLNK(entry.external_attr >> 16):
            problems.append(f"{entry.filename!r} is a link; only plain files are read.")
        elif entry.compress_type not in METHODS:
            problems.append(f"{entry.filename!r} cannot be unpacked: it is not packed by deflate. Pack it again.")
        elif entry.flag_bits & 1:
            problems.append(f"{entry.filename!r} is encrypted.")
        elif name.suffix.lower() in REFUSED_SUFFIXES:
            problems.append(f"{entry.filename!r} can carry code and is never read; leave it out.")
        elif entry.file_size > size_limit(entry.filename) and name.name in WANTED:
            problems.append(f"{entry.filename!r} is larger than {size_limit(entry.filename) // 1_000_000} MB.")
        elif entry.file_size > 1_000_000 and entry.file_size > MAX_RATIO * max(entry.compress_size, 1):
            problems.append(f"{entry.filename!r} grows more than {MAX_RATIO} times when unpacked.")
        total += entry.file_size
    if total > MAX_FOLDER_BYTES:
        problems.append(f"The zip unpacks to {total:,} bytes; at most {MAX_FOLDER_BYTES:,} are read.")
    if not any(PurePosixPath(entry.filename).name == "tokenizer.json" for entry in entries):
        problems.append("The zip holds no tokenizer.json.")
    return problems


def unpack_zip(path: str | Path, target: str | Path) -> Path:
    """Unpack the wanted files into ``target``, flat. Raises :class:`TokenizerUnusable` with all problems."""
    if problems := check_zip(Path(path)):
        raise TokenizerUnusable(" ".join(problems))
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path) as archive:
        # The folder that holds tokenizer.json; the shallowest one when there are several.
        holders = [PurePosixPath(n).parent for n in archive.namelist() if PurePosixPath(n).name == "tokenizer.json"]
        holder = min(holders, key=lambda parent: len(parent.parts))
        for entry in archive.infolist():
            name = PurePosixPath(entry.filename)
            if name.parent != holder or name.name not in WANTED or entry.is_dir():
                continue
            limit = size_limit(name.name)
            try:
                with archive.open(entry) as source:
                    # The size in the table of contents can lie, so the stream itself is measured.
                    data = source.read(limit + 1)
            except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError) as error:
                raise TokenizerUnusable(f"{entry.filename!r} cannot be unpacked: {error}.") from error
            if len(data) > limit:
                raise TokenizerUnusable(f"{entry.filename!r} is larger than {limit // 1_000_000} MB.")
            (target / name.name).write_bytes(data)
    if problems := check_folder(target):
        raise TokenizerUnusable(" ".join(problems))
    return target


_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_REVISION = re.compile(r"(?=.{1,100}\Z)\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
"""Each part begins with a letter, a digit or `_`, so that none is `..`: the cache makes a file of this name."""


def from_hub(hub_id: str, revision: str, cache_dir: str | Path, allowed: bool = False) -> Path:
    """Download a model's tokenizer files at one revision and return their folder. No code of the model is ever run.
    Raises :class:`TokenizerUnusable` when fetching is not allowed, when there is no such model or tokenizer, or when
    the hub cannot be reached."""
    if not allowed:
        raise TokenizerUnusable(
            "This installation does not fetch tokenizers from the hub. Name a local folder, or upload tokenizer.json."
        )
    if not _ID.fullmatch(hub_id):
        raise TokenizerUnusable(f"{hub_id!r} is not a hub id. A hub id looks like Qwen/Qwen3-4B.")
    if not _REVISION.fullmatch(revision):
        raise TokenizerUnusable("Name a revision: a commit, a tag or a branch such as main.")
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            hub_id, revision=revision, cache_dir=str(cache_dir), allow_patterns=list(WANTED), etag_timeout=10
        )
    except Exception as error:
        reason = type(error).__name__
        raise TokenizerUnusable(
            f"The tokenizer of {hub_id} at {revision} could not be fetched from the hub ({reason}). The machine may be "
            "offline, or the model does not exist or needs a login. Download the folder yourself and name it here."
        ) from error
    path = Path(folder)
    if not (path / "tokenizer.json").is_file():
        raise TokenizerUnusable(f"{hub_id} at {revision} has no tokenizer.json.")
    # The hub's cache consists of links into its own blobs. The files behind the links are checked.
    plain = path.parent.parent / "plain" / path.name
    copy_wanted(path, plain)
    if problems := check_folder(plain):
        raise TokenizerUnusable(" ".join(problems))
    return plain
