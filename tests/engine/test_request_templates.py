"""Chat templates that clients send are rendered within limits, as those of the model are without."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.engine import chat_template as request_templates
from octavo.engine.chat_messages import HERMES
from octavo.engine.chat_template import render_and_read, render_in_sandbox, variables_in_sandbox
from octavo.process.sandbox import Sandbox
from tests.busy_machine import PATIENCE

HELLO = [{"role": "user", "content": "hello \ud83d", "name": "Ann"}]
PLAIN = "{% for m in messages %}<{{ m.name }}:{{ m.content }}>{% endfor %}{{ word }}"
#: The template reads the first of these, not the second.
FIELDS = [(0, "name"), (0, "tone")]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}]
ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    yield Sandbox()


def rendered(sandbox: Sandbox, template: str, client: str = "a", **options: Any) -> tuple[str, list[bool]]:
    return asyncio.run(render_in_sandbox(sandbox, client, template, HELLO, FIELDS, options))


def test_a_template_writes_what_it_writes_in_this_process(sandbox: Sandbox) -> None:
    for options in ({"word": "!"}, {"tools": TOOLS, "call_format": HERMES, "add_generation_prompt": False}):
        expected = render_and_read(PLAIN, HELLO, FIELDS, options)
        assert rendered(sandbox, PLAIN, **options) == expected and expected[1] == [True, False]
    assert asyncio.run(variables_in_sandbox(sandbox, "a", PLAIN)) == {"messages", "word"}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS, r"takes more than 0\.5 seconds of processor time"),
        (DOUBLED, "memory|MemoryError|more than"),
        pytest.param("{{ '%300000000d' % 1 }}", "memory|MemoryError|more than", marks=pytest.mark.slow),
        ("{{ '%3000000000d' % 1 }}", "memory|MemoryError|more than"),
        ("{{ 'a'.ljust(3000000000) }}", "memory|MemoryError|more than"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "deep"),
        ("{% if", "not valid jinja"),
        ("{{ raise_exception('no') }}", "refuses this conversation: no"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|was stopped"),
    ],
    ids=lambda text: text[:24],
)
def test_a_template_that_exceeds_a_limit_is_refused(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, template: str, words: str
) -> None:
    monkeypatch.setattr(request_templates, "SECONDS", 0.5)
    with pytest.raises(InvalidRequestError, match=words):
        rendered(sandbox, template)
    assert rendered(sandbox, "{{ 1 }}")[0] == "1"


def test_endless_templates_of_one_client_hold_up_no_other(sandbox: Sandbox) -> None:
    async def test() -> None:
        endless = [
            asyncio.ensure_future(render_in_sandbox(sandbox, "a", ENDLESS, HELLO, [], {"number": i})) for i in range(8)
        ]
        await asyncio.sleep(0)
        for _ in range(3):
            assert (await render_in_sandbox(sandbox, "b", "{{ 1 }}", HELLO, [], {}))[0] == "1"
        assert not all(task.done() for task in endless)
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{% for m in messages %}{{ m['tone'] }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.get('tone') }}{% endfor %}", True),
        ("{{ messages[0].tone }}", True),
        ("{{ messages | tojson }}", True),
        ("{% for m in messages %}{% for k, v in m.items() %}{{ v }}{% endfor %}{% endfor %}", True),
        ("{{ messages | map(attribute='tone') | join }}", True),
        ("{% for m in messages %}{{ m | list | join }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{{ messages | length }}", False),
    ],
)
def test_which_fields_of_messages_a_template_reads(template: str, read: bool) -> None:
    messages = [{"role": "user", "content": "Hello", "tone": "loud"}]
    assert render_and_read(template, messages, [(0, "tone")], {})[1] == [read]
