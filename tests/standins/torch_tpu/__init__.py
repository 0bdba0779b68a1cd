"""Stands in for torch_tpu where only its presence is asked for."""
