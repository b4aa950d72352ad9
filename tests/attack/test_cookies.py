"""Cookies that no browser makes of its own accord."""

import pytest
from django.conf import settings
from django.test import Client

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("value", ['"\\000aaaaaaaaaaaa"', '"\\355\\240\\200aaaaaaaa"', "a" * 3000])
def test_a_session_that_no_database_can_hold_is_none(value: str) -> None:
    visitor = Client(headers={"cookie": f"{settings.SESSION_COOKIE_NAME}={value}"})
    found = [visitor.get(address).status_code for address in ("/", "/login", "/s/x", "/api/v1/runs")]
    assert found == [302, 200, 404, 401]
