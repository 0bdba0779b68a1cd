"""`accelerate.test_utils.testing`, answered by accel: what the tests of peft and diffusers import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.compat.children import ROOT, environment, said

HELPERS = """
import accel.compat, json, logging, os, sys, unittest
from accelerate.test_utils import require_multi_gpu
from accelerate.test_utils.testing import (
    DEFAULT_LAUNCH_COMMAND, AccelerateTestCase, TempDirTestCase, assert_exception, capture_call_output,
    execute_subprocess_async, get_backend, get_torch_dist_unique_port, require_cpu, require_non_cpu,
    require_transformers, run_command, torch_device,
)
import accelerate.test_utils.testing as testing

class Test(TempDirTestCase):
    @require_cpu
    def test_runs(self):
        (self.tmpdir / "file").touch()
    @require_non_cpu
    def test_needs_a_gpu(self):
        raise AssertionError
    @require_multi_gpu
    def test_needs_several(self):
        raise AssertionError

result = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromTestCase(Test).run(result)
with assert_exception(ValueError, "twelve"):
    raise ValueError("not twelve")
done = execute_subprocess_async([sys.executable, "-c", "print('out'); print('é')"], quiet=True, echo=False)
try:
    execute_subprocess_async([sys.executable, "-c", "raise SystemExit('why')"], quiet=True, echo=False)
except RuntimeError as error:
    failed = str(error)
needs = [name for name in accelerate_names if name.startswith("require_") and name != "require_torch_min_version"]
for name in needs:
    getattr(testing, name)(lambda: None)
os.environ["PYTEST_XDIST_WORKER"] = "gw3"
print(json.dumps({
    "missing": [name for name in accelerate_names if not hasattr(testing, name)],
    "package": os.path.exists(testing.path_in_accelerate_package("test_utils")),
    "skips": sorted(reason for _, reason in result.skipped), "failures": len(result.failures + result.errors),
    "ran": result.testsRun, "backend": [get_backend()[0], torch_device], "port": get_torch_dist_unique_port(),
    "launch": DEFAULT_LAUNCH_COMMAND[:2], "stdout": done.stdout, "failed": failed, "needs": len(needs),
    "printed": capture_call_output(print, "a"), "command": run_command([sys.executable, "-c", "print(1)"], True),
}))
"""


def test_the_helpers_do_what_their_names_say() -> None:
    source = (ROOT / "tests/compat/accelerate_testing.txt").read_text().split()
    shown = json.loads(said("-c", f"accelerate_names = {source!r}\n{HELPERS}", env={"CUDA_VISIBLE_DEVICES": ""}))
    assert "failed with returncode 1\n\nwhy" in shown.pop("failed")
    assert shown == {
        "missing": [],
        "package": False,
        "skips": ["test requires an accelerator", "test requires several GPUs"],
        "failures": 0,
        "ran": 3,
        "backend": ["cpu", "cpu"],
        "port": 29503,
        "launch": ["accelerate", "launch"],
        "stdout": ["out", "é"],
        "needs": len([name for name in source if name.startswith("require_")]) - 1,
        "printed": "a\n",
        "command": "1\n",
    }


def test_the_names_that_the_tests_of_peft_and_diffusers_import(tmp_path: Path) -> None:
    code = f"""
import accel.compat, json, torch
from accelerate import PartialState, infer_auto_device_map
from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook
from accelerate.test_utils.testing import get_backend, run_command
from accelerate.utils import patch_environment, write_basic_config
from accelerate.utils.imports import is_bf16_available
from accelerate.utils.memory import clear_device_cache
from accelerate.utils.modeling import _get_proper_dtype, compute_module_sizes, dtype_byte_size
from accel.cli.launch import resolve_settings
assert _get_proper_dtype("torch.float16") is torch.float16
path = write_basic_config("BF16", save_location={str(tmp_path / "new" / "default.yml")!r})
again = write_basic_config(save_location=path)
settings = resolve_settings({{"config_file": str(path)}})
print(json.dumps([again, *(settings[name].value for name in ("cpu", "mixed_precision", "num_processes", "multi_gpu"))]))
try:
    write_basic_config("int8", save_location={str(tmp_path / "other.yml")!r})
except ValueError as error:
    print(error)
"""
    shown, values, wrong = said("-c", code, env={"CUDA_VISIBLE_DEVICES": ""}).splitlines()
    assert shown == str(tmp_path / "new" / "default.yml")
    assert json.loads(values) == [False, True, "bf16", 1, False]
    assert wrong.startswith("--mixed_precision: 'int8' is not one of no")


LAUNCHES = """
import accel.compat, json, subprocess, sys
from accelerate.commands.launch import launch_command, launch_command_parser

def outcome(*words):
    try:
        launch_command(launch_command_parser().parse_args([*words]))
    except Exception as error:
        return type(error).__name__, getattr(error, "returncode", str(error))
    except SystemExit as error:
        return "SystemExit", error.code
    return "done", 0

one, script = ["--cpu", "--num_processes", "1"], sys.argv[1]
print(json.dumps([
    outcome(*one, script, "0"),
    outcome(*one, script, "3"),
    outcome(*one, "--quiet", script, "3"),
    outcome("--cpu", "--multi_gpu", script, "0"),
]))
"""


def test_a_launch_by_a_function_returns_to_its_caller(tmp_path: Path) -> None:
    script = tmp_path / "it's a script.py"
    script.write_text("import accelerate, sys; sys.exit(int(sys.argv[1]))")
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES, str(script)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    *others, wrong = json.loads(done.stdout.splitlines()[-1])
    assert others == [["done", 0], ["CalledProcessError", 3], ["SystemExit", 3]]
    assert wrong[0] == "ArgumentError"
    assert "--cpu and --multi_gpu contradict each other" in wrong[1]


def test_the_logger_of_accelerate_reaches_accels() -> None:
    code = """
import accel.compat, logging, sys
logging.getLogger("accelerate").setLevel(logging.ERROR)
logging.getLogger("accelerate").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("accel.memory").error("shown")
logging.getLogger("accel.memory").warning("hidden")
"""
    assert said("-c", code) == "shown"
