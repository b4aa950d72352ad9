"""Addresses of people: login, account, projects, invitations, accounts, shares, API keys, the audit log."""

from django.urls import path

from inspector.team import (
    account, accounts, activity_page, api_keys, join, login, project_alarms, projects, provider, shares
)
from inspector.web.twins import twins

urlpatterns = [
    *twins("shares", shares.index, name="shares"),
    path("shares/<int:pk>/revoke", shares.revoke, name="share-revoke"),
    path("s/<str:token>", shares.open_link, name="share-open"),
    *twins("tokens", api_keys.index, name="api-tokens"),
    path("tokens/<int:pk>/revoke", api_keys.revoke, name="api-token-revoke"),
    *twins("projects", projects.index, name="projects"),
    *twins("projects/<code:code>", projects.detail, name="project"),
    path("projects/<code:code>/rename", projects.rename, name="project-rename"),
    path("projects/<code:code>/delete", projects.delete, name="project-delete"),
    *twins("projects/<code:code>/alarms", project_alarms.alarms, name="project-alarms"),
    path("projects/<code:code>/members/<int:pk>", projects.member, name="project-member"),
    *twins("projects/<code:code>/invitations", projects.invite, name="project-invite"),
    path(
        "projects/<code:code>/invitations/<int:pk>/revoke", projects.revoke_invitation, name="project-invitation-revoke"
    ),
    path("join/<str:token>", join.index, name="join"),
    *twins("account", account.account, name="account"),
    path("account/password", account.PasswordPage.as_view(), name="account-password"),
    path("account/sessions/<int:pk>/end", account.end_session, name="session-end"),
    path("account/sessions/end-others", account.end_other_sessions, name="sessions-end-others"),
    *twins("accounts", accounts.index, name="accounts"),
    path("accounts/<int:pk>", accounts.change, name="account-change"),
    *twins("audit", activity_page.index, name="audit"),
    path("audit.<str:kind>", activity_page.export, name="audit-export"),
    path("login", login.login, name="login"),
    path("login/provider", provider.begin, name="provider"),
    path("login/provider/callback", provider.callback, name="provider-callback"),
    path("logout", login.logout, name="logout"),
]
