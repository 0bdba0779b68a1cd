"""Operations on jobs, the same for every target: submit, poll, follow, attach, recover, prune."""
