"""This node: its devices, the gang of ranks on it, their signals, their end and the report of a failure."""
