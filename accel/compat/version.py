"""Name and version of the package that accel replaces."""

NAME = "accelerate"
VERSION = "1.15.0"
