"""Amazon SageMaker: training jobs whose containers run `accel launch`; not what the launcher does in them
(`accel/launch/`).
"""
