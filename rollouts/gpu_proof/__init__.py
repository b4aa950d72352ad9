"""The proof on a GPU: real rollouts through the worker's own code on vLLM, every id and log-probability checked."""
