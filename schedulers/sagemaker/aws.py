"""Access to AWS: clients, and their errors as one-line messages with a remedy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ..errors import ConfigError, CredentialsExpired, SchedulerError, SubmitError, Unreachable
from ..printable import one_line
from .options import SageMakerOptions
from .request import resolved

_INSTALL = "the package boto3 is not installed: pip install 'accel-launch[sagemaker]'"
_INSTALL_SDK = "the package sagemaker 3 is not installed: pip install 'accel-launch[sagemaker-sdk]'"
_LOGIN = "log in again (aws sso login, aws configure, or new values of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
# A call without a response fails within a minute, by SageMaker's SDK too; transfers to S3 have longer.
ATTEMPTS, CONNECT_S, REPLY_S = 3, 5.0, 14.0
_RETRIES = {"mode": "adaptive", "total_max_attempts": ATTEMPTS}
# Error codes of any operation, by their cause.
_STALE = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_UNKNOWN = ("InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_DENIED = ("AccessDenied", "AccessDeniedException", "403")
_BUSY = ("Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded", "SlowDown")


class AwsError(SchedulerError):
    """AWS refused a request. `code`: its error code."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Aws:
    """The clients of one account and region. Thread-safe."""

    def __init__(self, options: SageMakerOptions, target: str) -> None:
        self.options, self.target, self.label = options, target, f"target {target}"

    @functools.cached_property
    def _session(self) -> Any:
        try:
            import boto3
            from botocore import config, session
        except ImportError:
            raise ConfigError(f"{self.label}: {_INSTALL}") from None
        core, options = session.get_session(), self.options
        limits = {"retries": _RETRIES, "connect_timeout": CONNECT_S, "read_timeout": REPLY_S}
        core.set_default_client_config(config.Config(max_pool_connections=16, **limits))
        with self.translated_errors("use the profile"):
            return boto3.Session(botocore_session=core, profile_name=options.profile, region_name=options.region)

    @functools.cached_property
    def region(self) -> str:
        region = self._session.region_name
        if not region:
            raise ConfigError(f"{self.label}: no region: set `region:` in accel.yaml or AWS_DEFAULT_REGION")
        return str(region)

    @functools.cache  # noqa: B019 - lives as long as the target
    def client(self, service: str, *, transfers: bool = False) -> Any:
        session = self._session
        from botocore.config import Config

        longer = Config(retries={**_RETRIES, "total_max_attempts": 6}, connect_timeout=10, read_timeout=60)
        with self.translated_errors(f"use {service}"):
            return session.client(service, region_name=self.region, config=longer if transfers else None)

    def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Call an operation and return the response. Raises AwsError, Unreachable, ConfigError."""
        client = self.client(service)
        with self.translated_errors(f"{service}:{client.meta.method_to_api_mapping.get(operation, operation)}"):
            return dict(getattr(client, operation)(**parameters))

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Yield the items under `key` from all pages of a list, fetched as they are read. Raises as `call`."""
        client = self.client(service)
        with self.translated_errors(f"{service}:{client.meta.method_to_api_mapping[operation]}"):
            for page in client.get_paginator(operation).paginate(**parameters):
                yield from page.get(key) or ()

    def training_job(self, name: str) -> object:
        """Return the SageMaker SDK's object of a training job. Raises ConfigError, AwsError, Unreachable."""
        try:
            from sagemaker.core.resources import TrainingJob
        except ImportError:
            raise ConfigError(f"{self.label}: {_INSTALL_SDK}") from None
        with self.translated_errors("sagemaker:DescribeTrainingJob"):
            return TrainingJob.get(training_job_name=name, session=self._session, region=self.region)

    @contextlib.contextmanager
    def translated_errors(self, action: str) -> Iterator[None]:
        """Convert boto3's exceptions to accel's. `action`: the call, as IAM names it, or one of several."""
        from botocore import exceptions as raised

        try:
            yield
        except (raised.NoCredentialsError, raised.PartialCredentialsError, raised.CredentialRetrievalError) as error:
            raise ConfigError(f"{self.label}: no AWS credentials: {one_line(str(error))}; {_LOGIN}") from None
        except (raised.SSOError, raised.UnauthorizedSSOTokenError, raised.TokenRetrievalError) as error:
            raise CredentialsExpired(f"{self.label}: the login has expired: {one_line(str(error))}; {_LOGIN}") from None
        except raised.ClientError as error:
            raise self._error_of(error, f"{action.partition(':')[0]}:{error.operation_name}") from None
        except (raised.HTTPClientError, raised.ConnectionError, raised.ResponseStreamingError) as error:
            raise Unreachable(f"{self.label}: {action}: {one_line(str(error))}") from None
        except raised.BotoCoreError as error:
            raise ConfigError(f"{self.label}: {action}: {one_line(str(error))}") from None

    def _error_of(self, error: Any, action: str) -> SchedulerError:
        details = error.response.get("Error", {})
        code, message = str(details.get("Code") or ""), one_line(str(details.get("Message") or error))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _BUSY or status >= 500:
            return Unreachable(f"{self.label}: AWS is busy ({code or status}): {message}")
        if code in _STALE:
            return CredentialsExpired(f"{self.label}: the credentials have expired; {_LOGIN}")
        if code in _UNKNOWN:
            return CredentialsExpired(f"{self.label}: AWS does not know these credentials ({code}); {_LOGIN}")
        problem = f"AWS does not allow {action}: {message}" if code in _DENIED else f"{action}: {message}"
        if code == "ResourceLimitExceeded":
            remedy = "request a higher quota (Service Quotas, Amazon SageMaker), or choose another instance_type"
            problem = f"{message}: {remedy}"
        elif code in ("NoSuchBucket", "404", "NoSuchKey"):
            problem = f"{problem} (s3_output_path)"
        return AwsError(f"{self.label}: {problem}", code)

    def resolved_options(self) -> SageMakerOptions:
        """Return the options with the values that only AWS knows. Raises SubmitError, ConfigError, Unreachable."""
        identity = self.call("sts", "get_caller_identity")
        role = self.options.role
        if not role.startswith("arn:"):
            try:
                role = str(self.call("iam", "get_role", RoleName=role.rpartition("/")[2])["Role"]["Arn"])
            except AwsError as error:
                problem = f"{role} not found" if error.code == "NoSuchEntity" else str(error)
                raise SubmitError(f"{self.label}: role: {problem}; give the ARN of an execution role") from None
        return resolved(self.options, account=str(identity["Account"]), region=self.region, role=role)


def split(uri: str) -> tuple[str, str]:
    """Return bucket and key of `s3://bucket/key`."""
    bucket, _, key = uri.partition("://")[2].partition("/")
    return bucket, key
