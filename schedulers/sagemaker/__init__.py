"""Amazon SageMaker: training jobs whose containers run `accel launch`."""
