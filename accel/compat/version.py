"""The package that accel answers for."""

NAME = "accelerate"
VERSION = "1.15.0"
