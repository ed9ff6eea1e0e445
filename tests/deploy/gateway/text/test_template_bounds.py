"""Templates that never end or fill the memory are rejected; others are rendered as before."""

import json
import resource
from functools import partial

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longshore.deploy.gateway.text import template_bounds
from longshore.deploy.gateway.text.chat_template import ChatTemplate, TemplateRejected

CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Where is C417?"},
    {"role": "assistant", "content": "<think>B42 or B13</think>B42\n"},
    {"role": "user", "content": "And C009?"},
]
MAX_BYTES = 300 << 20
TEXT = "{% set n = namespace(x='ab') %}"


def peak_bytes() -> int:
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
        TEXT + "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        TEXT + "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        TEXT + "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set t %}{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
        "{% set l = range(99999) | list %}{% for i in l %}{% if 'x' in l %}{% endif %}{% endfor %}",
        "{% set l = range(99999) | list %}{% for i in l %}{% set s = l | sum %}{% endfor %}",
        "{% set l = range(99999) | list %}{% for i in l %}{% set s = l[1:] %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'x' }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 9 ** 99999 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10 ** 10) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ 'x'.center(10 ** 10) }}",
        "{{ 'x'.ljust(width=10 ** 10) }}",
        "{{ 'x'.zfill(10 ** 10) }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ ['x'] | map('center', 10 ** 10) | list }}",
        "{{ ('x' * 9999).replace('x', 'y' * 9999) }}",
        "{{ ('x' * 9999) | replace('x', 'y' * 9999) }}",
        "{{ ('x' * 9999).replace('', 'y' * 9999) }}",
        "{{ ('x' * 9999).join('y' * 9999) }}",
        "{{ range(9999) | join('y' * 9999) }}",
        "{{ range(9999) | map('string') | join('y' * 9999) }}",
        "{{ ('\\n' * 9999) | indent(10 ** 6, true) }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ messages | tojson(separators=('x' * 10 ** 6, 'y' * 10 ** 6)) }}",
        "{{ [[1] * 9999] | tojson(indent=9999) }}",
        "{{ ('{:9999}' * 99999).format(*([1] * 99999)) }}",
        "{{ ('{0:9999}' * 99999).format(1) }}",
        "{{ ('%(a)9999d' * 99999) % {'a': 1} }}",
        "{{ ('%9999d' * 9999) | format(*range(9999)) }}",
        "{{ ('{0}' * 99999).format([messages] * 99) }}",
        "{{ ('a b ' * 9999) | wordwrap(1, wrapstring='x' * 9999) }}",
        "{{ ('\\n' * 9999) | indent('x' * 9999, true) }}",
        "{{ ('a' * 9999).translate({97: 'x' * 9999}) }}",
        "{{ strftime_now('%99999999Y' * 9999) }}",
        "{{ [1] | batch(10 ** 9, 'x') | list }}",
        "{{ lipsum(n=10 ** 6) }}",
    ],
)  # fmt: skip
def test_a_template_without_end_is_rejected_before_it_takes_the_memory(source: str) -> None:
    template = ChatTemplate(source, {})
    before = peak_bytes()
    with pytest.raises(TemplateRejected):
        template.render(CHAT)
    assert peak_bytes() - before < MAX_BYTES


SETS = "{% set x = messages %}" * 200
TWICE = (
    f"{{% set ns = namespace(rest={'(' * 22}none{',)' * 22}) %}}"
    + """
{%- macro twice() %}{% if ns.rest %}
{%- set own = ns.rest %}{% set ns.rest = own[0] %}{% set x = twice() %}
{%- set ns.rest = own[0] %}{% set x = twice() %}{% endif %}{% endmacro %}{% set x = twice() %}"""
)
NESTED = "{% set a0 = [1] %}{% set b0 = [1] %}" + "".join(
    f"{{% set {name}{depth + 1} = [{', '.join([f'{name}{depth}'] * 100)}] %}}"
    for depth in range(6)
    for name in "ab"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(999) %}" + SETS + "{% endfor %}{% endfor %}",
        "{% macro m() %}" + SETS + "{% endmacro %}{% for a in range(99999) %}{% set x = m() %}"
        "{% endfor %}",
        "{% macro m() %}{% set x = caller() %}{% endmacro %}{% for a in range(99999) %}"
        "{% call m() %}" + SETS + "{% endcall %}{% endfor %}",
        TWICE,
        NESTED + "{{ a6 == b6 }}",
        NESTED + "{{ a6 in [b6, b6] }}",
        NESTED + "{{ {'k': a6} == {'k': b6} }}",
    ],
    ids=["loops", "macro", "caller", "recursion", "equal", "in", "values"],
)
def test_statements_that_cost_nothing_by_themselves_are_paid_for_where_they_are_repeated(
    source: str,
) -> None:
    with pytest.raises(TemplateRejected, match=r"loops too often|takes longer"):
        ChatTemplate(source, {}).render(CHAT)


def test_a_rendering_is_limited_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MAX_RENDERING_S", -1.0)
    with pytest.raises(TemplateRejected, match="takes longer than"):
        ChatTemplate("{% for m in messages %}{{ m }}{% endfor %}", {}).render(CHAT)


HONEST = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif -%}
{%- set ns = namespace(last=-1, text='') %}
{%- macro turn(message, is_last=false) -%}
<|{{ message.role | upper }}|>{{ message['content'].split('</think>')[-1].strip() }}
{%- if is_last %} (last){% endif %}{{ '\\n' }}
{%- endmacro -%}
{%- for message in rest if message.content is string %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}
{{- turn(message, is_last=loop.last) ~ loop.index ~ '/' ~ loop.length }}
{%- if loop.previtem is defined and 'C' in message.content %}
{%- set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{{- ns.last }}{{ {'a': [1, 'é']} | tojson(indent=2) }}
{{- system | default('none') | replace('B', 'b') }}
{{- ['a', 'b'] | map('upper') | join(', ') }}{{ '%05d|%s' % (7, 'x') }}{{ '{:>6}'.format(5) }}
{{- 'a,b'.split(',') | join('+') }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}
{%- for key, value in {'k': 1} | dictsort %}{{ key }}={{ value }}{% endfor %}
{{- 'x' * 3 ~ 2 * 3 ~ messages[::-1][0].content | indent(4) }}{{ nothing }}{{ 'b' in 'abc' }}
"""


def test_an_honest_template_renders_as_without_bounds() -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    expected = plain.from_string(HONEST)
    for chat in (CHAT, CHAT[1:]):
        assert ChatTemplate(HONEST, {}).render(chat) == expected.render(messages=chat)


def test_the_budget_grows_with_what_is_rendered() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}", {})
    chat = [{"role": "user", "content": "x" * (4 << 20)}] * 16
    assert len(template.render(chat)) == 64 << 20
    many = [{"role": "user", "content": "x"}] * 100_000
    assert len(template.render(many)) == 100_000
