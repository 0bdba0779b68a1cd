"""Programs sent to hosts, which run them with Python 3.8 or later and its standard library only; not what sends
them (`hosts`).
"""
