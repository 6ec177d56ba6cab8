"""A run that outlives its machines: records of each rank's state on another machine, and checkpoints made of them."""

RECORDS = "second-home"  # default folder of records, in a run's folder
