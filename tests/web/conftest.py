"""A member who is logged in, and the visitor of a share link."""

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.models import Tokenizer
from tests.people import make_member
from tests.web.trajectory_samples import Maker


@pytest.fixture
def member(db: Any, django_user_model: Any) -> Any:
    return make_member("ada", password="a long password")


@pytest.fixture
def web(member: Any) -> Client:
    """A browser that is logged in."""
    client = Client()
    client.force_login(member)
    return client


@pytest.fixture
def visitor(db: Any) -> Client:
    """A browser without a login."""
    return Client()


@pytest.fixture
def make(tiny_tokenizer: Path) -> Maker:
    """Trajectories in the demo policy's tokens, and runs of them."""
    return Maker(tiny_tokenizer)


@pytest.fixture
def tokenizer(tiny_tokenizer: Path) -> Tokenizer:
    """The tokenizer of the demo policy, registered."""
    return register_tokenizer(tiny_tokenizer, name="demo")
