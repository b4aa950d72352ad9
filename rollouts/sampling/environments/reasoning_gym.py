"""reasoning-gym: generated tasks; each data set has a scorer. The package is imported when tasks are made."""

import importlib.util
import random
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rollout_inspector.refusal import Refusal
from rollouts.sampling.environments.protocol import Outcome, Task, import_package

FAMILIES: dict[str, list[str]] = {
    "algebra": "complex_arithmetic polynomial_equations simple_equations".split(),  # noqa: SIM905
    "algorithmic": """
        ab base_conversion binary_alternation caesar_cipher count_primes cryptarithm game_of_life graph_color
        group_anagrams jugs letter_counting letter_jumble manipulate_matrix number_filtering number_sorting
        palindrome_generation palindrome_partitioning pool_matrix rotate_matrix rotten_oranges sentence_reordering
        spell_backward string_manipulation string_splitting string_synthesis word_sequence_reversal word_sorting
    """.split(),  # noqa: SIM905
    "arc": "arc_1d arc_agi rearc".split(),  # noqa: SIM905
    "arithmetic": """
        basic_arithmetic bitwise_arithmetic calendar_arithmetic chain_sum count_bits decimal_arithmetic
        decimal_chain_sum dice fraction_simplification gcd gsm_symbolic lcm leg_counting number_format
        power_function prime_factorization products time_intervals
    """.split(),  # noqa: SIM905
    "code": "bf".split(),  # noqa: SIM905
    "cognition": """
        color_cube_rotation figlet_font modulo_grid needle_haystack number_sequence rectangle_count rubiks_cube
    """.split(),  # noqa: SIM905
    "games": """
        boxnet emoji_mystery futoshiki kakurasu mahjong_puzzle maze mini_sudoku rush_hour sokoban sudoku survo
        tower_of_hanoi tsumego
    """.split(),  # noqa: SIM905
    "geometry": "advanced_geometry simple_geometry".split(),  # noqa: SIM905
    "graphs": """
        course_schedule family_relationships largest_island path_star quantum_lock shortest_path
    """.split(),  # noqa: SIM905
    "logic": "aiw circuit_logic knights_knaves propositional_logic self_reference syllogism".split(),  # noqa: SIM905
    "probability": "coin_flip".split(),  # noqa: SIM905
}
"""Topic of the package -> its data sets on offer: all that it registers, except those in ``WITHHELD``."""

DATASETS: tuple[str, ...] = tuple(sorted(name for names in FAMILIES.values() for name in names))

_EVALUATES = "its scorer evaluates the model's answer as Python code."
_BY_PROCESS = "it makes other tasks in every process, so a run could not be repeated."
WITHHELD: dict[str, str] = {
    "acre": "its first tasks depend on how many tasks are asked for.",
    "binary_matrix": _EVALUATES,
    "codeio": "it executes programs to make its tasks.",
    "composite": "it has no tasks of its own; choose one of its parts.",
    "countdown": _EVALUATES,
    "game_of_life_halting": "its scorer accepts every answer as right.",
    "intermediate_integration": _EVALUATES,
    "isomorphic_strings": _BY_PROCESS,
    "knight_swap": _BY_PROCESS,
    "list_functions": _BY_PROCESS,
    "n_queens": _EVALUATES,
    "polynomial_multiplication": _EVALUATES,
    "puzzle24": _EVALUATES,
    "ransom_note": _BY_PROCESS,
    "simple_integration": _EVALUATES,
    "spiral_matrix": _EVALUATES,
    "string_insertion": _EVALUATES,
    "word_ladder": _BY_PROCESS,
    "zebra_puzzles": "it needs pycosat, which has to be compiled.",
}
"""Data sets that are not offered, and why."""

_importing = threading.Lock()


def load_package() -> ModuleType:
    """Import the package. Raises :class:`Refusal` when it is not installed."""
    with _importing:
        if "reasoning_gym" not in sys.modules and importlib.util.find_spec("pycosat") is None:
            # One withheld data set needs this compiled module, but the package imports it for all data sets.
            sys.modules["pycosat"] = ModuleType("pycosat")
            try:
                return import_package("reasoning_gym.utils")
            finally:
                del sys.modules["pycosat"]
        return import_package("reasoning_gym.utils")


class ReasoningGymEpisode:
    """One turn. The data set scores the text between the last ``<answer>`` tags."""

    def __init__(self, dataset: Any, entry: dict[str, Any]) -> None:
        self._dataset, self._entry = dataset, entry

    def step(self, message: Mapping[str, Any]) -> Outcome:
        content = message.get("content")
        answer = load_package().utils.extract_answer(content) if isinstance(content, str) else None
        if answer is None:
            return self._end(0.0, False, "no_answer")
        try:
            score = float(self._dataset.score_answer(answer, self._entry))
        except Exception:
            # Some scorers raise on what a model may write. The answer is then wrong.
            return self._end(0.0, True, "answer_unreadable")
        return self._end(score, True, "answered")

    def truncated(self, reason: str) -> Outcome:
        return self._end(0.0, False, reason)

    def _end(self, score: float, formatted: bool, reason: str) -> Outcome:
        parts = {"score": score, "formatted": float(formatted)}
        return Outcome(messages=[], done=True, reward=score, reward_parts=parts, stop_reason=reason)


class ReasoningGymEnvironment:
    """Tasks of one data set. Equal seeds make equal tasks, so a worker can make again what the scorer needs."""

    def __init__(self, dataset: str) -> None:
        self.name = f"reasoning_gym:{dataset}"
        self._dataset = dataset
        self._made: dict[int, Any] = {}

    def tasks(self, n: int, seed: int) -> list[Task]:
        """Raises :class:`Refusal` when the package is not installed."""
        system = load_package().utils.SYSTEM_PROMPTS["default"].strip()
        dataset_seed = random.Random(f"reasoning gym tasks {seed}").randrange(2**31)
        dataset = self._load(dataset_seed)
        tasks = []
        for index in range(n):
            entry = dataset[index]
            messages = [{"role": "system", "content": system}, {"role": "user", "content": str(entry["question"])}]
            answer = None if entry["answer"] is None else str(entry["answer"])
            tasks.append(Task(messages, None, answer, index, {"seed": dataset_seed}))
        return tasks

    def start(self, task: Task) -> ReasoningGymEpisode:
        """Raises :class:`Refusal` when another version of the package makes another task."""
        dataset = self._load(task.data["seed"])
        entry = dataset[task.index]
        if str(entry["question"]) != task.messages[-1]["content"]:
            raise Refusal(
                f"{self.name} makes another task {task.index} here than where the run was launched; "
                "install the same version of reasoning-gym in both places."
            )
        return ReasoningGymEpisode(dataset, entry)

    def _load(self, seed: int) -> Any:
        package = load_package()
        if seed not in self._made:
            self._made[seed] = package.create_dataset(self._dataset, seed=seed)
        return self._made[seed]
