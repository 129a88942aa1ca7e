"""The calculator's agent with OpenAI's SDK alone: a loop of one's own."""

from __future__ import annotations

from calculator import INSTRUCTIONS, MAX_CALLS, Number, add, multiply, result, tool_choice
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel, ValidationError

from kuberoll_workers.environments.agents import AgentEpisode, AgentResult


class Numbers(BaseModel):
    """Arguments of both tools."""

    a: Number
    b: Number


FUNCTIONS = {"add": add, "multiply": multiply}
TOOLS = [
    pydantic_function_tool(Numbers, name=name, description=function.__doc__) for name, function in FUNCTIONS.items()
]


async def play(episode: AgentEpisode) -> AgentResult:
    """Let the policy call tools until it answers."""
    messages = [{"role": "system", "content": INSTRUCTIONS}, *episode.messages]
    choice = tool_choice(episode)
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.token) as client:
        for _ in range(MAX_CALLS):
            completion = await client.chat.completions.create(
                model=episode.model, messages=messages, tools=TOOLS, tool_choice=choice
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return result(episode, message.content)
            messages.append(message)
            for call in message.tool_calls:
                output = calculate(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
            choice = "auto"
    return result(episode, None)


def calculate(name: str, arguments: str) -> str:
    """What a call of a tool gives."""
    try:
        return str(FUNCTIONS[name](**Numbers.model_validate_json(arguments).model_dump()))
    except (KeyError, ValidationError) as error:
        return f"Error: {error}"
