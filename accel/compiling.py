"""The earlier name of `accel.training.compile`: docs/training.md printed `accel.compiling.compile_regions`."""

from accel.training.compile import compile_regions as compile_regions
