"""Programs sent to hosts, for Python 3.8 or later with its standard library."""
