"""The world of processes and the machine below it: environment, process group, devices, packages."""
