"""A trainer and a loss that know the project only through its plugin host."""
