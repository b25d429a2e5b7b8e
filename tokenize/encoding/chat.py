"""The special tokens, and how a conversation is written with them."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (END_OF_TEXT, PAD, *(f"<|{role}|>" for role in ROLES), END_OF_TURN)
"""In the order of their ids, from 0, in a tokenizer that is trained here."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
"""Jinja, as transformers renders it: role, line break, content, end of turn, line break. Every line break that counts
is in a string, because transformers' `trim_blocks` eats those of the template. `generation` marks what the assistant
learns: its answer and the end of its turn."""
