"""The benchmarks use fixtures of the tests."""

from collections.abc import Iterator

import pytest

from tests.conftest import (  # noqa: F401
    bucket, chromium, corpus, django_db_modify_db_settings, push_process, pushes_in_this_process,
    pytest_collection_finish, redis_url, s3, tiny_tokenizer, vllm_available, warm_tokenizers
)


@pytest.fixture
def engines() -> Iterator[None]:
    """Engines that a benchmark starts in this process end with it."""
    from rollouts.worker.run_rollouts import close_engines

    yield
    close_engines()
