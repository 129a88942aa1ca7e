"""The KubeRoll operator. Never imports torch, ray or vllm."""
