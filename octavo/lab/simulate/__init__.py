"""The scheduler and the block manager on a virtual clock, with a cost model in the place of the workers."""
