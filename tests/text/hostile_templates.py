"""Chat templates that would run for hours, or fill the memory, if nothing stopped them.

python -m tests.text.hostile_templates prints, as JSON, how each of them ended.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from pagedec.errors import InvalidArgument
from pagedec.text.chat_template import render_chat

SPACE = 2 << 30
"""Bytes of address space that the process may take for it."""
BIG = "{% set big = 'a' * 8000000 %}"


LONG = "{% set long = ('b',) * 300000 %}"


def grown(step: str, times: int = 60) -> str:
    """A small text and a small list, made larger and larger."""
    return "{% set ns = namespace(x='a', l=[0]) %}{% for i in range(" + str(times) + ") %}" + step + "{% endfor %}"


def often(step: str) -> str:
    return "{% set many = range(99999)|list %}{% for i in many %}" + step + "{% endfor %}"


STEPS = {
    "a range": "{% for i in range(10**9) %}x{% endfor %}",
    "silent loops": often("{% for j in many %}{% endfor %}"),
    "loops that write": often("{% for j in many %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}"),
    "loops over nothing": often("{% for j in many if false %}{% endfor %}"),
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "calls": "{% macro m() %}{% endmacro %}" + often("{% for j in range(99) %}{{ m() }}{% endfor %}"),
    "recursive": "{% for x in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "blocks": "{% block a %}{% if [1]|random %}{{ self.a() }}{{ self.a() }}{% endif %}{% endblock %}",
    "a long body": often("{% if i %}{% endif %}" * 2900),
    "a long macro": "{% macro m() %}" + "{% if i %}{% endif %}" * 2900 + "{% endmacro %}" + often("{{ m() }}"),
    "sums": often("{{ many|sum }}"),
    "sorts": often("{% set y = many|sort %}"),
    "slices": BIG + often("{% set y = big[1:] %}"),
    "searches": BIG + often("{% if 'b' in big %}{% endif %}"),
    "searches of lists": often("{% if 'b' in many %}{% endif %}"),
    "searches of ranges": often("{% if 'b' in range(99999) %}{% endif %}"),
    "tests": often("{% if 'b' is in(many) %}{% endif %}"),
    "counts": BIG + often("{% set y = big.count('b') %}"),
    "splits": "{% set x = 'a ' * 100000 %}" + often("{% set y = x.split() %}"),
    "capitals": BIG + often("{% set y = big|upper %}"),
    "wraps": BIG + often("{{ big|wordwrap(3) }}"),
    "prints": often("{% set y = many|pprint %}"),
    "uniques": often("{% set y = many|unique|list %}"),
    "groups": often("{% set y = many|groupby('real') %}"),
    "selections": often("{% set y = many|select('odd')|list %}"),
    "a chain": grown("{% set ns.l = ns.l|select('defined') %}", 9999) + "{{ ns.l|list|length }}",
    "attributes": BIG + often("{{ {'a': big}|xmlattr }}"),
    "links": BIG + often("{{ big|urlize }}"),
    "JSON": often("{% for j in range(99) %}{{ {'a': [1, 2, 3]}|tojson }}{% endfor %}"),
    "our own filters": often("{% for j in many %}{% set y = [-10**9]|map('_body')|list %}{% endfor %}"),
    "searches from the right": BIG + "{{ big.rfind('ab' + 'a' * 4000000) }}",
    "searches of bytes": BIG + "{{ big.encode().rsplit(('ab' + 'a' * 4000000).encode()) }}",
    "strips": BIG + "{{ big.strip('b' * 8000000 + 'a') }}",
    "trims": BIG + "{{ big|trim('b' * 8000000 + 'a') }}",
    "brackets behind a link": "{{ (')' * 400000 ~ 'x)')|urlize }}",
    "a wide space, wrapped": "{{ (' ' * 900000)|wordwrap(1) }}",
    "numbers of texts": BIG + often("{% set y = big|float %}"),
    "deep prints": "{% set ns = namespace(x=range(80000)|list) %}"
    "{% for i in range(200) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|pprint }}",
    "tables of characters": BIG + often("{% set y = {}.fromkeys(big) %}"),
    "long beginnings": LONG + often("{% set y = 'x'.startswith(long) %}"),
    "long keys": LONG + often("{% set y = {}[long] %}"),
    "long keys, looked up": LONG + often("{% set y = {}.get(long) %}"),
    "long keys of tables": LONG + often("{% set y = {long: 1} %}"),
    "long attributes": LONG + "{{ ([{}] * 99999)|map(attribute=long)|list }}",
    "long numbers": "{% set x = 2 ** 8000 - 1 %}" + often("{% set y = x * x // (x - 1) %}"),
    "bytes of numbers": often("{% set y = (1).to_bytes(1000000, 'big') %}"),
    "many arguments": "{% macro m() %}{{ varargs|length }}{% endmacro %}" + LONG + often("{{ m(*long) }}"),
    "free turns": often("{% for j in [many]|map('_turns', 0)|first %}{% endfor %}"),
}
SIZES = {
    "tilde": grown("{% set ns.x = ns.x ~ ns.x %}"),
    "plus": grown("{% set ns.x = ns.x + ns.x %}"),
    "times": grown("{% set ns.x = ns.x * 2 %}"),
    "blocks that are set": grown("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "lists": grown("{% set ns.l = ns.l + ns.l %}"),
    "text times": "{{ 'a' * 10**10 }}", "times text": "{{ 10**10 * 'a' }}", "list times": "{% set x = [0] * 10**10 %}",
    "power": "{{ 9**(9**9) }}", "power of power": "{{ (2**16000)**16000 }}",
    "product": "{% set ns = namespace(x=2**8000) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "nested, written": grown("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
    "nested, as JSON": grown("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l|tojson }}",
    "nested, compared": grown("{% set ns.l = [ns.l, ns.l] %}{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.l == ns.x }}",
    "nested tables": grown("{% set ns.l = {'a': ns.l, 'b': ns.l} %}") + "{{ ns.l }}",
    "nested keys": grown("{% set ns.l = (ns.l, ns.l) %}") + "{{ {ns.l: 1} }}",
    "dict()": grown("{% set ns.l = dict(a=ns.l, b=ns.l) %}") + "{{ ns.l }}",
    "namespace()": grown("{% set ns.l = namespace(a=ns.l, b=ns.l) %}") + "{{ ns.l }}",
    "a namespace that grows": "{% set ns = namespace(a='') %}{% set l = [ns] * 99999 %}"
    "{% set ns.a = 'a' * 9999999 %}{{ l }}",
    "varargs": "{% macro m(n) %}{% if n %}{{ m(n-1, varargs, varargs) }}{% else %}"
    "{{ varargs }}{% endif %}{% endmacro %}{{ m(60, 1) }}",
    "cycler": grown("{% set ns.l = cycler(ns.l, ns.l).items %}") + "{{ ns.l }}",
    "defaults": grown("{% set ns.l = range(9)|map(attribute='z', default=ns.l)|list %}") + "{{ ns.l }}",
    "center": "{{ 'a'|center(10**10) }}", "ljust": "{{ 'a'.ljust(10**10) }}", "zfill": "{{ 'a'.zfill(10**10) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}", "expandtabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "a wide format": "{{ '%9999999999d'|format(1) }}", "a wide percent": "{{ '%9999999999d' % 1 }}",
    "a wide star": "{{ '%*d' % (10**9, 1) }}", "a wide brace": "{{ '{:9999999999}'.format(1) }}",
    "a wide inner brace": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "many wide formats": "{{ ('{0:99999}' * 100000).format(1) }}",
    "many wide stars": "{{ ('%*d' * 4000) % ((1000000, 1) * 4000) }}",
    "a star before a wide percent": "{{ '* %9999999999d' % 1 }}",
    "a wide item": "{{ '{:{a[0]}}'.format(1, a=[9999999999]) }}",
    "a wide text": "{{ '{:{w}}'.format(1, w='9999999999') }}",
    "a number of bytes": BIG + "{% set x = (1).from_bytes(big[:5000000].encode(), 'big') %}"
    "{% set y = (1).from_bytes(big[:2500000].encode(), 'big') %}{{ x // y > 1 or x is divisibleby y }}",
    "differences": "{% set ns = namespace(x=1) %}"
    "{% for i in range(70000) %}{% set ns.x = ns.x - (-ns.x) %}{% endfor %}{{ ns.x // 3 > 1 }}",
    "percents": BIG + "{{ '%s' * 100000 % (big,) }}", "named percents": BIG + "{{ ('%(a)s' * 100000) % {'a': big} }}",
    "braces": BIG + "{{ ('{0}' * 100000).format(big) }}", "formats": BIG + "{{ ('%(a)s' * 100000)|format(a=big) }}",
    "format_map": BIG + "{{ ('{a}' * 100000).format_map({'a': big}) }}",
    "replace": BIG + "{{ big.replace('a', big) }}", "replace, a filter": BIG + "{{ big|replace('a', big) }}",
    "replace nothing": BIG + "{{ big.replace('', 'abcdefgh') }}", "translate": BIG + "{{ big.translate({97: big}) }}",
    "join": BIG + "{{ big.join('a' * 99999) }}", "join, a filter": BIG + "{{ range(99999)|join(big) }}",
    "join of what comes": BIG + "{{ range(99999)|map('string')|join(big) }}",
    "indent": "{{ ('\\n' * 99999)|indent(99999, first=true, blank=true) }}",
    "JSON far to the right": "{{ [[[[1]]]]|tojson(indent=10**10) }}",
    "JSON behind a text": "{{ (range(99999)|list)|tojson(indent='a' * 99999) }}",
    "JSON far apart": "{{ (range(99999)|list)|tojson(separators=('a' * 99999, 'b')) }}",
    "wordwrap": BIG + "{{ ('a' * 99999)|wordwrap(1, wrapstring=big) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}", "slice": "{{ [1]|slice(10**10)|list }}",
    "slices searched": "{{ 5 in ([1]|slice(1000000)) }}", "slices as arguments": "{{ dict(*([1]|slice(1000000))) }}",
    "sums of lists": "{{ range(99999)|batch(1)|sum(start=[]) }}",
    "a text's items": BIG + "{{ (big|list)|length }}", "words": "{{ ('a ' * 8000000).split()|length }}",
    "time": "{{ strftime_now('%c' * 4000000) }}", "title": BIG + "{{ big|title }}",
    "what is kept": "{% set ns = namespace(l=[]) %}" + often("{% set ns.l = ns.l + [('x' * 8000000) ~ i] %}"),
    "what macros keep": "{% macro m(n) %}{% set x = 'a' * 15000000 ~ n %}"
    "{{ m(n-1) if n else '' }}{{ x|length }}{% endmacro %}{{ m(99) }}",
    "lists that macros keep": "{% macro m(n) %}{% set x = [n] * 1000000 %}"
    "{{ m(n-1) if n else '' }}{{ x|length }}{% endmacro %}{{ m(99) }}",
    "filler": "{{ lipsum(n=10**7) }}",
    "deep blocks": "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}  # fmt: skip


def main() -> None:
    used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, used + SPACE))
    tokenizer = SimpleNamespace(chat_templates={}, special_tokens={}, path="none")
    ends = {}
    for name in sys.argv[1:]:
        began = time.process_time()
        try:
            messages = [{"role": "user", "content": "Hi"}]
            rendered = render_chat(tokenizer, messages, chat_template=(STEPS | SIZES)[name])  # type: ignore[arg-type]
            field, limit = "rendered", f"{len(rendered)} characters"
        except InvalidArgument as error:
            field, limit = error.field, error.limit
        ends[name] = (time.process_time() - began, field, limit)
    json.dump(ends, sys.stdout)


if __name__ == "__main__":
    main()
