"""The commands under the names of Accelerate's documents: `python -m accel.commands.launch`."""
