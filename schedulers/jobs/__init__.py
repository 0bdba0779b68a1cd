"""Jobs and what is done with them: submit, poll, follow, attach, recover, prune."""
