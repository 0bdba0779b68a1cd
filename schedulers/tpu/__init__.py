"""Google Cloud TPUs: slices whose hosts run `accel launch`. `accel tpu-config` is in `accel/launch/tpu/`."""
