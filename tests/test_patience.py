"""No test races the clock: it waits for a condition, as long as only a fault lasts, and chooses no free port."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
LEAST_SECONDS = 60
"""A busy machine can use up a shorter limit."""
CLOCKS = {
    "attack/hostile_engine.py": "its answers come in pieces",
    "attack/hostile_provider.py": "its answers drip or hang",
    "attack/slow_clients.py": "pauses before it connects again",
    "conftest.py": "`wait_until`, and a model that is slow",
    "guard/test_audit.py": "work that hangs until it is killed",
    "loop/test_loop.py": "the loop's own clock put forward, and engines that rest between two steps",
    "machines/test_faults.py": "how long an outage lasts",
    "ops/test_serve.py": "brackets a moment from both sides",
    "recorder/harness.py": "a server that hangs",
    "recorder/test_proxy.py": "waits in a coroutine, for a minute at most",
    "samples/engine_processes.py": "engines that rest between two steps, or wait for a file",
    "worker/test_forks.py": "sees that somebody looks at the clock",
}
"""Where tests may sleep or look at the clock, and why."""
SHORT_WAITS = {"storage/test_import_shards_faults.py": "a thread that is blocked is not waited for"}
PORTS = {"ports.py": "holds one", "attack/test_sandbox.py": "is to be refused"}
"""Where a socket may be bound without listening."""
LOOKS = {"is_visible", "is_hidden", "is_checked", "is_enabled", "count", "get_attribute", "input_value"}
"""What a page answers at once, drawn or not."""


def faults_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and kind (``clock``, ``short``, ``port``) of what may race."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        if name == "wait_until":
            limits += node.args[1:2]
        elif name in ("wait", "join", "result", "exception"):
            limits += node.args[:1]
        if any(0 < value < LEAST_SECONDS for value in map(_number, limits)):
            yield node.lineno, "short"
        if name in ("sleep", "monotonic", "perf_counter"):
            yield node.lineno, "clock"
        if name == "bind" and isinstance(node.func, ast.Attribute):
            yield node.lineno, "port"


def hasty_looks(source: str) -> Iterator[int]:
    """Lines that assert how a page is at this moment; ``expect`` of Playwright waits until it is so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
            for part in parts:
                look = part.operand if isinstance(part, ast.UnaryOp) else part
                look = look.left if isinstance(look, ast.Compare) and isinstance(look.ops[0], ast.Eq) else look
                if isinstance(look, ast.Call) and isinstance(look.func, ast.Attribute) and look.func.attr in LOOKS:
                    yield node.lineno


def _number(node: ast.expr) -> float:
    value = node.value if isinstance(node, ast.Constant) else 0
    return value if isinstance(value, (int, float)) else 0


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("wait_until(is_done, 240, 'it is done')", []), ("wait_until(is_done, 20, 'it is done')", ["short"]),
        ("future.result(60)\n', '.join(names)", []), ("future.result(30)", ["short"]), ("thread.join(1.5)", ["short"]),
        ("requests.get(url, timeout=60)", []), ("requests.get(url, timeout=5)", ["short"]),
        ("begun.wait()", []), ("time.sleep(0.3)", ["clock"]), ("assert time.monotonic() < until", ["clock"]),
        ("socket.create_server(('127.0.0.1', 0))", []), ("free.bind(('127.0.0.1', 0))", ["port"]),
    ],
)
def test_what_may_race_is_found(source: str, kinds: list[str]) -> None:
    assert [kind for _, kind in faults_of(source)] == kinds


def test_no_test_races_the_clock() -> None:
    allowed = {"clock": CLOCKS, "short": SHORT_WAITS, "port": PORTS}
    faults, used = [], set()
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        for line, kind in faults_of(path.read_text()):
            used.add((kind, name))
            if name not in allowed[kind]:
                faults.append(f"{name}:{line}: {kind}")
    assert not faults, "wait by `wait_until` for a condition, take a HeldPort, or say in the tables above why not"
    assert used == {(kind, name) for kind, names in allowed.items() for name in names}


@pytest.mark.parametrize(
    ("source", "is_hasty"),
    [
        ("assert page.is_visible('#a')", True), ("assert a and not page.locator('#a').is_hidden()", True),
        ("assert page.locator('i').count() == 4", True), ("assert page.locator('i').count() > 3", False),
        ("expect(page.locator('i')).to_have_count(4)", False), ("assert page.url == '/'", False),
    ],
)
def test_a_hasty_look_is_found(source: str, is_hasty: bool) -> None:
    assert bool([*hasty_looks(source)]) == is_hasty


def test_no_browser_test_looks_before_the_page_is_drawn() -> None:
    paths = sorted((TESTS / "browser").glob("test_*.py"))
    looks = [f"{path.name}:{line}" for path in paths for line in hasty_looks(path.read_text())]
    assert paths and not looks, "say it by `expect`: a slow machine has not drawn the page yet"
