"""Model setups whose planted faults are diagnosed."""

from rollout_inspector.diagnose import Finding, Severity
from tests.samples.planted.plant import Case, ModelSetup

SETUPS = ("toggling", "stable", "bare", "headers", "pieces", "composed")

OPTIONS = ({}, {"history": True}, {"system": False}, {"tools": False})


def problem(case: Case, s: ModelSetup, findings: list[Finding]) -> str:
    """What is wrong with the findings; empty = the planted fault was named, at its step, and nothing else."""
    loud = [f for f in findings if f.severity is not Severity.INFO]
    right = [f for f in findings if f.kind in (case.kind, *case.also) and f.step == case.step]
    if case.start is not None and (places := [f.start for f in right if f.start != case.start]):
        return f"{s.name} {case.name}: the first wrong token is {case.start}, got {places}"
    false = [f for f in loud if f not in right]
    if (case.kind is None or right) and not false:
        return ""
    return (
        f"{s.name} {case.name}: wanted {case.kind} at {case.step}, got {[(f.kind, f.step, f.evidence) for f in loud]}"
    )


PAIRS = [
    ("qwen2.5", "vllm--chatml"), ("qwen3", "qwen3-coder"), ("qwen3", "qwen3.5-think"), ("qwen3", "qwq-32b"),
    ("llama3.1", "llama3.2"), ("llama3.1", "trl--llama3"), ("mistral-nemo", "mistral-nemo"),
    ("deepseek-r1", "deepseek-r1"), ("deepseek-r1", "deepseek-v3.1"), ("gpt-oss", "gpt-oss"),
]
