"""Addresses of the rest: tokenizers, workers, shares, API tokens, the push API, help, health and login."""

from django.urls import path

from inspector.views import api_tokens, errors, health, login, metrics, push, shares, tokenizers, workers
from inspector.web.twins import twins

urlpatterns = [
    *twins("tokenizers", tokenizers.index, name="tokenizers"),
    *twins("workers", workers.index, name="workers"),
    *twins("shares", shares.index, name="shares"),
    path("shares/<int:pk>/revoke", shares.revoke, name="share-revoke"),
    path("s/<str:token>", shares.open_link, name="share-open"),
    *twins("tokens", api_tokens.index, name="api-tokens"),
    path("tokens/<int:pk>/revoke", api_tokens.revoke, name="api-token-revoke"),
    path("api/runs", push.create_run, name="api-runs"),
    path("api/runs/<code:code>/trajectories", push.push, name="api-trajectories"),
    path("robots.txt", errors.robots, name="robots"),
    path("help", errors.help_page, name="help"),
    path("health", health.health, name="health"),
    path("metrics", metrics.metrics, name="metrics"),
    path("login", login.login, name="login"),
    path("logout", login.logout, name="logout"),
]
