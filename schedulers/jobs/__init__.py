"""Operations on jobs, the same for every target: submit, poll, follow, attach, recover, prune; not a target's
own part (its room).
"""
