"""Does accel work here? ``python -m accel.sanity`` under any launcher; `accel test` runs it on 1, 2 and 4 processes."""
