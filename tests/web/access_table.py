"""Every address of the site, and what each caller gets there. A new address needs a row (``test_access.py``).

A row is a verb, the answers by caller, and the form. ``door`` is the login page, or 401 for a script. The answers of an
``.json`` twin are those of its page, with the status of JSON where a form was taken.
"""

from dataclasses import dataclass, field
from typing import Any

PEOPLE = ("visitor", "link", "foreign", "viewer", "member", "maker", "admin", "server")
"""Nobody; the holder of share links to a run, a trajectory and a check; an admin of another project; a viewer and a
member; a member who made the objects; an admin of the project; an admin of the server."""
TOKENS = ("read", "push", "launch", "of_viewer", "of_foreign", "expired")
"""API keys of a member with one scope; with all scopes: of a viewer, of an admin of another project, an old one."""


@dataclass(frozen=True)
class Row:
    """What one verb is answered at an address."""

    verb: str
    people: str
    """A status for each of :data:`PEOPLE`."""
    tokens: str = ""
    """A status for each of :data:`TOKENS`; empty = API keys are not taken here."""
    form: dict[str, Any] = field(default_factory=dict)
    """In its texts, names of a dataset's values stand in braces."""
    json: int | None = None
    """The status of the ``.json`` twin where the page answers below 400 to a POST; None = the same."""
    query: str = ""


def get(people: str, **more: Any) -> Row:
    return Row("GET", people, **more)


def post(people: str, **more: Any) -> Row:
    return Row("POST", people, **more)


def all_of(status: int) -> str:
    return " ".join([str(status)] * len(PEOPLE))


def member_gets(status: int, foreign: int = 404) -> str:
    """The answers to what takes a member."""
    return f"door door {foreign} 403 {status} {status} {status} {status}"


def admin_gets(status: int) -> str:
    """The answers to what takes an admin of the project."""
    return f"door door 404 403 403 403 {status} {status}"


READ = "door 200 404 200 200 200 200 200"
LIST = "door door 200 200 200 200 200 200"
OWN = "door door 404 403 403 {0} {0} {0}"
"""What takes the maker or an admin."""
AUTHOR = "door door 404 403 403 200 403 403"
"""What takes the maker alone."""
FORM = member_gets(200, foreign=200)
"""A form that makes something in a project of the user."""

API_ONE = "door door 404 200 200 200 200 200"
API_WAITING = "door door 404 409 409 409 409 409"
"""The answer exists when somebody has asked for a replay."""
API_READ = "200 403 403 200 404 401"
API_LIST = "200 403 403 200 200 401"


def api_member(status: int) -> str:
    return f"403 403 {status} 403 404 401"


API_OWN = "403 403 {0} 403 404 401"

ROWS: dict[str, list[Row]] = {
    # Lists, and what is made.
    "": [get(LIST)],
    "import": [get(FORM), post(member_gets(422, foreign=422))],
    "runs/new": [get(FORM), post(member_gets(422, foreign=422))],
    "templates": [get(LIST), post(member_gets(400, foreign=400))],
    "templates/conversation": [get(FORM), post(member_gets(400, foreign=400))],
    "templates/matrix": [get(LIST), post(member_gets(302, foreign=302))],
    "templates/matrix.csv": [get(LIST)],
    "templates/compare": [
        get(LIST),
        get("door door 404 200 200 200 200 200", query="a={sha256}&b={sha256}"),
        post(member_gets(302), form={"a": "{sha256}", "b": "{sha256}", "project": "{project}"}),
    ],
    "tokenizers": [get(LIST), post(member_gets(422, foreign=422))],
    "workers": [get(LIST)],
    "gallery": [
        get(LIST),
        post(member_gets(302, foreign=302), json=200),
        post(member_gets(302), json=202, form={"training": "1", "project": "{project}"}),
    ],
    "gallery/<slug:kind>": [get("door door 404 404 404 404 404 404")],
    "runs/demo": [post(member_gets(302, foreign=302))],
    "runs/compare": [get(LIST), get("door door 404 200 200 200 200 200", query="run={run}&run={run}")],
    # One run.
    "runs/change": [
        get(LIST),
        get(member_gets(200), query="run={run}"),
        post(member_gets(302), form={"run": "{run}", "do": "tag", "tags": "x"}, json=200),
    ],
    "runs/<code:code>": [get(READ)],
    "search": [get(LIST), get(LIST, query="q=kestrel"), get(LIST, query="q=84")],
    "runs/<code:code>/search": [get(API_ONE), get(API_ONE, query="by=metadata&q=a")],
    # Files are open in place only on the server that `rollout-inspector open` starts.
    "runs/<code:code>/check-files": [post(member_gets(422))],
    "runs/<code:code>/import-files": [post(member_gets(422))],
    "runs/<code:code>/cancel": [post(member_gets(302))],
    "runs/<code:code>/resume": [post(member_gets(302))],
    "runs/<code:code>/delete": [post(OWN.format(302), form={"sure": "yes"})],
    "runs/<code:code>/cost": [get(READ)],
    "runs/<code:code>/training": [get(READ)],
    "runs/<code:code>/columns": [get(READ)],
    "runs/<code:code>/columns/<code:column>/delete": [post(OWN.format(302), json=200)],
    "runs/<code:code>/damage": [post(member_gets(302), form={"model": "demo"}, json=202)],
    "runs/<code:code>/rescore": [post(member_gets(302), form={"model": "demo"}, json=202)],
    "runs/<code:code>/weights": [get(READ.replace("200", "301"))],
    "runs/<code:code>/weigh": [post(member_gets(302), json=202)],
    "runs/<code:code>/gap": [get(READ)],
    "runs/<code:code>/gap/read": [post(member_gets(302), json=422)],
    "runs/<code:code>/groups/<path:key>": [get(READ)],
    "runs/<code:code>/mute": [
        post(member_gets(302), form={"kind": "boundary_merge", "scope": "project", "reason": "x"}, json=201)
    ],
    "muted/<int:pk>/unmute": [post(OWN.format(302), json=200)],
    "runs/<code:code>/alarms": [get(READ)],
    "runs/<code:code>/alarms/set": [
        post(member_gets(302), form={"figure": "gap", "limit": "5", "scope": "project"}, json=201)
    ],
    "alarms/<int:pk>/drop": [post(OWN.format(302), json=200)],
    "runs/<code:code>/replay": [post(member_gets(302), json=202)],
    "runs/<code:code>/diagnose": [post(member_gets(302), json=202)],
    "runs/<code:code>/export": [get(READ)],
    "runs/<code:code>/exports": [post(member_gets(302), json=200)],
    "runs/<code:code>/jobs/<code:job>/cancel": [post(member_gets(302), json=200)],
    "runs/<code:code>/jobs/<code:job>/file": [get("door 410 404 410 410 410 410 410")],
    # One trajectory.
    "trajectories/<code:code>": [get(READ)],
    "trajectories/<code:code>/card.json": [get(READ.replace("door", "401"))],
    "trajectories/<code:code>/alternatives.json": [get(READ.replace("door", "401"))],
    "trajectories/<code:code>/find.json": [get(READ.replace("door", "401"))],
    "trajectories/<code:code>/file.html": [get(READ)],
    "trajectories/<code:code>/findings/<int:number>.py": [get(READ)],
    "trajectories/<code:code>/find": [get(READ, query="q=84")],
    "trajectories/<code:code>/compare": [get(READ)],
    "trajectories/<code:code>/deltas": [get(READ)],
    "trajectories/<code:code>/mask": [get(READ)],
    "trajectories/<code:code>/strategies": [get(READ)],
    "trajectories/<code:code>/record": [get(READ)],
    "trajectories/<code:code>/media/<int:step>/<int:number>": [get("door 404 404 404 404 404 404 404")],
    "trajectories/<code:code>/seen": [post("door door 404 302 302 302 302 302", json=200)],
    "trajectories/<code:code>/comments": [
        get("door door 404 302 302 302 302 302", json=200),
        post(member_gets(302), form={"text": "look here"}, json=201),
    ],
    "trajectories/<code:code>/comments/<code:comment>": [
        get("door door 404 302 302 302 302 302", json=200),
        post(member_gets(302), form={"do": "resolve"}, json=200),
        post(OWN.format(302), form={"do": "delete"}, json=200),
    ],
    "trajectories/<code:code>/parsers": [get(READ)],
    "trajectories/<code:code>/parsers/again": [post(member_gets(302))],
    "trajectories/<code:code>/strategies/again": [post(member_gets(302))],
    "trajectories/<code:code>/forks": [get(READ)],
    "trajectories/<code:code>/forks/new": [post(member_gets(422), form={"row": "0", "at": "0"})],
    # One template check.
    "templates/checks/<code:code>": [get(READ)],
    "templates/checks/<code:code>/conversation": [get(READ)],
    "templates/checks/<code:code>/marks.<str:kind>": [get("door 404 404 404 404 404 404 404")],
    "templates/checks/<code:code>/repair.<str:kind>": [get("door 404 404 404 404 404 404 404")],
    "templates/checks/<code:code>/search": [post(member_gets(302))],
    # People.
    "shares": [get(LIST), post(member_gets(201), form={"target": "run", "code": "{run}"})],
    "shares/<int:pk>/revoke": [post(OWN.format(302), json=200)],
    "s/<str:token>": [get(all_of(302))],
    "tokens": [get(LIST), post(member_gets(201, foreign=201), form={"name": "x", "scopes": "push"})],
    "tokens/<int:pk>/revoke": [post(OWN.format(302), json=200)],
    "login": [get("200 200 302 302 302 302 302 302")],
    "logout": [post(all_of(302))],
    "login/provider": [get(all_of(404))],
    "login/provider/callback": [get(all_of(404))],
    "join/<str:token>": [get(all_of(200)), post("422 422 302 302 302 302 302 302")],
    "account": [get(LIST)],
    "account/password": [get(LIST)],
    "account/sessions/<int:pk>/end": [post("door door 302 404 404 404 404 404")],
    "account/sessions/end-others": [post("door door 302 302 302 302 302 302")],
    "accounts": [get("door door 403 403 403 403 403 200")],
    "accounts/<int:pk>": [post("door door 403 403 403 403 403 302", form={"change": "close"})],
    "audit": [get("door door 200 403 403 403 200 200")],
    "audit.<str:kind>": [get("door door 200 403 403 403 200 200")],
    "projects": [get(LIST), post("door door 403 403 403 403 403 422")],
    "projects/<code:code>": [get("door door 404 200 200 200 200 200")],
    "projects/<code:code>/rename": [post(admin_gets(302), form={"name": "another name"})],
    "projects/<code:code>/delete": [post(admin_gets(409))],
    "projects/<code:code>/alarms": [
        get(admin_gets(200)),
        post(admin_gets(302), form={"webhook": "https://hooks.example/x"}, json=200),
    ],
    "projects/<code:code>/members/<int:pk>": [post(admin_gets(302), form={"role": "viewer"})],
    "projects/<code:code>/invitations": [post(admin_gets(201), form={"role": "viewer", "days": "7"})],
    "projects/<code:code>/invitations/<int:pk>/revoke": [post(admin_gets(302))],
    # For everybody.
    "robots.txt": [get(all_of(200))],
    "help": [get(all_of(200))],
    "help/findings": [get(all_of(200))],
    "docs": [get(all_of(200))],
    "docs/": [get(all_of(200))],
    "docs/<path:name>": [get(all_of(200))],
    "go": [get(LIST), get(LIST, query="q=kestrel"), get(LIST, query="q={trajectory}")],
    "health": [get(all_of(503))],
    "metrics": [get(all_of(200))],
    # Pushes.
    "api/runs": [post(all_of(401), tokens="403 201 403 403 201 401", form={"name": "x"})],
    "api/runs/<code:code>/trajectories": [post(all_of(401), tokens="403 415 403 403 404 401", form={"a": "b"})],
    # The API. Its documents say nothing about data.
    "api/docs": [get(LIST)],
    "api/v1/openapi.json": [get(all_of(200))],
    "api/v1/": [get(all_of(404))],
    "api/v1/runs": [
        get(LIST, tokens=API_LIST),
        post(all_of(401), tokens="403 201 403 403 201 401", form={"name": "x"}),
    ],
    "api/v1/compare": [get(API_ONE, tokens=API_READ, query="run={run}&run={run}")],
    "api/v1/search": [get(LIST, tokens=API_LIST, query="text=a")],
    "api/v1/checks": [
        get(LIST, tokens=API_LIST),
        post(
            member_gets(202),
            tokens=api_member(202),
            form={"project": "{project}", "chat_template": "{{{{ messages }}}}"},
        ),
    ],
    "api/v1/tokenizers": [get(LIST, tokens=API_LIST)],
    "api/v1/shares": [get(LIST, tokens=API_LIST)],
    "api/v1/jobs": [get(LIST, tokens=API_LIST)],
    "api/v1/runs/<code>": [get(API_ONE, tokens=API_READ), Row("DELETE", OWN.format(204), tokens=API_OWN.format(403))],
    "api/v1/launches": [
        post(member_gets(422), tokens=api_member(422), form={"project": "{project}", "settings": {"model": "none"}})
    ],
    "api/v1/imports": [post(member_gets(202), tokens=api_member(202), form={"project": "{project}"})],
    "api/v1/runs/<code>/cancel": [post(member_gets(200), tokens=api_member(200))],
    "api/v1/runs/<code>/resume": [post(member_gets(409), tokens=api_member(409))],
    "api/v1/runs/<code>/diagnose": [post(member_gets(202), tokens=api_member(202))],
    "api/v1/runs/<code>/replay": [post(member_gets(202), tokens=api_member(202))],
    "api/v1/runs/<code>/gap": [
        get(API_ONE, tokens=API_READ),
        post(member_gets(422), tokens=api_member(422)),
    ],
    "api/v1/runs/<code>/exports": [post(member_gets(200), tokens=api_member(200))],
    **{
        f"api/v1/{route}": [get(API_ONE, tokens=API_READ)]
        for route in (
            "runs/<code>/summary",
            "runs/<code>/training",
            "runs/<code>/weights",
            "runs/<code>/columns",
            "runs/<code>/alarms",
            "runs/<code>/findings",
            "runs/<code>/jobs",
            "trajectories/<code>",
            "trajectories/<code>/steps",
            "trajectories/<code>/steps/<index>",
            "trajectories/<code>/steps/<index>/tokens",
            "trajectories/<code>/lanes",
            "trajectories/<code>/file",
            "trajectories/<code>/rows",
            "trajectories/<code>/rows/<index>/tokens",
            "trajectories/<code>/findings",
            "trajectories/<code>/findings/<number>",
            "trajectories/<code>/strategies",
            "checks/<code>",
            "jobs/<code>",
        )
    },
    "api/v1/trajectories/<code>/forks": [
        get(API_ONE, tokens=API_READ), post(member_gets(422), tokens=api_member(422), form={"settings": {"at": 0}})
    ],
    "api/v1/trajectories/<code>/comments": [
        get(API_ONE, tokens=API_READ),
        post(member_gets(201), tokens=api_member(201), form={"text": "look here"}),
    ],
    "api/v1/trajectories/<code>/comments/<comment>": [Row("DELETE", OWN.format(204), tokens=API_OWN.format(403))],
    "api/v1/trajectories/<code>/comments/<comment>/edit": [
        post(AUTHOR, tokens=API_OWN.format(403), form={"text": "another", "version": 1})
    ],
    "api/v1/trajectories/<code>/comments/<comment>/resolve": [post(member_gets(200), tokens=api_member(200))],
    "api/v1/trajectories/<code>/comments/<comment>/reopen": [post(member_gets(409), tokens=api_member(409))],
    "api/v1/trajectories/<code>/seen": [
        get(API_ONE, tokens=API_READ),
        post("door door 404 200 200 200 200 200", tokens="403 403 200 200 404 401"),
    ],
    "api/v1/trajectories/<code>/steps/<index>/parsers": [
        get(API_ONE, tokens=API_READ),
        post(member_gets(202), tokens=api_member(202)),
    ],
    "api/v1/runs/<code>/muted": [
        get(API_ONE, tokens=API_READ),
        post(member_gets(201), tokens=api_member(201), form={"kind": "boundary_merge", "reason": "x"}),
    ],
    "api/v1/muted/<id>": [Row("DELETE", OWN.format(204), tokens=API_OWN.format(403))],
    "api/v1/runs/<code>/trajectories": [
        get(API_ONE, tokens=API_READ),
        post(all_of(401), tokens="403 415 403 403 404 401", form={"a": "b"}),
    ],
    "api/v1/trajectories/<code>/strategies": [get(API_WAITING, tokens="409 403 403 409 404 401")],
    "api/v1/trajectories/<code>/replay": [post(member_gets(202), tokens=api_member(202))],
    **{
        f"api/v1/trajectories/<code>/strategies/<strategy>/{rest}": [get(API_WAITING, tokens="409 403 403 409 404 401")]
        for rest in ("rows", "rows/<index>/tokens")
    },
    "api/v1/jobs/<code>/cancel": [post(member_gets(200), tokens=api_member(200))],
    "api/v1/jobs/<code>/file": [get("door door 404 410 410 410 410 410", tokens="410 403 403 410 404 401")],
}
"""Route -> its rows. A route that ends in ``.json`` is a twin, and has no rows of its own."""
