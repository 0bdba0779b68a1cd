"""`accel.training.compile` by its earlier name: docs/training.md printed `accel.compiling.compile_regions`."""

from accel.training.compile import compile_regions as compile_regions
