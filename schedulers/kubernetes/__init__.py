"""The kubernetes target: a job as objects of a cluster, whose every pod runs `accel launch`; not the charts
(`helm/`), which must equal it.
"""
