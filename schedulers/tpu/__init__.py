"""Google Cloud TPUs: slices whose hosts run `accel launch`; not `accel tpu-config` (`accel/launch/tpu/`)."""
