"""Files of a dataset, in a folder or a store, as texts and rows of a bounded size."""
