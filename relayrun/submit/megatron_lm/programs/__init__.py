"""Programs that the Python of the ranks runs; it may have no relayrun. Nothing else lies in this folder, because Python
puts the folder of a started file on the search path before the checkout of Megatron-LM.
"""
