"""The API request that creates a job's slice, as JSON: a node, or a queued resource of one. Pure functions."""

from __future__ import annotations

import json
import os
import urllib.parse
from typing import Any

from .options import OWN_METADATA, TpuOptions, seconds
from .topology import GENERATIONS

JOB_LABEL = "accel-job"
# How long the slice's startup script (schedulers/node/tpu_slice.py) waits, in seconds.
ARRIVE_S = 1800.0  # from its start until the job is there, in addition to start_timeout_s
SILENT_S = 600.0
ENDED_S = 120.0  # for a client to read how the job ended, and its logs
OTHERS_S = 60.0  # on the other workers, for the first to act
_SCOPES = "https://www.googleapis.com/auth/"


def node_id(job_id: str, attempt: int) -> str:
    """Return the name of a job's slice, and of its queued resource, the same for all clients."""
    return f"accel-{job_id}-{attempt}"


def body(options: TpuOptions, job_id: str, attempt: int, *, parent: str, endpoint: str, script: str) -> dict[str, Any]:
    """Return the request's body. `parent`: the zone's path in the API; `script`: the startup script's text."""
    name, kind = node_id(job_id, attempt), "queuedResources" if options.queued else "nodes"
    settings = {
        "job": job_id,
        "root": options.root,
        "url": f"{endpoint}/v2/{parent}/{kind}/{name}{'?force=true' if options.queued else ''}",
        "arrive_s": ARRIVE_S + options.start_timeout_s,
        "silent_s": SILENT_S,
        "ended_s": ENDED_S,
        "others_s": OTHERS_S,
        "result": result_url(options, name, job_id, upload=True),
    }
    guard_metadata = {} if options.keep else dict(zip(OWN_METADATA, (script, json.dumps(settings)), strict=True))
    node = _node(options, job_id, guard_metadata)
    if not options.queued:
        return node | _without_empty(
            {"schedulingConfig": _without_empty({"spot": options.spot, "reserved": options.reserved})}
        )
    return {
        "tpu": {"nodeSpec": [{"parent": parent, "nodeId": name, "node": node}]},
        **({"spot": {}} if options.spot else {"guaranteed": {"reserved": True}} if options.reserved else {}),
        "queueingPolicy": {"validUntilDuration": f"{seconds(options.valid_until_duration)}s"},
    }


def result_url(options: TpuOptions, name: str, job_id: str, *, upload: bool = False) -> str:
    """Return the URL of the job's result on the slice, in the bucket of `checkpoint_uri`; "" without one."""
    if options.checkpoint_uri is None:
        return ""
    bucket, _, prefix = options.checkpoint_uri.removeprefix("gs://").replace("{id}", job_id).partition("/")
    file = urllib.parse.quote(f"{prefix.strip('/')}/{name}.json", safe="")
    storage = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    if upload:
        return f"{storage}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={file}"
    return f"{storage}/storage/v1/b/{bucket}/o/{file}?alt=media"


def _node(options: TpuOptions, job_id: str, guard_metadata: dict[str, str]) -> dict[str, Any]:
    shape = {"type": GENERATIONS[options.type], "topology": options.topology} if options.type else None
    scopes = [scope if "/" in scope else _SCOPES + scope for scope in options.scopes or ("cloud-platform",)]
    return _without_empty({
        "acceleratorType": options.accelerator_type,
        "acceleratorConfig": shape,
        "runtimeVersion": options.version,
        "networkConfig": _without_empty({"network": options.network, "subnetwork": options.subnetwork})
        | {"enableExternalIps": not options.internal_ips},
        "serviceAccount": _without_empty({"email": options.service_account, "scope": scopes}),
        "labels": {**options.labels, JOB_LABEL: job_id},
        "tags": list(options.tags),
        "metadata": {"enable-guest-attributes": "TRUE", **options.metadata, **guard_metadata},  # where host keys are
        "dataDisks": [_disk(disk) for disk in options.data_disk],
    })  # fmt: skip


def _disk(text: str) -> dict[str, str]:
    fields = dict(pair.split("=", 1) for pair in text.split(","))
    return {"sourceDisk": fields["source"], "mode": fields.get("mode", "read-write").upper().replace("-", "_")}


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value}
