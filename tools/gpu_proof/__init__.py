"""The proof on a GPU: real rollouts on vLLM through the worker's own code. Every id and log-probability is checked."""
