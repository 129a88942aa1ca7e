"""The calculator's agent with the OpenAI Agents SDK: pip install openai-agents"""

from __future__ import annotations

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from calculator import INSTRUCTIONS, MAX_CALLS, add, multiply, result, tool_choice
from openai import AsyncOpenAI

from kuberoll_workers.environments.agents import AgentEpisode, AgentResult

set_tracing_disabled(True)  # traces would be sent to OpenAI
MODELS = {"chats": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def play(episode: AgentEpisode) -> AgentResult:
    """Let the SDK call tools until the policy answers."""
    kind = MODELS[episode.config.get("api", "chats")]
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.token) as client:
        agent = Agent(
            name="calculator",
            instructions=INSTRUCTIONS,
            tools=[function_tool(add), function_tool(multiply)],
            model=kind(model=episode.model, openai_client=client),
            # After its first call the SDK lets the policy choose.
            model_settings=ModelSettings(tool_choice=tool_choice(episode)),
        )
        try:
            run = await Runner.run(agent, list(episode.messages), max_turns=MAX_CALLS)
        except (MaxTurnsExceeded, ModelBehaviorError):
            return result(episode, None)
    return result(episode, run.final_output)
