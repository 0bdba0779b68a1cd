"""The request of a job, run by AWS's own programs: local mode of the SageMaker SDK, and the toolkit in a container."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.docker import HOST, MOUNTS, Docker
from tests.clusters.sagemaker import SageMaker
from tests.clusters.sagemaker_sdk import Outcome, run, toolkit

from .conftest import Submit

Run = Callable[..., Outcome]


@pytest.fixture
def local_mode(sagemaker: SageMaker, submit: Submit, docker: Docker, tmp_path: Path) -> Run:
    """Submits the text of a shell script, and runs the request that `--dry-run` prints by local mode."""

    def local_mode(text: str, **given: Any) -> Outcome:
        sagemaker.configure(capacity=False)  # the endpoint itself does not run the job
        options = {"image": HOST, **given.pop("options", {})}
        job = submit(text, nodes=2, procs_per_node=2, options=options, **given)
        request = json.loads(job.record.plan().files["sagemaker/request.json"])
        return run(request, docker, tmp_path / "local")

    return local_mode


def left(tmp_path: Path) -> dict[str, str]:
    """The files that the containers left as the job's model and output."""
    root = tmp_path / "local/artifacts"
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_two_instances(local_mode: Run, tmp_path: Path) -> None:
    """No host ends before the ranks of all have: local mode takes the others down with the first one."""
    text = """\
echo "$RANK of $WORLD_SIZE ${GLOO_SOCKET_IFNAME-none} ${FI_PROVIDER-none} $SM_MODEL_DIR $SM_CHANNEL_CODE" \\
    > $SM_OUTPUT_DATA_DIR/$RANK
[ "$RANK" != 3 ] || exec touch $SM_MODEL_DIR/early
[ "$RANK" = 0 ] || exit 0
until [ -e $SM_MODEL_DIR/early ]; do sleep 0.1; done
sleep 2
echo saved > $SM_MODEL_DIR/late"""
    done = local_mode(text)
    assert (done.code, done.containers) == (0, [0, 0]), done.text
    same = "of 4 none none /opt/ml/model /opt/ml/input/data/code\n"
    ranks = {f"output/data/{rank}": f"{rank} {same}" for rank in range(4)}
    assert left(tmp_path) == {"model/early": "", "model/late": "saved\n", **ranks}, done.text


@pytest.mark.long  # test_training.py has the first error on the tests' own endpoint
def test_the_first_error_is_in_local_mode_too(local_mode: Run, tmp_path: Path) -> None:
    done = local_mode('[ "$RANK" = 3 ] || exec sleep 600; echo "ValueError: no data" >&2; exit 3')
    assert 3 in done.containers, done.text
    assert left(tmp_path)["output/failure"].startswith("rank 3 on node 1: "), done.text


def test_the_toolkit_starts_the_entry(local_mode: Run, docker: Docker, tmp_path: Path) -> None:
    """As in an image whose command is sagemaker-training's `train`."""
    place = toolkit()
    seen = json.loads(docker.run("inspect", "--format", "{{json .Config.Env}}", HOST))
    mounts = next(variable.partition("=")[2] for variable in seen if variable.startswith(f"{MOUNTS}="))
    train = '["python3", "-m", "sagemaker_training.cli.train"]'
    docker.build(
        "toolkit:1", f"FROM {HOST}", f"ENV {MOUNTS}={mounts}:{place} PYTHONPATH={place}", f"ENTRYPOINT {train}"
    )
    hyperparameters = {"sagemaker_program": "entry.py", "sagemaker_submit_directory": "/opt/ml/input/data/code"}
    patch = {"AlgorithmSpecification": {"ContainerEntrypoint": None}, "HyperParameters": hyperparameters}
    done = local_mode("echo $RANK > $SM_MODEL_DIR/$RANK", options={"image": "toolkit:1", "patch": patch})
    assert (done.code, done.containers) == (0, [0, 0]), done.text
    assert "Invoking user script" in done.text
    models = {f"model/{rank}": f"{rank}\n" for rank in range(4)}
    assert left(tmp_path) == {**models, "output/success": ""}, done.text
