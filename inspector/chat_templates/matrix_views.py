"""`/templates/matrix` and `/templates/compare`: all templates in a table, and two templates side by side."""

from typing import Any
from urllib.parse import urlencode

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from inspector.chat_templates import template_compare, template_matrix
from inspector.chat_templates.template_compare import ComparedPage
from inspector.chat_templates.template_matrix import MatrixPage
from inspector.web.access import access, chosen_project, projects_to_filter, sees_several_projects
from inspector.web.twins import page
from rollouts.jobs import template_checks
from rollouts.jobs.broker import send_job
from rollouts.store.chat_templates.chat_templates import find_chat_template, project_with_template
from rollouts.store.chat_templates.template_checks import renderer_checks
from rollouts.store.chat_templates.tokenizers import list_tokenizers, tokenizers_of, tokenizers_with_template
from rollouts.store.models import ChatTemplate, Project, Role, Tokenizer


@require_http_methods(["GET", "HEAD", "POST"])
def matrix(request: HttpRequest) -> HttpResponse:
    """The template of every tokenizer against every probe. A POST has workers run the missing checks."""
    if request.method == "POST":
        chosen_project(request)  # refuses a user who is a member of no project
        reader = access(request)
        for tokenizer in tokenizers_with_template(reader.limit(list_tokenizers(reader), least=Role.MEMBER), texts=True):
            assert tokenizer.chat_template is not None
            _ask(tokenizer, tokenizer.chat_template, request, tokenizer.project)
        for check in renderer_checks(reader, least=Role.MEMBER):
            _ask(check.tokenizer, check.chat_template, request, check.project)
        return redirect("templates-matrix")
    matrix_page = _matrix(request)
    legend = [
        {"tone": word, "letter": letter, "word": template_matrix.WORDS[word]}
        for word, letter in template_matrix.LETTERS.items()
    ]
    return page(
        request, "chat_templates/matrix.html", matrix_page, groups=template_matrix.rows(matrix_page), legend=legend,
        csv_url=f"{reverse('templates-csv')}?{request.GET.urlencode()}", projects=projects_to_filter(request),
    )


def _matrix(request: HttpRequest) -> MatrixPage:
    return template_matrix.matrix(access(request), request.GET, sees_several_projects(request))


@require_safe
def matrix_csv(request: HttpRequest) -> HttpResponse:
    """The matrix for a spreadsheet, with the same filter."""
    text = template_matrix.as_csv(_matrix(request))
    response = HttpResponse(text, content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="template_matrix.csv"'
    return response


def _ask(tokenizer: Tokenizer | None, chat_template: ChatTemplate, request: HttpRequest, project: Project) -> None:
    check, to_do = template_checks.ask(tokenizer, chat_template, user=request.user, repair=False, project=project)
    if to_do:
        send_job(check.job)


@require_http_methods(["GET", "HEAD", "POST"])
def compare(request: HttpRequest) -> HttpResponse:
    """`?a=sha256&b=sha256&tokenizer=name`: two templates of a project. A POST has workers run the missing checks."""
    params = request.POST if request.method == "POST" else request.GET
    first = None if params.get("project") else project_with_template(access(request), params.get("a", "")[:64])
    where = chosen_project(request, Role.MEMBER if request.method == "POST" else Role.VIEWER, preferred=first)
    project = where.chosen
    sides = {side: _template(project, params.get(side, "")) for side in "ab"}
    a, b = sides["a"], sides["b"]
    listed = template_compare.choices(project, [template.sha256 for template in (a, b) if template is not None])
    tokenizers = {template.name: template for template in tokenizers_of(project)}
    only_html: dict[str, Any] = {"chosen": sides, "names": list(tokenizers), "where": where}
    if a is None or b is None:
        compare_page = ComparedPage(project.code, listed)
        return page(request, "chat_templates/compare.html", compare_page, **only_html, tokenizer="")
    tokenizer = _tokenizer(params.get("tokenizer"), tokenizers, a, b)
    if request.method == "POST":
        for template in (a, b):
            _ask(tokenizer, template, request, project)
        query = {
            "project": project.code, "a": a.sha256, "b": b.sha256, "tokenizer": tokenizer.name if tokenizer else "",
        }
        return redirect(f"{reverse('templates-compare')}?{urlencode(query)}")
    compare_page = template_compare.compare(project, listed, a, b, tokenizer)
    return page(
        request, "chat_templates/compare.html", compare_page, **only_html, **template_compare.drawn(compare_page)
    )


def _template(project: Project, sha256: str) -> ChatTemplate | None:
    if not sha256:
        return None
    template = find_chat_template(project, sha256[:64])
    if template is None:
        raise Http404(f"There is no chat template with the sha256 {sha256[:64]}.")
    return template


def _tokenizer(
    name: str | None, tokenizers: dict[str, Tokenizer], a: ChatTemplate, b: ChatTemplate
) -> Tokenizer | None:
    """The tokenizer with that name; without a name, the first whose own template is one of the two."""
    if name is not None:
        return tokenizers.get(name)
    own = [tokenizer for tokenizer in tokenizers.values() if tokenizer.chat_template_id in (a.sha256, b.sha256)]
    return own[0] if own else None
