"""Pickles that a user converts: slime's and SkyRL's are read, a hostile one does nothing, and the server opens none."""

import ast
import gzip
import io
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any, Tuple  # noqa: UP035

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from rollout_inspector.formats import FileRefused, Source
from rollout_inspector.streams.trajectory import Trajectory
from tests.samples.formats import read
from tests.samples.product import source_files

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent.parent


def convert(data: bytes, folder: Path) -> list[Trajectory]:
    source, target = folder / "dump.pt", folder / "out.jsonl"
    source.write_bytes(data)
    call_command("convert_pickle", source, target, stdout=io.StringIO())
    name, found, rejected = read(target.read_bytes())
    assert (name, rejected) == ("own_jsonl", [])
    return found


def saved(value: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **more)
    return file.getvalue()


def sample(index: int, **more: Any) -> dict[str, Any]:
    """The fields of slime's ``Sample.to_dict()`` that say something, as slime/utils/types.py has them."""
    return {
        "index": index, "group_index": 0, "prompt": "2+2?", "tokens": [1, 2, 3, 10, 20, 11], "response": "4",
        "response_length": 3, "label": "4", "reward": 1.0, "loss_mask": [1, 0, 1], "weight_versions": ["3"],
        "rollout_log_probs": [-0.5, 0.0, -0.25], "remove_sample": False, "status": "completed", "metadata": {"a": 1},
        "spec_info": {"spec_verify_ct": 0}, **more,
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_a_slime_dump(tmp_path: Path, zipped: bool) -> None:
    dump = {
        "rollout_id": 7,
        "samples": [
            sample(0), sample(1, loss_mask=None, rollout_log_probs=torch.tensor([-1.0, -2.0, -3.0])),
            sample(
                1, remove_sample=True, reward={"form": 1, "score": np.float32(0.5)}, status="truncated", label="\ud800"
            ),
        ],
    }
    found = convert(saved(dump, _use_new_zipfile_serialization=zipped), tmp_path)
    assert [one.external_id for one in found] == ["7-0", "7-1", "7-1+"] and {one.group for one in found} == {"0"}
    first, second, third = (one.rows[0] for one in found)
    assert first.ids.tolist() == [1, 2, 3, 10, 20, 11] and first.loss_mask.tolist() == [False] * 3 + [True, False, True]
    assert first.logprobs is not None and first.logprobs[3:].tolist() == [-0.5, 0.0, -0.25]
    assert np.isnan(first.logprobs[:3]).all() and first.extra["metadata"] == {"a": 1}
    assert second.loss_mask.tolist() == [False] * 3 + [True] * 3 and second.logprobs is not None
    assert second.logprobs[3:].tolist() == [-1, -2, -3]
    assert found[2].reward_parts == {"form": 1, "score": 0.5} and third.extra["label"] == "?"
    assert not third.loss_mask.any() and found[2].reward == 0.5 and found[2].stop_reason == "truncated"


def skyrl_module() -> ModuleType:
    """Stand-ins of the names and the reduction that skyrl/backends/skyrl_train/training_batch.py has."""
    module = ModuleType("skyrl.backends.skyrl_train.training_batch")

    def rebuild(cls: Any, state: Any) -> Any:
        raise AssertionError("the package's own code was run")

    class TrainingInputBatch(dict[str, Any]):
        metadata: dict[str, Any]

        def __reduce__(self) -> Any:
            arrays = {
                key: None if value is None else
                {"format": "torch", "data": saved(value)} if value.dtype == torch.bfloat16 else
                {"format": "numpy", "data": value.numpy().tobytes(), "shape": tuple(value.shape),
                 "dtype": str(value.numpy().dtype)}
                for key, value in self.items()
            }
            state = {"batch_dict": arrays, "batch_size": 3, "device": torch.device("cpu"), "metadata": self.metadata}
            return rebuild, (TrainingInputBatch, state)

    rebuild.__module__ = TrainingInputBatch.__module__ = module.__name__
    rebuild.__qualname__ = "_rebuild_tensor_batch"
    TrainingInputBatch.__qualname__ = "TrainingInputBatch"
    module._rebuild_tensor_batch = rebuild  # type: ignore[attr-defined]
    module.TrainingInputBatch = TrainingInputBatch  # type: ignore[attr-defined]
    return module


def test_a_skyrl_training_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = skyrl_module()
    for name in ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    batch = module.TrainingInputBatch(
        sequences=torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 0, 0, 0, 0]]),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]),
        response_mask=torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0]]),
        loss_mask=torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 0]]),
        rewards=torch.tensor([[0, 0, 1.0], [0, 0, 0.5], [0, 0, 0]]).bfloat16(),
        rollout_logprobs=torch.tensor([[0, -0.5, -0.25], [-1, 0, -2.0], [0, 0, 0]]),
        advantages=torch.tensor([[0, 0.5, 0.5], [1, 0, 1.0], [0, 0, 0]]),
        pixel_values=None,
    )
    batch.metadata = {"uids": ["p", "q", "p"], "pad_size": 1}
    data = pickle.dumps(batch)
    for name in [name for name in sys.modules if name.split(".")[0] == "skyrl"]:
        monkeypatch.delitem(sys.modules, name)
    first, second = convert(data, tmp_path)
    row = first.rows[0]
    assert row.ids.tolist() == [1, 2, 3, 4] and row.loss_mask.tolist() == [False, False, True, True]
    assert row.logprobs is not None and row.logprobs[2:].tolist() == [-0.5, -0.25] and np.isnan(row.logprobs[:2]).all()
    assert row.columns["advantages"].tolist() == [0, 0, 0.5, 0.5] and (first.reward, first.group) == (1.0, "p")
    assert second.rows[0].loss_mask.tolist() == [False, False, True, False, True] and second.reward == 0.5


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Hostile(mark)))
    assert mark.exists()
    mark.unlink()
    hostile = {"rollout_id": 1, "samples": [sample(0, metadata={"x": Hostile(mark)})]}
    for data in (pickle.dumps(hostile), saved(hostile), saved(hostile, _use_new_zipfile_serialization=False)):
        convert(data, tmp_path)
        assert not mark.exists()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": 1}, "neither a slime debug dump"),
        ([1], "holds a list"),
        ({"samples": []}, "no samples"),
        ({"samples": [3]}, r"samples\[0\] is not an object"),
        ({"samples": [sample(0, response_length=9)]}, "response_length is 9, but there are 6"),
        ({"samples": [sample(0, tokens=["a"])]}, "not a list of numbers"),
        ({"samples": [sample(0, response_length="x")]}, "of an unknown shape"),
        ({"samples": [sample(0, loss_mask=[[1, 1, 1]])]}, "of an unknown shape"),
        ({"sequences": torch.tensor([[1, 2]]), "response_mask": torch.tensor([1])}, "of an unknown shape"),
        ({"samples": [sample(0, tokens=[-1], response_length=0)]}, "not a flat list of token ids"),
    ],
)
def test_what_is_no_dump_is_refused_with_a_sentence(value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=says):
        convert(pickle.dumps(value), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump.pt"]


def test_damaged_and_absent_files(tmp_path: Path) -> None:
    whole = saved({"rollout_id": 1, "samples": [sample(0)]})
    for data in (whole[: len(whole) // 2], pickle.dumps([1])[:-3], b"", b"text"):
        with pytest.raises(CommandError, match="could be opened"):
            convert(data, tmp_path)
    with pytest.raises(CommandError, match="No such file"):
        call_command("convert_pickle", tmp_path / "none", tmp_path / "out")


def test_the_help_says_that_a_pickle_is_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call_command("convert_pickle", "--help")
    assert "opening one runs what it says" in capsys.readouterr().out


def test_the_server_names_the_command_and_opens_no_pickle() -> None:
    for data in (pickle.dumps([1]), saved([torch.zeros(1)])):
        with pytest.raises(FileRefused, match="convert_pickle IN OUT"):
            read(data)
    assert Source.of_bytes(b"{}").kind() == "plain"
    openers = set()
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            called = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if {"pickle", "dill", "joblib", "cloudpickle", "convert_pickle"} & {*names, *(module or "").split(".")} or (
                called.startswith(("torch.load(", "pd.read_pickle(")) or "allow_pickle=True" in called
            ):
                openers.add(path.relative_to(ROOT).as_posix())
    # The engine's process is given pickles by the worker that started it, through a pipe of theirs, and by nobody else.
    assert openers == {"tools/pickles/unpickling.py", "rollouts/sampling/engines/engine_process.py"}


def training(**more: Any) -> dict[str, Any]:
    """What slime/utils/train_dump_utils.py saves of one rank, with two samples."""
    data = {
        "tokens": [torch.tensor([1, 2, 10, 11]), torch.tensor([1, 5])], "response_lengths": [2, 1],
        "total_lengths": [4, 2], "loss_masks": [torch.tensor([1, 0]), torch.tensor([1])], "rewards": [0.5, -0.5],
        "raw_reward": [1.0, 0.0, 1.0], "sample_indices": [6, 9], "weight_versions": [["3"], ["3", "4"]],
        "log_probs": [torch.tensor([-0.5, -1.0]), torch.tensor([-2.0])],
        "rollout_log_probs": [torch.tensor([-0.25, 0.0]), torch.tensor([-1.5])],
        "advantages": [torch.tensor([0.5, 0.5]), torch.tensor([-0.5])], "entropy": None,
        "rollout_routed_experts": [np.ones((3, 2, 2), np.int32), np.zeros((1, 2, 2), np.int32)], **more,
    }
    return {"rollout_id": 12, "rank": 0, "rollout_data": data}


def test_a_training_dump_of_slime_has_both_sides_log_probabilities(tmp_path: Path) -> None:
    first, second = convert(saved(training()), tmp_path)
    assert [first.external_id, second.external_id] == ["12-6", "12-9"] and first.training_step == 12
    row = first.rows[0]
    assert row.ids.tolist() == [1, 2, 10, 11] and row.loss_mask.tolist() == [False, False, True, False]
    assert row.logprobs is not None and row.logprobs[2:].tolist() == [-0.25, 0]
    assert row.columns["trainer_logprobs"][2:].tolist() == [-0.5, -1] and np.isnan(row.columns["advantages"][:2]).all()
    assert set(row.columns) == {"trainer_logprobs", "advantages"} and (first.reward, second.reward) == (0.5, -0.5)
    routing = {"repeats": 1.0, "zero_layers": 0, "length": 3}
    assert row.extra == {"weight_versions": ["3"], "policy_version": "3", "routing": routing}
    assert second.rows[0].extra["routing"] == {"repeats": 0.0, "zero_layers": 2, "length": 1}


def test_a_slice_of_context_parallelism_is_left_out_and_named(tmp_path: Path) -> None:
    sliced = training(log_probs=[torch.tensor([-0.5]), torch.tensor([-2.0])])
    first, second = convert(saved(sliced), tmp_path)
    assert first.rows[0].extra["left_out"] == {"log_probs": "1 values for 2 tokens of the response"}
    assert "trainer_logprobs" not in first.rows[0].columns and "trainer_logprobs" in second.rows[0].columns


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tokens": None}, "tokens is not a list"),
        ({"response_lengths": None}, "nobody knows where the responses begin"),
        ({"response_lengths": [9, 1]}, "is 9, but there are 4"),
        ({"rewards": [1.0]}, "rewards has 1 elements for 2 tokens"),
        ({"loss_masks": ["x", [1]]}, "is not a list of numbers"),
    ],
)
def test_what_is_no_training_dump_is_refused_with_a_sentence(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=says):
        convert(saved(training(**more)), tmp_path)


def test_a_rollout_dump_has_its_training_step_and_the_summary_of_its_routing(tmp_path: Path) -> None:
    routed = sample(0, rollout_routed_experts=[[[1, 2]]] * 5)
    (found,) = convert(saved({"rollout_id": 7, "samples": [routed]}), tmp_path)
    assert found.training_step == 7 and "rollout_routed_experts" not in found.rows[0].extra
    assert found.rows[0].extra["routing"] == {"repeats": 1.0, "zero_layers": 0, "length": 5}


class Scripted(torch.nn.Module):
    """Its state is code of TorchScript, which fills the file ``path``."""

    path: str

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.x = str(path), torch.zeros(1)

    @torch.jit.export
    def __getstate__(self) -> Tuple[torch.Tensor, str, bool]:  # noqa: UP006  TorchScript reads it
        return (self.x, self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: Tuple[torch.Tensor, str, bool]) -> None:  # noqa: UP006
        self.x, self.path, self.training = state[0], state[1], state[2]
        self.x = torch.from_file(state[1], True, 6, dtype=torch.uint8).fill_(80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def scripted(mark: Path) -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Scripted(mark)), file)
    return file.getvalue()


def with_entry(data: bytes, name: str) -> bytes:
    """An archive of torch.save with one more record."""
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(name, b"1")
    return file.getvalue()


def in_tar(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def test_archives_that_hold_programs_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program, whole = scripted(mark), saved({"rollout_id": 1, "samples": [sample(0)]})
    torch.jit.load(io.BytesIO(program))
    assert mark.read_bytes() == b"PPPPPP"
    mark.unlink()
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    tarred = in_tar(pickle.dumps([1]))
    state = {"sequences": {"format": "torch", "data": program}, "response_mask": torch.zeros(1, 1)}
    arrays = io.BytesIO()
    np.savez(arrays, tokens=np.array([Hostile(mark)], dtype=object))
    for data, says in (
        (program, "may hold a program"),
        (pickle.dumps({"batch_dict": state}), "may hold a program"),
        *((with_entry(whole, f"archive/{name}"), "may hold a program") for name in
          ("code/__torch__.py", "constants.pkl", "archive_format", "models/model.json", "inner.zip", "x.pt")),
        (arrays.getvalue(), "no pickle that could be opened|may hold a program"),
        (tarred, "no pickle that could be opened"),
        (magic + tarred[len(magic):], "tar archive|no pickle that could be opened"),
        (gzip.compress(program), "no pickle that could be opened"),
        (gzip.compress(pickle.dumps([1])), "no pickle that could be opened"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "no pickle that could be opened"),
        (b"\x93NUMPY\x01\x00" + pickle.dumps(Hostile(mark)), "no pickle that could be opened"),
    ):
        with pytest.raises(CommandError, match=says):
            convert(data, tmp_path)
        assert not mark.exists()


def test_what_gets_past_the_list_of_classes_can_still_write_nothing(tmp_path: Path) -> None:
    """A storage that torch maps to a file: the process that opens the pickle may open no other file."""
    mark = tmp_path / "mark"
    program = (
        "import sys; sys.argv = ['', sys.argv[1], sys.argv[2]]\n"
        "from rollout_inspector.text.confinement import confine\n"
        "import torch\n"
        "assert not confine(2_000_000_000)\n"
        "try:\n    torch.UntypedStorage.from_file(sys.argv[1], True, 6)\n"
        "except Exception as error:\n    print(type(error).__name__)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(mark), ""], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "RuntimeError" and not mark.exists()


def test_a_pickle_that_never_ends_or_grows_is_ended(tmp_path: Path) -> None:
    bomb: Any = []
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(CommandError, match=r"no pickle|unknown shape|more memory|ended"):
        convert(pickle.dumps({"samples": [sample(0, metadata=np.zeros(1)), sample(1, tokens=bomb)]}), tmp_path)
    with pytest.raises(CommandError, match="is no file"):
        call_command("convert_pickle", "/dev/zero", tmp_path / "out.jsonl")
