"""Programs that are sent to hosts and run there by Python 3.8 or later: standard library only; not what sends them
(`hosts`).
"""
