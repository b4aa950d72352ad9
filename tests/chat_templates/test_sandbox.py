"""Whatever a template does, its render ends with a text or a sentence, and the pool goes on."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollout_inspector.text.chat_templates.sandbox import client
from rollout_inspector.text.chat_templates.sandbox.client import Rendered, RenderJob, render
from tests.conftest import wait_until

ROOT = Path(__file__).parents[2]


def one(template: str) -> Rendered:
    return render(template, [RenderJob({"messages": [{"role": "user", "content": "hello"}]})])[0]


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "raises"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "time"),
        ("{{ 9 ** (9 ** 9) }}", "time"),
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "memory"),
        ("{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}", "memory"),
        ("{{ [0] * 10**9 }}", "memory"),
        ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "size"),
        ("{{ ''.__class__.__mro__ }}", "forbidden"),
        ("{{ cycler.__init__.__globals__ }}", "forbidden"),
        ("{{ messages.append(1) }}", "forbidden"),
        ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "depth"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "depth"),
        ("{% if %}", "syntax"),
        ("{{ raise_exception('no') }}", "raises"),
        ("{% include '/etc/passwd' %}", "raises"),
    ],
)
def test_a_hostile_template_gets_a_sentence(template: str, kind: str) -> None:
    outcome = one(template)
    assert outcome.kind == kind, outcome
    assert outcome.error.startswith("The template") and outcome.error.endswith((".", outcome.error[-1]))
    assert one("{{ messages[0].content }}").text == "hello"


def test_attributes_that_hide_are_empty() -> None:
    assert one("{{ 'x' | attr('__class__') }}{{ '{0.__class__}'.format(1) }}").text == ""


def test_a_batch_keeps_its_order_and_a_slow_one_spoils_only_what_follows() -> None:
    loops = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    slow = "{% if n == 2 %}" + loops + "{% endif %}{{ n }}"
    outcomes = render(slow, [RenderJob({"n": n}) for n in range(5)])
    assert [outcome.text for outcome in outcomes[:2]] == ["0", "1"]
    assert [outcome.kind for outcome in outcomes[2:]] == ["time"] * 3
    hungry = "{% if n == 1 %}{{ 'a' * 10**10 }}{% endif %}{{ n }}"
    outcomes = render(hungry, [RenderJob({"n": n}) for n in range(4)])
    assert [outcome.text for outcome in outcomes] == ["0", "", "2", "3"]
    assert outcomes[1].kind == "memory"


def test_a_worker_that_dies_is_replaced() -> None:
    assert one("a").text == "a"
    for worker in client.pool().idle:
        worker.process.kill()
        worker.process.wait()
    assert one("b").text == "b"


def test_text_outside_unicode_planes_comes_back() -> None:
    text = "🙂\x00\u2028 \ud800 é"
    assert render("{{ t }}", [RenderJob({"t": text})])[0].text == text


def test_many_threads_share_the_pool() -> None:
    found: list[str] = []

    def work(n: int) -> None:
        found.extend(render("{{ n }}", [RenderJob({"n": n * 100 + m})])[0].text for m in range(10))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(str(n * 100 + m) for n in range(8) for m in range(10))
    assert len(client.pool().idle) <= 2


def test_a_forked_process_has_its_own_pool() -> None:
    code = """
import os
from rollout_inspector.text.chat_templates.sandbox.client import RenderJob, pool, render
assert render("{{ n }}", [RenderJob({"n": 1})])[0].text == "1"
parents = {worker.process.pid for worker in pool().idle}
child = os.fork()
if child == 0:
    ok = render("{{ n }}", [RenderJob({"n": 2})])[0].text == "2"
    ok = ok and not parents & {worker.process.pid for worker in pool().idle}
    from rollout_inspector.text.chat_templates.sandbox import client
    client.close()
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert render("{{ n }}", [RenderJob({"n": 3})])[0].text == "3"
assert parents == {worker.process.pid for worker in pool().idle}
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_workers_end_with_their_process() -> None:
    code = """
import os, signal
from rollout_inspector.text.chat_templates.sandbox.client import RenderJob, pool, render
render("a", [RenderJob({})])
print(pool().idle[0].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, stdout=subprocess.PIPE, text=True)
    pid = int(done.stdout)
    wait_until(lambda: not _alive(pid), 60, "the sandbox's worker has ended")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def test_the_sandbox_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rollout_inspector.text.chat_templates import renderer;"
        "from rollout_inspector.streams.interfaces import Conversation;"
        "renderer(None, 'a').render_text(Conversation([]));"
        "heavy = {'torch', 'transformers', 'django', 'tokenizers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
