"""Access to AWS: clients, and their errors as one-line messages with a remedy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ..errors import ConfigError, SchedulerError, SubmitError, Unreachable
from ..printable import one_line
from .options import SageMakerOptions
from .request import Account

_INSTALL = "the package boto3 is not installed: pip install 'accel-launch[sagemaker]'"
_INSTALL_SDK = "the package sagemaker 3 is not installed: pip install 'accel-launch[sagemaker-sdk]'"
_LOGIN = "log in again (aws sso login, aws configure, or new values of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
# Codes of refusals, whatever was asked, and what to do.
_STALE = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_UNKNOWN = ("InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_DENIED = ("AccessDenied", "AccessDeniedException", "403")
_BUSY = ("Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded", "SlowDown")


class Refused(SchedulerError):
    """AWS refused a request. `code`: its error code."""

    def __init__(self, message: str, code: str, said: str) -> None:
        super().__init__(message)
        self.code, self.said = code, said


class Aws:
    """The clients of one account and region. Thread-safe."""

    def __init__(self, options: SageMakerOptions, target: str) -> None:
        self._options, self.where = options, f"target {target}"

    @functools.cached_property
    def _session(self) -> Any:
        try:
            import boto3
        except ImportError:
            raise ConfigError(f"{self.where}: {_INSTALL}") from None
        with self.asked("use the profile"):
            return boto3.Session(profile_name=self._options.profile, region_name=self._options.region)

    @functools.cached_property
    def region(self) -> str:
        found = self._session.region_name
        if not found:
            raise ConfigError(f"{self.where}: no region: say region: in accel.yaml, or set AWS_DEFAULT_REGION")
        return str(found)

    @functools.cache  # noqa: B019 - as long as the target
    def client(self, service: str) -> Any:
        session = self._session
        from botocore.config import Config

        retries = {"mode": "adaptive", "max_attempts": 6}
        config = Config(retries=retries, connect_timeout=10, read_timeout=60, max_pool_connections=16)
        with self.asked(f"use {service}"):
            return session.client(service, region_name=self.region, config=config)

    def call(self, service: str, operation: str, **asked: Any) -> dict[str, Any]:
        """Call an operation and return the response. Raises Refused, Unreachable, ConfigError."""
        client = self.client(service)
        with self.asked(f"{service}:{client.meta.method_to_api_mapping.get(operation, operation)}"):
            return dict(getattr(client, operation)(**asked))

    def pages(self, service: str, operation: str, key: str, **asked: Any) -> Iterator[dict[str, Any]]:
        """Yield the items under `key` from all pages of a list, fetched as they are read. Raises as `call`."""
        client = self.client(service)
        with self.asked(f"{service}:{client.meta.method_to_api_mapping[operation]}"):
            for page in client.get_paginator(operation).paginate(**asked):
                yield from page.get(key) or ()

    def training_job(self, name: str) -> object:
        """Return the SageMaker SDK's object of a training job. Raises ConfigError, Refused, Unreachable."""
        try:
            from sagemaker.core.resources import TrainingJob
        except ImportError:
            raise ConfigError(f"{self.where}: {_INSTALL_SDK}") from None
        with self.asked("sagemaker:DescribeTrainingJob"):
            return TrainingJob.get(training_job_name=name, session=self._session, region=self.region)

    @contextlib.contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Convert boto3's exceptions to accel's. `what`: the call, as IAM names it."""
        from botocore import exceptions as raised

        try:
            yield
        except (raised.NoCredentialsError, raised.PartialCredentialsError, raised.CredentialRetrievalError) as error:
            raise ConfigError(f"{self.where}: no credentials of AWS: {one_line(str(error))}; {_LOGIN}") from None
        except (raised.SSOError, raised.UnauthorizedSSOTokenError, raised.TokenRetrievalError) as error:
            raise ConfigError(f"{self.where}: the login has expired: {one_line(str(error))}; {_LOGIN}") from None
        except (raised.ProfileNotFound, raised.NoRegionError, raised.ConfigParseError) as error:
            raise ConfigError(f"{self.where}: {one_line(str(error))}") from None
        except raised.ClientError as error:
            raise self._refusal(error, what) from None
        except (raised.HTTPClientError, raised.ConnectionError, raised.ResponseStreamingError) as error:
            raise Unreachable(f"{self.where}: {what}: {one_line(str(error))}") from None
        except raised.BotoCoreError as error:
            raise ConfigError(f"{self.where}: {what}: {one_line(str(error))}") from None

    def _refusal(self, error: Any, what: str) -> SchedulerError:
        answer = error.response.get("Error", {})
        code, said = str(answer.get("Code") or ""), one_line(str(answer.get("Message") or error))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _BUSY or status >= 500:
            return Unreachable(f"{self.where}: AWS has too much to do ({code or status}): {said}")
        if code in _STALE:
            return ConfigError(f"{self.where}: the credentials have expired; {_LOGIN}")
        if code in _UNKNOWN:
            return ConfigError(f"{self.where}: AWS does not know these credentials ({code}); {_LOGIN}")
        if code in _DENIED:
            return Refused(f"{self.where}: AWS does not allow {what}: {said}", code, said)
        if code == "ResourceLimitExceeded":
            remedy = "ask for a higher quota (Service Quotas, Amazon SageMaker), or take another instance_type"
            return Refused(f"{self.where}: {said}: {remedy}", code, said)
        if code in ("NoSuchBucket", "404", "NoSuchKey"):
            return Refused(f"{self.where}: {what}: {said} (s3_output_path)", code, said)
        return Refused(f"{self.where}: {what}: {said}", code, said)

    def resolved(self) -> Account:
        """Return the account data that the plan left open. Raises SubmitError, ConfigError, Unreachable."""
        identity = self.call("sts", "get_caller_identity")
        partition, role = str(identity["Arn"]).split(":")[1], self._options.role
        if not role.startswith("arn:"):
            try:
                role = str(self.call("iam", "get_role", RoleName=role.rpartition("/")[2])["Role"]["Arn"])
            except Refused as error:
                lacks = f"there is no role {role}" if error.code == "NoSuchEntity" else str(error)
                raise SubmitError(f"{self.where}: role: {lacks}; give the ARN of an execution role") from None
        return Account(account=str(identity["Account"]), region=self.region, partition=partition, role_arn=role)


def split(uri: str) -> tuple[str, str]:
    """Return bucket and key of `s3://bucket/key`."""
    bucket, _, key = uri.partition("://")[2].partition("/")
    return bucket, key
