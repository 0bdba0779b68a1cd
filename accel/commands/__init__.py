"""The commands by the names that Accelerate's documents give them: `python -m accel.commands.launch`."""
