"""The logs of a job's pods: sources, streams, cursors, archives."""
