"""Amazon SageMaker: training jobs whose containers run `accel launch`. The launcher is in `accel/launch/`."""
