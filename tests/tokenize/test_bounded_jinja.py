"""Limits on time and memory of a chat template that somebody else wrote."""

from __future__ import annotations

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gristmill.tokenize import bounded_jinja
from gristmill.tokenize.bounded_jinja import BoundedEnvironment, render

MESSAGES = [
    {"role": role, "content": content}
    for role, content in (
        ("system", "Be kind."),
        ("user", " 2 * 3 % 4? "),
        ("assistant", "<think>x</think>\n\n6"),
        ("user", "Thanks"),
    )
]
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor "
    "%}{% endfor %}",
    "a long loop over a text": "{% for a in 'ab' * 9999999 %}{% for b in 'ab' * "
    "9999999 %}{% endfor %}{% endfor %}",
    "calls that call twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) "
    "}}{% endif %}{% endmacro %}{{ f(40) }}",
    "calls without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling by ~": "{% set x = namespace(t='a') %}{% for i in range(60) %}{% set "
    "x.t = x.t ~ x.t %}{% endfor %}",
    "doubling by +": "{% set x = namespace(t='a') %}{% for i in range(60) %}{% set "
    "x.t = x.t + x.t %}{% endfor %}",
    "doubling a list": "{% set x = namespace(t=[1]) %}{% for i in range(60) %}{% set "
    "x.t = x.t + x.t %}{% endfor %}",
    "a product": "{{ 'a' * 10000000000 }}",
    "a product of lists": "{{ [1] * 10000000000 }}",
    "a power": "{{ 9 ** 9999999 }}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "a filter's width": "{{ 'a'|center(9999999999) }}",
    "a format": "{{ '%9999999999d'|format(1) }}",
    "a method's width": "{{ 'a'.ljust(9999999999) }}",
    "a format method": "{{ '{:>9999999999}'.format('a') }}",
    "a replacement": "{% set t = 'a' * 99999 %}{{ t.replace('a', t) }}{{ "
    "t|replace('a', t) }}",
    "a separator": "{% set t = 'a' * 99999 %}{{ range(99999)|join(t) }}",
    "a slice": "{{ [1]|slice(9999999999)|list }}",
    "filters in loops": "{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "any text": "{{ lipsum(n=99999) }}",
    "a recursive loop": "{% for a in range(99999) recursive %}{% if loop.depth < 3 "
    "%}{{ loop(range(99999)) }}"
    "{% endif %}{% endfor %}",
    "a list of lists": "{% set x = namespace(t=[1]) %}{% for i in range(60) %}{% set "
    "x.t = [x.t, x.t] %}{% endfor %}"
    "{{ x.t }}",
    "slices of a long text": "{% set t = 'a' * 60000000 %}{% for a in range(9999) "
    "%}{% set u = t[1:] %}{% endfor %}",
    "searches of a long text": "{% set t = 'a' * 60000000 %}{% for a in range(9999) "
    "%}{% if 'b' in t %}{% endif %}"
    "{% endfor %}",
    "methods of a long text": "{% set t = 'a' * 60000000 %}{% for a in range(9999) "
    "%}{% set u = t.upper() %}"
    "{% endfor %}",
    "powers of powers": "{{ ((((2**64)**64)**64)**64)**64 > 1 }}",
    "much output": "{% set t = 'a' * 60000000 %}{% for a in range(9999) %}{{ t }}{% "
    "endfor %}",
    "a macro of much text": "{% macro f() %}"
    + "x" * 9999
    + "{% endmacro %}{% for a in range(99999) %}{% set u = f() %}"
    "{% endfor %}",
    "a format of a long text": "{% set t = 'a' * 60000000 %}{{ '%(a)s' * 999 % "
    "{'a': t} }}",
    "a width that is a value": "{{ '%*d' % (9999999999, 1) }}{{ '{:{}}'.format('a', "
    "9999999999) }}",
    "a width that is a value, behind a bracket": "{{ '{0[}]:{1}}'.format({'}': 'a'}, "
    "9999999999) }}",
    "many widths": "{{ ('{0:99999}' * 9000).format(1) }}",
    "a translation": "{% set t = 'a' * 60000 %}{{ t.translate({97: t}) }}",
    "text in a loop": "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "a long body": "{% for a in range(99999) %}"
    + "{% set u = a %}" * 2000
    + "{% endfor %}",
}
BENIGN = [
    "{% for m in messages %}{{ loop.index0 % 2 }}{{ loop.last }}{{ loop.length }}"
    "{{ m.role ~ ': ' + m['content']|trim }}{% endfor %}",
    "{%- for m in messages[::-1] if m.role == 'user' %}{{ m.content.split('?')[0] ~ "
    "loop.previtem }}{% break %}"
    "{% endfor %}",
    "{% macro tag(x, n=2) %}<{{ x * n }}>{% endmacro %}{{ tag('ab') }}"
    "{{ tag(messages[2].content.split('</think>')[-1]) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + "
    "m.content|length ** 2 %}{% endfor %}"
    "{{ ns.n }}",
    "{{ messages|selectattr('role', 'equalto', "
    "'user')|map(attribute='content')|join(' | ') }}"
    "{{ '%s-%03d' % ('a', 7) }}",
    "{% set d = dict([('a', 1)], b=2) %}{{ d }}{{ dict.fromkeys('xy', 3) }}"
    "{% set ns = namespace(d, self=4) %}{{ ns.b }}{{ ns.self }}",
    "{% for a in range(300) %}{{ a }}{% for b in [] %}{% else %}-{% endfor %}{% "
    "endfor %}{{ 'x'|center(9) }}",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_stopped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_jinja, "MOST_WORK", 1_000_000)
    template = BoundedEnvironment(extensions=[loopcontrols]).from_string(HOSTILE[name])
    with pytest.raises(
        TemplateError, match=r"does more than it may|'lipsum' is undefined"
    ):
        render(template, messages=MESSAGES)


@pytest.mark.parametrize(
    "text",
    [
        "{% set _ = dict.update(messages[0], {'content': 'other'}) %}",
        "{% set _ = dict.pop(messages[0], 'content') %}",
        "{% set _ = messages[0].update({'content': 'other'}) %}",
    ],
)
def test_template_cannot_change_the_messages(text: str) -> None:
    messages = [{"role": "user", "content": "Thanks"}]
    with pytest.raises(TemplateError):
        render(BoundedEnvironment().from_string(text), messages=messages)
    assert messages == [{"role": "user", "content": "Thanks"}]


@pytest.mark.parametrize(
    "text",
    [
        "{% set ns = namespace(__len__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ],
)
def test_namespace_takes_no_names_of_internals(text: str) -> None:
    with pytest.raises(SecurityError, match="underscore"):
        render(BoundedEnvironment().from_string(text))


@pytest.mark.parametrize("text", BENIGN)
def test_benign_template_renders_as_in_the_sandbox_of_jinja(text: str) -> None:
    def render_in_sandbox(messages: list[dict[str, str]]) -> str:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        return environment.from_string(text).render(messages=messages)

    bounded = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    ).from_string(text)
    for messages in (MESSAGES, MESSAGES * 2, []):
        try:
            expected = render_in_sandbox(messages)
        except TemplateError as error:
            with pytest.raises(type(error)):
                render(bounded, messages=messages)
        else:
            assert render(bounded, messages=messages) == expected
