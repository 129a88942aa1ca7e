"""The calculator's agent with LangChain, whose agents run on LangGraph: pip install langchain langchain-openai"""

from __future__ import annotations

from calculator import INSTRUCTIONS, MAX_CALLS, add, multiply, result, tool_choice
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware, wrap_model_call
from langchain.tools import tool
from langchain_openai import ChatOpenAI

from kuberoll_workers.environments.agents import AgentEpisode, AgentResult


async def play(episode: AgentEpisode) -> AgentResult:
    """Let the graph call tools until the policy answers."""

    @wrap_model_call
    async def choose(request, handler):
        first = request.messages[-1].type == "human"
        return await handler(request.override(tool_choice=tool_choice(episode) if first else "auto"))

    stream = episode.config.get("stream", False)
    model = ChatOpenAI(model=episode.model, base_url=episode.base_url, api_key=episode.token, streaming=stream)
    agent = create_agent(
        model,
        [tool(add), tool(multiply)],
        system_prompt=INSTRUCTIONS,
        middleware=[choose, ModelCallLimitMiddleware(run_limit=MAX_CALLS)],
    )
    state = await agent.ainvoke({"messages": list(episode.messages)})
    return result(episode, state["messages"][-1].text)
