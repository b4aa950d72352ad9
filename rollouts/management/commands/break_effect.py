"""Compare what the policy does on both sides of a finding: from what was sampled, and from what was made of it.

Both sides have the same seeds. With --wait it prints the difference of their rewards with its 95 % interval.
"""

from rollouts.management.commands import fork
from rollouts.store.models import StoredTrajectory
from rollouts.store.runs.forks import ForkFigures, effects_of


class Command(fork.Command):
    of_finding = True

    def tell(self, trajectory: StoredTrajectory, figures: list[ForkFigures], as_json: bool) -> None:
        """Print the effect."""
        (effect,), sides = effects_of(figures), {figure.side: figure for figure in figures}
        change = effect.reward
        result = {
            name: {"run": sides[name].run, "mean": sides[name].reward_mean, "n": sides[name].finished}
            for name in ("sampled", "broken")
        } | {"difference": change.difference, "interval": list(change.interval), "seen": change.is_seen}
        self.print_result(as_json, result, " ".join(f"{what}: {words}." for what, words in effect.words.items()))
