"""Prints the names of vLLM's parsers, as JSON: field of the configuration -> names that it may have."""

import json

from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

if __name__ == "__main__":
    managers = {"tool_parser": ToolParserManager, "reasoning_parser": ReasoningParserManager}
    print(json.dumps({field: manager.list_registered() for field, manager in managers.items()}))
