"""The special tokens, and how a conversation is written with them."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (END_OF_TEXT, PAD, *(f"<|{role}|>" for role in ROLES), END_OF_TURN)
"""In the order of their ids, from 0, in a tokenizer that is trained here."""

CHAT_TEMPLATE = """\
{%- set described = 'Tools: ' + tools | tojson if tools else '' -%}
{%- if described and messages[0]['role'] != 'system' -%}{{- '<|system|>\\n' + described + '<|end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}
{{- ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n' -}}
{{- call['function'] | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endgeneration -%}
{%- elif message['role'] == 'tool' -%}
{{- '<tool_response>\\n' + message['content'] + '\\n</tool_response><|end|>' -}}
{%- else -%}
{{- message['content'] + ('\\n\\n' + described if described and message['role'] == 'system' else '') + '<|end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
"""Jinja, as transformers renders it: role, line break, content, end of turn, line break. Every line break that counts
is in a string, because transformers' `trim_blocks` eats those of the template. `generation` marks what the assistant
learns: its answer and the end of its turn. Tools are described by the system; calls of them and their answers are
written in Hermes' form (Qwen2.5's template too), an answer as the user's turn."""
