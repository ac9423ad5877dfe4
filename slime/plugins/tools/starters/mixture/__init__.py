"""A task of two data sets, whose weights change in the course of the run."""
