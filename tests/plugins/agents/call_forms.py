# ruff: noqa: E501 (a table of texts)
"""What models of each family write when they call ``get_weather(city="Paris", days=2)``, some of
them twice.
"""

from __future__ import annotations

from typing import Any

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}}, "more": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    },
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": PARAMETERS}}
    for name in ("get_weather", "get_time")
]
ONE = [("get_weather", {"city": "Paris", "days": 2})]
TWO = [*ONE, ("get_time", {"city": "東京"})]
TYPED = [
    (
        "get_weather",
        {"city": "12", "days": 2, "metric": True, "places": ["a", "b"], "more": {"x": [1]}},
    )
]

SEP = "<｜tool▁sep｜>"
DS, DE, DSS, DES = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
KS, KE, KA = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
PARIS, TOKYO = '{"city": "Paris", "days": 2}', '{"city": "東京"}'

FORMS: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", "qwen25",
        'I look.\n'
        '<tool_call>\n'
        f'{{"name": "get_weather", "arguments": {PARIS}}}\n'
        '</tool_call>', ONE),
    ("hermes, two", "qwen25",
     f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
     f'<tool_call>\n{{"name": "get_time", "parameters": {TOKYO}}}\n</tool_call>', TWO),
    ("glm-4.5", "glm45",
     "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>", ONE),
    ("glm-4.5, types", "glm45",
     "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>2</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n<arg_key>places</arg_key>\n"
     '<arg_value>["a", "b"]</arg_value>\n<arg_key>more</arg_key>\n<arg_value>{"x": [1]}</arg_value>\n</tool_call>', TYPED),
    ("glm-4.7", "glm47",
     "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
     "<arg_value>2</arg_value></tool_call><tool_call>get_time<arg_key>city</arg_key><arg_value>東京</arg_value></tool_call>",
     TWO),
    ("deepseek v3", "deepseekv3",
     f"I look.{DSS}{DS}function{SEP}get_weather\n"
     "```json\n"
     f"{PARIS}\n"
     f"```{DE}\n"
     f"{DS}function{SEP}get_time\n"
     "```json\n"
     f"{TOKYO}\n"
     f"```{DE}{DES}", TWO),
    ("deepseek v3.1", "deepseekv31", f"I look.{DSS}{DS}get_weather{SEP}{PARIS}{DE}{DS}get_time{SEP}{TOKYO}{DE}{DES}", TWO),
    ("kimi k2", "kimi_k2",
     "I "
     f"look.<|tool_calls_section_begin|>{KS}functions.get_weather:0{KA}{PARIS}{KE}{KS}functions.get_time:1{KA}{TOKYO}{KE}<|tool_calls_section_end|>", TWO),
    ("llama 3, tag", "llama3", f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}', ONE),
    ("llama 3, whole", "llama3",
     f'{{"name": "get_weather", "parameters": {PARIS}}};{{"name": "get_time", "parameters": '
     f'{TOKYO}}}', TWO),
    ("llama 4", "pythonic", '[get_weather(city="Paris", days=2), get_time(city="東京")]', TWO),
    ("qwen3-coder", "qwen3_coder",
     "I look.\n"
     "<tool_call>\n"
     "<function=get_weather>\n"
     "<parameter=city>\n"
     "Paris\n"
     "</parameter>\n"
     "<parameter=days>\n"
     "2\n"
     "</parameter>\n"
     "</function>\n"
     "</tool_call>", ONE),
    ("qwen3-coder, types", "qwen3_coder",
     "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
     "<parameter=metric>\ntrue\n</parameter>\n<parameter=places>\n[\"a\", \"b\"]\n</parameter>\n"
     '<parameter=more>\n{"x": [1]}\n</parameter>\n</function>\n</tool_call>', TYPED),
    ("mistral", "mistral",
     f'I look.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": '
     f'"get_time", "arguments": {TOKYO}}}]',
     TWO),
    ("mistral, later", "mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time[ARGS]{TOKYO}", TWO),
]  # fmt: skip
NO_CALLS = [
    ("qwen25", "<tool_call>\n{oops}\n</tool_call>"), ("glm45",
        "<tool_call>get_weather\n"
        "<arg_key>city</arg_key>"),
    ("deepseekv31", f"{DSS}{DS}get_weather{SEP}{{oops{DE}{DES}"), ("kimi_k2", f"{KS}functions.get_weather:0{KA}"),
    ("llama3", '{"city": "Paris"}'), ("pythonic", "[1, 2]"), ("pythonic", "[open('x').read()]"),
    ("mistral", "[TOOL_CALLS] [{oops"), ("qwen3_coder", "<tool_call>\n<function=\n</tool_call>"),
]  # fmt: skip
