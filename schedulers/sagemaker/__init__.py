"""The SageMaker target: training jobs whose containers run `accel launch`."""
