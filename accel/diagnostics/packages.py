"""Versions of installed packages, from their metadata alone: even a package that cannot be imported has one."""

from __future__ import annotations

PACKAGES = (
    *("torch", "numpy", "safetensors", "torchdata", "torchvision", "torch_xla", "torchao", "triton"),
    *("accelerate", "transformers", "huggingface_hub", "tokenizers", "datasets", "peft", "trl", "timm"),
    *("deepspeed", "bitsandbytes", "transformer_engine", "megatron-core", "flash_attn"),
    *("fabric", "paramiko", "submitit", "kubernetes", "boto3", "sagemaker", "google-cloud-tpu"),
    *("tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "aim", "clearml", "dvclive", "swanlab"),
    *("msgspec", "pathspec", "platformdirs", "PyYAML", "rich"),
)


def versions() -> dict[str, str | None]:
    """Return the version of each distribution; ``None`` if not installed."""
    return {name: version_of(name) for name in PACKAGES}


def version_of(name: str) -> str | None:
    """Return the installed version, ``None`` without one, or a note that its metadata are damaged."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return str(version(name) or "installed, its metadata name no version")
    except PackageNotFoundError:
        return None
    except Exception as error:
        return f"installed, its metadata cannot be read ({type(error).__name__})"
