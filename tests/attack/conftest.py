"""A member who is logged in."""

from typing import Any

import pytest
from django.test import Client

from tests.people import make_member


@pytest.fixture
def member(django_user_model: Any) -> Client:
    """The browser of a member."""
    client = Client()
    client.force_login(make_member("ada", password="a long password"))
    return client
