"""The calculator's agent with Pydantic AI: pip install 'pydantic-ai-slim[openai]'"""

from __future__ import annotations

from calculator import INSTRUCTIONS, MAX_CALLS, add, multiply, result, tool_choice
from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from kuberoll_workers.environments.agents import AgentEpisode, AgentResult


async def play(episode: AgentEpisode) -> AgentResult:
    """Let the framework call tools until the policy answers."""
    provider = OpenAIProvider(base_url=episode.base_url, api_key=episode.token)
    agent = Agent(
        OpenAIChatModel(episode.model, provider=provider),
        instructions=INSTRUCTIONS,
        tools=[add, multiply],
        # A number is answered by a call, too: then the framework demands a call each time.
        output_type=int if tool_choice(episode) == "required" else str,
    )
    question = episode.messages[-1]["content"]
    try:
        run = await agent.run(question, usage_limits=UsageLimits(request_limit=MAX_CALLS))
    except (UsageLimitExceeded, UnexpectedModelBehavior):
        return result(episode, None)
    return result(episode, run.output)
