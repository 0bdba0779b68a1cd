"""`import accelerate` is answered by accel: in this process, whatever is installed, as far as the table goes."""

from __future__ import annotations

import json

import pytest

from tests.compat.children import python, said


def test_import_version_and_spec_are_answered_though_accelerate_is_installed() -> None:
    code = """
import importlib.metadata as metadata, importlib.util, sys
import accel.compat
assert importlib.util.find_spec("accelerate").origin.endswith("mirror.py")
import accelerate
import accelerate.utils.imports
print(accelerate.__version__, metadata.version("accelerate"), metadata.version("Accelerate"))
print(metadata.metadata("accelerate")["Name"], "accelerate" in metadata.packages_distributions()["accelerate"])
print(importlib.util.find_spec("accelerate.state").name, "torch" in sys.modules)
"""
    assert said("-c", code).splitlines() == ["1.15.0 1.15.0 1.15.0", "accelerate True", "accelerate.state False"]


def test_objects_are_accels_own_and_pickle() -> None:
    code = """
import pickle
import accel.compat, accel
import accelerate, accelerate.utils
from accelerate.state import DistributedType
assert accelerate.Accelerator is accel.Accelerator
assert accelerate.utils.DistributedType is DistributedType is accel.DistributedType
assert pickle.loads(pickle.dumps(accelerate.Accelerator)) is accel.Accelerator
theirs = b"caccelerate.utils.dataclasses\\nProjectConfiguration\\n."
assert pickle.loads(theirs) is accel.ProjectConfiguration
print("ok")
"""
    assert said("-c", code) == "ok"


def test_accelerate_itself_imported_before_is_an_error_in_one_line() -> None:
    done = python("-c", "import accelerate, accel.compat")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("accel.errors.StateError: accelerate is already imported, from ")
    assert last.endswith("import accel.compat before it")


def test_a_second_import_changes_nothing() -> None:
    code = """
import os, sys
import accel.compat
from accel.compat.finder import install
before = len(sys.meta_path), os.environ["PYTHONPATH"]
install()
import accelerate
install()
print((len(sys.meta_path), os.environ["PYTHONPATH"]) == before)
"""
    assert said("-c", code) == "True"


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("from accelerate.utils import MegatronLMDummyDataLoader", "ImportError"),
        ("from accelerate.utils.megatron_lm import GPTTrain", "ImportError"),
        ("import accelerate.test_utils.scripts", "ModuleNotFoundError"),
        ("from accelerate.state import PartialStat", "ImportError"),
        ("import accelerate; accelerate.utils.MegatronLMDummyDataLoader", "AttributeError"),
    ],
)
def test_what_is_not_there_fails_where_it_is_imported_and_says_where_to_read(statement: str, kind: str) -> None:
    done = python("-c", f"import accel.compat\n{statement}")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{kind}: ")
    assert "docs/migrating.md" in last
    assert "Dummy" not in statement or "MegatronLMDummyDataLoader" in last


def test_a_name_that_is_nearly_right_is_told() -> None:
    done = python("-c", "import accel.compat\nfrom accelerate.state import PartialStat")
    assert "did you mean 'PartialState'?" in done.stderr


def test_questions_about_what_is_not_there_are_answered_with_no() -> None:
    code = """
import accel.compat, accelerate.utils
print(hasattr(accelerate.utils, "T5TrainStep"), getattr(accelerate.utils, "gone", None), hasattr(accelerate, "x"))
"""
    assert said("-c", code) == "False None False"


def test_a_patch_reaches_the_code_that_calls_and_is_undone() -> None:
    code = """
from unittest import mock
import accel.compat, accelerate.utils.random, accel.collectives.rng
real = accel.collectives.rng.set_seed
with mock.patch("accelerate.utils.random.set_seed", lambda *args: "patched"):
    assert accel.collectives.rng.set_seed(1) == accelerate.utils.random.set_seed(1) == "patched"
assert accel.collectives.rng.set_seed is real and accelerate.utils.random.set_seed is real
accelerate.utils.random.set_seed = len
assert accel.collectives.rng.set_seed is len
accelerate.utils.random.set_seed = real
assert accel.collectives.rng.set_seed is real
print("ok")
"""
    assert said("-c", code) == "ok"


def test_a_module_and_a_function_of_one_name_are_both_there() -> None:
    code = """
import accel.compat, accel.progress
import accelerate.utils.tqdm
from accelerate.utils import tqdm
from accelerate.utils.tqdm import tqdm as inner
print(tqdm is inner is accel.progress.tqdm)
"""
    assert said("-c", code) == "True"


def test_everything_in_the_table_is_at_home() -> None:
    code = """
import json, warnings
import accel.compat
from importlib import import_module
from accel.compat.name_table import TABLE, names_of
lost = []
for module in TABLE:
    for name in names_of(module):
        try:
            getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            lost.append(f"{module}.{name}: {error}")
print(json.dumps(lost))
"""
    assert json.loads(said("-c", code)) == []


def test_dir_and_star_give_what_the_table_says() -> None:
    code = """
import accel.compat, accelerate.scheduler
from accelerate.scheduler import *
print("AcceleratedScheduler" in dir(accelerate.scheduler), AcceleratedScheduler.__module__)
"""
    assert said("-c", code) == "True accel.training.optimizer"


def test_the_import_costs_what_accel_costs() -> None:
    code = """
import sys
if {compat}:
    import accel.compat
    from accelerate import Accelerator
else:
    import accel.accelerator
print(*sorted(name for name in sys.modules if not name.startswith(("accelerate", "accel.compat", "accel.launch"))))
"""
    ours = set(said("-c", code.format(compat=False)).split())
    theirs = set(said("-c", code.format(compat=True)).split())
    assert theirs - ours <= {"accel.launch"}


def test_modules_that_import_from_each_other_answer_for_each_other() -> None:
    code = """
import accel.compat
from accel.compat.name_table import TABLE, find, names_of
print(find("accelerate.state", "DistributedType").module, find("accelerate", "gather"))
print("gather" in names_of("accelerate.utils"), set(TABLE) >= {"accelerate.utils.operations", "accelerate.hooks"})
"""
    assert said("-c", code).splitlines() == ["accel.enums None", "True True"]
