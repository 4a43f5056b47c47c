"""The same as datatrove's steps, for pipelines of your own."""
