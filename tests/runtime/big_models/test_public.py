from __future__ import annotations

import subprocess
import sys

import accel.big_models


def test_every_public_name_is_there() -> None:
    assert sorted(accel.big_models._HOME_OF) == accel.big_models.__all__
    assert all(callable(getattr(accel.big_models, name)) for name in accel.big_models.__all__)
    assert set(accel.big_models.__all__) <= set(dir(accel.big_models))


def test_the_table_loads_nothing() -> None:
    code = "import sys, accel.big_models; print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "set()"


def test_making_hooks_and_maps_loads_no_compiler() -> None:
    code = (
        "import sys, torch; from accel.big_models import *; m = torch.nn.Linear(2, 2); before = set(sys.modules)\n"
        "infer_auto_device_map(m, {'cpu': 1000}); cpu_offload(m)(torch.ones(1, 2))\n"
        "print({name for name in set(sys.modules) - before if name.startswith(('torch._dynamo', 'torch._inductor'))})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "set()"
