"""Log-probabilities of stored tokens, by vLLM itself: `python rescore.py MODEL < ids.json`, run as a process."""

from __future__ import annotations

import json
import os
import sys

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    ids = json.load(sys.stdin)
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        block_size=32,
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = engine.generate([TokensPrompt(prompt_token_ids=ids)], sampling)
    scored = [
        None if entry is None else entry[token].logprob
        for token, entry in zip(ids, output.prompt_logprobs, strict=True)
    ]
    json.dump(scored, reports)
    reports.flush()


if __name__ == "__main__":
    main()
