"""A dataset in dumps of about equal size: which there are, their jobs, and where they stand."""
