"""Fetches a tokenizer from the Hugging Face hub, where the installation allows it: JSON and template files only."""

import re
from pathlib import Path

from rollout_inspector.text.tokenizers.files import WANTED, TokenizerUnusable, copy_wanted
from rollout_inspector.text.tokenizers.validate import check_folder

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
    problems = check_folder(plain)
    if problems:
        raise TokenizerUnusable(" ".join(problems))
    return plain
