"""Chat templates in the manners of known families, for tests."""

from __future__ import annotations

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' +
    message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{ bos_token }}
{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n'
        + message['content'] | trim + '<|eot_id|>' %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, '
            + 'with the exception of an initial system message') }}
    {%- endif %}
{%- endfor %}
"""

TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(count=0, seen=false) %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' }}{{ {"name": call.function.name,
        "arguments": call.function.arguments} | tojson }}{{ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

PARTS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content
    %}{{ part.text }}{% endfor %}{% endif %}
{% generation %}{% endgeneration %}<|im_end|>
{% endfor %}"""

THINKING = """{% for message in messages %}{% set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content
    %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Drops an answer's thoughts as soon as it is history."""

MACROS = """{%- macro value(v, quote=true) -%}
    {%- if v is string -%}{{ '"' ~ v ~ '"' if quote else v }}
    {%- elif v is boolean -%}{{ 'yes' if v else 'no' }}
    {%- elif v is mapping -%}{
        {%- for k, inner in v | dictsort %}{{ k }}:{{ value(inner, quote=quote) }}{% if not loop.last %},
        {% endif %}{% endfor -%}
    }
    {%- elif v is sequence -%}[{% for inner in v %}{{ value(inner) }}{{ ',' if not loop.last }}{% endfor %}]
    {%- else -%}{{ v }}
    {%- endif -%}
{%- endmacro -%}
{%- macro turn(role) -%}<{{ role | upper }}{{ varargs | join('/') }}{{ kwargs | length }}>{{
    caller() | trim }}</{{ role }}>{%- endmacro -%}
{%- set ns = namespace(previous=none, roles=[]) -%}
{%- for tool in tools or [] -%}{{ tool | tojson(indent=2) }}|{{ value(tool.function, quote=false) }}{%- endfor -%}
{%- for message in messages -%}
    {%- set ns.roles = ns.roles + [message.role] -%}
    {%- call turn(message.role, loop.index, last=loop.last) -%}
        {%- for part in (message.content or '').split('</think>') -%}{{ part | replace('Hi',
        'Ho') | indent(2) }}{% endfor -%}
        {%- for call in message.tool_calls or [] %}{{ value(call.function.arguments) }}{% endfor -%}
        {%- filter upper %}after {{ ns.previous | default('nothing', true) }}{% endfilter -%}
    {%- endcall -%}
    {%- set ns.previous = message.role -%}
{%- endfor -%}
{{ ns.roles | unique | join(', ') }} {{ '%s of %3d' % (ns.roles[-1], messages | length) }} {{ '{:>5}|{}'.format('x',
ns.roles[:1]) }}
{%- set text %}{{ messages | map(attribute='role') | list }}{{ (1, 2) + (3,) }}{{ 'ab' * 3 }}{{ 2 ** 10 }}{% endset -%}
{{ text }}{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}
{%- for row in range(5) | batch(2, 'x') %}{{ row }}{{ loop.length }}{% endfor %}{% for a in [[1, [2]], 3] recursive %}
{{- loop(a) if a is iterable else a }}{% endfor %}{{ 'b' in 'abc' }}{{ 1 < 2 < 3 }}{{ messages[0].role is in ['user',
'system'] }}
{%- if add_generation_prompt %}<ASSISTANT>{% endif -%}"""
"""All that jinja has and a template may use."""

HARMONY = """{% for message in messages %}{{- '<|start|>' + message.role }}
{%- if message.role == 'assistant' %}
    {%- if '<|' in message.content %}{{ raise_exception('thoughts are passed as such') }}{% endif %}
    {%- if message.thinking and loop.last %}
        {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
    {%- endif %}
    {{- '<|channel|>final' }}
{%- endif %}{{ '<|message|>' + message.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""As gpt-oss': an answer has parts, of which the thoughts are no history."""

CALLS_AS_TEXT = """{{ bos_token + 'Tools.' }}{% for message in messages %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined %}
    {%- for call in message['tool_calls'] %}
        {%- if loop.first and message['content'] is not none %}{{ message['content'] + '|' }}{% endif %}
        {{- '<call>' + call['function']['name'] + '<sep>' + call['function']['arguments'] + '</call>' }}
    {%- endfor %}{{ eos_token }}
{%- else %}{{ '<' + message['role'] + '>' + message['content'] }}{% endif %}{% endfor %}"""
"""As DeepSeek-V3.1's and functionary's: a message without content has it none, and arguments are put between texts."""

CALLS_AS_TEXT_WITH_CONTENT = """{% for message in messages %}
{%- if message.content is not string %}{{ raise_exception('Invalid message') }}{% endif %}
{{- '<' + message.role + '>' + message.content }}
{%- for call in message.tool_calls or [] %}
    {%- if call.type != 'function' %}{{ raise_exception('Invalid type') }}{% endif %}
    {{- '[{"' + call.function.name + '": ' + call.function.arguments + '}]' }}
{%- endfor %}{% endfor %}"""
"""As Apertus': a message has a content, even if that is empty."""

CALLS_WRITTEN_OUT = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}{"name": "{{ call.function.name }}", "arguments": {{
call.function.arguments }}}{% endfor %}{% endfor %}"""
"""Takes anything, and writes what Python makes of it."""

CALLS_OF_BOTH = """{% for message in messages %}{{ '<' + message.role + '>' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{% set call = call.function %}{{ call.name }}
    {%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
{%- endfor %}{% endfor %}"""
"""As Qwen3's: text stays as it is."""

CALLS_BY_ITEM = """{% for message in messages %}{{ '<' + message.role + '>' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}(
{%- if call.function.arguments is mapping %}{% for name, value in call.function.arguments.items() %}
    {{- name }}={{ value | tojson }}{% endfor %}{% else %}{{ '{' + call.function.arguments + '}' }}{% endif %})
{%- endfor %}{% endfor %}"""
"""As Gemma 4's: what it makes of text no model has seen."""

HARMONY_CALLS = """{% set last = namespace(name=none) %}{% for message in messages %}
{%- if message.role == 'assistant' %}
    {%- if '<|channel|>' in (message.content or '') %}{{ raise_exception('thoughts are passed as such') }}{% endif %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
        {%- if message.content and message.thinking %}{{ raise_exception('one or the other') }}{% endif %}
        {%- if message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- elif message.role == 'tool' %}
    {%- if last.name is none %}{{ raise_exception('nothing was called') }}{% endif %}
    {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
    {{- message.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""As gpt-oss' that calls tools: one a message, by the thoughts or by what is said before, not both."""
