"""Addresses of people: login, shares, API tokens."""

from django.urls import path

from inspector.team import api_tokens, login, shares
from inspector.web.twins import twins

urlpatterns = [
    *twins("shares", shares.index, name="shares"),
    path("shares/<int:pk>/revoke", shares.revoke, name="share-revoke"),
    path("s/<str:token>", shares.open_link, name="share-open"),
    *twins("tokens", api_tokens.index, name="api-tokens"),
    path("tokens/<int:pk>/revoke", api_tokens.revoke, name="api-token-revoke"),
    path("login", login.login, name="login"),
    path("logout", login.logout, name="logout"),
]
