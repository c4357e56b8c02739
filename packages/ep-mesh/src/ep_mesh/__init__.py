"""Parallel degrees to a validated DeviceMesh in which expert parallelism is carved out of the data-parallel shards."""
