"""Google Cloud TPUs: slices whose hosts run `accel launch`."""
