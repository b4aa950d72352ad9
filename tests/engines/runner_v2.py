"""Runs vLLM's Model Runner V2 on its CPU build by Triton's interpreter: ``pytest -p tests.engines.runner_v2``.

On a GPU a dense model gets this runner. The CPU build falls back to V1, because Triton has no backend for a CPU. The
stand-in here says that it has one, and the interpreter runs the kernels as Python. That shows what the runner does, and
nothing of speed, memory or compiled kernels. The process needs ``TRITON_INTERPRET=1`` and the package ``triton``.
"""

from types import SimpleNamespace
from typing import Any

import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def _in_plain_torch(logits: Any, k: Any, p: Any, *_: Any, **__: Any) -> Any:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, k, p)


def pytest_configure() -> None:
    """The interpreter cannot run the kernel of top_k and top_p; vLLM's own version in PyTorch takes its place."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import sampler, states

    for module in (topk_topp_sampler, sampler, states):
        if hasattr(module, "apply_top_k_top_p"):
            module.apply_top_k_top_p = _in_plain_torch
