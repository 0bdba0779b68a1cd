"""Asks the cluster whether this account may do all that the Role says, and whether the kinds of job are there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from api import Api, ApiError, arguments


def wanted(rule: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Each single permission of a rule, as an access review has it."""
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            name, _, part = resource.partition("/")
            for verb in rule["verbs"]:
                for instance in rule.get("resourceNames", [""]):
                    yield {"group": group, "resource": name, "subresource": part, "verb": verb, "name": instance}


def allowed(api: Api, namespace: str, permission: dict[str, str]) -> bool:
    """Raises ApiError."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {**permission, "namespace": namespace}},
    }
    answer = api.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def there(api: Api, kind: dict[str, str]) -> bool:
    """Raises ApiError, but for a group that the cluster does not have."""
    try:
        answer = api.ask("GET", f"/apis/{kind['group']}/{kind['version']}")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return any(resource["name"] == kind["resource"] for resource in answer["resources"])


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--kinds", type=json.loads, required=True, help="group, version and resource of each, as JSON")
    parser.add_argument("--rules", type=json.loads, required=True, help="the rules of the Role, as JSON")
    args = parser.parse_args()
    api = Api(args.server, args.account)
    wrong = 0
    asked = 0
    try:
        for permission in [p for rule in args.rules for p in wanted(rule)]:
            asked += 1
            if not allowed(api, args.namespace, permission):
                wrong += 1
                what = "/".join(filter(None, (permission["resource"], permission["subresource"])))
                print(f"not allowed: {permission['verb']} {what} (group {permission['group'] or 'core'})")
        present = [kind["resource"] for kind in args.kinds if there(api, kind)]
    except ApiError as error:
        print(f"cannot ask: {error}")
        return 1
    absent = [kind["resource"] for kind in args.kinds if kind["resource"] not in present]
    print(f"{asked - wrong} of {asked} permissions; kinds there: {', '.join(present) or 'none'}")
    if absent:
        print(f"the cluster does not have: {', '.join(absent)}")
    return 1 if wrong or not present else 0


if __name__ == "__main__":
    sys.exit(main())
