"""AWS's images and instance types as known offline: registries, tags, and the GPUs of an instance.

https://docs.aws.amazon.com/sagemaker/latest/dg-ecr-paths/sagemaker-algo-docker-registry-paths.html and
https://aws.amazon.com/sagemaker/pricing/
"""

from __future__ import annotations

import re

from ..errors import SpecError, nearest

_PREFIX = "pytorch:"
# Version -> the tag of its Python. The torch of older images is too old for accel.
VERSIONS = {"2.6.0": "py312", "2.7.1": "py312", "2.8.0": "py312"}
NEWEST = "2.8.0"
_COMMON = "763104351884"
_REGISTRIES = {
    "af-south-1": "626614931356", "ap-east-1": "871362719292", "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452", "ap-southeast-3": "907027046896", "ap-southeast-4": "457447274322",
    "ap-southeast-5": "550225433462", "ap-southeast-7": "590183813437", "ca-west-1": "204538143572",
    "cn-north-1": "727897471807", "cn-northwest-1": "727897471807", "eu-central-2": "380420809688",
    "eu-south-1": "692866216735", "eu-south-2": "503227376785", "il-central-1": "780543022126",
    "me-central-1": "914824155844", "me-south-1": "217643126080", "mx-central-1": "637423239942",
    "us-gov-east-1": "446045086412", "us-gov-west-1": "442386744353", "us-iso-east-1": "886529160074",
    "us-isob-east-1": "094389454867",
}  # fmt: skip
_SUFFIXES = {"cn-": "amazonaws.com.cn", "us-iso-": "c2s.ic.gov", "us-isob-": "sc2s.sgov.gov"}

_INSTANCE = re.compile(r"ml\.(?P<family>[a-z0-9-]+)\.(?P<size>[a-z0-9]+)\Z")
# Family -> GPUs by size; "" is every size that is not named.
_GPUS: dict[str, dict[str, int]] = {
    "p2": {"xlarge": 1, "8xlarge": 8, "16xlarge": 16},
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
    "p6-b300": {"48xlarge": 8},
    "g4dn": {"12xlarge": 4, "": 1},
    "g5": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8, "": 1},
    "g6": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8, "": 1},
    "g6e": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8, "": 1},
}
_ACCELERATED = re.compile(r"(p|g|trn|inf|dl)\d")  # GPUs, or AWS's and Habana's chips


def is_named(image: str) -> bool:
    """Return True for `pytorch:VERSION`, which is no image's address."""
    return image.startswith(_PREFIX)


def address(image: str, region: str, instance_type: str, subject: str) -> str:
    """Return the address of an image: itself, or that of `pytorch:VERSION` in the region. Raises SpecError."""
    if not is_named(image):
        return image
    version = image.removeprefix(_PREFIX)
    full_version = next(
        (candidate for candidate in VERSIONS if candidate == version or candidate.rpartition(".")[0] == version), None
    )
    if full_version is None:
        choices = ", ".join(VERSIONS)
        raise SpecError(
            f"{subject}: {image}: unknown version (known: {choices}){nearest(version, VERSIONS)}; give a URI"
        )
    kind = "cpu" if gpus(instance_type) == 0 else "gpu"
    suffix = next((candidate for start, candidate in _SUFFIXES.items() if region.startswith(start)), "amazonaws.com")
    registry = f"{_REGISTRIES.get(region, _COMMON)}.dkr.ecr.{region}.{suffix}"
    return f"{registry}/pytorch-training:{full_version}-{kind}-{VERSIONS[full_version]}"


def gpus(instance_type: str) -> int | None:
    """Return the number of GPUs of an instance type, or None if unknown or if its accelerators are not GPUs."""
    match = _INSTANCE.match(instance_type)
    if match is None:
        return None
    sizes = _GPUS.get(match["family"])
    if sizes is not None:
        return sizes.get(match["size"], sizes.get(""))
    return None if _ACCELERATED.match(match["family"]) else 0
