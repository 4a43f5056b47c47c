"""Which tokens are global sample k: closed form over data sets, epochs and windows."""
