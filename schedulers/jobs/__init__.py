"""Jobs and what is done with them: submit, poll, follow, attach, recover, prune; not how a target does it (its own
room).
"""
