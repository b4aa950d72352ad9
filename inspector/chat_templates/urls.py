"""Addresses of chat templates: the check form, one check, the matrix, and two templates side by side."""

from django.urls import path

from inspector.chat_templates import matrix_views, views
from inspector.web.twins import twins

urlpatterns = [
    *twins("templates", views.index, name="templates"),
    *twins("templates/matrix", matrix_views.matrix, name="templates-matrix"),
    path("templates/matrix.csv", matrix_views.matrix_csv, name="templates-csv"),
    *twins("templates/compare", matrix_views.compare, name="templates-compare"),
    *twins("templates/conversation", views.conversation, name="templates-conversation"),
    *twins("templates/checks/<code:code>", views.detail, name="check"),
    *twins("templates/checks/<code:code>/conversation", views.check_conversation, name="check-conversation"),
    path("templates/checks/<code:code>/marks.<str:kind>", views.marks_file, name="check-marks"),
    path("templates/checks/<code:code>/search", views.repair, name="check-search"),
    path("templates/checks/<code:code>/repair.<str:kind>", views.repair_file, name="check-repair"),
]
