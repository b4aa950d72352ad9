"""The Django app that launches, stores and works. What a trainer imports is `rollout_inspector`."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

EARLIER = {
    "rollouts.guard": "rollout_inspector.guard",
    "rollouts.client": "rollout_inspector.client.client",
    "rollouts.adapters": "rollout_inspector.client.adapters",
    "rollouts.engines": "rollouts.sampling.engines",
    "rollouts.demo_policy": "rollouts.sampling.demo_policy",
}
"""Earlier names of modules, and what they are called now. Programs of users go on importing them."""


class _EarlierNames(MetaPathFinder, Loader):
    """Finds a module by its earlier name, with all below it: it is the same module under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_earlier = ".".join(fullname.split(".", 2)[:2]) in EARLIER
        return ModuleSpec(fullname, self) if is_earlier else None

    def exec_module(self, module: ModuleType) -> None:
        earlier = ".".join(module.__name__.split(".", 2)[:2])
        sys.modules[module.__name__] = import_module(EARLIER[earlier] + module.__name__.removeprefix(earlier))


sys.meta_path.insert(0, _EarlierNames())
