"""A double of the webhook of Kubeflow Trainer v2: a TrainJob whose runtime is not there is refused, dry or not.

https://github.com/kubeflow/trainer/blob/master/pkg/runtime/core/trainingruntime.go
The real one asks a cache, which may be a moment behind; this one asks the server.
"""

from __future__ import annotations

import base64
import ssl

from aiohttp import web

from .client import Object, Refused
from .watch import Access, Connection

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
_GROUP, _VERSION = "trainer.kubeflow.org", "v1alpha1"
_PORT, _PATH = 9443, "/validate-trainer-kubeflow-org-v1alpha1-trainjob"


def configuration(address: str, authority: bytes) -> Object:
    """What makes an API server ask it."""
    where = {"url": f"https://{address}:{_PORT}{_PATH}", "caBundle": base64.b64encode(authority).decode()}
    rule = {
        "apiGroups": [_GROUP], "apiVersions": [_VERSION], "operations": ["CREATE", "UPDATE"],
        "resources": ["trainjobs"],
    }  # fmt: skip
    webhook = {
        "name": f"validator.trainjob.{_GROUP}", "clientConfig": where, "rules": [rule], "failurePolicy": "Fail",
        "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 30,
    }  # fmt: skip
    kind = "ValidatingWebhookConfiguration"
    metadata = {"name": f"validator.{_GROUP}"}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": metadata, "webhooks": [webhook]
    }  # fmt: skip


async def serve(access: Access, address: str, connection: Connection) -> None:
    """Answers until the event loop ends; `access` has the server's own certificate."""
    made = web.Application()

    async def validate(request: web.Request) -> web.Response:
        asked = (await request.json())["request"]
        why = await _refusal(connection, asked)
        verdict = {"uid": asked["uid"], "allowed": why is None, "status": {"code": 403, "message": why or ""}}
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": verdict})

    made.router.add_post(_PATH, validate)
    runner = web.AppRunner(made)
    await runner.setup()
    await web.TCPSite(runner, address, _PORT, ssl_context=access.context(ssl.Purpose.CLIENT_AUTH)).start()


async def _refusal(connection: Connection, asked: Object) -> str | None:
    name = asked["object"]["spec"]["runtimeRef"]["name"]
    try:
        await connection.call(
            "GET", f"/apis/{_GROUP}/{_VERSION}/namespaces/{asked['namespace']}/trainingruntimes/{name}"
        )
    except Refused:
        lacking = f'TrainingRuntime.{_GROUP} "{name}" not found'
        said = "specified trainingRuntime must be created before the TrainJob is created"
        return f'spec.runtimeRef: Invalid value: "{name}": {lacking}: {said}'
    return None
