"""Black-box agents: programs that speak to an OpenAI or Anthropic endpoint and are trained as they are."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass
class AgentConfig:
    _title = "agents"

    agent_function_path: str = flag(
        None,
        kind="hook",
        help="agent program run(task), sync or async, that calls the model through task.openai_base_url or "
        "task.anthropic_base_url and returns a reward or None; sets --custom-generate-function-path",
    )
    agent_command: str = flag(
        None,
        help="agent program as a command line: it finds OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, "
        "ANTHROPIC_API_KEY, SLIME_MODEL and SLIME_TASK (JSON) in its environment",
    )
    agent_timeout: float = flag(
        1800.0, above=0, help="seconds that an agent program may take; then its sample is left out"
    )
    agent_tool_parser: str = flag(
        "auto",
        help="reads tool calls in the model's text: auto (by the chat template, then the model type), hermes, qwen25, "
        "qwen3_coder, glm45, glm47, deepseekv3, deepseekv31, kimi_k2, llama3, pythonic, mistral, none, another name of "
        "the installed SGLang's, or a class of your own",
    )
    agent_reasoning_parser: str = flag(
        "auto",
        help="takes reasoning out of the answer: auto (by the chat template and the tokenizer), none, or a name of "
        "SGLang's such as qwen3, deepseek-r1, glm45, kimi_k2, kimi, mistral",
    )
    agent_host: str = flag("127.0.0.1", help="this machine's address, under which agent programs reach the endpoint")
