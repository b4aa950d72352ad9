"""What a worker's first use of a tokenizer from the bucket takes beyond loading its files. Printed."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import file_storage
from rollout_inspector.text import tokenizers
from rollouts.store import files
from rollouts.store.chat_templates.tokenizers import byte_table, files_of, register_tokenizer

pytestmark = [pytest.mark.bench, pytest.mark.django_db]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def test_the_first_use_of_a_tokenizer_from_a_bucket(corpus: Path, bucket: str, tmp_path: Path, settings: Any) -> None:
    settings.INSPECTOR_DATA = tmp_path / "first"
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": bucket}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    tokenizer = register_tokenizer(corpus / "tokenizers" / "qwen3")
    settings.INSPECTOR_DATA = tmp_path / "second"  # a machine that never saw it
    n_bytes = sum(one.size for one in files.listed(f"tokenizers/{tokenizer.files_sha256}/"))
    fetched = seconds(lambda: files_of(tokenizer.files_sha256))
    again = seconds(lambda: files_of(tokenizer.files_sha256))
    loaded = seconds(lambda: tokenizers.load(files_of(tokenizer.files_sha256)))
    table = seconds(lambda: byte_table(tokenizer.files_sha256))
    print(
        f"\nqwen3, {n_bytes / 1e6:.1f} MB: fetched in {fetched:.3f} s, found again in {again * 1e6:.0f} us; loading "
        f"takes {loaded:.2f} s, so the first use takes {1 + fetched / loaded:.2f} times as long; table {table:.3f} s"
    )
