"""The TPU target: slices of Google Cloud TPUs, whose hosts run `accel launch`."""
