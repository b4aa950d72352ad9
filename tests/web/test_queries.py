"""What each page asks the database does not grow with what it shows."""

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.people.shares import create_share
from tests.web.samples import stored_run

pytestmark = pytest.mark.django_db


def test_the_forms_ask_for_the_visitor_and_what_can_be_chosen(web: Client, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(5):  # session, user, roles, projects, the registered chat templates
        web.get("/runs/new")
    with django_assert_num_queries(5):  # and the registered tokenizers
        web.get("/import")


def test_the_help_asks_nothing_of_a_stranger(visitor: Client, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):
        visitor.get("/help")


def test_the_list_of_links_asks_once_for_all(web: Client, member: Any, django_assert_num_queries: Any) -> None:
    run = stored_run(3)
    for target in (run, *run.trajectories.all()):
        create_share(member, target)
    with django_assert_num_queries(4):  # session, user, roles, links with their targets
        web.get("/shares")


def test_the_list_of_tokenizers_asks_once(web: Client, tiny_tokenizer: Path, django_assert_num_queries: Any) -> None:
    register_tokenizer(tiny_tokenizer, "a")
    register_tokenizer(tiny_tokenizer, "b")
    with django_assert_num_queries(5):  # session, user, roles, projects of the form, tokenizers
        web.get("/tokenizers")


def test_a_share_link_is_found_by_its_hash_at_once(
    visitor: Client, member: Any, django_assert_max_num_queries: Any
) -> None:
    _, token = create_share(member, stored_run(1))
    # The link, its count, the line of the audit log, and a session that is made; each of the last two in a savepoint.
    with django_assert_max_num_queries(9):
        assert visitor.get(f"/s/{token}").status_code == 302
